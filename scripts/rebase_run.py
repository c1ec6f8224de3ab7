"""One run of the tool on a rebase under way: patch after patch to the end, or to what the user has to decide.

Each step is written down before the next begins; patch files and upstream.toml are written when all is done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unidiff.patch import PatchedFile

from scripts import (
    export,
    overlay,
    overlay_check,
    patch,
    pins,
    rebase_state,
    rebase_stop,
    resolutions,
    series,
    storage,
    tree,
    upstream,
    way_back,
)
from scripts.console import console
from scripts.errors import EditError, RebaseError, SeriesError, UnsavedWorkError
from scripts.export import Exported
from scripts.layout import Layout
from scripts.patch import Patch
from scripts.pins import Project
from scripts.rebase_state import OLD, Rebase
from scripts.repository import IDENTITY, Author, Entry
from scripts.storage import locked
from scripts.upstream import Upstream
from scripts.verdict import Kind, judge


@dataclass(frozen=True)
class Rebased:
    """A finished rebase: the verdict on each patch, the patch files written, the new pin, what is still to do."""

    verdicts: Mapping[str, str]
    exported: Exported
    project: Project
    rest: tuple[str, ...]


class Run:
    """A rebase, opened to go on with it."""

    def __init__(self, layout: Layout, folder: Path, state: Rebase) -> None:
        self.layout, self.folder, self.state = layout, folder, state
        self.project = state.new
        self.repository = tree.open_tree(folder)

    def _save(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        rebase_state.save(self.folder, self.state)

    def to_the_end(self) -> Rebased:
        """Do the patches that are left, look at the overlay, and write.

        Raises:
            RebaseError: it stopped at a patch or at the overlay.
        """
        self.repository.remove_locks("HEAD", "index", "refs/heads/main")
        while self.state.rest:
            self._next()
        if problems := self._overlay_problems():
            self._save(stop="overlay")
            raise RebaseError(
                "\n".join(["every patch is done, but the overlay does not fit:", *problems]),
                cure="mend overlay/ and CONTINUE=1; KEEP=1 writes the patches nevertheless, ABORT=1 drops the rebase",
            )
        return self.write()

    # -- the next patch ------------------------------------------------------------------------------

    def _next(self) -> None:
        """Carry the next patch over, or stop at it."""
        old, one = self._old(self.state.rest[0])
        with self.repository.private_index() as index_file:
            self.repository.read_tree(index_file, self.state.tip)
            found = judge(self.repository, index_file, one, self.project.package)
            made = self.repository.write_tree(index_file)
        if found.good or found.kind is Kind.MERGED:
            commit = self.repository.commit(made, [self.state.tip], one.message, one.author)
            if old:
                found = way_back.confirm(self.repository, found, one, old, commit, self.project.package)
            if found.kind is not Kind.CONFLICT:
                self._done(commit, str(found))
                return
        clean = rebase_stop.lay(self.repository, self.state.tip, old)
        conflicts, laid = rebase_stop.unmerged(self.repository), rebase_stop.content(self.repository)
        merged = [change.path for change in self.repository.changes(self.state.tip, laid)]
        if found.kind is Kind.CONFLICT and merged and not clean and not conflicts:
            self.resolved(f"{found}, resolved as before")  # by git, which remembers
            return
        self._save(stop="patch", laid=laid, verdicts={**self.state.verdicts, one.name: str(found)})
        lines = [f"{one.path}: {found}", found.explanation]
        if found.kind is not Kind.UPSTREAMED:
            lines += rebase_stop.upstream_side(self.layout, self.repository, self.state, one)
        cure = rebase_stop.cure(self.folder, found, conflicts, merged)
        raise RebaseError("\n".join(line for line in lines if line), cure=cure)

    def _old(self, name: str) -> tuple[str, Patch]:
        """A patch with its commit in the old series, whose parent is what the patch was made for.

        One that did not apply there gets a commit on the new tip with the files that it names by blob id; it has
        none where those are unknown.
        """
        path = self.layout.patches(self.project.name) / name
        if commit := self.state.commits.get(name):
            return commit, way_back.as_committed(self.repository, path, commit)
        one = patch.load(self.repository, path)
        with self.repository.private_index() as index_file:
            self.repository.read_tree(index_file, self.state.tip)
            known = {file.path: entry for file in one.files if (entry := self._preimage(file))}
            if len(known) < len(one.files):
                return "", one
            self.repository.update_index(index_file, known)
            author = Author(*IDENTITY, one.author.date)
            base = self.repository.commit(self.repository.write_tree(index_file), [self.state.tip], "base\n", author)
            if not self.repository.apply(one.diff, index_file):
                return "", one
            made = self.repository.write_tree(index_file)
        return self.repository.commit(made, [base], one.message, one.author), one

    def _preimage(self, file: PatchedFile) -> Entry | None:
        """The file that a patch was made for, where its header names it and git has it."""
        header = "".join(map(str, file.patch_info or ()))
        found = re.search(r"^index ([0-9a-f]{40})\.\.[0-9a-f]{40}(?: ([0-7]{6}))?$", header, re.MULTILINE)
        if not found or not self.repository.attempt("cat-file", "-e", found[1]):
            return None
        return Entry(found[2] or "100644", found[1])

    def _done(self, commit: str, verdict: str, dropped: tuple[str, ...] = ()) -> None:
        name = self.state.rest[0]
        console.print(f"{name}: {verdict}")
        verdicts = {**self.state.verdicts, name: verdict}
        gone = (*self.state.dropped, *dropped)
        self._save(tip=commit, rest=self.state.rest[1:], verdicts=verdicts, dropped=gone, stop="", laid="")

    def drop(self, verdict: str) -> None:
        """Leave the next patch out."""
        self._done(self.state.tip, f"{verdict}, dropped", (self.state.rest[0],))

    def resolved(self, verdict: str) -> None:
        """Make the work tree the commit of the patch that was stopped at, and remember how it was resolved.

        Raises:
            RebaseError, SeriesError: it is not a patch of this series yet.
        """
        _, one = self._old(self.state.rest[0])
        commit = rebase_stop.take(self.folder, self.repository, self.state.tip, one)
        export.as_patch(self.layout, self.project, self.repository, commit)  # refused while it can still be mended
        self.repository.attempt("rerere")
        resolutions.copy(self.repository.git_dir / "rr-cache", self.layout.remembered(self.project.name))
        self._done(commit, verdict)

    # -- the end -------------------------------------------------------------------------------------

    def _overlay_problems(self) -> list[str]:
        ours = overlay.files(self.layout, self.project)
        pinned = self.repository.ref(OLD)
        assert pinned is not None
        found = overlay_check.check(
            self.repository, ours, upstream=self.state.upstream, tip=self.state.tip, pinned=pinned
        )
        return [str(problem) for problem in found]

    def write(self) -> Rebased:
        """Write patch files, series, resolutions and pin. A run that was killed between is continued here."""
        state, layout = self.state, self.layout
        self._save(stop="writing")
        arguments = (layout, self.project, self.repository, state.upstream, state.overlay, state.tip, state.patches)
        try:
            exported = export.export_commits(*arguments, rest=state.rest, dropped=state.dropped)
        except (EditError, SeriesError, UnsavedWorkError):
            self._save(stop=state.stop)  # refused before anything was written
            raise
        resolutions.copy(layout.remembered(self.project.name), layout.resolutions(self.project.name))
        if state.rest:
            self._keep_old(upstream.from_sdist(layout, self.project))
        pins.record(layout.pins, self.project)
        self._verify()
        storage.discard(self.folder, layout.build)
        made = layout.tree(self.project.name)
        if made.exists() and not state.rest and not tree.unsaved(made):
            tree.build(layout, self.project, upstream.from_sdist(layout, self.project))
        return Rebased(state.verdicts, exported, self.project, state.rest)

    def _keep_old(self, origin: Upstream) -> None:
        """Leave the old series' commits in the cache, so that the patches still to do can be merged later."""
        with locked(origin.repository.git_dir.with_suffix(".lock")):
            kept = f"+{OLD}:refs/kept/{self.state.old.version}"
            origin.repository.run("fetch", "--quiet", "--no-tags", str(self.repository.git_dir), kept)

    def _verify(self) -> None:
        """The files just written give the tree that was resolved, but for what was changed in overlay/ meanwhile."""
        names = [name for name in series.names(self.layout, self.project) if name not in self.state.rest]
        folder = self.layout.patches(self.project.name)
        patches = [patch.load(self.repository, folder / name) for name in names]
        applied = series.lay(self.project, self.repository, self.state.overlay, {}, patches)
        applied.refuse_bad()
        if self.repository.tree(applied.tip) != self.repository.tree(self.state.tip):
            raise RebaseError(
                f"{folder}: the patches written do not give the tree that was rebased",
                cure=f"this is a defect of the tool: please report it; the commits are in {self.folder}",
            )
