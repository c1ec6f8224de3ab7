"""The states between two states of this repository: one part changed after the other, the pin first.

A patch that does not apply to the other pin takes its new text together with the pin: that is what it was changed for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts import build, overlay, series
from scripts.patch import Patch
from scripts.pins import Project
from scripts.prefix import Prefix
from scripts.repository import Repository
from scripts.revision import State
from scripts.series import Applied


def between(before: State, after: State, name: str, repository: Repository) -> list[Prefix]:
    """The states of the project `name`, from `before` to `after`; each is named after the part that changed.

    One that does not apply is left out: the next one has the names of both.

    Raises:
        ApplyError: `before` or `after` does not apply.
    """
    old, new = (_apply(state, name, repository) for state in (before, after))
    changed = _Changes(repository, new.project, [step.patch for step in old.steps], [step.patch for step in new.steps])
    states = [Prefix((before.name,), old.project, old.upstream, old.overlay, old.tip, tuple(changed.old.values()))]
    ours = [overlay.files(state.layout, applied.project) for state, applied in ((before, old), (after, new))]
    waiting: list[str] = []

    def add(part: str, upstream: str, files: Mapping[str, Path], patches: Sequence[Patch]) -> None:
        waiting.append(part)
        if laid := changed.lay(upstream, files, patches):
            commits = (laid.upstream, laid.overlay, laid.tip)
            states.append(Prefix(tuple(waiting), new.project, *commits, tuple(patches)))
            waiting.clear()

    if old.upstream != new.upstream:
        changed.fit(new.upstream, ours[0])
        add(f"the pin ({name} {old.project.version} -> {new.project.version})", new.upstream, ours[0], changed.now())
    if _contents(ours[0]) != _contents(ours[1]):
        add("the overlay", new.upstream, ours[1], changed.now())
    if changed.reorder():
        add("the order of the series", new.upstream, ours[1], changed.now())
    while part := changed.step():
        add(part, new.upstream, ours[1], changed.now())
    return states


class _Changes:
    """The patches of the one series, on their way to be those of the other."""

    def __init__(self, repository: Repository, project: Project, old: list[Patch], new: list[Patch]) -> None:
        self._repository, self._project = repository, project
        self.old = {patch.name: patch for patch in old}
        self._new = {patch.name: patch for patch in new}
        self._now = dict(self.old)
        self._order = list(self.old)

    def now(self) -> list[Patch]:
        """The patches as they are now, in order."""
        return [self._now[name] for name in self._order if name in self._now]

    def lay(self, upstream: str, files: Mapping[str, Path], patches: Sequence[Patch]) -> Applied | None:
        """Overlay and patches on a release, or None where they do not fit."""
        if overlay.shadows(files, self._repository.files(upstream)):
            return None
        applied = series.lay(self._project, self._repository, upstream, files, patches)
        return applied if all(step.verdict.good for step in applied.steps) else None

    def fit(self, upstream: str, files: Mapping[str, Path]) -> None:
        """Let the patches that do not apply to a release have their new text."""
        shadows = overlay.shadows(files, self._repository.files(upstream))
        fitting = {path: file for path, file in files.items() if path not in shadows}
        for step in series.lay(self._project, self._repository, upstream, fitting, self.now()).steps:
            if not step.verdict.good and step.patch.name in self._new:
                self._now[step.patch.name] = self._new[step.patch.name]

    def reorder(self) -> bool:
        """Take the order of the new series, old patches after those that they followed; whether that changes it."""
        order, before = list(self._new), ""
        for name in self.old:
            if name not in self._new:
                order.insert(order.index(before) + 1 if before else 0, name)
            before = name
        self._order = order
        return [name for name in order if name in self.old] != list(self.old)

    def step(self) -> str:
        """Make the next patch what it is in the new series; which that is, or nothing where all are."""
        for name in self._order:
            now, new = self._now.get(name), self._new.get(name)
            if new is None and now is not None:
                del self._now[name]
                return f"{name} (gone)"
            if new is not None and (now is None or now.text != new.text):
                self._now[name] = new
                return name
        return ""


def _apply(state: State, name: str, repository: Repository) -> Applied:
    project = state.pins.project(name)
    upstream = build.get_upstream(state.layout, project, "sdist")
    applied = series.apply(state.layout, project, repository, upstream.commit)
    applied.refuse_bad()
    return applied


def _contents(files: Mapping[str, Path]) -> dict[str, tuple[str, bytes]]:
    return {path: (overlay.mode(file), file.read_bytes()) for path, file in files.items()}
