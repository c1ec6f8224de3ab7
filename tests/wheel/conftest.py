from __future__ import annotations

from pathlib import Path

import pytest

from scripts import wheel
from scripts.sources import Build
from tests.wheel.synthetic import UpstreamWheel, small_build


@pytest.fixture
def upstream_wheel(tmp_path: Path) -> Path:
    folder = tmp_path / "upstream"
    folder.mkdir()
    return UpstreamWheel().write(folder)


@pytest.fixture
def build(upstream_wheel: Path) -> Build:
    """All that decides the content of the small wheel."""
    return small_build(upstream_wheel)


@pytest.fixture
def finished(build: Build, tmp_path: Path) -> Path:
    """The small wheel, built."""
    return wheel.assemble(
        build.pins, build.project, build.platform, build.upstream_wheel, build.sources, tmp_path / "dist"
    ).path
