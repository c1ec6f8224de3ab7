"""Commits back to patch files.

A patch file is left alone where its old text makes the same commit: no churn from shifted line numbers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts import overlay, patch, series, tree
from scripts.errors import EditError, SeriesError, UnsavedWorkError
from scripts.layout import Layout
from scripts.patch import FILENAME_TRAILER, Patch
from scripts.pins import Project
from scripts.repository import Repository
from scripts.series import Applied
from scripts.storage import write
from scripts.upstream import Upstream


@dataclass(frozen=True)
class Exported:
    """The file names of a series after an export, and which of them are new, rewritten or gone."""

    names: tuple[str, ...]
    written: tuple[str, ...]
    removed: tuple[str, ...]


def canonical(repository: Repository, commit: str) -> bytes:
    """A commit as the text of its patch file."""
    text = repository.format_patch(commit)
    return re.sub(rb"^%s: .*\n" % FILENAME_TRAILER.encode(), b"", text, count=1, flags=re.MULTILINE)


def export_tree(
    layout: Layout, project: Project, upstream: Upstream, *, force: bool = False, verbatim: bool = False
) -> Exported:
    """Write the commits of build/<project> to patches/<project>.

    Raises:
        UnsavedWorkError: the tree holds changes that are in no commit, or a patch would vanish and not `force`.
        EditError: there is no tree, it is in the middle of something, or its history is not a plain line.
    """
    folder = layout.tree(project.name)
    made = tree.state(folder)
    if made is None:
        raise EditError(f"{folder}: there is no tree to export from", cure="`make tree` makes it")
    repository = tree.open_tree(folder)
    for marker in ("rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "MERGE_HEAD"):
        if (repository.git_dir / marker).exists():
            raise EditError(f"{folder}: a rebase, pick or merge is under way", cure="finish or abort it first")
    if changed := tree.uncommitted(repository):
        raise UnsavedWorkError(
            f"{folder}: changes that are in no commit: {', '.join(changed[:5])}", cure="commit them or take them back"
        )
    tip = repository.ref("HEAD")
    assert tip is not None
    exported = export_commits(
        layout, project, repository, made.upstream, made.overlay, tip, made.patches, force=force, verbatim=verbatim
    )
    applied = series.apply(layout, project, repository, upstream.commit)
    applied.refuse_bad()
    adopt(layout, folder, repository, applied, tip)
    return exported


def adopt(layout: Layout, folder: Path, repository: Repository, applied: Applied, tip: str) -> None:
    """Replace the tree's commits by those that the exported files make.

    The content is the same but for overlay files, which may have been edited in overlay/ meanwhile.
    """
    changed = {change.path for change in repository.changes(tip, applied.tip)}
    before = {
        change.path for change in repository.changes(applied.upstream, repository.commits(applied.upstream, tip)[0])
    }
    if changed - before - set(overlay.files(layout, applied.project)):
        raise SeriesError(
            f"{folder}: the exported patches do not give the tree they were exported from",
            cure="this is a defect of the tool: please report it; your commits are untouched",
        )
    repository.remove_locks("HEAD", "index", "refs/heads/main")
    repository.run("update-ref", "refs/heads/main", applied.tip)
    repository.run("symbolic-ref", "HEAD", "refs/heads/main")
    if changed:
        repository.run("reset", "--quiet", "--hard")
    tree.record(folder, repository, applied)


def export_commits(
    layout: Layout,
    project: Project,
    repository: Repository,
    upstream: str,
    overlay_commit: str,
    tip: str,
    patches: Mapping[str, str],
    *,
    force: bool = False,
    verbatim: bool = False,
    rest: Sequence[str] = (),
    dropped: Collection[str] = (),
) -> Exported:
    """Write the commits after `overlay_commit` up to `tip` as patch files and list them in the series.

    `patches` are the patch files that the commits were made from, by sha256. `rest` are those that have no commit
    and stay as they are at the end of the series, `dropped` those that are meant to go.

    Raises:
        UnsavedWorkError: a patch would vanish, or a patch file was edited meanwhile, and not `force`.
        EditError: the history is not overlay and a plain line of commits.
        SeriesError: a commit cannot be a patch of this series.
    """
    commits = repository.commits(upstream, tip)
    if not commits or commits[0] != overlay_commit:
        raise EditError(
            "the history does not begin with the overlay commit that was put there",
            cure="change overlay files in overlay/, not in the tree; keep that commit as it is",
        )
    if merges := [commit for commit in commits if len(repository.parents(commit)) != 1]:
        raise EditError(f"commit {merges[0]} is a merge", cure="a series is a plain line of commits: rebase it")
    folder = layout.patches(project.name)
    listed = series.listed(folder / "series")
    names = [_name(repository, commit) for commit in commits[1:]]
    series.refuse_names(folder / "series", names)
    series.refuse_unlisted(folder, {*listed, *names})
    removed = tuple(name for name in listed if name not in names and name not in rest)
    if (lost := [name for name in removed if name not in dropped]) and not force:
        raise UnsavedWorkError(
            f"no commit for {', '.join(lost)}: the export would remove it", cure="FORCE=1 if that is meant"
        )
    texts = {}
    kept = []
    for name, commit in zip(names, commits[1:], strict=True):
        new, old = as_patch(layout, project, repository, commit), _old(repository, folder / name)
        if old and not verbatim and _equal(repository, old, commit):
            kept.append(old)
            continue
        kept.append(new)
        if not old or old.text != new.text:
            texts[new.path] = new.text
    series.refuse_repeats(kept)
    edited = [path.name for path in texts if path.exists() and patches.get(path.name) != _sha256(path)]
    if edited and not force:
        raise UnsavedWorkError(
            f"{folder}: edited since the commits were made from them: {', '.join(edited)}",
            cure="put those changes into the commits; FORCE=1 overwrites the files",
        )
    # Only now, when all is well; and in this order, so that a run that was killed between can be run again.
    for path, text in texts.items():
        write(path, text)
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    _write_series(folder / "series", [*names, *rest])
    return Exported(tuple(names), tuple(path.name for path in texts), removed)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _name(repository: Repository, commit: str) -> str:
    message = repository.run("show", "--no-patch", "--format=%B", commit).decode()
    if name := repository.trailers(message).get(FILENAME_TRAILER):
        return name
    slug = re.sub(r"[^a-z0-9]+", "-", message.splitlines()[0].lower()).strip("-")
    return f"{slug or commit[:12]}.patch"


def _old(repository: Repository, path: Path) -> Patch | None:
    """The patch file as it is, or None where there is none that could be kept."""
    try:
        return patch.load(repository, path)
    except SeriesError:
        return None


def as_patch(layout: Layout, project: Project, repository: Repository, commit: str) -> Patch:
    """The patch that a commit makes, not written yet.

    Raises:
        SeriesError: no patch file can hold what it changes or says.
    """
    path = layout.patches(project.name) / _name(repository, commit)
    ours = overlay.files(layout, project)
    for change in repository.changes(f"{commit}^", commit):
        if change.path in ours:
            raise SeriesError(f"{path}: changes overlay file {change.path}", cure=f"edit overlay/{change.path} instead")
        if change.status == "A":
            raise SeriesError(f"{path}: adds {change.path}", cure=f"put it at overlay/{change.path}")
    return patch.parse(repository, path, canonical(repository, commit))


def _equal(repository: Repository, old: Patch, commit: str) -> bool:
    """Whether the old patch file, applied at this place, makes the same tree, author and message."""
    message = repository.run("show", "--no-patch", "--format=%an%n%ae%n%at%n%B", commit).decode()
    with repository.private_index() as index:
        repository.read_tree(index, f"{commit}^")
        if not repository.apply(old.diff, index) or repository.write_tree(index) != repository.tree(commit):
            return False
    redone = repository.commit(repository.tree(commit), repository.parents(commit), old.message, old.author)
    redone_message = repository.run("show", "--no-patch", "--format=%an%n%ae%n%at%n%B", redone).decode()
    return message.rstrip() == redone_message.rstrip()


def _write_series(path: Path, names: list[str]) -> None:
    """Change the series file only where the order or the names did; comments stay at the top."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    listed = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    if [name for name in listed if name] != names:
        comments = [line for line in text.splitlines() if line.startswith("#")]
        write(path, "\n".join([*comments, *names, ""]).encode())


def problems(repository: Repository, applied: Applied) -> list[str]:
    """Patch files that apply exactly and yet are not the text that an export would write."""
    return [
        f"{step.patch.path}: is not what `make export VERBATIM=1` writes"
        for step in applied.steps
        if step.commit and step.verdict.kind == "exact" and canonical(repository, step.commit) != step.patch.text
    ]
