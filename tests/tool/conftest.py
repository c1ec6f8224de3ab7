from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.tool import miniature
from tests.tool.miniature import Checkout

#: Golden folders that hold tests of a miniature package.
collect_ignore_glob = ["verify_scenarios/*"]


@pytest.fixture(autouse=True)
def clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the user's reaches a test: pip's, make's variables for the tool, git's."""
    variables = ("PROJECT", "PLATFORM", "SOURCE", "REPOSITORY", "FORCE", "VERBATIM", "JSON", "PATCH", "CMD")
    variables += ("CONTINUE", "ABORT", "SKIP", "KEEP", "YES", "TAG", "TAGS", "MARKDOWN", "REV", "TEST")
    for name in [*variables, *(name for name in os.environ if name.startswith(("PIP_", "GIT_")))]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("VLLM_SM120_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SHELL", "/bin/sh")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    checkout = miniature.make(folder)
    repository = checkout.upstream().repository  # imported into git once for all tests
    repository.run("repack", "-a", "-d", "--quiet")  # fewer files to copy for each of them
    return folder


def _copy(template: Path, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    for name in ("root", "files"):
        shutil.copytree(template / name, folder / name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder / "files"))
    monkeypatch.setenv("VLLM_SM120_CACHE", str(cache))
    return Checkout(folder / "root", cache, folder / "files")


@pytest.fixture
def checkout(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A miniature checkout. The cache is warm and shared by the tests: none may take from it, see `own_cache`."""
    return _copy(template, tmp_path, template / "cache", monkeypatch)


@pytest.fixture
def own_cache(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The same with a warm cache of its own, for tests that damage it."""
    shutil.copytree(template / "cache", tmp_path / "cache")
    return _copy(template, tmp_path, tmp_path / "cache", monkeypatch)


@pytest.fixture
def cold(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """The same with an empty cache."""
    return _copy(template, tmp_path, tmp_path / "cache", monkeypatch)


@pytest.fixture
def hostile_config(tmp_path: Path) -> dict[str, str]:
    """The environment of a run below a hook of another repository, by a user with unusual settings."""
    outer = tmp_path / "outer"
    outer.mkdir()
    miniature.git(outer, "init", "--quiet")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("pre-commit", "commit-msg", "post-checkout", "reference-transaction", "post-index-change"):
        (hooks / hook).write_text("#!/bin/sh\nexit 1\n")
        (hooks / hook).chmod(0o755)
    (tmp_path / "attributes").write_text("* text eol=crlf\n*.py -diff\n")
    (tmp_path / "excludes").write_text("*\n")
    settings = {name: tmp_path / name for name in ("hooks", "attributes", "excludes")}
    config = tmp_path / "home" / ".gitconfig"  # for a run that no longer has the variable
    config.parent.mkdir()
    config.write_text(miniature.HOSTILE_CONFIG.format_map(settings))
    return {
        "GIT_CONFIG_GLOBAL": str(config),
        "GIT_DIR": str(outer / ".git"),
        "GIT_WORK_TREE": str(outer),
        "GIT_INDEX_FILE": str(outer / ".git" / "index"),
        "GIT_PREFIX": "somewhere/",
        "GIT_EXTERNAL_DIFF": "/bin/false",
        "GIT_DIFF_OPTS": "--unified=0",
        "GIT_AUTHOR_NAME": "Someone Else",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "core.bare",
        "GIT_CONFIG_VALUE_0": "true",
    }
