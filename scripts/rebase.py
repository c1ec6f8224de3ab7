"""`make rebase`: bring the series to another upstream release, patch by patch.

The rebase has a repository of its own at build/rebase/<project>, where a patch that conflicts is resolved, and where
it is written down how far it is; so it can be continued, cut short or aborted after a conflict, a killed run or a
reboot. These are the commands; `rebase_run` does the work.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from scripts import fetch, index, overlay, rebase_state, rebase_stop, resolutions, series, storage, upstream
from scripts.console import console
from scripts.errors import RebaseError, UnsavedWorkError
from scripts.layout import Layout
from scripts.pins import Project
from scripts.rebase_run import Rebased, Run
from scripts.rebase_state import OLD, Rebase
from scripts.repository import Repository

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
        repository.run("update-ref", OLD, applied.tip)
        for store in (layout.resolutions(project.name), layout.remembered(project.name)):
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
        rebase_state.save(made, state)
        storage.replace(made, folder)
    return Run(layout, folder, state).to_the_end()


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
    if run.state.stop == "patch" and rebase_stop.content(run.repository) not in untouched:
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


def _open(layout: Layout, project: Project) -> Run:
    folder = layout.rebase(project.name)
    return Run(layout, folder, rebase_state.load(folder))
