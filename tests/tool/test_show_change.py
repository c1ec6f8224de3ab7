"""`make show-change`: golden folders, whose `before/` is committed and whose `after/` is the working tree."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.tool.miniature import SERIES, UPSTREAM, Checkout, git, read_files, sdist, sha256
from tests.tool.test_interrupt import leftovers
from tests.tool.test_verify_prefixes import change

pytestmark = pytest.mark.slow

START, CONFIG, HOOK = SERIES
CHANGES = sorted(Path(__file__).with_name("changes").iterdir())


def put(checkout: Checkout, state: Path) -> None:
    """Make patches and overlay those of a golden folder."""
    for name in ("patches", "overlay"):
        shutil.rmtree(checkout.root / name, ignore_errors=True)
        if (state / name).is_dir():
            shutil.copytree(state / name, checkout.root / name, copy_function=shutil.copyfile)  # new times, for git


def commit(checkout: Checkout, subject: str) -> str:
    if not (checkout.root / ".git").exists():
        git(checkout.root, "init", "--quiet")
        (checkout.root / ".gitignore").write_text("/build/\n")
    git(checkout.root, "add", "--all")
    git(checkout.root, "commit", "--quiet", f"--message={subject}")
    return git(checkout.root, "rev-parse", "HEAD").strip()


def show(checkout: Checkout, *arguments: str) -> str:
    outcome = checkout.run("show-change", "--project=vllm", *arguments)
    assert outcome.code == 0, outcome.err
    return outcome.out


@pytest.mark.parametrize("scenario", CHANGES, ids=lambda path: path.name)
def test_scenario(checkout: Checkout, scenario: Path) -> None:
    put(checkout, scenario / "before")
    commit(checkout, "before")
    put(checkout, scenario / "after")
    expected = (scenario / "expected.txt").read_text()
    assert show(checkout) == expected
    assert show(checkout, "--rev=HEAD") == expected
    before = commit(checkout, "after")
    assert show(checkout, "--rev=HEAD~1..HEAD") == expected
    assert show(checkout, f"--rev=HEAD~1..{before[:10]}") == expected
    assert show(checkout, "--rev=HEAD..HEAD") == "vllm: nothing changed\n"


def test_both_projects(checkout: Checkout) -> None:
    commit(checkout, "before")
    assert checkout.run("show-change").out == "vllm: nothing changed\nvllm-gguf-plugin: nothing changed\n"


def release(checkout: Checkout, version: str, changes: dict[str, tuple[str, str]]) -> None:
    """Pin a release of vLLM that differs from the miniature's in some files."""
    files = {**UPSTREAM, **{path: UPSTREAM[path].replace(*change) for path, change in changes.items()}}
    path = sdist(checkout.files, "vllm", version, files)
    kept = checkout.cache / "files" / sha256(path) / path.name
    kept.parent.mkdir()
    shutil.copy(path, kept)
    text = checkout.layout.pins.read_text().replace("0.33.0", version)
    checkout.layout.pins.write_text(text.replace(checkout.project.sdist, sha256(path)))


def test_pin(own_cache: Checkout) -> None:
    """Of what a release changes, only what the series or the overlay touches is shown; the rest is counted."""
    checkout = own_cache
    commit(checkout, "before")
    first = {"vllm/engine.py": ("def drain(value)", "def drain(value, now)"), "README.md": ("vLLM", "vLLM, new")}
    release(checkout, "0.33.1", first)
    text = show(checkout)
    assert text.startswith(
        "vllm: 0.33.0 becomes 0.33.1\nvllm: 1 more file differs between the releases, left out here\n"
        " vllm/engine.py | 2 +-\n"
    )
    assert [line for line in text.splitlines() if re.match(r"[-+]\w", line)] == [
        "-def drain(value):",
        "+def drain(value, now):",
    ]


def test_pin_that_changes_nothing_of_ours(own_cache: Checkout) -> None:
    commit(own_cache, "before")
    release(own_cache, "0.33.1", {"README.md": ("vLLM", "vLLM, new"), "vllm/notes.txt": ("two", "2")})
    assert show(own_cache) == (
        "vllm: 0.33.0 becomes 0.33.1\nvllm: 2 more files differ between the releases, left out here\n"
    )


def test_project_that_is_new(checkout: Checkout) -> None:
    text = checkout.layout.pins.read_text()
    checkout.layout.pins.write_text(text.partition("\n[vllm-gguf-plugin]")[0])
    commit(checkout, "before")
    checkout.layout.pins.write_text(text)
    out = checkout.run("show-change").out
    assert out == "vllm: nothing changed\nvllm-gguf-plugin: is pinned in the working tree only\n"


def test_nothing_is_left_and_nothing_touched(own_cache: Checkout) -> None:
    commit(own_cache, "before")
    change(own_cache, START, "+    result = 1\n", "+    result = 2\n")
    before, index = read_files(own_cache.root), (own_cache.root / ".git" / "index").read_bytes()
    assert "+    result = 2" in show(own_cache)
    assert read_files(own_cache.root) == before
    assert (own_cache.root / ".git" / "index").read_bytes() == index
    assert leftovers(own_cache) == []


def test_in_another_work_tree_of_the_repository(checkout: Checkout, tmp_path: Path) -> None:
    """Where .git is a file."""
    commit(checkout, "before")
    git(checkout.root, "worktree", "add", "--quiet", "--detach", str(tmp_path / "other"))
    other = Checkout(tmp_path / "other", checkout.cache, checkout.files)
    change(other, START, "+    result = 1\n", "+    result = 2\n")
    assert "+    result = 2" in show(other)
    assert show(checkout) == "vllm: nothing changed\n"


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["nothing", "--output=x", "HEAD..nothing", "HEAD:patches"])
def test_unknown_revision(checkout: Checkout, revision: str) -> None:
    commit(checkout, "before")
    outcome = checkout.run("show-change", f"--rev={revision}")
    assert outcome.code == 29
    assert f"{revision.removeprefix('HEAD..')!r} is not a revision of this repository\ncure: " in outcome.err


def test_no_repository(checkout: Checkout) -> None:
    outcome = checkout.run("show-change")
    assert outcome.code == 29
    assert f"{checkout.root}: not a git repository\ncure: " in outcome.err


def test_revision_that_does_not_apply(checkout: Checkout) -> None:
    path = checkout.patches / CONFIG
    good = path.read_bytes()
    change(checkout, CONFIG, "-B = 2\r\n", "-B = 3\r\n")
    bad = commit(checkout, "before")
    path.write_bytes(good)
    outcome = checkout.run("show-change")
    assert outcome.code == 21
    assert f"{bad[:12]}/patches/vllm/{CONFIG}: conflict(vllm/config.py)" in outcome.err


def test_revision_without_pins(checkout: Checkout) -> None:
    pins = checkout.layout.pins.read_text()
    checkout.layout.pins.unlink()
    commit(checkout, "before")
    checkout.layout.pins.write_text(pins)
    outcome = checkout.run("show-change")
    assert outcome.code == 10
    assert "upstream.toml: not found" in outcome.err
