"""The same on upstream's real wheels, of both platforms on any machine."""

from __future__ import annotations

import hashlib
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import fetch, pins, verify, wheel
from scripts.errors import SourceError, WheelError
from scripts.layout import Layout, default_cache
from scripts.sources import Build, SourceFile, Sources, blob_id
from tests.wheel.synthetic import patch_info

LAYOUT = Layout(Path(__file__).resolve().parents[2], default_cache())
PINS = pins.load(LAYOUT.pins)


def sources_of(project: pins.Project, sdist: Path) -> Sources:
    """Upstream's tree with one patched and one new file."""
    package = f"{project.package}/"
    with tarfile.open(sdist) as archive:
        members = {one.name.split("/", 1)[1]: one for one in archive if one.isfile() and "/" in one.name}
        files = {name: archive.extractfile(one) for name, one in members.items() if name.startswith(package)}
        contents = {name: file.read() for name, file in files.items() if file}
    target = f"{package}__init__.py"
    diff = f"--- a/{target}\n+++ b/{target}\n@@ -0,0 +1 @@\n+# patched\n".encode()
    added = f"{package}added_by_test.py"
    return Sources(
        upstream={name: blob_id(data) for name, data in contents.items()},
        changed={
            target: SourceFile(b"# patched\n" + contents[target], False),
            added: SourceFile(b"added = True\n", False),
        },
        deleted=frozenset(),
        overlay=frozenset({added}),
        patches=(patch_info(diff),),
        tree="5" * 40,
    )


def real_build(name: str, platform: str) -> Build:
    project = PINS.project(name)
    try:
        sdist, base = fetch.sdist(LAYOUT, project), fetch.wheel(LAYOUT, project, platform)
    except SourceError as error:
        pytest.skip(str(error))
    return Build(PINS, project, platform, base, sources_of(project, sdist))


@pytest.mark.slow
@pytest.mark.parametrize("platform", pins.PLATFORMS)
@pytest.mark.parametrize("name", PINS.projects)
def test_real_wheel(name: str, platform: str, tmp_path: Path) -> None:
    build = real_build(name, platform)
    built = [
        wheel.assemble(PINS, build.project, platform, build.upstream_wheel, build.sources, tmp_path / str(number))
        for number in range(2)
    ]
    assert built[0].sha256 == built[1].sha256 == hashlib.sha256(built[0].path.read_bytes()).hexdigest()
    built[1].path.unlink()
    verify.verify(PINS, build.project, platform, built[0].path, build.sources, build.upstream_wheel)
    other = replace(build.sources, changed={**build.sources.changed, "csrc/a.cu": SourceFile(b"", False)})
    with pytest.raises(WheelError, match=r"csrc/a\.cu"):
        wheel.assemble(PINS, build.project, platform, build.upstream_wheel, other, tmp_path / "other")
