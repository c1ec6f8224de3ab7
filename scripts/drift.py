"""`make drift`: what the series and the overlay would meet on other upstream releases.

Nothing is checked out and nothing of the repository changes. A release is downloaded and imported into the cache when
it is first asked about; an interrupted run goes on with what is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import InvalidVersion, Version
from rich import box
from rich.measure import Measurement
from rich.table import Table

from scripts import index, overlay, overlay_check, series, upstream, way_back
from scripts.console import console
from scripts.errors import DriftError, PinError
from scripts.index import Release
from scripts.layout import Layout
from scripts.overlay_check import Problem
from scripts.pins import Project
from scripts.repository import Repository
from scripts.series import Applied
from scripts.verdict import Kind, Verdict

#: How many releases on either side of the pin are looked at where none is named.
NEIGHBOURS = 4
_SEVERAL = re.compile(r"[\s,]+")


@dataclass(frozen=True)
class Column:
    """What one release does to the series and the overlay.

    `unmergeable` are the patches that not even a three-way merge gets in.
    """

    tag: str
    verdicts: Mapping[str, Verdict]
    unmergeable: tuple[str, ...]
    overlay: tuple[Problem, ...]

    @property
    def clean(self) -> bool:
        """Whether a rebase to this release would ask for nothing."""
        return not self.unmergeable and not self.overlay


@dataclass(frozen=True)
class Drift:
    """The columns, oldest release first, and the tags of all releases that are newer than the pin."""

    project: Project
    columns: tuple[Column, ...]
    newer: tuple[str, ...]

    def refuse_unclean(self) -> None:
        """Stop unless a rebase to each of the releases would be clean.

        Raises:
            DriftError: names those to which it would not.
        """
        if unclean := [column.tag for column in self.columns if not column.clean]:
            raise DriftError(
                f"a rebase of {self.project.name} would not be clean to {', '.join(unclean)}",
                cure="docs/drift.md says how to read the table; `make rebase TAG=...` does the work patch by patch",
            )


def drift(layout: Layout, project: Project, tags: str = "") -> Drift:
    """Lay the series over other releases, and check the overlay against them.

    Args:
        layout: the checkout.
        project: the project at its pin.
        tags: releases by tag, `pin`, `latest`, or ranges of them (`v0.28.0..pin`), separated by blanks or commas;
            without any, the pin and its NEIGHBOURS on either side.

    Raises:
        PinError: there is no such release.
        ApplyError: the series does not even apply to its pin.
        SeriesError: the series or the overlay breaks a rule.
        SourceError: a release, or the list of releases, cannot be had.
    """
    known = {one.version: one for one in index.releases(project.name)}
    chosen = choose(known, project, tags)
    pinned = upstream.from_sdist(layout, project)
    columns = []
    with series.workshop(layout, pinned) as repository:
        # At its pin first: a three-way merge starts from the files that a patch was made for.
        base = series.apply(layout, project, repository, pinned.commit)
        base.refuse_bad()
        commits = {step.patch.name: step.commit for step in base.steps if step.commit}
        # As a rebase takes them: with the line numbers of the pin, even where a file has others.
        patches = [way_back.as_committed(repository, step.patch.path, commits[step.patch.name]) for step in base.steps]
        ours = overlay.files(layout, project)
        from_patches = set(
            overlay_check.check(repository, ours, upstream=pinned.commit, tip=base.overlay, pinned=base.tip)
        )
        for version in chosen:
            other = at(project, version, known)
            commit = upstream.from_sdist(layout, other).commit
            theirs = repository.files(commit)
            shadows = overlay.shadows(ours, theirs)
            fitting = {path: file for path, file in ours.items() if path not in shadows}
            applied = confirmed(repository, series.lay(other, repository, commit, fitting, patches), commits)
            problems = overlay_check.check(repository, ours, upstream=commit, tip=applied.tip, pinned=base.tip)
            column = _column(other.tag, applied, problems, from_patches)
            console.print(f"{other.tag}: {_summary(column)}")
            columns.append(column)
    newer = [_tag(one.version) for one in known.values() if _final(one) and one.version > Version(project.version)]
    return Drift(project, tuple(columns), tuple(newer))


def confirmed(repository: Repository, applied: Applied, commits: Mapping[str, str]) -> Applied:
    """The series on another release, with patches that went in as another change counted as conflicts, as in a rebase.

    `commits` are those of the patches at the pin. What such a patch made stays there for those after it, since a
    resolution will not be far from it.
    """
    steps = []
    for step in applied.steps:
        if step.commit is not None:
            old = commits[step.patch.name]
            found = way_back.confirm(repository, step.verdict, step.patch, old, step.commit, applied.project.package)
            step = replace(step, verdict=found, commit=None if found.kind is Kind.CONFLICT else step.commit)
        steps.append(step)
    return replace(applied, steps=tuple(steps))


def _column(tag: str, applied: Applied, problems: Sequence[Problem], from_patches: set[Problem]) -> Column:
    """A release's column. What the overlay misses because a patch did not apply is told by that patch's verdict."""
    verdicts = {step.patch.name: step.verdict for step in applied.steps}
    unmergeable = tuple(step.patch.name for step in applied.steps if step.commit is None)
    left = [one for one in problems if not unmergeable or one not in from_patches]
    return Column(tag, verdicts, unmergeable, tuple(left))


# -- which releases ----------------------------------------------------------------------------------


def _tag(version: Version) -> str:
    return f"v{version}"


def _final(release: Release) -> bool:
    return not release.version.is_prerelease and not release.yanked


def at(project: Project, version: Version, known: Mapping[Version, Release]) -> Project:
    """The project at another release, as far as its sources go."""
    if version == Version(project.version):
        return project
    return replace(project, version=str(version), tag=_tag(version), commit="", sdist=known[version].sdist, wheels={})


def choose(known: Mapping[Version, Release], project: Project, tags: str) -> list[Version]:
    """The releases that `tags` asks for, as in `drift`, oldest first.

    Raises:
        PinError: there is none of a name.
    """
    pin = Version(project.version)
    final = sorted({one.version for one in known.values() if _final(one)} | {pin})
    words = [word for word in _SEVERAL.split(tags) if word]
    if not words:
        place = final.index(pin)
        return final[max(0, place - NEIGHBOURS) : place + NEIGHBOURS + 1]
    chosen: set[Version] = set()
    for word in words:
        first, dots, last = word.partition("..")
        low = _find(known, project, final, first)
        high = _find(known, project, final, last) if dots else low
        chosen |= {version for version in final if low <= version <= high} | {low, high}
    return sorted(chosen)


def _find(known: Mapping[Version, Release], project: Project, final: Sequence[Version], tag: str) -> Version:
    if tag in ("pin", "latest"):
        return Version(project.version) if tag == "pin" else final[-1]
    try:
        version = Version(tag.removeprefix("v"))
    except InvalidVersion:
        version = None
    if version is None or version not in {*known, Version(project.version)}:
        newest = ", ".join(_tag(one) for one in reversed(final[-5:]))
        raise PinError(f"no release {tag!r} of {project.name} in the package indexes", cure=f"the newest: {newest}")
    return version


# -- showing it --------------------------------------------------------------------------------------


def as_json(found: Drift) -> dict[str, Any]:
    """The values of the JSON report."""
    return {
        column.tag: {
            "patches": {name: str(verdict) for name, verdict in column.verdicts.items()},
            "overlay": [str(problem) for problem in column.overlay],
            "clean": column.clean,
        }
        for column in found.columns
    }


def table(found: Drift) -> Table:
    """The table for people: a row for each patch, one for the overlay, one for the whole."""
    shown = Table(title=_title(found), title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    heads, *rows = _rows(found)
    for head in heads:
        shown.add_column(head, no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    # As wide as it is, where there is no terminal and on a narrow one, too: rich would cut cells off.
    shown.width = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    return shown


def details(found: Drift) -> list[str]:
    """What the table has no room for, a line each: `<tag> <patch>: <verdict>` and the overlay's problems."""
    return [f"{column.tag} {line}" for column in found.columns for line in _unclean(column)]


def markdown(found: Drift) -> str:
    """The report as one page of Markdown."""
    heads, *rows = (["" if cell == "patch" else cell.replace("|", "\\|") for cell in row] for row in _rows(found))
    lines = [f"# {_title(found)}", "", news(found), ""]
    lines += [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    for column in found.columns:
        if not column.clean:
            lines += ["", f"## {column.tag}", "", *(f"* `{line}`" for line in _unclean(column))]
    return "\n".join(lines) + "\n"


def news(found: Drift) -> str:
    """Whether upstream has released something newer than the pin, in a sentence."""
    if not found.newer:
        return f"{found.project.tag}, which is pinned, is upstream's newest release."
    count = len(found.newer)
    newer = f"{count} newer releases, the newest" if count > 1 else "a newer release,"
    return f"Upstream has {newer} {found.newer[-1]}; {found.project.tag} is pinned."


def _title(found: Drift) -> str:
    return f"Drift of {found.project.name} from {found.project.tag}"


def _rows(found: Drift) -> list[list[str]]:
    names = list(found.columns[0].verdicts)
    rows = [["patch", *(column.tag for column in found.columns)]]
    rows += [
        [name.removesuffix(".patch"), *(_cell(column.verdicts[name]) for column in found.columns)] for name in names
    ]
    rows.append(["overlay", *(_problems(column) for column in found.columns)])
    rows.append(["rebase", *("clean" if column.clean else "not clean" for column in found.columns)])
    return rows


def _cell(verdict: Verdict) -> str:
    return str(verdict) if verdict.kind is Kind.OFFSET else str(verdict.kind)


def _problems(column: Column) -> str:
    count = len(column.overlay)
    return f"{count} problem{'s' * (count > 1)}" if count else "fits"


def _unclean(column: Column) -> list[str]:
    return [f"{name}: {column.verdicts[name]}" for name in column.unmergeable] + [str(one) for one in column.overlay]


def _summary(column: Column) -> str:
    taken = len(column.verdicts) - len(column.unmergeable)
    return f"{taken} of {len(column.verdicts)} patches apply, overlay {_problems(column)}"
