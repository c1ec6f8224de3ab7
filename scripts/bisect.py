"""`make bisect`: which part of the distribution breaks a command, or mends it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts import prefix as prefix_module
from scripts import revision, series, storage
from scripts.between import between
from scripts.console import console
from scripts.errors import BisectError
from scripts.layout import Layout
from scripts.pins import Project
from scripts.prefix import OVERLAY, UPSTREAM, Checkout, Prefix
from scripts.repository import Repository
from scripts.upstream import Upstream

#: What a shell answers where it cannot run a command: that says nothing about a prefix.
_NOT_RUN = (126, 127)


@dataclass(frozen=True)
class Found:
    """The first prefix with another result, what it does to the command, and what the command printed there."""

    prefix: Prefix
    mends: bool
    output: str

    def describe(self) -> str:
        """The answer as a sentence."""
        project = self.prefix.project
        parts = {UPSTREAM: f"the pin ({project.name} {project.version})", OVERLAY: "the overlay"}
        names = [parts.get(name, name) for name in self.prefix.names]
        verb = "mends it" if self.mends else "breaks it"
        return f"{names[0]} {verb}" if len(names) == 1 else f"one of these, or several, {verb}: {', '.join(names)}"


def bisect(layout: Layout, project: Project, upstream: Upstream, command: str) -> Found:
    """Run a shell command on prefixes of the series until the one is found that changes its result.

    Where it fails with the whole series and with upstream alone, it is taken for one that some patch mends and a
    later one breaks; only if it passes nowhere, the pin is to blame.

    Raises:
        BisectError: no command is given or it cannot be run, or it passes with the whole series and upstream alone.
        ApplyError: a patch does not apply.
    """

    def prefixes(repository: Repository) -> list[Prefix]:
        applied = series.apply(layout, project, repository, upstream.commit)
        applied.refuse_bad()
        return prefix_module.prefixes(applied)

    return _bisect(layout, project, upstream, command, prefixes, _in_series)


def bisect_change(layout: Layout, project: Project, upstream: Upstream, command: str, revisions: str) -> Found:
    """The same for what has changed since a revision of this repository (or from one to another, `A..B`).

    Raises:
        BisectError: as `bisect`, or it has the same result at both ends.
        RevisionError: one of them is not a revision.
        ApplyError: one of them does not apply.
    """
    with revision.states(layout, revisions) as (before, after):

        def states(repository: Repository) -> list[Prefix]:
            return between(before, after, project.name, repository)

        return _bisect(layout, project, upstream, command, states, _in_change)


def _bisect(
    layout: Layout,
    project: Project,
    upstream: Upstream,
    command: str,
    choose: Callable[[Repository], list[Prefix]],
    search: Callable[[_Runs, list[Prefix]], Found],
) -> Found:
    if not command.strip():
        raise BisectError("no command is given", cure="make bisect TEST='python -m pytest tests/...'")
    with series.workshop(layout, upstream) as repository, storage.scratch(layout.build, ".bisect-") as folder:
        prefixes = choose(repository)
        if prefix_module.installed_package(project) is None:
            console.print(f"{project.name} {project.version} is not installed: there are its sources only")
        checkout = Checkout(layout, project, repository, folder / "checkout")
        return search(_Runs(checkout, command), prefixes)


def _in_series(runs: _Runs, prefixes: list[Prefix]) -> Found:
    last, first = runs.passes(prefixes[-1]), runs.passes(prefixes[0])
    if last and first:
        raise BisectError(
            "the command passes with upstream alone and with the whole series",
            cure="give one that passes with one of the two only; where it fails in between, `make verify` says",
        )
    if not last and not first:
        position = next((place for place in reversed(range(len(prefixes))) if runs.passes(prefixes[place])), None)
        bad = prefixes[0 if position is None else position + 1]
        return Found(bad, False, runs.output(bad))
    return _halve(runs, prefixes)


def _in_change(runs: _Runs, states: list[Prefix]) -> Found:
    last, first = runs.passes(states[-1]), runs.passes(states[0])
    if len(states) == 1 or last == first:
        raise BisectError(
            f"the command {'passes' if last else 'fails'} at both ends" if len(states) > 1 else "nothing has changed",
            cure="REV=, a revision at which it has another result; without REV= the series is searched",
        )
    return _halve(runs, states)


def _halve(runs: _Runs, prefixes: list[Prefix]) -> Found:
    """The first prefix from where on the result is that of the last, if it changes once."""
    low, high = 0, len(prefixes) - 1
    first = runs.passes(prefixes[low])
    while high - low > 1:
        middle = (low + high) // 2
        if runs.passes(prefixes[middle]) == first:
            low = middle
        else:
            high = middle
    return Found(prefixes[high], not first, runs.output(prefixes[high]))


class _Runs:
    """The command's results, each found out once."""

    def __init__(self, checkout: Checkout, command: str) -> None:
        self._checkout = checkout
        self._command = command
        self._done: dict[str, tuple[bool, str]] = {}

    def passes(self, prefix: Prefix) -> bool:
        if prefix.name not in self._done:
            self._checkout.lay(prefix)
            result = self._checkout.run(["/bin/sh", "-c", self._command])
            if result.returncode in _NOT_RUN:
                raise BisectError(
                    f"the command cannot be run: {result.stdout.strip()}",
                    cure="it runs in a copy of this checkout, which holds the package and no build/ or .venv/",
                )
            passed = result.returncode == 0
            console.print(f"{prefix.name}: {'passes' if passed else f'fails ({result.returncode})'}")
            self._done[prefix.name] = passed, result.stdout
        return self._done[prefix.name][0]

    def output(self, prefix: Prefix) -> str:
        return self._done[prefix.name][1]
