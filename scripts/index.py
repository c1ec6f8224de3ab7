"""What releases of a project the package indexes have, and what their files hash to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from scripts.errors import HashError, SourceError
from scripts.fetch import digest
from scripts.pins import PLATFORMS, Project

if TYPE_CHECKING:
    from unearth import Link, Package


@dataclass(frozen=True)
class Release:
    """A release that has a source distribution; `wheels` holds the hash of each platform that it has a wheel for."""

    version: Version
    sdist: str
    wheels: Mapping[str, str]
    yanked: bool

    def pin(self, project: Project) -> Project:
        """The project as it is pinned once this release takes the place of its own.

        Raises:
            SourceError: the release has no wheel for one of the platforms.
        """
        if missing := [platform for platform in PLATFORMS if platform not in self.wheels]:
            raise SourceError(
                f"{project.name} {self.version} has no wheel of known hash for {', '.join(missing)}",
                cure="choose another release",
            )
        version = str(self.version)
        prefix = project.tag.removesuffix(project.version)
        local = version + project.local_version.removeprefix(project.version)
        return replace(
            project,
            version=version,
            tag=f"{prefix}{version}",
            commit="",
            sdist=self.sdist,
            wheels=dict(self.wheels),
            local_version=local,
        )


def releases(name: str) -> list[Release]:
    """The releases of a project, the oldest first; those without a source distribution of known hash are left out.

    Raises:
        SourceError: no index has the project, or one is unreachable.
        HashError: two indexes disagree about a file.
    """
    from scripts.pipconfig import PipConfig, Refusals

    config = PipConfig.load()
    with config.client() as client, Refusals() as refusals:
        packages = list(config.finder(client).find_all_packages(name, allow_yanked=True))
    if not packages:
        why = "; ".join(refusals.messages) or "none of the package indexes that pip is configured with has it"
        raise SourceError(f"{name}: no release found: {why}", cure="check the network and `pip config list`")
    files: dict[Version, dict[str, list[Link]]] = {}
    for package in packages:
        for kind in _kinds(package):
            files.setdefault(Version(package.version or ""), {}).setdefault(kind, []).append(package.link)
    found = []
    for version, links in sorted(files.items()):
        hashes = {kind: sha256 for kind, offered in links.items() if (sha256 := _sha256(offered))}
        if sdist := hashes.pop("sdist", ""):
            yanked = any(link.yank_reason is not None for link in links["sdist"])
            found.append(Release(version, sdist, hashes, yanked))
    return found


def latest(found: Iterable[Release]) -> Release | None:
    """The newest release that is neither a pre-release nor withdrawn."""
    final = [one for one in found if not one.version.is_prerelease and not one.yanked]
    return max(final, key=lambda one: one.version, default=None)


def _kinds(package: Package) -> list[str]:
    """What a file is of those that are pinned: the sdist, or the wheel of which platforms."""
    try:
        Version(package.version or "")
        if not package.link.is_wheel:
            return ["sdist"]
        _, _, _, tags = parse_wheel_filename(package.link.filename)
    except (InvalidVersion, InvalidWheelFilename):
        return []
    systems = {tag.platform for tag in tags if tag.platform.startswith("manylinux")}
    return [platform for platform in PLATFORMS if any(system.endswith(f"_{platform}") for system in systems)]


def _sha256(links: list[Link]) -> str:
    """The hash on which all that offer a file agree; empty where nobody knows one, or where there are several files.

    Of a file in a folder it is the file's own.
    """
    if len({link.filename for link in links}) > 1:
        return ""  # old releases have a wheel for each Python
    named = {link: (link.hash_option or {}).get("sha256", [""])[0] for link in links}
    hashes = {value or (digest(link.file_path) if link.is_file else "") for link, value in named.items()} - {""}
    if len(hashes) > 1:
        raise HashError(
            f"{links[0].filename}: the indexes disagree: sha256 {', '.join(sorted(hashes))}",
            cure="a release does not change: find out which index to distrust",
        )
    return hashes.pop() if hashes else ""
