"""`make show-change`: what a change of patches, overlay or pin does to the source, as a diff of two trees.

A diff of patch files is a diff of diffs. Here both states of this repository are applied, and what comes out of them
is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from scripts import build, pins, series, storage
from scripts.errors import RevisionError
from scripts.layout import Layout
from scripts.pins import Pins, Project
from scripts.repository import Repository
from scripts.series import Applied

WORKING_TREE = "the working tree"


@dataclass(frozen=True)
class State:
    """A state of this repository: a revision, checked out as far as it matters here, or the working tree."""

    name: str
    layout: Layout
    pins: Pins


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


@contextmanager
def states(layout: Layout, revisions: str) -> Iterator[tuple[State, State]]:
    """The states that `A..B` names; those of `A` are that revision and the working tree.

    Raises:
        RevisionError: one of them is not a revision, or this is not a git repository.
        PinError: its upstream.toml cannot be read.
    """
    before, separator, after = revisions.partition("..")
    with storage.scratch(layout.build, ".change-") as folder:
        old = _check_out(layout, before or "HEAD", folder / "before")
        if separator:
            yield old, _check_out(layout, after or "HEAD", folder / "after")
        else:
            yield old, State(WORKING_TREE, layout, pins.load(layout.pins))


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


def _check_out(layout: Layout, revision: str, folder: Path) -> State:
    """Write the pins, patches and overlay of a revision below `folder`."""
    repository = Repository(layout.root / ".git")
    if not repository.git_dir.exists():
        raise RevisionError(f"{layout.root}: not a git repository", cure="run it in a clone of this repository")
    commit = repository.ref(revision)
    if commit is None:
        raise RevisionError(
            f"{revision!r} is not a revision of this repository",
            cure="REV is one revision, or two as in REV=v1..v2; `git log upstream.toml patches overlay` lists some",
        )
    root = folder / commit[:12]  # which messages about its files name
    files = {
        path: entry
        for part in ("upstream.toml", "patches", "overlay")
        for path, entry in repository.files(commit, part).items()
    }
    contents = repository.blobs([entry.blob for entry in files.values()])
    for (path, entry), data in zip(files.items(), contents, strict=True):
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o755 if entry.mode == "100755" else 0o644)
    made = replace(layout, root=root)
    return State(revision, made, pins.load(made.pins))


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
