"""Where a rebase stops: the work tree in which the user decides, what he is told, and what he has made of it."""

from __future__ import annotations

import shutil
from pathlib import Path

from packaging.version import Version

from scripts import upstream, upstream_change
from scripts.errors import RebaseError
from scripts.layout import Layout
from scripts.patch import FILENAME_TRAILER, Patch
from scripts.rebase_state import Rebase
from scripts.repository import Repository
from scripts.verdict import Kind, Verdict

# -- the work tree -----------------------------------------------------------------------------------


def lay(repository: Repository, tip: str, old: str) -> bool:
    """Make the work tree hold the commit `tip` and, merged into it, the commit `old`; whether that merged."""
    repository.run("update-ref", "refs/heads/main", tip)
    repository.run("symbolic-ref", "HEAD", "refs/heads/main")
    repository.run("reset", "--quiet", "--hard", tip)
    repository.run("clean", "--quiet", "--force", "-d", "-x")  # what a killed run left of another patch
    return bool(old) and bool(repository.attempt("cherry-pick", "--no-commit", old))


def unmerged(repository: Repository) -> list[str]:
    """The files that still conflict."""
    return repository.run("diff", "--name-only", "--diff-filter=U", "-z").decode().split("\0")[:-1]


def content(repository: Repository) -> str:
    """The work tree as it is now, as a tree."""
    with repository.private_index() as index_file:
        shutil.copyfile(repository.git_dir / "index", index_file)  # which knows the files that are unchanged
        everything = ("--", ".", ":(exclude,glob)**/__pycache__/**")
        repository.run("add", "--all", "--force", *everything, index=index_file)
        return repository.write_tree(index_file)


# -- what is said ------------------------------------------------------------------------------------


def upstream_side(layout: Layout, repository: Repository, state: Rebase, one: Patch) -> list[str]:
    """What upstream did to the places that a patch changes."""
    old, new = (
        upstream_change.Release(project.tag, commit)
        for project, commit in ((state.old, state.base), (state.new, state.upstream))
    )
    known = upstream.imported(layout, state.new)
    ends = sorted((Version(state.old.version), Version(state.new.version)))
    between = [
        upstream_change.Release(f"v{version}", known[version])
        for version in sorted(known, reverse=state.new.version != str(ends[1]))
        if ends[0] < version < ends[1]
    ]
    lines = []
    for file in one.files:
        lines += upstream_change.describe(repository, old, new, between, file)
    return [f"upstream, {old.tag} to {new.tag}:", *(f"  {line}" for line in lines)] if lines else []


def cure(folder: Path, found: Verdict, conflicts: list[str], merged: list[str]) -> str:
    """What the user can do at a patch: `conflicts` are the files that conflict, `merged` those that changed."""
    others = "KEEP=1 stops here and keeps what is done, ABORT=1 drops the rebase"
    if found.kind is Kind.UPSTREAMED:
        return f"SKIP=1 drops the patch; {others}"
    if conflicts:
        todo = f"resolve it in {folder} (`git status` lists the files) and `git add` them, then CONTINUE=1"
    elif merged:
        todo = f"git has merged what it can into {', '.join(merged)}: look at it in {folder}, then CONTINUE=1"
    else:
        todo = f"make the change in {folder}, then CONTINUE=1"
    return f"{todo}; SKIP=1 leaves the patch out; {others}"


# -- what is taken -----------------------------------------------------------------------------------


def take(folder: Path, repository: Repository, tip: str, one: Patch) -> str:
    """The work tree as a commit of the patch, after `tip`.

    Raises:
        RebaseError: it is not resolved, or changes nothing.
    """
    repository.remove_locks("HEAD", "index")
    cure = f"resolve it in {folder}, `git add` the files, then CONTINUE=1; SKIP=1 leaves the patch out"
    if conflicts := unmerged(repository):
        raise RebaseError(f"{one.name} still conflicts in {', '.join(conflicts)}", cure=cure)
    made = content(repository)
    marked = repository.attempt("diff", "--check", tip, made).stdout.decode(errors="replace")
    if left := [line for line in marked.splitlines() if line.endswith(": leftover conflict marker")]:
        raise RebaseError("\n".join([f"{one.name} still has conflict markers:", *left]), cure=cure)
    if made == repository.tree(tip):
        raise RebaseError(
            f"{one.name} would become empty",
            cure="SKIP=1 drops it; or make its change in the work tree, and CONTINUE=1",
        )
    return repository.commit(made, [tip], _message(folder, repository, tip, one), one.author)


def _message(folder: Path, repository: Repository, tip: str, one: Patch) -> str:
    """The patch's message, or the one that the user committed the resolution with."""
    head = repository.ref("HEAD")
    assert head is not None
    if head == tip:
        return one.message
    if repository.parents(head) != [tip]:
        raise RebaseError(
            f"{folder}: HEAD is not one commit after the last patch",
            cure=f"one commit a patch: `git reset --soft {tip}`, then CONTINUE=1",
        )
    message = repository.run("show", "--no-patch", "--format=%B", head).decode().rstrip("\n") + "\n"
    if repository.trailers(message).get(FILENAME_TRAILER) != one.name:
        raise RebaseError(
            f"{folder}: the message does not say {FILENAME_TRAILER}: {one.name}",
            cure="put the trailer back with `git commit --amend`, then CONTINUE=1",
        )
    return message
