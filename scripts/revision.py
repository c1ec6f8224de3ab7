"""The states of this repository that commands compare: a revision of its history, or the working tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from scripts import pins, storage
from scripts.errors import RevisionError
from scripts.layout import Layout
from scripts.pins import Pins
from scripts.repository import Repository

WORKING_TREE = "the working tree"


@dataclass(frozen=True)
class State:
    """A state of this repository: a revision, checked out as far as it matters here, or the working tree."""

    name: str
    layout: Layout
    pins: Pins


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
