"""Runs that are killed: whatever the moment, the next run ends where an undisturbed one does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import storage
from tests.tool.miniature import SERIES, Checkout, git, read_files, sha256

START = next(iter(SERIES))

#: How often each command is killed, at moments spread evenly over the time that it takes.
KILLS = 4


@pytest.fixture(name="checkout")
def checkout_with_own_cache(own_cache: Checkout) -> Checkout:
    return own_cache


def outcome(checkout: Checkout) -> dict[str, object]:
    """All that a run leaves, apart from locks and times."""
    tree = checkout.tree
    return {
        "tree": read_files(tree),
        "tip": git(tree, "rev-parse", "HEAD") if tree.exists() else "",
        "patches": read_files(checkout.patches),
        "pins": checkout.layout.pins.read_bytes(),
        "releases": checkout.layout.releases.read_bytes(),
        "dist": {path.name: sha256(path) for path in checkout.layout.dist.rglob("*.whl")},
        "edit": read_files(checkout.layout.edit("vllm")),
    }


def leftovers(checkout: Checkout) -> list[str]:
    """Temporary files and folders in the checkout and in the cache."""
    hidden = [path for path in checkout.root.rglob(".*") if ".git" not in path.parts and path.name != ".lock"]
    hidden = [path for path in hidden if path.name not in (".gitattributes", ".gitignore")]
    partial = [path for path in (checkout.cache / "partial").glob("*") if path.suffix != ".lock"]
    packs = list((checkout.cache / "git").rglob("tmp_*"))
    return [str(path) for path in [*hidden, *partial, *packs]]


def kill_after(checkout: Checkout, delay: float, *arguments: str) -> bool:
    """Kill a run and every process that it started; whether it was still running."""
    run = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); from scripts.cli import main; main()", *arguments],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert run.stdout
    run.stdout.readline()
    time.sleep(delay)
    running = run.poll() is None
    if running:
        os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=20)
    return running


def copy(checkout: Checkout, target: Path) -> Checkout:
    """The checkout and its cache in another place."""
    for path in (checkout.root, checkout.cache):
        shutil.copytree(path, target / path.name, symlinks=True)
    return Checkout(target / "root", target / "cache", checkout.files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([("tree",)], id="tree from a cold cache"),
        pytest.param([("tree",), ("change overlay",), ("tree",)], id="tree over a tree"),
        pytest.param([("tree",), ("commit",), ("export",)], id="export"),
        pytest.param([("wheel", "--platform=x86_64")], id="wheel"),
        pytest.param([("edit", f"--patch={START}", "--command=sed -i 's/= 1$/= 11/' vllm/engine.py")], id="edit"),
        pytest.param([("bump",)], id="bump"),
        pytest.param([("tree",), ("clean",)], id="clean"),
    ],
)
def test_killed_at_any_point(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: list[tuple[str, ...]]
) -> None:
    last = commands[-1]
    if commands == [("tree",)]:
        shutil.rmtree(checkout.cache)
        checkout.cache.mkdir()
    for command in commands[:-1]:
        if command == ("change overlay",):
            (checkout.root / "overlay" / "vllm" / "ours" / "new.py").write_text("new\n")
        elif command == ("commit",):
            checkout.commit("vllm/notes.txt", lambda text: text.replace("two", "2"), "Notes")
        else:
            assert checkout.run(*command).code == 0

    calm = copy(checkout, tmp_path / "calm")
    monkeypatch.setenv("VLLM_SM120_CACHE", str(calm.cache))
    begun = time.monotonic()
    assert calm.spawn(*last).code == 0
    span = time.monotonic() - begun
    expected = outcome(calm)

    killed = 0
    for number in range(KILLS):
        disturbed = copy(checkout, tmp_path / f"disturbed{number}")
        monkeypatch.setenv("VLLM_SM120_CACHE", str(disturbed.cache))
        arguments = ("--root", str(disturbed.root), *last)
        killed += kill_after(disturbed, span * (number + 1) / (KILLS + 1), *arguments)
        for path in disturbed.patches.glob("*.patch"):
            assert path.read_bytes().startswith(b"From "), "a half-written patch"
        finish(disturbed, last)
        if last != ("bump",):
            assert outcome(disturbed) == expected
        assert disturbed.run("status").code == 0
        assert leftovers(disturbed) == []
        shutil.rmtree(disturbed.root.parent)
    assert killed


def finish(checkout: Checkout, command: tuple[str, ...]) -> None:
    """Run again what was killed; an edit that had begun is continued."""
    if checkout.layout.edit("vllm").exists():
        command = ("edit", "--continue") if "result = 11" in engine(checkout) else command
        if command[-1] != "--continue":
            assert checkout.run("edit", "--abort").code == 0
    result = checkout.run(*command)
    assert result.code == 0, result


def engine(checkout: Checkout) -> str:
    return (checkout.layout.edit("vllm") / "vllm" / "engine.py").read_text()


# -- temporary files ---------------------------------------------------------------------------------


def test_scratch_of_a_killed_run_goes_with_the_next(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        with storage.scratch(tmp_path, ".tree-") as folder:
            (folder / "file").write_text("half\n")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(list(tmp_path.iterdir())) == 2  # the folder and its lock
    with storage.scratch(tmp_path, ".workshop-") as folder:
        assert {path.name for path in tmp_path.iterdir()} == {folder.name, f"{folder.name}.lock"}
    assert list(tmp_path.iterdir()) == []


def test_scratch_in_use_stays(tmp_path: Path) -> None:
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        with storage.scratch(tmp_path, ".tree-") as folder:
            (folder / "file").write_text("whole\n")
            os.write(ready[1], b"x")
            os.read(done[0], 1)
            os._exit(0 if (folder / "file").exists() else 1)
    os.read(ready[0], 1)
    with storage.scratch(tmp_path, ".workshop-"):
        pass
    os.write(done[1], b"x")
    assert os.waitpid(pid, 0)[1] == 0


def test_foreign_files_are_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / ".my-notes").mkdir()
    (tmp_path / ".lock").touch()
    (tmp_path / "thesis-12345678.lock").touch()
    with storage.scratch(tmp_path, ".tree-"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {".my-notes", ".lock", "thesis-12345678.lock"}


def test_write_keeps_the_mode_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    storage.write(path, b"one")
    path.chmod(0o640)
    (tmp_path / ".file.tmp").write_bytes(b"of a killed run, and longer")
    storage.write(path, b"two")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"two", 0o640)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(storage.StorageError, match=f"{path}: cannot be written: No space left"):
        storage.write(path, b"three")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"two")]
