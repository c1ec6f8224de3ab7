"""Upstream's source tree as a git commit in the cache.

The commit is parentless and depends on the pinned content alone, so that its id is the same on every
machine. `make clean` leaves it where it is; a build repository reads its objects as alternates.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.version import Version

from scripts import fetch, pins
from scripts.console import console
from scripts.errors import HashError, SourceError
from scripts.layout import Layout
from scripts.pins import Project
from scripts.repository import IDENTITY, Author, Repository
from scripts.storage import locked, writable

#: Generated when a release is made: the one file below the package that a sdist has and a clone has not.
GENERATED = "_version.py"


@dataclass(frozen=True)
class Upstream:
    """A commit with upstream's files, and the repository in the cache that holds it."""

    repository: Repository
    commit: str


def from_sdist(layout: Layout, project: Project) -> Upstream:
    """Upstream as the pinned source distribution has it; fetched and imported at the first use."""
    repository = _repository(layout, project)
    ref = f"refs/upstream/{project.sdist}"
    commit = repository.ref(ref)
    if commit is None:
        archive = fetch.sdist(layout, project)
        with locked(repository.git_dir.with_suffix(".lock")), writable(repository.git_dir):
            commit = repository.ref(ref) or _import(repository, ref, project, archive)
    return Upstream(repository, commit)


def from_git(layout: Layout, project: Project, url: str = "") -> Upstream:
    """Upstream as a clone of the pinned tag has it, checked against the pinned commit.

    Where the source distribution is in the cache as well, or no commit is pinned, every file below the package
    but the generated `_version.py` must be the same in both, byte for byte.

    Raises:
        SourceError: the tag cannot be cloned, or there is neither a pinned commit nor a source distribution to
            check it against.
        HashError: the tag names another commit, or the clone differs from the source distribution.
    """
    url = url or project.repository
    repository = _repository(layout, project)
    clone = f"refs/clones/{project.tag}"
    with locked(repository.git_dir.with_suffix(".lock")), writable(repository.git_dir):
        _init(repository)
        known = repository.ref(clone)
        if known is None or not known.startswith(project.commit):
            console.print(f"cloning {project.tag} of {url}")
            arguments = ("fetch", "--quiet", "--depth=1", "--no-tags", "--end-of-options", url)
            result = repository.attempt(*arguments, f"+refs/tags/{project.tag}:{clone}")
            if not result:
                raise SourceError(
                    f"{url}: tag {project.tag} cannot be cloned: {result.stderr.strip()}",
                    cure="check the network, or give another address with REPOSITORY=",
                )
    source = repository.ref(clone)
    assert source is not None
    if not source.startswith(project.commit):
        raise HashError(
            f"{url}: tag {project.tag} is commit {source}, pinned is {project.commit}",
            cure="the tag was moved or this is another repository: do not build from it",
        )
    _compare_with_sdist(layout, repository, project, source)
    if not project.commit:
        console.print(f"{project.name}: {project.tag} is commit {source}; the source distribution vouches for it")
    elif source != project.commit:
        pins.record_commit(layout.pins, project, source)
        console.print(f"{layout.pins.name}: {project.name}.commit is now the full {source}")
    date = repository.line("show", "--no-patch", "--format=%ct +0000", source)
    message = f"upstream {project.name} {project.version}\n\ncommit {source}\n"
    tree = repository.tree(source)
    return Upstream(repository, repository.commit(tree, [], message, Author(*IDENTITY, f"@{date}")))


def _compare_with_sdist(layout: Layout, repository: Repository, project: Project, source: str) -> None:
    released = repository.ref(f"refs/upstream/{project.sdist}")
    if released is None and (not project.commit or fetch.cached(layout, project.sdist)):
        released = from_sdist(layout, project).commit
    if released is None:
        console.print("the source distribution is not in the cache: the clone is checked by its commit alone")
        return
    clone, sdist = (repository.files(commit, f"{project.package}/") for commit in (source, released))
    sdist.pop(f"{project.package}/{GENERATED}", None)
    if differing := sorted(path for path in clone.keys() | sdist.keys() if clone.get(path) != sdist.get(path)):
        raise HashError(
            f"{len(differing)} files of {project.tag} differ from the source distribution, first {differing[0]}",
            cure="one of the two was tampered with: do not build from either",
        )


def imported(layout: Layout, project: Project) -> dict[Version, str]:
    """The commits of the releases whose source distributions are in the cache as git objects."""
    repository = _repository(layout, project)
    if not repository.git_dir.exists():
        return {}
    listing = repository.run("for-each-ref", "--format=%(objectname) %(contents:subject)", "refs/upstream").decode()
    records = [line.split(" ") for line in listing.splitlines()]
    return {Version(version): commit for commit, _, _, version in records}


def stated_commit(origin: Upstream, project: Project) -> str:
    """The commit that a release says it was made of; empty where it does not say, or not enough of it."""
    text = origin.repository.read(origin.commit, f"{project.package}/{GENERATED}") or b""
    found = re.search(rb"^__commit_id__ = (?:\w+ = )?'g([0-9a-f]+)'$", text, re.MULTILINE)
    return found[1].decode() if found and len(found[1]) >= pins.COMMIT_DIGITS else ""


def _repository(layout: Layout, project: Project) -> Repository:
    return Repository(layout.cache / "git" / f"{project.name}.git")


def _init(repository: Repository) -> None:
    """Make the repository, or take it as a killed run has left it: nobody else writes to it now."""
    for pattern in ("*.lock", "refs/**/*.lock", "objects/pack/tmp_*", "fast_import_crash_*"):
        for leftover in repository.git_dir.glob(pattern):
            leftover.unlink()
    Repository.init(repository.git_dir)  # which locks a file itself


def _import(repository: Repository, ref: str, project: Project, archive: Path) -> str:
    console.print(f"importing {archive.name} into git")
    _init(repository)
    message = f"upstream {project.name} {project.version}\n\nsdist sha256 {project.sdist}\n"
    try:
        with tarfile.open(archive) as tar:
            members = [(member, _content(archive, tar, member)) for member in tar if not member.isdir()]
        # When the release was made: the time of the last file packed.
        author = Author(*IDENTITY, f"{int(max(member.mtime for member, _ in members))} +0000")
        files = ((_path(member), bool(member.mode & 0o100), data) for member, data in members)
        return repository.import_files(ref, files, message, author)
    except (tarfile.TarError, EOFError) as error:
        raise SourceError(f"{archive}: not a readable source distribution: {error}", cure="remove it") from None


def _path(member: tarfile.TarInfo) -> str:
    """A member's path without the archive's top folder."""
    return member.name.split("/", 1)[1]


def _content(archive: Path, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    parts = PurePosixPath(member.name).parts
    file = tar.extractfile(member) if member.isreg() else None
    if file is None or ".." in parts or member.name.startswith("/") or len(parts) < 2:
        raise SourceError(
            f"{archive}: member {member.name!r} is not a plain file below the top folder",
            cure="this is not a source distribution that can be trusted",
        )
    return file.read()
