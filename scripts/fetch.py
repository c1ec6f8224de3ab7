"""Upstream's files: from the package indexes into a content-addressed cache, checked by hash.

A file lies at `<cache>/files/<sha256>/<file name>`. It gets there by a rename of a finished download whose
hash is right, so whatever is there is whole; it is hashed again whenever it is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from scripts.console import console, download_progress
from scripts.errors import HashError, SourceError
from scripts.layout import Layout
from scripts.pins import Project
from scripts.storage import locked, replace, writable

if TYPE_CHECKING:
    from unearth import Link, Package
    from unearth.fetchers import PyPIClient

#: How often a broken download is taken up again before giving up.
ATTEMPTS = 5


def sdist(layout: Layout, project: Project) -> Path:
    """The project's source distribution, downloaded if need be."""
    return _file(layout, project, "sdist", project.sdist)


def wheel(layout: Layout, project: Project, platform: str) -> Path:
    """The project's upstream wheel for `platform`, downloaded if need be."""
    return _file(layout, project, platform, project.wheels[platform])


def cached(layout: Layout, sha256: str) -> Path | None:
    """The cached file with this hash, or None; its content is not looked at."""
    folder = layout.cache / "files" / sha256
    return next((path for path in folder.iterdir() if path.is_file()), None) if folder.is_dir() else None


def _file(layout: Layout, project: Project, kind: str, sha256: str) -> Path:
    path = cached(layout, sha256)
    if path:
        if digest(path) == sha256:
            return path
        console.print(f"{path}: damaged, fetching it again")
    with locked(layout.cache / "partial" / f"{sha256}.lock"):
        path = cached(layout, sha256)
        if path and digest(path) == sha256:
            return path  # another run fetched it while this one waited
        return _download(layout, project, kind, sha256)


def digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -- resolving ---------------------------------------------------------------------------------------


def _matches(package: Package, project: Project, kind: str) -> bool:
    name = package.link.filename
    if not package.version or Version(package.version) != Version(project.version):
        return False
    if not package.link.is_wheel:
        return kind == "sdist"
    try:
        _, _, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return False
    return any(tag.platform.startswith("manylinux") and tag.platform.endswith(kind) for tag in tags)


@contextmanager
def _resolved(project: Project, kind: str, sha256: str) -> Iterator[tuple[PyPIClient, list[Link]]]:
    """A client, and the links that may be the file: those with its hash first, then those without any."""
    from scripts.pipconfig import PipConfig, Refusals

    what = f"{project.name} {project.version} ({'sdist' if kind == 'sdist' else f'wheel, {kind}'})"
    config = PipConfig.load()
    with config.client() as client:
        with Refusals() as refusals:
            packages = list(config.finder(client).find_all_packages(project.name, allow_yanked=True))
        links = [package.link for package in packages if _matches(package, project, kind)]
        if not links:
            problem = "none of the package indexes that pip is configured with has it"
            if refusals.messages:
                problem = f"a package index is unreachable or refused: {'; '.join(refusals.messages)}"
            raise SourceError(f"{what} is not cached, and {problem}", cure=_offline_cure(sha256))
        hashes = {link: (link.hash_option or {}).get("sha256", [""])[0] for link in links}
        wanted = [link for link in links if hashes[link] == sha256] + [link for link in links if not hashes[link]]
        if not wanted:
            offered = ", ".join(sorted({f"{link.filename} sha256 {hashes[link]}" for link in links}))
            raise HashError(
                f"{what}: the package index offers {offered}; pinned is sha256 {sha256}",
                cure="a release does not change: check upstream.toml, and distrust the index",
            )
        yield client, wanted


def _offline_cure(sha256: str) -> str:
    return (
        "check the network and `pip config list` (index, proxy, certificate), or put the file into a folder and "
        f"set PIP_FIND_LINKS to it; expected sha256 {sha256}"
    )


# -- downloading -------------------------------------------------------------------------------------


def _download(layout: Layout, project: Project, kind: str, sha256: str) -> Path:
    partial = layout.cache / "partial" / sha256
    with _resolved(project, kind, sha256) as (client, links):
        failure: Exception | None = None
        for link in links:
            try:
                left = digest(partial) if partial.exists() else ""
                if left != sha256:
                    _stream(client, link, partial)
                if left and digest(partial) != sha256:
                    partial.unlink()  # the fault may be in what an earlier run left
                    _stream(client, link, partial)
            except _TransferError as error:
                failure = error
                continue
            actual = digest(partial)
            if actual == sha256:
                target = layout.cache / "files" / sha256 / link.filename
                replace(partial, target)
                return target
            partial.unlink()  # it cannot be continued: its content is wrong
            failure = HashError(
                f"{link.redacted}: sha256 is {actual}, pinned is {sha256}",
                cure="the download was discarded; check upstream.toml, and distrust the index",
            )
    if isinstance(failure, HashError):
        raise failure
    raise SourceError(
        f"{links[0].filename}: the download broke off: {failure}",
        cure="run the command again: it goes on where it stopped",
    )


class _TransferError(Exception):
    """A transfer broke off; what came so far is kept."""


def _stream(client: PyPIClient, link: Link, partial: Path) -> None:
    """Download `link` into `partial`, going on from what is there."""
    import httpx2

    last: Exception | None = None
    with download_progress(link.filename) as progress:
        for _ in range(ATTEMPTS):
            have = partial.stat().st_size if partial.exists() else 0
            headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
            try:
                with client.get_stream(link.normalized, headers=headers) as response:
                    if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                        partial.unlink()  # longer than the file, so not a part of it
                        continue
                    response.raise_for_status()
                    resumed = response.status_code == HTTPStatus.PARTIAL_CONTENT
                    length = int(response.headers.get("Content-Length", 0))
                    start = have if resumed else 0
                    progress.begin(start, start + length)
                    with writable(partial), partial.open("ab" if resumed else "wb") as file:
                        for chunk in response.iter_raw():
                            file.write(chunk)
                            progress.advance(len(chunk))
                    if length and partial.stat().st_size < start + length:
                        raise httpx2.ReadError("the connection closed early")
                    return
            except httpx2.HTTPStatusError as error:
                raise _TransferError(f"{link.redacted}: {error.response.status_code}") from None
            except httpx2.HTTPError as error:
                last = error
    raise _TransferError(str(last) or type(last).__name__)
