"""Commits of build/vllm become patch files: all of them, in order, and only where something changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import export, tree
from scripts.errors import EditError, SeriesError, UnsavedWorkError
from scripts.export import Exported
from tests.tool.miniature import SERIES, UPSTREAM, Checkout, git, message, read_files

START, CONFIG, HOOK = SERIES
NOTHING = Exported(tuple(SERIES), (), ())


@pytest.fixture
def built(checkout: Checkout) -> Checkout:
    """A checkout with build/vllm."""
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    return checkout


def run(checkout: Checkout, *, force: bool = False, verbatim: bool = False) -> Exported:
    return export.export_tree(checkout.layout, checkout.project, checkout.upstream(), force=force, verbatim=verbatim)


def patches(checkout: Checkout) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkout.patches.iterdir())}


def assert_settled(checkout: Checkout) -> None:
    """The tree is what the files say, and a second export finds nothing to do."""
    files, written = read_files(checkout.tree), patches(checkout)
    assert tree.unsaved(checkout.tree) == ""
    assert run(checkout, verbatim=True).written == ()
    tip = git(checkout.tree, "rev-parse", "HEAD")
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    assert (read_files(checkout.tree), patches(checkout)) == (files, written)
    assert git(checkout.tree, "rev-parse", "HEAD") == tip


# -- no churn ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbatim", [False, True])
def test_round_trip_changes_no_byte(built: Checkout, verbatim: bool) -> None:
    before = patches(built)
    assert run(built, verbatim=verbatim) == NOTHING
    assert patches(built) == before


@pytest.mark.slow
def test_shifted_lines_change_no_file(built: Checkout) -> None:
    """Two lines more near the top: the later patch still applies, at an offset, so its file stays."""
    path = built.patches / START
    path.write_bytes(
        path.read_bytes()
        .replace(b"+    result = 1\n", b"+    result = 1\n+    # a\n+    # b\n")
        .replace(b"-1,5 +1,5", b"-1,5 +1,7")
    )
    tree.build(built.layout, built.project, built.upstream())
    before = patches(built)
    assert run(built).written == ()
    assert patches(built) == before
    assert run(built, verbatim=True).written == (START, HOOK)  # the first names the blobs from before it was edited
    assert re.findall(rb"^@@ .* @@", before[HOOK], re.MULTILINE) != re.findall(
        rb"^@@ .* @@", patches(built)[HOOK], re.MULTILINE
    )


@pytest.mark.slow
def test_series_file_keeps_its_comments(built: Checkout) -> None:
    built.commit("vllm/attention.py", lambda text: text.replace("select_a", "select_one"), "New one")
    run(built)
    assert (built.patches / "series").read_text() == "# The order.\n" + "".join(
        f"{name}\n" for name in [*SERIES, "new-one.patch"]
    )


# -- changes -----------------------------------------------------------------------------------------


def test_new_commit_at_the_end(built: Checkout) -> None:
    before = patches(built)
    built.commit("vllm/attention.py", lambda text: text.replace("select_a", "select_one"), "Select one: at last!")
    assert run(built) == Exported((*SERIES, "select-one-at-last.patch"), ("select-one-at-last.patch",), ())
    assert {name: before[name] for name in SERIES} == {name: patches(built)[name] for name in SERIES}
    assert_settled(built)


@pytest.mark.slow
def test_new_commit_in_the_middle(built: Checkout) -> None:
    git(built.tree, "checkout", "--quiet", "--detach", "HEAD~2")
    built.commit("vllm/notes.txt", lambda text: text.replace("two", "2"), "Middle")
    git(built.tree, "cherry-pick", "main~1", "main")
    assert run(built).names == (START, "middle.patch", CONFIG, HOOK)
    assert built.names == [START, "middle.patch", CONFIG, HOOK]
    assert git(built.tree, "symbolic-ref", "HEAD") == "refs/heads/main\n"
    assert_settled(built)


@pytest.mark.slow
def test_amended_commit(built: Checkout) -> None:
    built.commit("vllm/attention.py", lambda text: text.replace("import backend", "import backend as ours"), amend=True)
    before = patches(built)
    assert run(built).written == (HOOK,)
    assert patches(built)[HOOK] != before[HOOK]
    assert_settled(built)


@pytest.mark.slow
def test_amended_message(built: Checkout) -> None:
    text = message("Hook, said better").rstrip() + f"\nPatch-Filename: {HOOK}\n"
    git(built.tree, "commit", "--amend", "--quiet", f"--message={text}")
    assert run(built).written == (HOOK,)
    assert b"\nSubject: Hook, said better\n" in patches(built)[HOOK]
    assert b"Patch-Filename" not in patches(built)[HOOK]
    assert_settled(built)


@pytest.mark.slow
def test_reordered_commits(built: Checkout) -> None:
    git(built.tree, "checkout", "--quiet", "--detach", "main~3")
    git(built.tree, "cherry-pick", "main~1", "main~2", "main")
    assert run(built) == Exported((CONFIG, START, HOOK), (), ())
    assert built.names == [CONFIG, START, HOOK]
    assert_settled(built)


@pytest.mark.slow
def test_removed_commit(built: Checkout) -> None:
    git(built.tree, "checkout", "--quiet", "--detach", "main~2")
    git(built.tree, "cherry-pick", "main")
    before = patches(built)
    with pytest.raises(UnsavedWorkError, match=f"no commit for {CONFIG}"):
        run(built)
    assert patches(built) == before
    assert run(built, force=True) == Exported((START, HOOK), (), (CONFIG,))
    assert built.names == [START, HOOK]
    assert not (built.patches / CONFIG).exists()
    assert_settled(built)


@pytest.mark.slow
def test_no_commits(built: Checkout) -> None:
    git(built.tree, "reset", "--quiet", "--hard", "main~3")
    before = patches(built)
    with pytest.raises(UnsavedWorkError, match=f"no commit for {START}, {CONFIG}, {HOOK}"):
        run(built)
    assert patches(built) == before


@pytest.mark.slow
def test_removed_file_of_upstream(built: Checkout) -> None:
    git(built.tree, "rm", "--quiet", "vllm/notes.txt")
    git(built.tree, "commit", "--quiet", f"--message={message('Drop notes')}")
    assert run(built).written == ("drop-notes.patch",)
    assert_settled(built)


@pytest.mark.slow
def test_overlay_edited_in_its_place_meanwhile(built: Checkout) -> None:
    """Its commit in the tree is old; the patches are what is exported, and the tree follows."""
    (built.root / "overlay" / "vllm" / "ours" / "backend.py").write_text("newer\n")
    built.commit("vllm/notes.txt", lambda text: text.replace("two", "2"), "Notes")
    assert run(built).written == ("notes.patch",)
    assert (built.tree / "vllm" / "ours" / "backend.py").read_text() == "newer\n"
    assert_settled(built)


# -- refusals: whatever is refused has changed nothing -----------------------------------------------


def add_file(checkout: Checkout) -> None:
    (checkout.tree / "vllm" / "new.py").write_text("new\n")
    git(checkout.tree, "add", "vllm/new.py")
    git(checkout.tree, "commit", "--quiet", f"--message={message('Add')}")


def change_overlay(checkout: Checkout) -> None:
    checkout.commit("vllm/ours/backend.py", lambda text: text + "more\n", "Change ours")


def change_overlay_commit(checkout: Checkout) -> None:
    git(checkout.tree, "reset", "--quiet", "--hard", "main~3")
    checkout.commit("vllm/ours/backend.py", lambda text: text + "more\n", amend=True)


def commit_nothing(checkout: Checkout) -> None:
    git(checkout.tree, "commit", "--quiet", "--allow-empty", "--message=nothing")


def commit_mode(checkout: Checkout) -> None:
    git(checkout.tree, "update-index", "--chmod=+x", "vllm/engine.py")
    (checkout.tree / "vllm" / "engine.py").chmod(0o755)
    git(checkout.tree, "commit", "--quiet", f"--message={message('Mode')}")


def commit_binary(checkout: Checkout) -> None:
    checkout.commit("vllm/notes.txt", lambda text: "\0", "Binary")


def merge(checkout: Checkout) -> None:
    git(checkout.tree, "switch", "--quiet", "--create", "side", "main~1")
    checkout.commit("vllm/notes.txt", lambda text: text + "more\n", "Side")
    git(checkout.tree, "switch", "--quiet", "main")
    git(checkout.tree, "merge", "--quiet", "--no-edit", "side")


def name(text: str) -> Callable[[Checkout], None]:
    def commit(checkout: Checkout) -> None:
        checkout.commit("vllm/notes.txt", lambda old: old + "more\n", "Named")
        git(checkout.tree, "commit", "--quiet", "--amend", f"--message={message('Named')}Patch-Filename: {text}")

    return commit


def say(text: str) -> Callable[[Checkout], None]:
    def commit(checkout: Checkout) -> None:
        checkout.commit("vllm/notes.txt", lambda old: old + "more\n", "Said")
        git(checkout.tree, "commit", "--quiet", "--amend", f"--message=Said\n\nUpstream says:\n{text}")

    return commit


def leave_dirty(checkout: Checkout) -> None:
    (checkout.tree / "vllm" / "engine.py").write_text("work\n")


def leave_untracked(checkout: Checkout) -> None:
    (checkout.tree / "vllm" / "new.py").write_text("work\n")


def rebase(checkout: Checkout) -> None:
    editor = "-c", "sequence.editor=sed -i 1s/pick/edit/"
    git(checkout.tree, *editor, "rebase", "--interactive", "main~3")


def add_patch_by_hand(checkout: Checkout) -> None:
    (checkout.patches / "other.patch").write_bytes((checkout.patches / START).read_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "error", "problem"),
    [
        (add_file, SeriesError, r"patches/vllm/add\.patch: adds vllm/new\.py"),
        (change_overlay, SeriesError, r"change-ours\.patch: changes overlay file vllm/ours/backend\.py"),
        (change_overlay_commit, EditError, "does not begin with the overlay commit"),
        (commit_nothing, SeriesError, r"nothing\.patch: empty"),
        (commit_mode, SeriesError, r"mode\.patch: .*changes no line"),
        (commit_binary, SeriesError, r"binary\.patch: changes a binary file"),
        (merge, EditError, "is a merge"),
        (name(START), SeriesError, f"listed twice: {START}"),
        (name("../../evil.patch"), SeriesError, r"'\.\./\.\./evil\.patch' is not the name of a patch file"),
        (name("Upper.patch"), SeriesError, r"'Upper\.patch' is not the name of a patch file"),
        (say("--- a line of dashes"), SeriesError, r"said\.patch: a line of the message begins like a diff"),
        (say("diff --git a/x b/x"), SeriesError, r"said\.patch: "),
        (leave_dirty, UnsavedWorkError, r"changes that are in no commit: vllm/engine\.py"),
        (leave_untracked, UnsavedWorkError, r"changes that are in no commit: vllm/new\.py"),
        (rebase, EditError, "a rebase, pick or merge is under way"),
        (add_patch_by_hand, SeriesError, r"not in the series: other\.patch"),
    ],
)
def test_refused(built: Checkout, do: Callable[[Checkout], None], error: type[Exception], problem: str) -> None:
    do(built)
    before = patches(built), read_files(built.tree), git(built.tree, "rev-parse", "HEAD")
    with pytest.raises(error, match=problem):
        run(built)
    assert (patches(built), read_files(built.tree), git(built.tree, "rev-parse", "HEAD")) == before
    assert [path.name for path in built.root.parent.glob("*.patch")] == []


def test_no_tree(checkout: Checkout) -> None:
    with pytest.raises(EditError, match="there is no tree to export from"):
        run(checkout)


@pytest.mark.slow
def test_patch_file_edited_by_hand_meanwhile(built: Checkout) -> None:
    """What was typed into a file after the commits were made from it is not overwritten unasked."""
    text = (built.patches / START).read_bytes().replace(b"result = 1", b"result = 11")
    (built.patches / START).write_bytes(text)
    with pytest.raises(UnsavedWorkError, match=rf"edited since the commits were made from them: {START}"):
        run(built)
    assert (built.patches / START).read_bytes() == text
    assert run(built, force=True).written == (START,)
    assert_settled(built)


# -- killed runs -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_killed_between_two_writes(built: Checkout, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """An export that dies after `count` files can simply be run again."""
    built.commit("vllm/attention.py", lambda text: text.replace("select_a", "select_one"), "One")
    built.commit("vllm/notes.txt", lambda text: text.replace("two", "2"), "Two")
    left = count

    def write(target: Path, data: bytes) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        target.write_bytes(data)

    with monkeypatch.context() as patched:
        patched.setattr(export, "write", write)
        patched.setattr(tree, "write", write)
        if count < 4:
            with pytest.raises(KeyboardInterrupt):
                run(built)
    run(built)
    assert built.names == [*SERIES, "one.patch", "two.patch"]
    assert_settled(built)


@pytest.mark.slow
def test_names_are_from_the_subject(built: Checkout) -> None:
    built.commit("vllm/notes.txt", lambda text: text.replace("two", "2"), "[Bugfix] Ünïcode & such -- (really)")
    assert run(built).written == ("bugfix-n-code-such-really.patch",)
    assert re.search(rb"^Subject: =\?UTF-8\?q\?", patches(built)["bugfix-n-code-such-really.patch"], re.MULTILINE)
    assert_settled(built)
    assert "vllm/notes.txt" in UPSTREAM
