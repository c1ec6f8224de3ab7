"""The series of this repository onto v0.32.0 and forward again, on upstream's own sources.

It runs where the cache has v0.32.0: ci/rebase brings it there. `rebase_v0.32.0/` holds the patches that conflict, as
a person has resolved them.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from packaging.version import Version

from scripts import pins, rebase, upstream
from scripts.errors import RebaseError
from scripts.index import Release
from scripts.layout import Layout, default_cache
from scripts.pins import Project
from tests.tool.miniature import REPOSITORY, git

pytestmark = pytest.mark.slow

RESOLVED = Path(__file__).with_name("rebase_v0.32.0")
#: The cache of whoever runs the tests, before a fixture hides it.
CACHE = default_cache()
SDIST = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
WHEELS = {
    "x86_64": "5e2ecdc5b0baf72921c288486417ca82778456a448e4fe60b62ee43c0dfc8611",
    "aarch64": "d0620dbdf99528bcfebe551a8906347a229921fb1602f887bd1286a920da2d44",
}


def rebase_onto(layout: Layout, tag: str, resolved: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Rebase, resolve each conflict by the patch of that name in `resolved`, and say where it stopped last."""
    project = pins.load(layout.pins).project("vllm")
    older, newer = Release(Version("0.32.0"), SDIST, WHEELS, False), pins.load(REPOSITORY / "upstream.toml")
    pinned = newer.project("vllm")
    known = [older, Release(Version(pinned.version), pinned.sdist, pinned.wheels, False)]
    monkeypatch.setattr(rebase.index, "releases", lambda _: known)
    folder = layout.rebase(project.name)
    try:
        rebase.start(layout, project, tag, yes=True)
    except RebaseError as error:
        stop = error
    else:
        return []
    while found := re.search(r"/([a-z0-9-]+\.patch): conflict", str(stop)):
        git(folder, "reset", "--quiet", "--hard")
        git(folder, "apply", "--index", str(resolved / found[1]))
        try:
            rebase.proceed(layout, project)
        except RebaseError as error:
            stop = error
        else:
            return []
    assert "every patch is done, but the overlay does not fit" in str(stop)
    rebase.keep(layout, project)
    return str(stop).splitlines()[1:]


def test_there_and_forward_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path / "root", CACHE)
    older = upstream.imported(layout, Project("vllm", "", "", "", "", "", {}, ""))
    if Version("0.32.0") not in older:
        pytest.skip("v0.32.0 is not in the cache: ci/rebase brings it")
    layout.root.mkdir()
    for name in ("patches", "overlay"):
        shutil.copytree(REPOSITORY / name, layout.root / name)
    shutil.copy(REPOSITORY / "upstream.toml", layout.pins)
    shutil.rmtree(layout.resolutions("vllm"), ignore_errors=True)
    monkeypatch.setattr(Layout, "remembered", lambda layout, project: layout.root / "resolutions" / project)
    monkeypatch.setenv("PIP_FIND_LINKS", os.devnull)
    pinned = layout.pins.read_bytes()
    before = {path.name: path.read_bytes() for path in layout.patches("vllm").glob("*.patch")}

    problems = rebase_onto(layout, "v0.32.0", RESOLVED, monkeypatch)
    # The boundary: the base class of v0.32.0 never calls the backend's kernel.
    assert any("_forward_mqa_kernel overrides nothing" in problem for problem in problems)
    there = {path.name: path.read_bytes() for path in layout.patches("vllm").glob("*.patch")}
    assert there.keys() == before.keys()
    for path in RESOLVED.iterdir():
        assert there[path.name] == path.read_bytes()
    assert pins.load(layout.pins).project("vllm").version == "0.32.0"

    shutil.rmtree(layout.resolutions("vllm"), ignore_errors=True)
    (problem,) = rebase_onto(layout, "v0.33.0", REPOSITORY / "patches" / "vllm", monkeypatch)
    # It gives strings of one more kind, which the doctor hands on.
    assert "_canonicalize_sparse_mla_kv_cache_dtype() gives CacheDType | str, gave CacheDType" in problem
    back = {path.name: path.read_bytes() for path in layout.patches("vllm").glob("*.patch")}
    assert {name: text for name, text in back.items() if text != before[name]} == {}
    assert layout.pins.read_bytes() == pinned
