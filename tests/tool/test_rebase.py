"""`make rebase`: every verdict and every way out on golden folders, and what can come between.

A scenario has `old/` and `new/`, two upstream releases (0.33.0 and 0.34.0), the patches in `before/` and in `after/`,
and in expected.json the runs of the tool: their options, exit code, what they say and what they leave unsaid, and the
files that the user writes before one (`write`; their text may be null: the file goes). `back` says that a rebase back
gives `before/` again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from scripts import export, pins, rebase, resolutions, storage, tree
from scripts.errors import RebaseError
from scripts.pipconfig import PipConfig
from scripts.repository import Output, Repository
from tests.tool.miniature import SERIES, UPSTREAM, Checkout, Outcome, git, read_files, sdist, sha256
from tests.tool.test_interrupt import kill_after, leftovers
from tests.wheel.synthetic import TAGS, UpstreamWheel

pytestmark = pytest.mark.slow

SCENARIOS = sorted(Path(__file__).with_name("rebase_scenarios").iterdir())
START, CONFIG, HOOK = SERIES

Files = Mapping[str, str]


def publish(checkout: Checkout, version: str, files: Files) -> None:
    """Put a release of vLLM where pip finds it."""
    sdist(checkout.files, "vllm", version, files)
    for platform in ("x86_64", "aarch64"):
        name = f"vllm-{version}-{TAGS.replace('x86_64', platform)}.whl"
        if not (checkout.files / name).exists():
            package = {path: text.encode() for path, text in files.items() if path.startswith("vllm/")}
            UpstreamWheel(package=package, info=f"vllm-{version}.dist-info", file_name=name).write(checkout.files)


def run(checkout: Checkout, *options: str) -> Outcome:
    return checkout.run("rebase", *options)


def patches(checkout: Checkout) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkout.patches.iterdir()) if path.is_file()}


def folder(checkout: Checkout) -> Path:
    return checkout.layout.rebase("vllm")


def edited(change: Callable[[str], str], path: str = "vllm/engine.py", files: Files = UPSTREAM) -> dict[str, str]:
    """Upstream's files with one of them changed."""
    assert change(files[path]) != files[path]
    return {**files, path: change(files[path])}


@pytest.fixture(name="checkout")
def checkout_with_index(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A checkout with its own cache of git objects, and pip configured with the folder of releases."""
    cache = checkout.root.parent / "own-cache"
    shutil.copytree(checkout.cache, cache)
    monkeypatch.setenv("VLLM_SM120_CACHE", str(cache))
    monkeypatch.setattr(PipConfig, "load", lambda: PipConfig({"no-index": "1", "find-links": str(checkout.files)}))
    aarch64 = next(checkout.files.glob("vllm-0.33.0-*x86_64.whl"))
    shutil.copy(aarch64, checkout.files / aarch64.name.replace("x86_64", "aarch64"))
    return Checkout(checkout.root, cache, checkout.files)


# -- golden folders ----------------------------------------------------------------------------------


def texts(folder: Path) -> dict[str, str]:
    return {path: data.decode() for path, (data, _) in read_files(folder).items()}


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_scenario(checkout: Checkout, scenario: Path) -> None:
    expected = json.loads((scenario / "expected.json").read_text())
    old, new, before = (texts(scenario / name) for name in ("old", "new", "before"))
    checkout.release(old)
    aarch64 = next(checkout.files.glob("vllm-0.33.0-*x86_64.whl"))
    shutil.copy(aarch64, checkout.files / aarch64.name.replace("x86_64", "aarch64"))
    publish(checkout, "0.34.0", new)
    shutil.rmtree(checkout.patches)
    shutil.copytree(scenario / "before", checkout.patches)
    shutil.rmtree(checkout.root / "overlay")
    if (scenario / "overlay").is_dir():
        shutil.copytree(scenario / "overlay", checkout.root / "overlay")
    pinned = checkout.layout.pins.read_bytes()
    for step in expected["runs"]:
        for path, text in step.get("write", {}).items():
            target = checkout.root / path
            target.unlink() if text is None else target.write_text(text)
            if path.startswith("build/"):
                git(folder(checkout), "add", "--all")
        if step["code"]:
            unchanged = (patches(checkout), checkout.layout.pins.read_bytes())
        outcome = run(checkout, *step["options"])
        assert outcome.code == step["code"], outcome.err
        for text in step.get("says", []):
            assert text in outcome.err + outcome.out
        for text in step.get("not", []):
            assert text not in outcome.err + outcome.out
        if step["code"]:
            assert (patches(checkout), checkout.layout.pins.read_bytes()) == unchanged
            assert "\ncure: " in outcome.err
    after = {path: text.encode() for path, text in texts(scenario / "after").items()}
    assert patches(checkout) == after
    assert checkout.project.version == expected["pinned"]
    assert not folder(checkout).exists()
    if expected["pinned"] == "0.33.0":
        assert checkout.layout.pins.read_bytes() == pinned
    if expected["back"]:
        assert run(checkout, "--tag=v0.33.0", "--yes").code == 0
        assert patches(checkout) == {path: text.encode() for path, text in before.items()}
        assert checkout.layout.pins.read_bytes() == pinned


def test_every_way_out_has_a_scenario() -> None:
    runs = [step for path in SCENARIOS for step in json.loads((path / "expected.json").read_text())["runs"]]
    options = {option.split("=")[0] for step in runs for option in step["options"]}
    assert options == {"--tag", "--yes", "--continue", "--skip", "--keep", "--abort"}


# -- beginning ---------------------------------------------------------------------------------------

#: A release whose engine.start is not what the first patch expects, and one that no patch minds.
OTHER_START = edited(lambda text: text.replace("start(value):\n    result = value", "start(value):\n    result = 7"))
HARMLESS = edited(lambda text: text.replace("three", "3"), "vllm/notes.txt")
RESOLVED = OTHER_START["vllm/engine.py"].replace("result = 7", "result = 1")


def stopped(checkout: Checkout, *says: str, options: tuple[str, ...] = ("--tag=v0.34.0", "--yes")) -> Outcome:
    outcome = run(checkout, *options)
    assert outcome.code == 25
    for text in says:
        assert text in outcome.err
    return outcome


def resolve(checkout: Checkout, text: str = RESOLVED) -> None:
    (folder(checkout) / "vllm" / "engine.py").write_text(text)
    git(folder(checkout), "add", "vllm/engine.py")


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ((), 2, "give one of TAG="),
        (("--tag=v0.34.0", "--abort"), 2, "give one of TAG="),
        (("--tag=nonsense",), 25, "'nonsense' is not a release"),
        (("--tag=v0.35.0",), 25, "no release v0.35.0 of vllm on the package indexes"),
        (("--tag=v0.33.0",), 25, "the series of vllm fits v0.33.0 already"),
        (("--tag=latest",), 25, "v0.34.0 is not pinned yet"),
        (("--continue",), 25, "no rebase is under way"),
        (("--skip",), 25, "no rebase is under way"),
        (("--keep",), 25, "no rebase is under way"),
        (("--abort",), 25, "no rebase is under way"),
    ],
)
def test_refused(checkout: Checkout, options: tuple[str, ...], code: int, said: str) -> None:
    publish(checkout, "0.34.0", HARMLESS)
    publish(checkout, "0.34.1rc1", HARMLESS)
    before = patches(checkout), checkout.layout.pins.read_bytes()
    outcome = run(checkout, *options)
    assert (outcome.code, said in outcome.err) == (code, True), outcome.err
    assert not folder(checkout).exists()
    assert (patches(checkout), checkout.layout.pins.read_bytes()) == before


def test_pin(checkout: Checkout) -> None:
    """Everything that a pin says is the release's, and the rest of upstream.toml stays."""
    version = UPSTREAM["vllm/_version.py"].replace("4ba787ec9", "0123456789ab").replace("0.33.0", "0.34.0")
    publish(checkout, "0.34.0", {**HARMLESS, "vllm/_version.py": version})
    assert run(checkout, "--tag=latest", "--yes").code == 0
    project = checkout.project
    wheels = {name: sha256(next(checkout.files.glob(f"vllm-0.34.0-*{name}.whl"))) for name in ("x86_64", "aarch64")}
    assert (project.version, project.tag, project.commit) == ("0.34.0", "v0.34.0", "0123456789ab")
    assert (project.sdist, project.wheels) == (sha256(checkout.files / "vllm-0.34.0.tar.gz"), wheels)
    text = checkout.layout.pins.read_text()
    assert "# A comment that stays." in text
    assert "number = 1\n" in text
    assert checkout.run("tree").code == 0


def test_other_project(checkout: Checkout) -> None:
    for path in checkout.files.glob("vllm_gguf_plugin-0.0.5*"):
        shutil.copy(path, path.with_name(path.name.replace("0.0.5", "0.0.6")))
        if path.suffix == ".whl":
            shutil.copy(path, path.with_name(path.name.replace("0.0.5", "0.0.6").replace("x86_64", "aarch64")))
    plugin = ("--project=vllm-gguf-plugin", "--tag=v0.0.6", "--yes")
    outcome = run(checkout, *plugin)
    assert (outcome.code, "fits" in outcome.err) == (0, False)
    assert pins.load(checkout.layout.pins).project("vllm-gguf-plugin").version == "0.0.6"


def test_series_that_does_not_apply_to_its_own_release(checkout: Checkout) -> None:
    publish(checkout, "0.34.0", HARMLESS)
    path = checkout.patches / CONFIG
    path.write_bytes(path.read_bytes().replace(b"-B = 2\r\n", b"-B = 3\r\n"))
    outcome = run(checkout, "--tag=v0.34.0", "--yes")
    assert (outcome.code, f"{CONFIG}: conflict" in outcome.err) == (21, True)


def test_tree_follows(checkout: Checkout) -> None:
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    publish(checkout, "0.34.0", HARMLESS)
    assert run(checkout, "--tag=v0.34.0", "--yes").code == 0
    assert "3\n" in (checkout.tree / "vllm" / "notes.txt").read_text()


# -- a conflict --------------------------------------------------------------------------------------


@pytest.fixture(name="conflicting")
def conflicting_checkout(checkout: Checkout) -> Checkout:
    """A rebase that has stopped at the first patch."""
    publish(checkout, "0.34.0", OTHER_START)
    stopped(checkout, f"{START}: conflict(vllm/engine.py)", "start changed (+1 -1 lines)")
    return checkout


def test_the_work_tree_is_a_plain_git_repository(conflicting: Checkout) -> None:
    work = folder(conflicting)
    assert git(work, "status", "--porcelain") == "UU vllm/engine.py\n"
    assert git(work, "log", "--format=%s").splitlines() == ["overlay", "upstream vllm 0.34.0"]
    assert (work / "vllm" / "notes.txt").read_bytes() == UPSTREAM["vllm/notes.txt"].encode()
    assert "<<<<<<<" in (work / "vllm" / "engine.py").read_text()


def test_only_one_at_a_time(conflicting: Checkout) -> None:
    stopped(conflicting, "a rebase is under way", "CONTINUE=1")
    assert conflicting.run("clean").code == 22
    assert folder(conflicting).exists()
    assert conflicting.run("clean", "--force").code == 0


def test_conflict_markers_are_no_resolution(conflicting: Checkout) -> None:
    git(folder(conflicting), "add", "vllm/engine.py")
    stopped(conflicting, "conflict markers", "vllm/engine.py:", options=("--continue",))


def test_empty_resolution(conflicting: Checkout) -> None:
    resolve(conflicting, OTHER_START["vllm/engine.py"])
    stopped(conflicting, f"{START} would become empty", "SKIP=1", options=("--continue",))


def test_new_file_is_refused_while_it_can_be_mended(conflicting: Checkout) -> None:
    resolve(conflicting)
    (folder(conflicting) / "vllm" / "new.py").write_text("new\n")
    outcome = run(conflicting, "--continue")
    assert (outcome.code, "adds vllm/new.py" in outcome.err) == (20, True)
    (folder(conflicting) / "vllm" / "new.py").unlink()
    assert run(conflicting, "--continue").code == 0


def test_committed_by_hand(conflicting: Checkout) -> None:
    """A commit of the user's is taken, with its message, as long as it says which patch it is."""
    resolve(conflicting)
    git(folder(conflicting), "commit", "--quiet", "--message=Mine")
    stopped(conflicting, f"the message does not say Patch-Filename: {START}", options=("--continue",))
    text = f"Better words\n\nUpstream prints: no.\n\nUpstream-Status: Pending\nPatch-Filename: {START}"
    git(folder(conflicting), "commit", "--quiet", "--amend", f"--message={text}")
    assert run(conflicting, "--continue").code == 0
    assert b"Subject: Better words\n" in patches(conflicting)[START]
    assert b"Patch-Filename" not in patches(conflicting)[START]
    assert b"From: A Person" in patches(conflicting)[START]


def test_two_commits_by_hand(conflicting: Checkout) -> None:
    resolve(conflicting)
    git(folder(conflicting), "commit", "--quiet", "--message=One")
    git(folder(conflicting), "commit", "--quiet", "--allow-empty", "--message=Two")
    stopped(conflicting, "HEAD is not one commit after the last patch", options=("--continue",))


def test_keep_does_not_lose_a_resolution(conflicting: Checkout) -> None:
    resolve(conflicting)
    outcome = run(conflicting, "--keep")
    assert (outcome.code, f"holds changes to {START} that are not done" in outcome.err) == (22, True)
    assert (folder(conflicting) / "vllm" / "engine.py").read_text() == RESOLVED
    git(folder(conflicting), "reset", "--quiet", "--hard")
    stopped(conflicting, "no patch is done yet", options=("--keep",))


def test_patch_edited_meanwhile_is_not_overwritten(conflicting: Checkout) -> None:
    path = conflicting.patches / START
    path.write_bytes(path.read_bytes().replace(b"Upstream prints", b"It prints"))
    mine = patches(conflicting)
    resolve(conflicting)
    outcome = run(conflicting, "--continue")
    assert (outcome.code, "edited since the commits were made" in outcome.err) == (22, True)
    assert patches(conflicting) == mine
    assert conflicting.project.version == "0.33.0"
    assert run(conflicting, "--abort").code == 0
    assert patches(conflicting) == mine


def test_abort_while_files_are_written(conflicting: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a series cannot be aborted, only finished."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    resolve(conflicting)
    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(pins, "record", die)
        rebase.proceed(conflicting.layout, conflicting.project)
    assert conflicting.project.version == "0.33.0"
    stopped(conflicting, "is being written", "CONTINUE=1 finishes", options=("--abort",))
    assert run(conflicting, "--continue").code == 0
    assert conflicting.project.version == "0.34.0"
    assert not folder(conflicting).exists()


# -- resolutions -------------------------------------------------------------------------------------


def test_resolution_is_remembered(checkout: Checkout) -> None:
    """Across an abort by the user's cache, and by everybody else through the repository."""
    both = {**OTHER_START, "vllm/config.py": UPSTREAM["vllm/config.py"].replace("B = 2\r\n", "B = 3\r\n")}
    publish(checkout, "0.34.0", both)
    pinned, before = checkout.layout.pins.read_bytes(), patches(checkout)
    stopped(checkout, f"{START}: conflict")
    resolve(checkout)
    stopped(checkout, f"{CONFIG}: conflict", options=("--continue",))
    assert run(checkout, "--abort").code == 0
    assert (patches(checkout), checkout.layout.resolutions("vllm").exists()) == (before, False)

    again = f"{START}: conflict(vllm/engine.py), resolved as before"
    assert again in stopped(checkout, f"{CONFIG}: conflict").err
    (folder(checkout) / "vllm" / "config.py").write_bytes(b"A = 1\r\nB = 20\r\nB2 = 21\r\nC = 3\r\nD = 4\r\n")
    git(folder(checkout), "add", "vllm/config.py")
    assert run(checkout, "--continue").code == 0
    after = patches(checkout)
    assert b"-    result = 7\n+    result = 1\n" in after[START]
    assert {path.name for path in checkout.layout.resolutions("vllm").rglob("*image")} == {"preimage", "postimage"}

    checkout.layout.pins.write_bytes(pinned)
    for name, text in before.items():
        (checkout.patches / name).write_bytes(text)
    shutil.rmtree(checkout.cache / "resolutions")
    outcome = run(checkout, "--tag=v0.34.0", "--yes")
    assert (outcome.code, outcome.err.count("resolved as before")) == (0, 2)
    assert patches(checkout) == after
    assert checkout.run("check", "--no-code").code == 0


# -- killed ------------------------------------------------------------------------------------------


@contextmanager
def death(count: int) -> Iterator[None]:
    """Let the n-th thing that a run does, a call of git or a file written, be its last."""
    done = 0
    attempt, write = Repository.attempt, storage.write

    def step() -> None:
        nonlocal done
        done += 1
        if done == count:
            raise KeyboardInterrupt

    def run_git(repository: Repository, *arguments: str, **options: Any) -> Output:
        try:
            step()
        except KeyboardInterrupt:
            if repository.work_tree:
                (repository.git_dir / "index.lock").touch()  # which a git that dies leaves
            raise
        return attempt(repository, *arguments, **options)

    def write_file(target: Path, data: bytes) -> None:
        step()
        write(target, data)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Repository, "attempt", run_git)
        for module in (storage, export, pins, resolutions):
            patched.setattr(module, "write", write_file)
        with suppress(KeyboardInterrupt):
            yield


def again(checkout: Checkout) -> Outcome:
    """What a user does after a kill."""
    if folder(checkout).exists():
        return run(checkout, "--continue")
    done = checkout.project.version == "0.34.0"
    return Outcome(0, "", "") if done else run(checkout, "--tag=v0.34.0", "--yes")


@pytest.mark.parametrize("count", [3, 20, 45, 60, 75, 90])
def test_killed_at_any_step(checkout: Checkout, count: int) -> None:
    """Before a conflict and after its resolution; neither the resolution nor a patch file is lost or half there."""
    before = patches(checkout)
    publish(checkout, "0.34.0", OTHER_START)
    with death(count), suppress(RebaseError):
        rebase.start(checkout.layout, checkout.project, "v0.34.0", yes=True)
    assert patches(checkout) == before
    assert again(checkout).code == 25
    resolve(checkout)
    with death(count):
        rebase.proceed(checkout.layout, checkout.project)
    for text in patches(checkout).values():
        assert text.startswith((b"From ", b"# The order."))
    assert again(checkout).code == 0
    assert (checkout.project.version, checkout.names) == ("0.34.0", list(SERIES))
    assert b"-    result = 7\n+    result = 1\n" in patches(checkout)[START]
    assert {name: text for name, text in patches(checkout).items() if name != START} == {
        name: text for name, text in before.items() if name != START
    }
    assert not folder(checkout).exists()
    assert leftovers(checkout) == []


def test_killed_for_real(checkout: Checkout) -> None:
    publish(checkout, "0.34.0", OTHER_START)
    before = patches(checkout)
    for delay in (0.2, 0.6, 1.2, 2.0):
        kill_after(checkout, delay, "--root", str(checkout.root), "rebase", "--tag=v0.34.0", "--yes")
        assert patches(checkout) == before
    assert again(checkout).code == 25
    resolve(checkout)
    for delay in (0.2, 0.5):
        kill_after(checkout, delay, "--root", str(checkout.root), "rebase", "--continue")
    assert again(checkout).code == 0
    assert b"-    result = 7\n+    result = 1\n" in patches(checkout)[START]


# -- there and back ----------------------------------------------------------------------------------

LINES = ("a\n", "b\n", "c\n", "    return\n", "\n")


@st.composite
def upstream_texts(draw: st.DrawFn) -> str:
    return "".join(draw(st.lists(st.sampled_from(LINES), min_size=4, max_size=14)))


@st.composite
def changes(draw: st.DrawFn, text: str) -> str:
    """The text with some lines replaced in one or two places."""
    for _ in range(draw(st.integers(1, 2))):
        lines = text.splitlines(keepends=True)
        start = draw(st.integers(0, len(lines)))
        stop = draw(st.integers(start, min(len(lines), start + 2)))
        text = "".join([*lines[:start], *draw(st.lists(st.sampled_from(LINES), max_size=3)), *lines[stop:]])
    return text


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_there_and_back(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A rebase to any other upstream and back gives the same patch files, or is reported; nothing differs silently.

    What a rebase will meet, `make drift` has foretold.
    """
    root = tmp_path_factory.mktemp("random")
    other = Checkout(root, root / "cache", root / "files")
    other.files.mkdir()
    other.patches.mkdir(parents=True)
    old = {"vllm/__init__.py": "", "vllm/a.py": data.draw(upstream_texts())}
    new = {**old, "vllm/a.py": data.draw(changes(old["vllm/a.py"]))}
    text = old["vllm/a.py"]
    other.release(old)
    publish(other, "0.33.0", old)
    publish(other, "0.34.0", new)
    tree.build(other.layout, other.project, other.upstream())
    for number in range(data.draw(st.integers(1, 2))):
        # Half of them hold upstream's own change as well, which is where a merge may lose one.
        start = data.draw(st.sampled_from((text, new["vllm/a.py"])))
        changed = data.draw(changes(start).filter(lambda one, text=text: one not in ("", text)))  # type: ignore[misc]
        other.commit("vllm/a.py", lambda _, changed=changed: changed, f"Change {number}")  # type: ignore[misc]
        text = changed
    export.export_tree(other.layout, other.project, other.upstream())
    shutil.rmtree(other.layout.build)
    before = patches(other)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PipConfig, "load", lambda: PipConfig({"no-index": "1", "find-links": str(other.files)}))
        patched.setenv("PIP_FIND_LINKS", str(other.files))
        for tag in ("v0.34.0", "v0.33.0"):
            foretold = other.run("drift", f"--tags={tag}")
            outcome = run(other, f"--tag={tag}", "--yes")
            assert (foretold.code, outcome.code) in ((0, 0), (26, 25)), foretold.out + outcome.err
            if outcome.code:
                event("stopped")
                assert outcome.code == 25
                assert re.search(r"\.patch: (conflict|upstreamed|partly-upstreamed|file-gone)", outcome.err), (
                    outcome.err
                )
                return
    event("there and back")
    assert patches(other) == before
