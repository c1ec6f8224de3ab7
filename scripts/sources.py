"""What a wheel is made from, as plain data: git on one side, wheels on the other.

Paths in a tree are POSIX paths from the root of the tree, which are also the names of the wheel's members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from scripts.errors import WheelError
from scripts.pins import Pins, Project

#: Parts of upstream's tree that no wheel contains; a patch may change them along with the code.
NOT_PACKAGED = ("benchmarks/", "docs/", "examples/", "tests/")

_NATIVE_SUFFIXES = (".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".pyx", ".rs", ".so")


def is_native(path: str, package: str) -> bool:
    """Whether only upstream's build, with its compilers, could bring a change of this file into a wheel."""
    return path.endswith(_NATIVE_SUFFIXES) or not path.startswith((f"{package}/", *NOT_PACKAGED))


@dataclass(frozen=True)
class SourceFile:
    """A file of the finished tree."""

    data: bytes
    executable: bool


@dataclass(frozen=True)
class PatchInfo:
    """One patch of the series; `text` is the mail itself and `sha256` its hash."""

    name: str
    sha256: str
    subject: str
    upstream_status: str
    upstream_link: str
    remove_when: str
    scope: str
    text: bytes


@dataclass(frozen=True)
class Sources:
    """The upstream tree of one project and everything in which the finished tree differs from it.

    Attributes:
        upstream: every upstream file below the package folder, with its git blob id.
        changed: changed and new files, wherever they are in the tree.
        deleted: upstream files that the finished tree has no more.
        overlay: those of `changed` that come from the overlay; the rest come from patches.
        patches: the series, in order.
        tree: the git tree id of the finished package folder, without the generated `_version.py`.
    """

    upstream: Mapping[str, str]
    changed: Mapping[str, SourceFile]
    deleted: frozenset[str]
    overlay: frozenset[str]
    patches: tuple[PatchInfo, ...]
    tree: str


@dataclass(frozen=True)
class Build:
    """Everything that decides the content of one wheel, and how upstream's wheel and ours call things.

    Raises:
        WheelError: the file name is not one of the project's wheel for the platform in the pinned version.
    """

    pins: Pins
    project: Project
    platform: str
    upstream_wheel: Path
    sources: Sources

    def __post_init__(self) -> None:
        expected = f"expected {self.project.package}-{self.project.version}-<tags>_{self.platform}.whl"
        try:
            name, version, _, tags = parse_wheel_filename(self.upstream_wheel.name)
        except InvalidWheelFilename as error:
            raise WheelError(f"{self.upstream_wheel}: {error}", cure=expected) from None
        if name != canonicalize_name(self.project.name) or version != Version(self.project.version):
            raise WheelError(f"{self.upstream_wheel}: is {name} {version}", cure=expected)
        if not all(tag.platform.endswith(f"_{self.platform}") for tag in tags):
            raise WheelError(f"{self.upstream_wheel}: is not for {self.platform}", cure=expected)

    @property
    def upstream_info(self) -> str:
        """The dist-info folder in upstream's wheel."""
        return f"{self.project.package}-{self.project.version}.dist-info"

    @property
    def info(self) -> str:
        """The dist-info folder in our wheel."""
        return f"{self.project.package}-{self.project.local_version}.dist-info"

    @property
    def file_name(self) -> str:
        """Our wheel's file name: upstream's with another version."""
        tags = self.upstream_wheel.name.split("-", 2)[2]
        return f"{self.project.package}-{self.project.local_version}-{tags}"


def blob_id(data: bytes) -> str:
    """The id that git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
