"""build/<project>: the patched sources as a git repository to look at, to test and to work in.

Commit "upstream" (tagged), commit "overlay", then one commit a patch. The folder is made beside its place
and renamed into it, so a failing series or a killed run leaves the previous tree as it was.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts import series
from scripts.errors import UnsavedWorkError
from scripts.layout import Layout
from scripts.pins import Project
from scripts.repository import Repository
from scripts.series import Applied
from scripts.storage import discard, replace, scratch, write
from scripts.upstream import Upstream

_STATE = "vllm-sm120.json"


@dataclass(frozen=True)
class State:
    """What the tool put into a tree: commit ids, the id of the tree they end in, and the patch files by sha256."""

    upstream: str
    overlay: str
    tip: str
    tree: str
    patches: dict[str, str]


def open_tree(folder: Path) -> Repository:
    """The repository of a tree."""
    return Repository(folder / ".git", folder)


def state(folder: Path) -> State | None:
    """What was put into the tree at `folder`, or None where the tool did not make it."""
    try:
        return State(**json.loads((folder / ".git" / _STATE).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def unsaved(folder: Path) -> str:
    """What would be lost if `folder` were removed, in words; empty if nothing would."""
    if not folder.exists():
        return ""
    made = state(folder)
    if made is None:
        return "was not made by this tool"
    repository = open_tree(folder)
    tip = repository.ref("HEAD")
    if tip != made.tip or repository.run("rev-list", "--max-count=1", "--all", "--not", made.tip):
        return "has commits that are in no patch file"
    changed = uncommitted(repository, "--ignored=matching")
    return f"has changes that are in no commit: {', '.join(changed[:5])}" if changed else ""


def uncommitted(repository: Repository, *options: str) -> list[str]:
    """The files of a work tree that differ from its commit, but for what Python compiles."""
    status = repository.run("status", "--porcelain", "-z", "--untracked-files=all", *options).decode().split("\0")
    return [record[3:] for record in status if record and "__pycache__" not in record]


def refuse_to_lose(folder: Path, force: bool) -> None:
    """Stop unless `folder` holds nothing of the user's, or `force` is given.

    Raises:
        UnsavedWorkError: it does.
    """
    if not force and (lost := unsaved(folder)):
        raise UnsavedWorkError(
            f"{folder} {lost}", cure="`make export` saves commits as patches; FORCE=1 discards what is there"
        )


def build(layout: Layout, project: Project, upstream: Upstream, *, force: bool = False) -> tuple[Applied, Path]:
    """Make build/<project>, or leave it alone where it is what the series says already.

    Raises:
        ApplyError: the series does not apply.
        UnsavedWorkError: there is work in the tree that exists nowhere else.
    """
    folder = layout.tree(project.name)
    refuse_to_lose(folder, force)
    with scratch(layout.build, ".tree-") as temporary:
        made = temporary / "tree"
        repository = Repository.init(made / ".git", made, upstream.repository.objects)
        applied = series.apply(layout, project, repository, upstream.commit)
        applied.refuse_bad()
        current = state(folder)
        if current and current.tip == applied.tip and not unsaved(folder):
            return applied, folder
        repository.run("update-ref", "refs/heads/main", applied.tip)
        repository.run("update-ref", "refs/tags/upstream", applied.upstream)
        repository.run("reset", "--quiet", "--hard")
        record(made, repository, applied)
        if folder.exists():
            replace(folder, temporary / "previous")
        replace(made, folder)
    return applied, folder


def record(folder: Path, repository: Repository, applied: Applied) -> None:
    """Write down what the tree at `folder` holds."""
    content = State(applied.upstream, applied.overlay, applied.tip, repository.tree(applied.tip), applied.hashes)
    write(folder / ".git" / _STATE, json.dumps(asdict(content), indent=1).encode() + b"\n")


def clean(layout: Layout, *, force: bool = False) -> None:
    """Remove build/ and dist/; the cache stays.

    Raises:
        UnsavedWorkError: a tree, an edit or a rebase holds work that exists nowhere else.
    """
    folders = sorted(path for path in layout.build.glob("*") if path.is_dir() and not path.name.startswith("."))
    for folder in folders:
        if folder.name not in ("edit", "rebase"):
            refuse_to_lose(folder, force)
        elif not force and any(folder.iterdir()):
            raise UnsavedWorkError(
                f"{folder}: {'an edit' if folder.name == 'edit' else 'a rebase'} is under way",
                cure="finish it, or FORCE=1 discards it",
            )
    for folder in [*folders, layout.dist]:
        if folder.exists():
            discard(folder, layout.build)
