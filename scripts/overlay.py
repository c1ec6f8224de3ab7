"""The overlay: our own new files, at the path that they have in the package."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from scripts.errors import SeriesError
from scripts.layout import Layout
from scripts.pins import Project
from scripts.repository import Entry

# What Python, an editor or a patch tool may leave behind.
_LEFTOVERS = (".pyc", ".orig", ".rej", ".swp", "~")


def files(layout: Layout, project: Project) -> dict[str, Path]:
    """The overlay's files by their path from the top of the tree, in the order of their names.

    Raises:
        SeriesError: something is not a plain file, or looks like a leftover.
    """
    top = layout.overlay(project.package)
    found: dict[str, Path] = {}
    for path in sorted(top.rglob("*")) if top.is_dir() else ():
        if "__pycache__" in path.parts or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not path.is_file():
            raise SeriesError(f"{path}: the overlay takes plain files only", cure="replace it by a file")
        if path.name.endswith(_LEFTOVERS):
            raise SeriesError(f"{path}: a leftover in the overlay", cure="remove it")
        found[path.relative_to(layout.root / "overlay").as_posix()] = path
    return found


def mode(path: Path) -> str:
    """The git mode of a file on disk."""
    return "100755" if path.stat().st_mode & 0o100 else "100644"


def shadows(overlay: Iterable[str], upstream: Iterable[str]) -> list[str]:
    """The overlay files that upstream has as well, or that are where upstream has a folder."""
    theirs = set(upstream)
    theirs |= {path.rsplit("/", count)[0] for path in theirs for count in range(1, path.count("/") + 1)}
    return [path for path in overlay if path in theirs]


def refuse_shadows(overlay: Mapping[str, Path], upstream: Mapping[str, Entry]) -> None:
    """Refuse overlay files that upstream has as well: a change of an upstream file is a patch.

    Raises:
        SeriesError: there are such files, or one is where upstream has a folder.
    """
    if found := shadows(overlay, upstream):
        raise SeriesError(
            f"overlay files shadow files of upstream: {', '.join(str(overlay[path]) for path in found)}",
            cure="change upstream's files with a patch; the overlay holds new files only",
        )
