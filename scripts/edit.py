"""`make edit`: work in the tree at one patch, fold the change into it, re-apply the rest, export.

The edit has a repository of its own at build/edit/<project>. Each step is written down before the next
begins, so that an edit can be continued or aborted after a conflict, a killed run or a reboot.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts import export, series, storage, tree
from scripts.console import console
from scripts.errors import EditError
from scripts.export import Exported
from scripts.layout import Layout
from scripts.patch import FILENAME_TRAILER
from scripts.pins import Project
from scripts.repository import Author, Repository
from scripts.upstream import Upstream

_STATE = "vllm-sm120-edit.json"


@dataclass(frozen=True)
class Edit:
    """An edit under way.

    `commit` is the patch's commit before the edit, `done` the last commit of the new series (empty until the
    edit is folded in), `rest` the old commits still to be re-applied, the next one first, and `patches` the patch
    files that all this began with, by sha256. `picking` says that re-applying the next one has begun.
    """

    patch: str
    upstream: str
    overlay: str
    commit: str
    done: str
    rest: tuple[str, ...]
    patches: dict[str, str]
    picking: bool = False


def start(layout: Layout, project: Project, upstream: Upstream, name: str, command: str) -> Exported:
    """Open a shell, or run `command`, in the tree at the patch `name`; then fold, re-apply and export.

    Raises:
        EditError: an edit is under way, there is no such patch, the command failed, or a later patch conflicts.
    """
    folder = layout.edit(project.name)
    if folder.exists():
        raise EditError(f"{folder}: an edit is under way", cure="CONTINUE=1 goes on with it, ABORT=1 drops it")
    known = series.names(layout, project)
    if name not in known:
        raise EditError(
            f"{name!r} is not in the series of {project.name}",
            cure=f"PATCH is one of: {', '.join(known)}",
        )
    with storage.scratch(layout.build, ".edit-") as temporary:
        made = temporary / "tree"
        repository = Repository.init(made / ".git", made, upstream.repository.objects)
        applied = series.apply(layout, project, repository, upstream.commit)
        applied.refuse_bad()
        commits = [step.commit for step in applied.steps if step.commit]
        position = known.index(name)
        repository.run("update-ref", "--no-deref", "HEAD", commits[position])
        repository.run("checkout", "--quiet", "--detach", "--force", commits[position])
        rest = tuple(commits[position + 1 :])
        _save(made, Edit(name, upstream.commit, applied.overlay, commits[position], "", rest, applied.hashes))
        storage.replace(made, folder)
    _run(folder, name, command)
    return proceed(layout, project, upstream)


def proceed(layout: Layout, project: Project, upstream: Upstream) -> Exported:
    """Fold the change in, re-apply the rest and export; also goes on with an edit that stopped half-way.

    Raises:
        EditError: no edit is under way, the patch would become empty, or a later patch conflicts.
        SeriesError: no patch file can hold what was changed; it can be mended in the tree.
    """
    folder = layout.edit(project.name)
    edit = _load(folder)
    repository = tree.open_tree(folder)
    repository.remove_locks("HEAD", "index")
    if not edit.done:
        edit = replace(edit, done=_fold(repository, edit))
        export.as_patch(layout, project, repository, edit.done)  # refused while it can still be changed
        repository.run("reset", "--quiet", "--soft", edit.done)
        _save(folder, edit)
    while edit.rest:
        edit = _pick(folder, repository, edit)
        export.as_patch(layout, project, repository, edit.done)
        _save(folder, edit)
    if changed := tree.uncommitted(repository):
        raise EditError(
            f"{folder}: changes that are in no patch: {', '.join(changed[:5])}",
            cure="move them elsewhere, or take them back with `git checkout`; then CONTINUE=1",
        )
    exported = export.export_commits(layout, project, repository, edit.upstream, edit.overlay, edit.done, edit.patches)
    applied = series.apply(layout, project, repository, edit.upstream)
    applied.refuse_bad()
    export.adopt(layout, folder, repository, applied, edit.done)
    storage.discard(folder, layout.build)
    if layout.tree(project.name).exists() and not tree.unsaved(layout.tree(project.name)):
        tree.build(layout, project, upstream)
    return exported


def abort(layout: Layout, project: Project) -> None:
    """Drop an edit; the patches stay as they are.

    Raises:
        EditError: no edit is under way.
    """
    folder = layout.edit(project.name)
    _load(folder)
    storage.discard(folder, layout.build)


def _run(folder: Path, name: str, command: str) -> None:
    shell = os.environ.get("SHELL", "/bin/sh")
    if not command:
        console.print(f"{folder} is at {name}. Leave the shell: exit folds the change in, exit 1 keeps it open.")
    result = subprocess.run(["/bin/sh", "-c", command] if command else [shell], cwd=folder, check=False)
    if result.returncode:
        raise EditError(
            f"the {'command' if command else 'shell'} ended with status {result.returncode}; nothing is folded in yet",
            cure="CONTINUE=1 folds what is in the tree, ABORT=1 drops it",
        )


def _fold(repository: Repository, edit: Edit) -> str:
    """One commit in the place of the patch's: the work tree as it is now, and a message amended there."""
    repository.run("add", "--all", "--force", "--", ".", ":(exclude,glob)**/__pycache__/**")
    content = repository.line("write-tree")
    head = repository.ref("HEAD")
    assert head is not None
    parent = repository.parents(edit.commit)[0]
    if content == repository.tree(parent):
        raise EditError(
            f"{edit.patch} would become empty", cure="to drop a patch, take it out of the series and remove its file"
        )
    amended = head if repository.parents(head) == [parent] else edit.commit
    message = repository.run("show", "--no-patch", "--format=%B", amended).decode().rstrip("\n") + "\n"
    if repository.trailers(message).get(FILENAME_TRAILER) != edit.patch:
        raise EditError(
            f"the message no longer says {FILENAME_TRAILER}: {edit.patch}",
            cure="put the trailer back with `git commit --amend` in the tree, then CONTINUE=1",
        )
    fields = repository.run("show", "--no-patch", "--format=%an%n%ae%n%at", edit.commit).decode().splitlines()
    return repository.commit(content, [parent], message, Author(fields[0], fields[1], f"@{fields[2]} +0000"))


def _pick(folder: Path, repository: Repository, edit: Edit) -> Edit:
    """Re-apply the next patch, or finish the one that conflicted."""
    commit = edit.rest[0]
    picking = repository.git_dir / "CHERRY_PICK_HEAD"
    editor = {"GIT_EDITOR": "true"}
    if picking.exists():
        result = repository.attempt("cherry-pick", "--continue", env=editor)
    elif repository.ref("HEAD") == edit.done:
        console.print(f"re-applying {_name(repository, commit)}")
        if edit.picking:  # and died half-way, or was aborted: there is nothing of the user's in the tree yet
            repository.run("reset", "--quiet", "--hard", edit.done)
        _save(folder, replace(edit, picking=True))
        result = repository.attempt("cherry-pick", "--allow-empty", "--keep-redundant-commits", commit, env=editor)
    else:
        result = None  # the user has finished it, or a killed run had
    if result is not None and not result:
        files = repository.run("diff", "--name-only", "--diff-filter=U", "-z").decode().split("\0")[:-1]
        if not files:
            _save(folder, replace(edit, picking=False))
            raise EditError(
                f"{_name(repository, commit)} cannot be re-applied after the edit of {edit.patch}: "
                f"{result.stderr.strip()}",
                cure="mend that, then CONTINUE=1; ABORT=1 drops the edit",
            )
        raise EditError(
            f"{_name(repository, commit)} conflicts with the edit of {edit.patch} in {', '.join(files)}",
            cure=f"resolve it in {folder}, `git add` the files, then CONTINUE=1; ABORT=1 drops the edit",
        )
    head = repository.ref("HEAD")
    assert head is not None
    if repository.parents(head) != [edit.done]:
        raise EditError(f"{folder}: HEAD is not one commit after the last patch", cure="ABORT=1, and begin anew")
    if repository.tree(head) == repository.tree(edit.done):
        raise EditError(
            f"{_name(repository, commit)} is empty after the edit of {edit.patch}: its change is in that patch now",
            cure="ABORT=1; take it out of the series first",
        )
    return replace(edit, done=head, rest=edit.rest[1:], picking=False)


def _name(repository: Repository, commit: str) -> str:
    message = repository.run("show", "--no-patch", "--format=%B", commit).decode()
    return repository.trailers(message).get(FILENAME_TRAILER, commit)


def _load(folder: Path) -> Edit:
    try:
        data = json.loads((folder / ".git" / _STATE).read_bytes())
        return Edit(**{**data, "rest": tuple(data["rest"])})
    except (OSError, ValueError, TypeError, KeyError):
        raise EditError(f"{folder}: no edit is under way", cure="`make edit PATCH=name` begins one") from None


def _save(folder: Path, edit: Edit) -> None:
    storage.write(folder / ".git" / _STATE, json.dumps(asdict(edit), indent=1).encode() + b"\n")
