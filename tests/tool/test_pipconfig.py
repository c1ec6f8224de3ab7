"""The indexes are those of the user's pip, asked of pip itself: `pip config list` takes half a second a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from scripts import fetch
from scripts.errors import SourceError
from scripts.pipconfig import PipConfig
from tests.tool.index_server import Index, serve
from tests.tool.miniature import Checkout

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_settings(cold: Checkout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")


def test_variables_over_sections_over_global(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = http://127.0.0.1/global\ntimeout = 7\ncert = 'quoted'\n"
        "extra-index-url =\n    http://127.0.0.1/a\n    http://127.0.0.1/b\n"
        "[download]\ntimeout = 8\n[wheel]\ntimeout = 9\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1/environment")
    loaded = PipConfig.load()
    assert loaded.options["index-url"] == "http://127.0.0.1/environment"
    assert loaded.words("extra-index-url") == ["http://127.0.0.1/a", "http://127.0.0.1/b"]
    assert loaded.options["timeout"] == "8"
    assert loaded.options["cert"] == "'quoted'"


@pytest.mark.parametrize("how", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "configuration file"])
def test_every_way_to_name_an_index(cold: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no such index").as_uri())
    files = {path.name: path.read_bytes() for path in cold.files.iterdir()}
    with serve(Index(files)) as index:
        if how == "configuration file":
            monkeypatch.delenv("PIP_INDEX_URL")
            (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = {index.url}\n")
            monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        else:
            monkeypatch.setenv(how, str(cold.files) if how == "PIP_FIND_LINKS" else index.url)
        path = fetch.sdist(cold.layout, cold.project)
    assert path.read_bytes() == files[path.name]


def test_pip_that_cannot_read_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text("not a configuration\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(SourceError, match="pip config list failed"):
        PipConfig.load()


def test_the_pip_of_this_environment_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever `pip` comes first on the PATH, it is the one beside this Python."""
    fake = tmp_path / "pip"
    fake.write_text("#!/bin/sh\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PIP_TIMEOUT", "5")
    assert PipConfig.load().options["timeout"] == "5"
