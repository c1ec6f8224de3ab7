"""build/vllm: the right commits, the same everywhere, and never at the cost of the user's work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import tree
from scripts.errors import ApplyError, UnsavedWorkError
from tests.tool import miniature
from tests.tool.miniature import EXECUTABLE, OVERLAY, SERIES, UPSTREAM, Checkout, git, read_files

CONFIG = list(SERIES)[1]


def patched() -> dict[str, tuple[bytes, bool]]:
    """What the tree must hold: made by replacing text, not by git."""
    texts = {**UPSTREAM, **OVERLAY}
    for edit in SERIES.values():
        for path, (old, new) in edit.items():
            texts[path] = texts[path].replace(old, new)
    return {path: (text.encode(), path in EXECUTABLE) for path, text in sorted(texts.items())}


@pytest.fixture
def built(checkout: Checkout) -> Checkout:
    """A checkout with build/vllm."""
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    return checkout


def build(checkout: Checkout, *, force: bool = False) -> None:
    tree.build(checkout.layout, checkout.project, checkout.upstream(), force=force)


def head(checkout: Checkout) -> str:
    return git(checkout.tree, "rev-parse", "HEAD").strip()


def test_files(built: Checkout) -> None:
    assert read_files(built.tree) == patched()


def test_commits(built: Checkout) -> None:
    subjects = git(built.tree, "log", "--reverse", "--format=%s").splitlines()
    assert subjects == ["upstream vllm 0.33.0", "overlay", "Engine start", "Config b", "Attention hook"]
    root = git(built.tree, "rev-list", "--max-parents=0", "HEAD")
    assert git(built.tree, "rev-parse", "upstream") == root
    assert git(built.tree, "symbolic-ref", "HEAD") == "refs/heads/main\n"
    overlay = git(built.tree, "diff", "--name-only", "upstream", "HEAD~3").split()
    assert overlay == list(OVERLAY)
    names = git(built.tree, "log", "--reverse", "--max-count=3", "--format=%(trailers:key=Patch-Filename,valueonly)")
    assert names.split() == list(SERIES)
    people = git(built.tree, "log", "--max-count=3", "--format=%an <%ae> %at by %cn at %ct").splitlines()
    assert people[2] == f"A Person <person@example.org> {miniature.MTIME} by vllm-sm120 at {miniature.MTIME}"


@pytest.mark.slow
def test_clean_for_the_user_as_well(built: Checkout, hostile_config: dict[str, str]) -> None:
    """Nothing is modified in the eyes of a git that knows upstream's attributes and the user's settings."""
    for settings in ("[core]\n", "[core]\n\tautocrlf = true\n"):
        config = built.root / "config"
        config.write_text(settings)
        shown = os.popen(f"GIT_CONFIG_GLOBAL={config} git -C {built.tree} status --porcelain --ignored").read()
        assert shown == ""


def test_same_commits_everywhere(built: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = miniature.make(tmp_path / "another place")
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    monkeypatch.chdir("/")
    build(other)
    assert head(other) == head(built)


def test_nothing_is_made_twice(built: Checkout) -> None:
    before = built.tree.stat().st_ino
    build(built)
    assert built.tree.stat().st_ino == before
    assert sorted(path.name for path in built.layout.build.iterdir()) == ["vllm"]


@pytest.mark.slow
def test_changed_series_makes_a_new_tree(built: Checkout) -> None:
    (built.root / "overlay" / "vllm" / "ours" / "run.sh").write_text("#!/bin/sh\n")
    (built.root / "overlay" / "vllm" / "ours" / "run.sh").chmod(0o755)
    build(built)
    assert read_files(built.tree) == {**patched(), "vllm/ours/run.sh": (b"#!/bin/sh\n", True)}


def test_failing_series_leaves_the_tree_as_it_is(built: Checkout) -> None:
    before = read_files(built.tree), head(built)
    path = built.patches / CONFIG
    path.write_bytes(path.read_bytes().replace(b" A = 1\r\n", b" A = 3\r\n"))
    with pytest.raises(ApplyError) as refused:
        build(built)
    said = str(refused.value).splitlines()
    assert said[0] == f"{path}: conflict(vllm/config.py)"
    assert said[1] == "vllm/config.py, hunk 1 of 1"
    assert said[2:4] == ["  the patch expects, at line 1:", "    A = 3"]
    assert "  ! A = 1" in said
    assert (read_files(built.tree), head(built)) == before
    assert sorted(path.name for path in built.layout.build.iterdir()) == ["vllm"]


# -- nothing is lost ---------------------------------------------------------------------------------


def dirty(folder: Path) -> None:
    (folder / "vllm" / "engine.py").write_text("work\n")


def staged(folder: Path) -> None:
    dirty(folder)
    git(folder, "add", "vllm/engine.py")


def untracked(folder: Path) -> None:
    (folder / "vllm" / "new.py").write_text("work\n")


def ignored(folder: Path) -> None:
    (folder / "vllm" / "new.sh").write_text("work\n")


def committed(folder: Path) -> None:
    staged(folder)
    git(folder, "commit", "--quiet", "--message=work")


def on_another_branch(folder: Path) -> None:
    git(folder, "switch", "--quiet", "--create", "work")
    committed(folder)
    git(folder, "switch", "--quiet", "main")


def stashed(folder: Path) -> None:
    dirty(folder)
    git(folder, "stash", "--quiet")


def foreign(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("work\n")


def foreign_repository(folder: Path) -> None:
    foreign(folder)
    git(folder, "init", "--quiet")


WORK = (committed, foreign, staged, untracked, ignored, on_another_branch, stashed, foreign_repository)


@pytest.mark.parametrize("work", [dirty, *(pytest.param(do, marks=pytest.mark.slow) for do in WORK)])
def test_work_is_not_discarded(built: Checkout, work: Callable[[Path], None]) -> None:
    work(built.tree)
    before = read_files(built.tree)
    (built.root / "overlay" / "vllm" / "ours" / "new.py").write_text("")
    with pytest.raises(UnsavedWorkError, match=str(built.tree)) as refused:
        build(built)
    assert "FORCE=1" in refused.value.cure
    with pytest.raises(UnsavedWorkError, match=str(built.tree)):
        tree.clean(built.layout)
    assert read_files(built.tree) == before
    build(built, force=True)
    assert read_files(built.tree) == {**patched(), "vllm/ours/new.py": (b"", False)}


def test_compiled_python_is_no_work(built: Checkout) -> None:
    (built.tree / "vllm" / "__pycache__").mkdir()
    (built.tree / "vllm" / "__pycache__" / "engine.cpython-311.pyc").write_bytes(b"x")
    assert tree.unsaved(built.tree) == ""


@pytest.mark.slow
def test_clean(built: Checkout) -> None:
    built.layout.dist.mkdir()
    (built.layout.dist / "vllm.whl").write_bytes(b"")
    assert built.run("clean").code == 0
    assert not built.layout.dist.exists()
    assert [path.name for path in built.layout.build.iterdir()] == [".lock"]
    assert built.run("clean").code == 0
