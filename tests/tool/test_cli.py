"""The command line: what it prints, how it ends, and that its surroundings change neither."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from scripts import build, cli, errors, repository, tree
from scripts.console import output
from tests.tool.miniature import SERIES, UPSTREAM, Checkout, git, read_files, sha256

START, CONFIG, HOOK = SERIES


# -- results and failures ----------------------------------------------------------------------------


def test_status(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "width", 160)
    outcome = checkout.run("status", "--project=vllm")
    assert outcome.code == 0
    rows = [re.split(r"\s{2,}", line.strip()) for line in outcome.out.splitlines() if ".patch" in line]
    assert rows == [
        ["1", START, "exact", "1", "1", "1", "Pending", "upstream does it"],
        ["2", CONFIG, "exact", "1", "2", "1", "Pending", "upstream does it"],
        ["3", HOOK, "exact", "2", "3", "1", "Pending", "upstream does it"],
    ]
    assert "vllm 0.33.0 -> 0.33.0+sm120.1" in outcome.out


def test_status_as_json(checkout: Checkout) -> None:
    path = checkout.patches / CONFIG
    path.write_bytes(path.read_bytes().replace(b"-B = 2\r\n", b"-B = 3\r\n"))
    report = json.loads(checkout.run("status", "--json").out)
    assert list(report) == ["vllm", "vllm-gguf-plugin"]
    rows = report["vllm"]
    assert [(row["order"], row["patch"], row["verdict"], row["good"]) for row in rows] == [
        (1, START, "exact", True),
        (2, CONFIG, "conflict(vllm/config.py)", False),
        (3, HOOK, "exact", True),
    ]
    assert (rows[2]["files"], rows[2]["added"], rows[2]["removed"]) == (["vllm/attention.py", "vllm/engine.py"], 3, 1)
    assert "hunk 1 of 1" in rows[1]["explanation"]


@pytest.mark.slow
def test_status_of_a_tree_with_work(checkout: Checkout) -> None:
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    (checkout.tree / "vllm" / "engine.py").write_text("work\n")
    outcome = checkout.run("status")
    assert "build/vllm has changes that are in no commit: vllm/engine.py" in outcome.out
    assert "note:" not in outcome.err


@pytest.mark.slow
def test_wheel_says_that_the_tree_is_not_in_it(checkout: Checkout) -> None:
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    (checkout.tree / "vllm" / "engine.py").write_text("work\n")
    outcome = checkout.run("wheel", "--platform=x86_64")
    assert outcome.code == 0
    assert "the wheel is made from patches/ and overlay/" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("wheel", "--platform=riscv64"), 10, "unknown platform 'riscv64'"),
        (("fetch", "--platform=../x"), 10, "unknown platform '../x'"),
        (("tree", "--source=svn"), 10, "unknown source 'svn'"),
        (("status", "--project=vlm"), 10, "no project 'vlm' in upstream.toml"),
        (("export",), 23, "there is no tree to export from"),
        (("edit", "--patch=x"), 23, "'x.patch' is not in the series of vllm"),
        (("edit", "--continue"), 23, "no edit is under way"),
        (("verify-wheel",), 32, "no wheel of vllm"),
        (("install",), 30, "no wheel of vllm"),
    ],
)
def test_failures(checkout: Checkout, arguments: tuple[str, ...], code: int, said: str) -> None:
    outcome = checkout.run(*arguments)
    assert outcome.code == code
    assert said in outcome.err
    assert "\ncure: " in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("arguments", [("nothing",), ("tree", "--nothing"), ("wheel", "--force")])
def test_wrong_usage(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    assert checkout.run(*arguments).code == 2


def test_wheels_of_another_platform_have_a_folder_of_their_own(checkout: Checkout) -> None:
    other = next(name for name in ("x86_64", "aarch64") if name != build.host_platform())
    assert build.target_folder(checkout.layout, build.host_platform()) == checkout.layout.dist
    assert build.target_folder(checkout.layout, other) == checkout.layout.dist / other


@pytest.mark.slow
def test_wheels_of_another_version_go(checkout: Checkout) -> None:
    checkout.layout.dist.mkdir()
    old, foreign = checkout.layout.dist / "vllm-0.32.0+sm120.9-py3-none-any.whl", checkout.layout.dist / "numpy-1.whl"
    for path in (old, foreign):
        path.write_bytes(b"")
    assert checkout.run("wheel").code == 0
    assert not old.exists()
    assert foreign.exists()


@pytest.mark.slow
def test_git_that_fails(checkout: Checkout) -> None:
    """A broken repository is reported, not thrown."""
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    (checkout.tree / ".git" / "index").write_bytes(b"garbage")
    outcome = checkout.run("tree")
    assert outcome.code == errors.GitError.exit_code
    assert "git " in outcome.err
    assert "Traceback" not in outcome.err


def test_disk_that_fails(checkout: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError from anywhere is a message and exit code 13."""

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(repository.Repository, "add_blobs", fail)
    outcome = checkout.run("tree")
    assert outcome.code == errors.StorageError.exit_code
    assert "No space left on device: 'somewhere'" in outcome.err


@pytest.mark.slow
def test_upstream_text_that_the_locale_lacks(checkout: Checkout) -> None:
    odd = {**UPSTREAM, "vllm/notes.txt": "one\n\u2192 \u00e9\nthree\n"}
    checkout.release(odd)
    diff = "\ndiff --git a/vllm/notes.txt b/vllm/notes.txt\n--- a/vllm/notes.txt\n+++ b/vllm/notes.txt\n"
    path = checkout.patches / START
    head = path.read_text().partition("\ndiff --git")[0]
    path.write_text(f"{head}{diff}@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n")
    outcome = checkout.spawn("status", PYTHONIOENCODING="ascii")
    assert outcome.code == 0
    assert "\\u2192 \\xe9" in outcome.out
    assert "Traceback" not in outcome.err


# -- surroundings ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_surroundings_change_nothing(
    checkout: Checkout, hostile_config: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below a hook of another repository, with a user's unusual settings, in another locale, folder and time zone."""
    calm, hostile = tmp_path / "calm", tmp_path / "hostile"
    results = []
    outer = Path(hostile_config["GIT_WORK_TREE"])
    inside = outer / "inside"
    inside.mkdir()
    outer_files = read_files(outer / ".git")
    for name, environment, folder in (
        (calm, {}, checkout.root),
        (hostile, {**hostile_config, "LANG": "de_DE.ISO-8859-1", "LC_ALL": "C", "TZ": "Asia/Tokyo"}, inside),
    ):
        environment = {**environment, "VLLM_SM120_CACHE": str(name)}
        for command in (("tree",), ("check", "--no-code"), ("export", "--verbatim"), ("wheel", "--platform=x86_64")):
            outcome = checkout.spawn(*command, folder=folder, **environment)
            assert outcome.code == 0, outcome
        edited = checkout.spawn("edit", f"--patch={CONFIG}", "--command=true", folder=folder, **environment)
        assert (edited.code, edited.out) == (0, "no patch file changed\n"), edited
        results.append(
            (
                git(checkout.tree, "rev-parse", "HEAD"),
                read_files(checkout.tree),
                [sha256(path) for path in sorted(checkout.layout.dist.rglob("*.whl"))],
                read_files(checkout.patches),
            )
        )
        assert checkout.run("clean").code == 0
    assert results[0] == results[1]
    assert read_files(outer / ".git") == outer_files


@pytest.mark.slow
def test_inside_another_repository(checkout: Checkout) -> None:
    """The checkout is a git repository with a build folder that is ignored: nothing climbs into it."""
    (checkout.root / ".gitignore").write_text("/build/\n*.py\n")
    git(checkout.root, "init", "--quiet")
    git(checkout.root, "add", "--all")
    git(checkout.root, "commit", "--quiet", "--message=ours")
    before = git(checkout.root, "rev-parse", "HEAD"), git(checkout.root, "status", "--porcelain")
    assert checkout.run("tree").code == 0
    checkout.commit("vllm/notes.txt", lambda text: text.replace("two", "2"), "Notes")
    assert checkout.run("export").out == f"written: {checkout.patches / 'notes.patch'}\n"
    (checkout.patches / "notes.patch").unlink()
    git(checkout.root, "checkout", "--quiet", ".")
    assert (git(checkout.root, "rev-parse", "HEAD"), git(checkout.root, "status", "--porcelain")) == before


@pytest.mark.slow
def test_without_git(checkout: Checkout, tmp_path: Path) -> None:
    outcome = checkout.spawn("tree", PATH=str(tmp_path))
    assert outcome.code == errors.GitError.exit_code
    assert "git is not installed" in outcome.err
    assert "Traceback" not in outcome.err


@pytest.mark.slow
def test_read_only_cache_that_is_warm(own_cache: Checkout) -> None:
    """Everything but a download works."""
    mount = ["mount", "--bind", str(own_cache.cache), str(own_cache.cache)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted: not root, or in a container that may not")
    try:
        assert own_cache.run("status").code == 0  # imports the second project
        subprocess.run(["mount", "-o", "remount,bind,ro", str(own_cache.cache)], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (own_cache.cache / "probe").touch()
        for command in (("fetch",), ("status",), ("check", "--no-code"), ("tree",), ("wheel",), ("export",)):
            outcome = own_cache.run(*command)
            assert outcome.code == 0, (command, outcome)
    finally:
        subprocess.run(["umount", str(own_cache.cache)], check=True)


@pytest.mark.slow
def test_full_disk_under_git(cold: Checkout) -> None:
    """The disk is full when git imports upstream; once there is space, the run can be made again."""
    cold.cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(cold.cache)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted: not root, or in a container that may not")
    try:
        outcome = cold.run("tree")
        assert outcome.code in (errors.StorageError.exit_code, errors.GitError.exit_code), outcome
        assert "No space left on device" in outcome.err
        assert not cold.tree.exists()
        subprocess.run(["mount", "-o", "remount,size=8m", str(cold.cache)], check=True)
        assert cold.run("tree").code == 0
    finally:
        subprocess.run(["umount", str(cold.cache)], check=True)


@pytest.mark.slow
def test_twice_at_once(checkout: Checkout) -> None:
    commands = (("tree",), ("tree",), ("status",), ("check", "--no-code"), ("wheel", "--platform=x86_64"))
    runs = [checkout.start(*command) for command in commands]
    outcomes = [(run.communicate(timeout=120), run.returncode) for run in runs]
    assert [code for _, code in outcomes] == [0] * len(commands), outcomes
    assert checkout.run("export").out == "no patch file changed\n"
    assert not [path for path in checkout.layout.build.iterdir() if path.name.startswith(".") and path.name != ".lock"]


@pytest.mark.slow
def test_lock_is_waited_for(checkout: Checkout) -> None:
    first = checkout.start("edit", f"--patch={START}", "--command=sleep 2; false")
    deadline = time.monotonic() + 20
    while not checkout.layout.edit("vllm").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    second = checkout.spawn("tree")
    assert first.wait(timeout=20) == 23
    assert second.code == 0
    assert "another run holds" in second.err


@pytest.mark.slow
def test_interrupt_from_the_keyboard(checkout: Checkout) -> None:
    # A shell's background job ignores interrupts, and so would what it starts, as these tests may be.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    run = checkout.start("edit", f"--patch={START}", "--command=exec sleep 20")
    signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 20
    while not checkout.layout.edit("vllm").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(run.pid, signal.SIGINT)
    _, err = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "Traceback" not in err
    assert checkout.run("edit", "--continue").code == 0


def test_help_names_every_command(checkout: Checkout) -> None:
    shown = checkout.run("--help").out
    for command in cli.app.registered_commands:
        assert command.callback
        assert command.callback.__name__.replace("_", "-") in shown
