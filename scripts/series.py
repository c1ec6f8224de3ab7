"""The series: upstream, the overlay and the patches in order, as commits made without a work tree."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts import overlay, patch, verdict
from scripts.errors import ApplyError, SeriesError
from scripts.layout import Layout
from scripts.patch import Patch
from scripts.pins import Project
from scripts.repository import IDENTITY, Author, Entry, Repository
from scripts.storage import scratch
from scripts.upstream import Upstream
from scripts.verdict import Kind, Verdict

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*\.patch")


@dataclass(frozen=True)
class Step:
    """A patch of the series and what became of it; no commit where it was left out."""

    patch: Patch
    verdict: Verdict
    commit: str | None


@dataclass(frozen=True)
class Applied:
    """A series laid over upstream. `tip` is the last commit."""

    project: Project
    upstream: str
    overlay: str
    steps: tuple[Step, ...]
    tip: str

    @property
    def hashes(self) -> dict[str, str]:
        """The patch files that were applied, by sha256."""
        return {step.patch.name: step.patch.sha256 for step in self.steps}

    def refuse_bad(self) -> None:
        """Stop here unless every patch applied exactly or at an offset.

        Raises:
            ApplyError: names each patch that did not, file and hunk, with both sides of the context.
        """
        bad = [step for step in self.steps if not step.verdict.good]
        if bad:
            parts = [f"{step.patch.path}: {step.verdict}\n{step.verdict.explanation}" for step in bad]
            raise ApplyError(
                "\n".join(parts),
                cure=f"bring the patch up to date with {self.project.name} {self.project.version}: see docs/patches.md",
            )


def listed(path: Path) -> list[str]:
    """The names in a series file, in order. A project without patches needs none.

    Raises:
        SeriesError: a line is not a file name, or a name stands twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError:
        raise SeriesError(f"{path}: not text", cure="restore it") from None
    found = [line.split("#", 1)[0].strip() for line in lines]
    found = [name for name in found if name]
    refuse_names(path, found)
    return found


def refuse_names(path: Path, names: Sequence[str]) -> None:
    """Refuse names that a series file, `path`, cannot list.

    Raises:
        SeriesError: one is not that of a patch file beside it, or stands twice.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise SeriesError(
                f"{path}: {name!r} is not the name of a patch file in this folder",
                cure="one file name a line, lower case, ending in .patch; comments begin with #",
            )
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SeriesError(f"{path}: listed twice: {', '.join(twice)}", cure="keep one of the lines")


def refuse_unlisted(folder: Path, names: Collection[str]) -> None:
    """Refuse patch files in `folder` that are none of `names`.

    Raises:
        SeriesError: there are such files.
    """
    if unlisted := sorted({file.name for file in folder.glob("*.patch")} - set(names)):
        raise SeriesError(
            f"{folder}: not in the series: {', '.join(unlisted)}",
            cure=f"add it to {folder / 'series'}, or remove the file",
        )


def names(layout: Layout, project: Project) -> list[str]:
    """The patch file names of a series, in order.

    Raises:
        SeriesError: the series file breaks a rule, or a patch file is missing or not listed.
    """
    folder = layout.patches(project.name)
    path = folder / "series"
    found = listed(path)
    if missing := [name for name in found if not (folder / name).exists()]:
        raise SeriesError(
            f"{path}: no such file: {', '.join(missing)}", cure="restore the patch, or take it out of the series"
        )
    refuse_unlisted(folder, found)
    return found


def load(layout: Layout, project: Project, repository: Repository) -> list[Patch]:
    """The patches of a series, in order.

    Raises:
        SeriesError: the series or a patch file breaks a rule.
    """
    patches = [patch.load(repository, layout.patches(project.name) / name) for name in names(layout, project)]
    refuse_repeats(patches)
    return patches


def refuse_repeats(patches: Iterable[Patch]) -> None:
    """Refuse patches that hold the same change.

    Raises:
        SeriesError: there are two.
    """
    seen: dict[bytes, Patch] = {}
    for one in patches:
        if other := seen.get(one.diff):
            raise SeriesError(f"{one.path}: the same change as {other.name}", cure="keep one of the two")
        seen[one.diff] = one


@contextmanager
def workshop(layout: Layout, upstream: Upstream) -> Iterator[Repository]:
    """A throw-away bare repository that sees upstream's objects: what is tried leaves no trace in the cache."""
    with scratch(layout.build, ".workshop-") as folder:
        yield Repository.init(folder / "git", objects=upstream.repository.objects)


def apply(layout: Layout, project: Project, repository: Repository, upstream: str) -> Applied:
    """Lay overlay and series over upstream in `repository`: one commit for the overlay, one for each patch.

    Every patch is judged, so that a report is whole; a patch that does not apply is left out, and
    `Applied.refuse_bad` is for those who cannot go on without it.

    Raises:
        SeriesError: a file of the series or of the overlay breaks a rule.
    """
    patches = load(layout, project, repository)
    ours = overlay.files(layout, project)
    overlay.refuse_shadows(ours, repository.files(upstream))
    for one in patches:
        if touched := [file.path for file in one.files if file.path in ours]:
            raise SeriesError(
                f"{one.path}: touches overlay files: {', '.join(touched)}", cure="change the overlay file itself"
            )
    return lay(project, repository, upstream, ours, patches)


def lay(
    project: Project, repository: Repository, upstream: str, ours: Mapping[str, Path], patches: Sequence[Patch]
) -> Applied:
    """The same for an overlay and patches that were read and found to keep the rules."""
    with repository.private_index() as index:
        repository.read_tree(index, upstream)
        blobs = repository.add_blobs(list(ours.values()))
        entries = {
            path: Entry(overlay.mode(file), blob) for (path, file), blob in zip(ours.items(), blobs, strict=True)
        }
        repository.update_index(index, entries)
        base = Author(*IDENTITY, repository.line("show", "--no-patch", "--format=@%at +0000", upstream))
        first = tip = repository.commit(repository.write_tree(index), [upstream], "overlay\n", base)
        steps = []
        for one in patches:
            found = verdict.judge(repository, index, one, project.package)
            commit = None
            if found.good or found.kind is Kind.MERGED:
                tip = commit = repository.commit(repository.write_tree(index), [tip], one.message, one.author)
            steps.append(Step(one, found, commit))
    return Applied(project, upstream, first, tuple(steps), tip)
