"""Whatever is committed comes back from its patch file: random edits, and plain tools that read the same files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from scripts import build, export, fetch, pins, series, tree
from scripts.layout import Layout, default_cache
from scripts.pins import Project
from scripts.sources import blob_id
from tests.tool.miniature import OVERLAY, REPOSITORY, SERIES, UPSTREAM, Checkout, git, read_files, write_files

Tool = Callable[[Path, Path], None]

#: The cache of whoever runs the tests, before a fixture hides it.
CACHE = default_cache()

# Lines that look like parts of a patch or of a mail, and characters that some tools take for line ends.
LINES = ("", "a", "b", "    return", "-- x", "--- a/x", "++ y", "+++ b/x", "@@ -1 +1 @@", "diff --git a/x b/x")
ODD = (
    "--\r",
    "From a",
    "\x0c",
    "caf\u00e9 \u2028 x",
    "a\rb",
    "\\ No newline at end of file",
    "trailing \t",
    "-- ",
    "--",
)
END = st.sampled_from(("\n", "\n", "\n", "\r\n"))


@st.composite
def texts(draw: st.DrawFn) -> str:
    lines = draw(st.lists(st.tuples(st.sampled_from(LINES + ODD), END), min_size=1, max_size=12))
    text = "".join(f"{line}{end}" for line, end in lines)
    return text if draw(st.booleans()) else text.removesuffix("\n").removesuffix("\r")


@st.composite
def edits(draw: st.DrawFn, text: str) -> str:
    """The text with some of its lines replaced by others."""
    lines = text.splitlines(keepends=True)
    start = draw(st.integers(0, len(lines)))
    stop = draw(st.integers(start, min(len(lines), start + 3)))
    return "".join([*lines[:start], draw(texts()), *lines[stop:]])


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_commits(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("random")
    files = {"vllm/a.py": data.draw(texts()), "vllm/b.py": data.draw(texts())}
    other = Checkout(folder, folder / "cache", folder / "files")
    other.files.mkdir()
    other.patches.mkdir(parents=True)
    other.release(files)
    tree.build(other.layout, other.project, other.upstream())
    for number in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(files)))
        new = data.draw(edits(files[path]))
        assume(new != files[path] and new not in ("", *files.values()))
        files[path] = new
        other.commit(path, lambda _, new=new: new, f"Change {number}")  # type: ignore[misc]
    expected = read_files(other.tree)
    exported = export.export_tree(other.layout, other.project, other.upstream())
    assert list(exported.written) == other.names
    before = {path.name: path.read_bytes() for path in other.patches.iterdir()}
    again = export.export_tree(other.layout, other.project, other.upstream(), verbatim=True)
    assert (again.written, {path.name: path.read_bytes() for path in other.patches.iterdir()}) == ((), before)
    shutil.rmtree(other.layout.build)
    tree.build(other.layout, other.project, other.upstream())
    assert read_files(other.tree) == expected
    assert {path: data.decode() for path, (data, _) in expected.items()} == files


# -- plain tools -------------------------------------------------------------------------------------


def git_am(folder: Path, patches: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=upstream")
    names = [line.split("#")[0].strip() for line in (patches / "series").read_text().splitlines()]
    git(folder, "am", "--quiet", "--keep-cr", *(str(patches / name) for name in names if name))


def quilt(folder: Path, patches: Path) -> None:
    if not shutil.which("quilt"):
        pytest.skip("quilt is not installed")
    environment = {**os.environ, "QUILT_PATCHES": str(patches), "LC_ALL": "C", "QUILT_PATCH_OPTS": "--fuzz=0"}
    command = ["quilt", "--quiltrc", "-", "push", "-a"]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("tool", [git_am, quilt])
def test_plain_tools_give_the_same_files(checkout: Checkout, tmp_path: Path, tool: Tool) -> None:
    plain = tmp_path / "plain"
    write_files(plain, UPSTREAM)
    tool(plain, checkout.patches)
    tree.build(checkout.layout, checkout.project, checkout.upstream())
    ours = {path: file for path, file in read_files(checkout.tree).items() if path not in OVERLAY}
    assert read_files(plain) == ours
    assert sum(plain_file != (UPSTREAM[path].encode(), False) for path, plain_file in ours.items()) >= len(SERIES)


@pytest.mark.slow
@pytest.mark.parametrize("tool", [git_am, quilt])
@pytest.mark.parametrize("name", ["vllm", "vllm-gguf-plugin"])
def test_plain_tools_on_the_real_series(tmp_path: Path, tool: Tool, name: str) -> None:
    layout = Layout(REPOSITORY, CACHE)
    project = pins.load(layout.pins).project(name)
    archive = fetch.cached(layout, project.sdist)
    if archive is None:
        pytest.skip(f"the sdist of {name} is not in the cache: `make fetch` brings it")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    plain = archive_top(tmp_path)
    if series.names(layout, project):
        tool(plain, layout.patches(name))
    compare_with_series(layout, project, plain)


def archive_top(folder: Path) -> Path:
    return next(path for path in folder.iterdir() if (path / "PKG-INFO").exists())


def compare_with_series(layout: Layout, project: Project, plain: Path) -> None:
    """The files that the wheel is made of are those that the plain tool gave."""
    _, sources = build.prepare(layout, project)
    assert sources.patches or not sources.changed.keys() - sources.overlay
    for path, file in sources.changed.items():
        if path not in sources.overlay:
            assert (plain / path).read_bytes() == file.data, path
    assert not [path for path in sources.deleted if (plain / path).exists()]
    shown = read_files(plain / project.package)
    unchanged = {path for path in sources.upstream if path not in sources.changed}
    for path in unchanged:
        assert blob_id(shown[path.removeprefix(f"{project.package}/")][0]) == sources.upstream[path], path
