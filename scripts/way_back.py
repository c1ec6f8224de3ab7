"""Whether a patch that went into another release is still the same change.

A merge can go wrong without a conflict: what git took for the place was another one, or a part of the change was
there already. The new patch, put back where the old one was, then gives other text than the old one gave.
"""

from __future__ import annotations

from pathlib import Path

from scripts import export, patch
from scripts.patch import Patch
from scripts.repository import Repository
from scripts.verdict import Kind, Verdict, judge


def as_committed(repository: Repository, path: Path, commit: str) -> Patch:
    """The patch file `path` as its commit says it, with the line numbers of the place where it went in."""
    return patch.parse(repository, path, export.canonical(repository, commit))


def confirm(repository: Repository, found: Verdict, one: Patch, old: str, new: str, package: str) -> Verdict:
    """The verdict on a patch that went in as the commit `new`, and whose commit where it came from is `old`."""
    back = as_committed(repository, one.path, new)
    paths = sorted({file.path for file in (*one.files, *back.files)})
    with repository.private_index() as index:
        repository.update_index(index, repository.files(f"{old}^", *paths))
        judge(repository, index, back, package)
        if repository.files(repository.write_tree(index), *paths) == repository.files(old, *paths):
            return found
    files = ", ".join(file.path for file in one.files)
    return Verdict(
        Kind.CONFLICT, files, f"it applies ({found}), but not as the same change: put back, it gives other text"
    )
