"""`make show-change`: what a change of patches, overlay or pin does to the source, as a diff of two trees.

A diff of patch files is a diff of diffs. Here both states of this repository are applied, and what comes out of them
is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scripts import build, series
from scripts.pins import Project
from scripts.repository import Repository
from scripts.revision import State
from scripts.series import Applied


@dataclass(frozen=True)
class Change:
    """What differs in one project: between the files of this repository, in words, and between the sources.

    `diff` is None where there is nothing to compare with. `elsewhere` counts the files that differ because upstream
    does, and that neither series nor overlay touch; they are left out of the diff.
    """

    project: str
    differences: tuple[str, ...]
    diff: bytes | None
    elsewhere: int = 0

    def text(self) -> str:
        """All of it for people."""
        lines = [f"{self.project}: {line}" for line in self.differences or ("nothing changed",)]
        if self.elsewhere:
            files = "file differs" if self.elsewhere == 1 else "files differ"
            lines.append(f"{self.project}: {self.elsewhere} more {files} between the releases, left out here")
        if self.differences and self.diff == b"" and not self.elsewhere:
            lines.append(f"{self.project}: the source is the same")
        return "\n".join([*lines, ""]) + (self.diff or b"").decode(errors="backslashreplace")


def compare(before: State, after: State, name: str) -> Change:
    """What happened to the project `name` between two states.

    Raises:
        SeriesError, ApplyError: one of them cannot be built.
    """
    old, new = (state.pins.projects.get(name) for state in (before, after))
    if old is None or new is None:
        only = after if old is None else before
        return Change(name, (f"is pinned in {only.name} only",), None)
    released = build.get_upstream(before.layout, old, "sdist")
    upstream = build.get_upstream(after.layout, new, "sdist")
    with series.workshop(after.layout, upstream) as repository:  # the cache has both releases in one repository
        first = _apply(before, old, repository, released.commit)
        second = _apply(after, new, repository, upstream.commit)
        differences = [f"{old.version} becomes {new.version}"] if old.version != new.version else []
        differences += _named("overlay file", _overlay(repository, first), _overlay(repository, second))
        differences += _named("patch", first.hashes, second.hashes)
        kept = [patch for patch in first.hashes if patch in second.hashes]
        if kept != [patch for patch in second.hashes if patch in first.hashes]:
            differences.append(f"order: {', '.join(second.hashes)}")
        changed = {change.path for change in repository.changes(first.tip, second.tip)}
        ours = {change.path for one in (first, second) for change in repository.changes(one.upstream, one.tip)}
        diff = _diff(repository, first.tip, second.tip, sorted(changed & ours))
    return Change(name, tuple(differences), diff, len(changed - ours))


def _apply(state: State, project: Project, repository: Repository, upstream: str) -> Applied:
    applied = series.apply(state.layout, project, repository, upstream)
    applied.refuse_bad()
    return applied


def _diff(repository: Repository, before: str, after: str, paths: list[str]) -> bytes:
    """The diff of two commits in some files."""
    if not paths:
        return b""
    options = ("--stat", "--patch", "--find-renames", "--abbrev=12", "--no-ext-diff", "--no-color")
    return repository.run("diff", *options, before, after, "--", *paths)


def _overlay(repository: Repository, applied: Applied) -> dict[str, str]:
    changes = repository.changes(applied.upstream, applied.overlay)
    return {change.path: change.entry.blob for change in changes if change.entry}


def _named(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The differences of two maps from names to hashes, in words."""
    found = {
        "added": sorted(after.keys() - before.keys()),
        "gone": sorted(before.keys() - after.keys()),
        "changed": sorted(name for name in before.keys() & after.keys() if before[name] != after[name]),
    }
    return [f"{what} {word}: {', '.join(names)}" for word, names in found.items() if names]
