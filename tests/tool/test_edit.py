"""`make edit`: a change to one patch of the series, and whatever can come between its beginning and its end."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import edit, export, tree
from scripts.errors import EditError
from scripts.export import Exported
from scripts.repository import Output, Repository
from tests.tool.miniature import SERIES, Checkout, git, read_files

pytestmark = pytest.mark.slow

START, CONFIG, HOOK = SERIES
#: A change beside the first patch's, which the later ones do not mind.
NEARBY = "sed -i 's/result = 1/result = 11/' vllm/engine.py"


def start(checkout: Checkout, command: str, name: str = START) -> Exported:
    return edit.start(checkout.layout, checkout.project, checkout.upstream(), name, command)


def proceed(checkout: Checkout) -> Exported:
    return edit.proceed(checkout.layout, checkout.project, checkout.upstream())


def patches(checkout: Checkout) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkout.patches.iterdir())}


def folder(checkout: Checkout) -> Path:
    return checkout.layout.edit("vllm")


@pytest.fixture
def conflicting(checkout: Checkout) -> Checkout:
    """A series whose second patch changes the line that the first one writes."""
    shutil.rmtree(checkout.root.parent / "author", ignore_errors=True)
    for name in SERIES:
        (checkout.patches / name).unlink()
    (checkout.patches / "series").write_text("")
    line = "def start(value):\n    result = {}"
    checkout.write_series(
        {
            "first.patch": {"vllm/engine.py": (line.format("value"), line.format(1))},
            "second.patch": {"vllm/engine.py": (line.format(1), line.format(2))},
            "third.patch": {"vllm/notes.txt": ("two", "2")},
        }
    )
    return checkout


def test_command_folds(checkout: Checkout) -> None:
    before = patches(checkout)
    assert start(checkout, NEARBY) == Exported(tuple(SERIES), (START,), ())
    after = patches(checkout)
    assert after[START] == before[START].replace(b"+    result = 1\n", b"+    result = 11\n").replace(
        *index_line(before[START], after[START])
    )
    assert {name: after[name] for name in (CONFIG, HOOK)} == {name: before[name] for name in (CONFIG, HOOK)}
    assert not folder(checkout).exists()
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    assert b"result = 11\n" in (checkout.tree / "vllm" / "engine.py").read_bytes()
    assert export.export_tree(checkout.layout, checkout.project, checkout.upstream()).written == ()


def index_line(*texts: bytes) -> tuple[bytes, bytes]:
    """The lines that name the blobs, in both texts."""
    first, second = (next(line for line in text.splitlines() if line.startswith(b"index ")) for text in texts)
    return first, second


def test_tree_follows_where_it_held_nothing_else(checkout: Checkout) -> None:
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    start(checkout, NEARBY)
    assert b"result = 11\n" in (checkout.tree / "vllm" / "engine.py").read_bytes()


def test_tree_with_work_stays(checkout: Checkout) -> None:
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    (checkout.tree / "vllm" / "engine.py").write_text("work\n")
    before = read_files(checkout.tree)
    start(checkout, NEARBY)
    assert read_files(checkout.tree) == before


def test_command_is_at_that_patch(checkout: Checkout) -> None:
    command = f"cp vllm/config.py {checkout.root}/seen; cp vllm/attention.py {checkout.root}/later"
    start(checkout, command, CONFIG)
    assert (checkout.root / "seen").read_bytes() == b"A = 1\r\nB = 20\r\nB2 = 21\r\nC = 3\r\nD = 4\r\n"
    assert "backend" not in (checkout.root / "later").read_text()


def test_nothing_changed(checkout: Checkout) -> None:
    before = patches(checkout)
    assert start(checkout, "true").written == ()
    assert patches(checkout) == before


def test_line_ends_survive(checkout: Checkout) -> None:
    start(checkout, "sed -i 's/B2 = 21/B2 = 22/' vllm/config.py", CONFIG)
    assert b"+B2 = 22\r\n" in patches(checkout)[CONFIG]


def test_amended_message_is_kept(checkout: Checkout) -> None:
    identity = "-c user.name=Editor -c user.email=editor@example.org"
    command = (
        f"{NEARBY}; git {identity} commit --quiet --amend --all "
        f"--message 'Better said' --message 'Why: because.' --message 'Scope: python\nPatch-Filename: {START}'"
    )
    assert start(checkout, command).written == (START,)
    text = patches(checkout)[START]
    assert b"\nSubject: Better said\n\nWhy: because.\n\nScope: python\n" in text
    assert b"\nFrom: A Person <person@example.org>\n" in text
    assert b"+    result = 11\n" in text


def test_message_without_the_name(checkout: Checkout) -> None:
    identity = "-c user.name=Editor -c user.email=editor@example.org"
    with pytest.raises(EditError, match="no longer says Patch-Filename"):
        start(checkout, f"{NEARBY}; git {identity} commit --quiet --amend --all --message 'Better said'")
    git(folder(checkout), "commit", "--quiet", "--amend", f"--message=Better\n\nPatch-Filename: {START}")
    assert proceed(checkout).written == (START,)


def test_shell(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = checkout.root / "shell"
    shell.write_text(f"#!/bin/sh\n{NEARBY}\n")
    shell.chmod(0o755)
    monkeypatch.setenv("SHELL", str(shell))
    outcome = checkout.run("edit", f"--patch={START}")
    assert outcome.code == 0
    assert outcome.out == f"written: {checkout.patches / START}\n"
    assert "exit folds the change in" in outcome.err


def test_unknown_patch(checkout: Checkout) -> None:
    with pytest.raises(EditError, match=r"'other\.patch' is not in the series") as refused:
        start(checkout, "true", "other.patch")
    assert ", ".join(SERIES) in refused.value.cure
    assert not folder(checkout).exists()


def test_nothing_left_of_the_patch(checkout: Checkout) -> None:
    with pytest.raises(EditError, match=f"{START} would become empty"):
        start(checkout, "git checkout --quiet HEAD~1 -- .")
    edit.abort(checkout.layout, checkout.project)


def test_new_file_is_refused_before_anything_is_written(checkout: Checkout) -> None:
    before = patches(checkout)
    outcome = checkout.run("edit", f"--patch={START}", "--command=echo new > vllm/new.py")
    assert outcome.code == 20
    assert "adds vllm/new.py" in outcome.err
    assert patches(checkout) == before
    (folder(checkout) / "vllm" / "new.py").unlink()
    engine = folder(checkout) / "vllm" / "engine.py"
    engine.write_text(engine.read_text().replace("result = 1\n", "result = 11\n"))
    assert proceed(checkout).written == (START,)


# -- stopping and going on ---------------------------------------------------------------------------


def test_failing_command_keeps_the_edit(checkout: Checkout) -> None:
    before = patches(checkout)
    with pytest.raises(EditError, match="the command ended with status 3; nothing is folded in yet") as failed:
        start(checkout, f"{NEARBY}; exit 3")
    assert "CONTINUE=1" in failed.value.cure
    assert patches(checkout) == before
    with pytest.raises(EditError, match="an edit is under way"):
        start(checkout, "true")
    assert proceed(checkout).written == (START,)


def test_abort(checkout: Checkout) -> None:
    before = patches(checkout)
    with pytest.raises(EditError):
        start(checkout, f"{NEARBY}; false")
    assert checkout.run("clean").code == 22  # an edit under way is work
    assert checkout.run("edit", "--abort").code == 0
    assert not folder(checkout).exists()
    assert patches(checkout) == before
    with pytest.raises(EditError, match="no edit is under way"):
        edit.abort(checkout.layout, checkout.project)
    with pytest.raises(EditError, match="no edit is under way"):
        proceed(checkout)


def test_later_patch_conflicts(conflicting: Checkout) -> None:
    before = patches(conflicting)
    with pytest.raises(EditError, match=r"second\.patch conflicts with the edit of first\.patch in vllm/engine\.py"):
        start(conflicting, NEARBY, "first.patch")
    assert patches(conflicting) == before
    with pytest.raises(EditError, match="conflicts"):
        proceed(conflicting)  # not resolved yet
    engine = folder(conflicting) / "vllm" / "engine.py"
    text = engine.read_text()
    ours, _, rest = text.partition("<<<<<<<")[2].partition("=======\n")
    assert "result = 11" in ours
    assert "result = 2" in rest
    engine.write_text(
        text.replace(f"<<<<<<<{ours}=======\n", "")
        .replace(rest.partition(">>>>>>>")[2].split("\n")[0], "")
        .replace(">>>>>>>\n", "")
    )
    git(folder(conflicting), "add", "vllm/engine.py")
    assert proceed(conflicting).written == ("first.patch", "second.patch")
    after = patches(conflicting)
    assert b"+    result = 11\n" in after["first.patch"]
    assert b"-    result = 11\n+    result = 2\n" in after["second.patch"]
    assert after["third.patch"] == before["third.patch"]
    assert not folder(conflicting).exists()


def test_conflict_finished_by_hand(conflicting: Checkout) -> None:
    with pytest.raises(EditError, match="conflicts"):
        start(conflicting, NEARBY, "first.patch")
    git(folder(conflicting), "checkout", "--quiet", "--theirs", "vllm/engine.py")
    git(folder(conflicting), "add", "vllm/engine.py")
    git(folder(conflicting), "-c", "core.editor=true", "cherry-pick", "--continue")
    assert proceed(conflicting).names == ("first.patch", "second.patch", "third.patch")


def test_conflict_aborted(conflicting: Checkout) -> None:
    before = patches(conflicting)
    with pytest.raises(EditError, match="conflicts"):
        start(conflicting, NEARBY, "first.patch")
    edit.abort(conflicting.layout, conflicting.project)
    assert patches(conflicting) == before


def test_later_patch_is_empty_after_the_edit(conflicting: Checkout) -> None:
    before = patches(conflicting)
    with pytest.raises(EditError, match=r"second\.patch .*empty"):
        start(conflicting, "sed -i 's/result = 1/result = 2/' vllm/engine.py", "first.patch")
    assert patches(conflicting) == before


def test_killed_while_git_re_applies(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that dies leaves its lock, and a work tree that it has changed in part."""
    attempt = Repository.attempt

    def die(repository: Repository, *arguments: str, **options: Any) -> Output:
        if arguments[0] == "cherry-pick":
            (repository.git_dir / "index.lock").touch()
            (folder(checkout) / "vllm" / "config.py").write_text("half")
            raise KeyboardInterrupt
        return attempt(repository, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Repository, "attempt", die)
        with pytest.raises(KeyboardInterrupt):
            start(checkout, NEARBY)
    assert proceed(checkout).names == tuple(SERIES)
    assert b"+    result = 11\n" in patches(checkout)[START]
    assert all(b"half" not in text for text in patches(checkout).values())


@pytest.mark.parametrize("path", ["vllm/notes.txt", "vllm/attention.py"])
def test_work_beside_a_resolved_conflict_is_not_thrown_away(conflicting: Checkout, path: str) -> None:
    """In a file that the next patch changes, and in one that none does."""
    with pytest.raises(EditError, match="conflicts"):
        start(conflicting, NEARBY, "first.patch")
    work = folder(conflicting)
    git(work, "checkout", "--quiet", "--theirs", "vllm/engine.py")
    git(work, "add", "vllm/engine.py")
    git(work, "-c", "core.editor=true", "cherry-pick", "--continue")
    (work / path).write_text("mine\n")
    for _ in range(2):
        with pytest.raises(EditError, match=r"cannot be re-applied|changes that are in no patch"):
            proceed(conflicting)
        assert (work / path).read_text() == "mine\n"
    git(work, "checkout", "--quiet", path)
    assert proceed(conflicting).names == ("first.patch", "second.patch", "third.patch")


@pytest.mark.parametrize("count", range(1, 9))
def test_killed_between_two_steps(checkout: Checkout, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """An edit that dies at its n-th write of any file goes on as if nothing had been."""
    from scripts import storage

    written = 0
    write = storage.write

    def die(target: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written == count:
            raise KeyboardInterrupt
        write(target, data)

    with monkeypatch.context() as patched:
        for module in (storage, export, tree):
            patched.setattr(module, "write", die)
        try:
            start(checkout, NEARBY)
            died = False
        except KeyboardInterrupt:
            died = True
    assert died or count > 6
    if folder(checkout).exists():
        proceed(checkout)
    elif died:
        start(checkout, NEARBY)
    assert b"+    result = 11\n" in patches(checkout)[START]
    assert checkout.names == list(SERIES)
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    assert b"result = 11\n" in (checkout.tree / "vllm" / "engine.py").read_bytes()
