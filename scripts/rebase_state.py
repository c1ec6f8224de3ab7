"""A rebase under way, as it is written down in its repository at build/rebase/<project>."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts import storage
from scripts.errors import RebaseError
from scripts.pins import Project

#: Keeps the commits of the series as it was.
OLD = "refs/rebase/old"
_FILE = "vllm-sm120-rebase.json"


@dataclass(frozen=True)
class Rebase:
    """Where a rebase stands.

    `old` and `new` are the pins as they were and as they are to be, `base` and `upstream` the releases' commits,
    `tip` the last commit of the new series. `commits` holds each patch's commit in the old series, where it
    applied there, `patches` the patch files that all this began with, by sha256; `rest` are the patches
    still to do, the next one first. `stop` says what the user has to decide; `laid` is the tree of the work tree as
    the stop left it.
    """

    old: Project
    new: Project
    base: str
    upstream: str
    overlay: str
    tip: str
    commits: Mapping[str, str]
    patches: Mapping[str, str]
    rest: tuple[str, ...]
    verdicts: Mapping[str, str]
    dropped: tuple[str, ...] = ()
    stop: str = ""
    laid: str = ""


def load(folder: Path) -> Rebase:
    """The rebase whose repository is `folder`.

    Raises:
        RebaseError: there is none.
    """
    try:
        data = json.loads((folder / ".git" / _FILE).read_bytes())
        for key in ("rest", "dropped"):
            data[key] = tuple(data[key])
        return Rebase(**{**data, "old": Project(**data["old"]), "new": Project(**data["new"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise RebaseError(f"{folder}: no rebase is under way", cure="`make rebase TAG=` begins one") from None


def save(folder: Path, state: Rebase) -> None:
    """Write a step down."""
    storage.write(folder / ".git" / _FILE, json.dumps(asdict(state), indent=1).encode() + b"\n")
