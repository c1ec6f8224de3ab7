"""`make rebase`: bring the series to another upstream release, patch by patch.

The rebase has a repository of its own at build/rebase/<project>, where a patch that conflicts is resolved. Each
step is written down there before the next begins, so that a rebase can be continued, cut short or aborted after a
conflict, a killed run or a reboot. Patch files and upstream.toml are written when all is done, and not before.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version
from unidiff.patch import PatchedFile

from scripts import (
    export,
    fetch,
    index,
    overlay,
    patch,
    pins,
    resolutions,
    series,
    storage,
    tree,
    upstream,
    upstream_change,
)
from scripts.console import console
from scripts.errors import EditError, RebaseError, SeriesError, UnsavedWorkError
from scripts.export import Exported
from scripts.layout import Layout
from scripts.patch import FILENAME_TRAILER, Patch
from scripts.pins import Project
from scripts.repository import IDENTITY, Author, Entry, Repository
from scripts.storage import locked
from scripts.upstream import Upstream
from scripts.verdict import Kind, Verdict, judge

_STATE = "vllm-sm120-rebase.json"
_OLD = "refs/rebase/old"  # keeps the commits of the series as it was


@dataclass(frozen=True)
class Rebase:
    """A rebase under way.

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


@dataclass(frozen=True)
class Rebased:
    """A finished rebase: the verdict on each patch, the patch files written, the new pin, what is still to do."""

    verdicts: Mapping[str, str]
    exported: Exported
    project: Project
    rest: tuple[str, ...]


# -- beginning ---------------------------------------------------------------------------------------


def start(layout: Layout, project: Project, tag: str, *, yes: bool) -> Rebased:
    """Rebase the series of `project` onto the release `tag`, or onto the newest where that is "latest".

    `yes` consents to the new pin.

    Raises:
        RebaseError: it stopped at something to decide, there is no such release, or a rebase is under way.
        ApplyError: the series does not apply to its own release.
    """
    folder = layout.rebase(project.name)
    if folder.exists():
        raise RebaseError(
            f"{folder}: a rebase is under way",
            cure="CONTINUE=1 goes on with it, KEEP=1 keeps what is done, ABORT=1 drops it",
        )
    target = _choose(project, tag)
    if target != project:
        _ask(project, target, yes)
    before, after = upstream.from_sdist(layout, project), upstream.from_sdist(layout, target)
    if target != project:
        target = replace(target, commit=upstream.stated_commit(after, target))
    with storage.scratch(layout.build, ".rebase-") as temporary:
        made = temporary / "tree"
        repository = Repository.init(made / ".git", made, after.repository.objects)
        for setting in ("rerere.enabled", "rerere.autoUpdate"):
            repository.run("config", setting, "true")
        applied = series.apply(layout, project, repository, before.commit)
        if target != project:
            applied.refuse_bad()
        elif all(step.verdict.good for step in applied.steps):
            raise RebaseError(f"the series of {project.name} fits {project.tag} already", cure="TAG=, another release")
        repository.run("update-ref", _OLD, applied.tip)
        for store in (layout.resolutions(project.name), _remembered(layout, project)):
            resolutions.copy(store, repository.git_dir / "rr-cache")
        ours = overlay.files(layout, project)
        for path in overlay.shadows(ours, repository.files(after.commit)):
            del ours[path]  # the overlay check reports it
        laid = series.lay(target, repository, after.commit, ours, [])
        names = tuple(step.patch.name for step in applied.steps)
        commits = {step.patch.name: step.commit or "" for step in applied.steps if step.verdict.good}
        state = Rebase(
            old=project,
            new=target,
            base=before.commit,
            upstream=after.commit,
            overlay=laid.overlay,
            tip=laid.tip,
            commits=commits,
            patches=applied.hashes,
            rest=names,
            verdicts={},
        )
        _save(made, state)
        storage.replace(made, folder)
    return _Run(layout, folder, state).to_the_end()


def _choose(project: Project, tag: str) -> Project:
    """The pin of the release that `tag` names; its own for the release that is pinned."""
    wanted = None
    if tag != "latest":
        try:
            wanted = Version(tag.removeprefix("v"))
        except InvalidVersion:
            raise RebaseError(f"{tag!r} is not a release", cure="TAG=v0.33.0, or TAG=latest") from None
        if wanted == Version(project.version):
            return project
    known = index.releases(project.name)
    found = index.latest(known) if wanted is None else next((one for one in known if one.version == wanted), None)
    if found is None:
        raise RebaseError(
            f"no release {tag} of {project.name} on the package indexes that pip is configured with",
            cure=f"the newest are {', '.join(f'v{one.version}' for one in known[-5:])}",
        )
    return project if found.version == Version(project.version) else found.pin(project)


def _ask(old: Project, new: Project, yes: bool) -> None:
    console.print(f"{new.name} {old.tag} -> {new.tag}, as the package index states it:")
    for kind, sha256 in {"sdist": new.sdist, **new.wheels}.items():
        console.print(f"  {kind:8} sha256 {sha256}")
    if yes:
        return
    if not sys.stdin.isatty():
        raise RebaseError(f"{new.tag} is not pinned yet", cure="compare the hashes; YES=1 pins them")
    if console.input("pin these? [y/N] ").strip().lower() not in ("y", "yes"):
        raise RebaseError(f"{new.tag} is not pinned", cure="nothing was changed")


# -- ways out of a stop ------------------------------------------------------------------------------


def proceed(layout: Layout, project: Project) -> Rebased:
    """Take the work tree as the patch that was stopped at, and go on; goes on after a killed run as well.

    Raises:
        RebaseError: no rebase is under way, the conflict is not resolved, or the next one is met.
    """
    run = _open(layout, project)
    if run.state.stop == "writing":
        return run.write()
    if run.state.stop == "patch":
        run.resolved(f"{run.state.verdicts[run.state.rest[0]]}, resolved")
    return run.to_the_end()


def skip(layout: Layout, project: Project) -> Rebased:
    """Leave out the patch that was stopped at, and go on; its file goes at the end.

    Raises:
        RebaseError: as `proceed`, or it did not stop at a patch.
    """
    run = _open(layout, project)
    if run.state.stop != "patch":
        raise RebaseError(f"{run.folder}: no patch to skip", cure="CONTINUE=1, KEEP=1 or ABORT=1")
    run.drop(run.state.verdicts[run.state.rest[0]])
    return run.to_the_end()


def keep(layout: Layout, project: Project) -> Rebased:
    """Write the patches that are done and the new pin; those still to do stay in the series as they are.

    Raises:
        RebaseError: no rebase is under way, or no patch is done.
        UnsavedWorkError: the work tree holds changes that would be lost.
    """
    run = _open(layout, project)
    untouched = (run.state.laid, run.repository.tree(run.state.tip))
    if run.state.stop == "patch" and run.content() not in untouched:
        raise UnsavedWorkError(
            f"{run.folder}: holds changes to {run.state.rest[0]} that are not done",
            cure="finish them and CONTINUE=1, or take them back with `git reset --hard`, and KEEP=1 again",
        )
    if run.state.tip == run.state.overlay and run.state.rest:
        raise RebaseError(f"{run.folder}: no patch is done yet", cure="CONTINUE=1, SKIP=1 or ABORT=1")
    return run.write()


def abort(layout: Layout, project: Project) -> None:
    """Drop a rebase; patch files and pin stay as they are.

    Raises:
        RebaseError: no rebase is under way, or it is writing the files.
    """
    run = _open(layout, project)
    folder = layout.patches(project.name)
    hashes = {path.name: fetch.digest(path) for path in folder.glob("*.patch")}
    if run.state.stop == "writing" and hashes != run.state.patches:
        raise RebaseError(f"{folder}: is being written", cure="CONTINUE=1 finishes; `git checkout` takes it back then")
    storage.discard(run.folder, layout.build)


# -- the work ----------------------------------------------------------------------------------------


class _Run:
    """One run of the tool on a rebase under way."""

    def __init__(self, layout: Layout, folder: Path, state: Rebase) -> None:
        self.layout, self.folder, self.state = layout, folder, state
        self.project = state.new
        self.repository = tree.open_tree(folder)

    def save(self, **changes: Any) -> None:
        """Write a step down."""
        self.state = replace(self.state, **changes)
        _save(self.folder, self.state)

    def to_the_end(self) -> Rebased:
        """Do the patches that are left, look at the overlay, and write."""
        self.repository.remove_locks("HEAD", "index", "refs/heads/main")
        while self.state.rest:
            self._next()
        if problems := self._overlay_problems():
            self.save(stop="overlay")
            raise RebaseError(
                "\n".join(["every patch is done, but the overlay does not fit:", *problems]),
                cure="mend overlay/ and CONTINUE=1; KEEP=1 writes the patches nevertheless, ABORT=1 drops the rebase",
            )
        return self.write()

    def _next(self) -> None:
        """Carry the next patch over, or stop at it."""
        name = self.state.rest[0]
        old, one = self._old(name)
        with self.repository.private_index() as index_file:
            self.repository.read_tree(index_file, self.state.tip)
            found = judge(self.repository, index_file, one, self.project.package)
            made = self.repository.write_tree(index_file)
        if found.good or found.kind is Kind.MERGED:
            commit = self.repository.commit(made, [self.state.tip], one.message, one.author)
            if not old or self._comes_back(old, commit):
                self._done(commit, str(found))
                return
            files = ", ".join(file.path for file in one.files)
            found = Verdict(
                Kind.CONFLICT, files, f"it applies ({found}), but not as the same change: put back, it gives other text"
            )
        self._stop(one, old, found)

    def _old(self, name: str) -> tuple[str, Patch]:
        """A patch with its commit in the old series, whose parent is what the patch was made for.

        One that did not apply there gets a commit on the new tip with the files that it names by blob id; it has
        none where those are unknown.
        """
        path = self.layout.patches(self.project.name) / name
        if commit := self.state.commits.get(name):
            return commit, patch.parse(self.repository, path, export.canonical(self.repository, commit))
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

    def _comes_back(self, old: str, commit: str) -> bool:
        """Whether the patch as it would be written gives the old tree where the old patch was applied."""
        path = self.layout.patches(self.project.name) / self.state.rest[0]
        one = patch.parse(self.repository, path, export.canonical(self.repository, commit))
        with self.repository.private_index() as index_file:
            self.repository.read_tree(index_file, f"{old}^")
            judge(self.repository, index_file, one, self.project.package)
            return self.repository.write_tree(index_file) == self.repository.tree(old)

    def _done(self, commit: str, verdict: str, dropped: tuple[str, ...] = ()) -> None:
        name = self.state.rest[0]
        console.print(f"{name}: {verdict}")
        verdicts = {**self.state.verdicts, name: verdict}
        gone = (*self.state.dropped, *dropped)
        self.save(tip=commit, rest=self.state.rest[1:], verdicts=verdicts, dropped=gone, stop="", laid="")

    def drop(self, verdict: str) -> None:
        """Leave the next patch out."""
        self._done(self.state.tip, f"{verdict}, dropped", (self.state.rest[0],))

    # -- stopping ------------------------------------------------------------------------------------

    def _stop(self, one: Patch, old: str, found: Verdict) -> None:
        """Put the conflict into the work tree and say all that is known of it.

        A conflict that was resolved before is resolved in the same way, and is no stop.
        """
        clean = self._lay(old)
        unmerged, laid = self._unmerged(), self.content()
        merged = [change.path for change in self.repository.changes(self.state.tip, laid)]
        if found.kind is Kind.CONFLICT and merged and not clean and not unmerged:
            self.resolved(f"{found}, resolved as before")
            return
        self.save(stop="patch", laid=laid, verdicts={**self.state.verdicts, one.name: str(found)})
        words = [f"{one.path}: {found}", found.explanation, *self._words(one, found)]
        raise RebaseError("\n".join(word for word in words if word), cure=self._cure(found, unmerged, merged))

    def _lay(self, old: str) -> bool:
        """Make the work tree hold the new series so far and, merged into it, the patch; whether it merged."""
        self.repository.run("update-ref", "refs/heads/main", self.state.tip)
        self.repository.run("symbolic-ref", "HEAD", "refs/heads/main")
        self.repository.run("reset", "--quiet", "--hard", self.state.tip)
        self.repository.run("clean", "--quiet", "--force", "-d", "-x")  # what a killed run left of another patch
        return bool(old) and bool(self.repository.attempt("cherry-pick", "--no-commit", old))

    def _unmerged(self) -> list[str]:
        return self.repository.run("diff", "--name-only", "--diff-filter=U", "-z").decode().split("\0")[:-1]

    def content(self) -> str:
        """The work tree as it is now, as a tree."""
        with self.repository.private_index() as index_file:
            shutil.copyfile(self.repository.git_dir / "index", index_file)  # which knows the files that are unchanged
            everything = ("--", ".", ":(exclude,glob)**/__pycache__/**")
            self.repository.run("add", "--all", "--force", *everything, index=index_file)
            return self.repository.write_tree(index_file)

    def _words(self, one: Patch, found: Verdict) -> list[str]:
        """What upstream did to the places that the patch changes."""
        if found.kind is Kind.UPSTREAMED:
            return []
        state = self.state
        old, new = (
            upstream_change.Release(project.tag, commit)
            for project, commit in ((state.old, state.base), (state.new, state.upstream))
        )
        known = upstream.imported(self.layout, state.new)
        ends = sorted((Version(state.old.version), Version(state.new.version)))
        between = [
            upstream_change.Release(f"v{version}", known[version])
            for version in sorted(known, reverse=state.new.version != str(ends[1]))
            if ends[0] < version < ends[1]
        ]
        lines = []
        for file in one.files:
            lines += upstream_change.describe(self.repository, old, new, between, file)
        return [f"upstream, {old.tag} to {new.tag}:", *(f"  {line}" for line in lines)] if lines else []

    def _cure(self, found: Verdict, unmerged: list[str], merged: list[str]) -> str:
        others = "KEEP=1 stops here and keeps what is done, ABORT=1 drops the rebase"
        if found.kind is Kind.UPSTREAMED:
            return f"SKIP=1 drops the patch; {others}"
        if unmerged:
            todo = f"resolve it in {self.folder} (`git status` lists the files) and `git add` them, then CONTINUE=1"
        elif merged:
            todo = f"git has merged what it can into {', '.join(merged)}: look at it in {self.folder}, then CONTINUE=1"
        else:
            todo = f"make the change in {self.folder}, then CONTINUE=1"
        return f"{todo}; SKIP=1 leaves the patch out; {others}"

    # -- a resolved conflict -------------------------------------------------------------------------

    def resolved(self, verdict: str) -> None:
        """Make the work tree the commit of the patch that was stopped at, and remember how it was resolved."""
        name = self.state.rest[0]
        self.repository.remove_locks("HEAD", "index")
        cure = f"resolve it in {self.folder}, `git add` the files, then CONTINUE=1; SKIP=1 leaves the patch out"
        if unmerged := self._unmerged():
            raise RebaseError(f"{name} still conflicts in {', '.join(unmerged)}", cure=cure)
        content = self.content()
        marked = self.repository.attempt("diff", "--check", self.state.tip, content).stdout.decode(errors="replace")
        if left := [line for line in marked.splitlines() if line.endswith(": leftover conflict marker")]:
            raise RebaseError("\n".join([f"{name} still has conflict markers:", *left]), cure=cure)
        if content == self.repository.tree(self.state.tip):
            raise RebaseError(
                f"{name} would become empty",
                cure="SKIP=1 drops it; or make its change in the work tree, and CONTINUE=1",
            )
        _, one = self._old(name)
        commit = self.repository.commit(content, [self.state.tip], self._message(one), one.author)
        export.as_patch(self.layout, self.project, self.repository, commit)  # refused while it can still be mended
        self.repository.attempt("rerere")
        resolutions.copy(self.repository.git_dir / "rr-cache", _remembered(self.layout, self.project))
        self._done(commit, verdict)

    def _message(self, one: Patch) -> str:
        """The patch's message, or the one that the user committed the resolution with."""
        head = self.repository.ref("HEAD")
        assert head is not None
        if head == self.state.tip:
            return one.message
        if self.repository.parents(head) != [self.state.tip]:
            raise RebaseError(
                f"{self.folder}: HEAD is not one commit after the last patch",
                cure=f"one commit a patch: `git reset --soft {self.state.tip}`, then CONTINUE=1",
            )
        message = self.repository.run("show", "--no-patch", "--format=%B", head).decode().rstrip("\n") + "\n"
        if self.repository.trailers(message).get(FILENAME_TRAILER) != one.name:
            raise RebaseError(
                f"{self.folder}: the message does not say {FILENAME_TRAILER}: {one.name}",
                cure="put the trailer back with `git commit --amend`, then CONTINUE=1",
            )
        return message

    # -- the end -------------------------------------------------------------------------------------

    def _overlay_problems(self) -> list[str]:
        from scripts import overlay_check

        ours = overlay.files(self.layout, self.project)
        pinned = self.repository.ref(_OLD)
        assert pinned is not None
        found = overlay_check.check(
            self.repository, ours, upstream=self.state.upstream, tip=self.state.tip, pinned=pinned
        )
        return [str(problem) for problem in found]

    def write(self) -> Rebased:
        """Write patch files, series, resolutions and pin. A run that was killed between is continued here."""
        state, layout = self.state, self.layout
        self.save(stop="writing")
        arguments = (layout, self.project, self.repository, state.upstream, state.overlay, state.tip, state.patches)
        try:
            exported = export.export_commits(*arguments, rest=state.rest, dropped=state.dropped)
        except (EditError, SeriesError, UnsavedWorkError):
            self.save(stop=state.stop)  # refused before anything was written
            raise
        resolutions.copy(_remembered(layout, self.project), layout.resolutions(self.project.name))
        if state.rest:
            self._remember_old(upstream.from_sdist(layout, self.project))
        pins.record(layout.pins, self.project)
        self._verify()
        storage.discard(self.folder, layout.build)
        made = layout.tree(self.project.name)
        if made.exists() and not state.rest and not tree.unsaved(made):
            tree.build(layout, self.project, upstream.from_sdist(layout, self.project))
        return Rebased(state.verdicts, exported, self.project, state.rest)

    def _remember_old(self, origin: Upstream) -> None:
        """Leave the old series' commits in the cache, so that the patches still to do can be merged later."""
        with locked(origin.repository.git_dir.with_suffix(".lock")):
            source = str(self.repository.git_dir)
            origin.repository.run(
                "fetch", "--quiet", "--no-tags", source, f"+{_OLD}:refs/kept/{self.state.old.version}"
            )

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


# -- the state on disk -------------------------------------------------------------------------------


def _remembered(layout: Layout, project: Project) -> Path:
    """Resolutions of this user, kept even where a rebase is aborted."""
    return layout.cache / "resolutions" / project.name


def _open(layout: Layout, project: Project) -> _Run:
    folder = layout.rebase(project.name)
    try:
        data = json.loads((folder / ".git" / _STATE).read_bytes())
        for key in ("rest", "dropped"):
            data[key] = tuple(data[key])
        state = Rebase(**{**data, "old": Project(**data["old"]), "new": Project(**data["new"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise RebaseError(f"{folder}: no rebase is under way", cure="`make rebase TAG=` begins one") from None
    return _Run(layout, folder, state)


def _save(folder: Path, state: Rebase) -> None:
    storage.write(folder / ".git" / _STATE, json.dumps(asdict(state), indent=1).encode() + b"\n")
