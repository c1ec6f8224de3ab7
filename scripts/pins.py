"""upstream.toml: which upstream releases the distribution is made of."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomlkit
import tomlkit.items
from packaging.version import InvalidVersion, Version

from scripts.errors import PinError
from scripts.storage import write

PLATFORMS = ("x86_64", "aarch64")

#: vLLM picks its platform, and some defaults, by looking for these in its own version string.
FORBIDDEN_IN_LABEL = ("cpu", "rocm", "tpu", "xpu", "dev")

#: The shortest commit id that may be pinned: as much of it as a release states in its `_version.py`.
COMMIT_DIGITS = 9

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(rf"[0-9a-f]{{{COMMIT_DIGITS},40}}")
_LABEL = re.compile(r"[a-z][a-z0-9]*")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_CURE = "see the comments in upstream.toml and docs/build.md"


@dataclass(frozen=True)
class Project:
    """One pinned upstream project.

    Hashes are lowercase sha256. `commit` is a full id or a prefix of at least COMMIT_DIGITS digits, and empty
    where the release does not state it.
    """

    name: str
    version: str
    tag: str
    commit: str
    repository: str
    sdist: str
    wheels: Mapping[str, str]
    local_version: str

    @property
    def package(self) -> str:
        """The name of the import package, and of the folder that holds it in tree and wheel."""
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Pins:
    """The validated content of upstream.toml."""

    label: str
    number: int
    projects: Mapping[str, Project]

    def project(self, name: str) -> Project:
        """The project called `name`.

        Raises:
            PinError: there is none.
        """
        try:
            return self.projects[name]
        except KeyError:
            known = ", ".join(self.projects)
            raise PinError(f"no project {name!r} in upstream.toml", cure=f"one of: {known}") from None


def local_version(version: str, label: str, number: int) -> str:
    """`version` with our local label, joined to one that upstream already has (PEP 440)."""
    separator = "." if "+" in version else "+"
    return f"{version}{separator}{label}.{number}"


def load(path: Path) -> Pins:
    """Read and validate the pins.

    Raises:
        PinError: the file is missing or a value is not what it must be; the message names the key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PinError(f"{path}: not found", cure="run in a checkout of this repository") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PinError(f"{path}: not valid TOML: {error}", cure=_CURE) from None
    release = _Table(path, "release", data.pop("release", None))
    label = release.text("label", _LABEL)
    for word in FORBIDDEN_IN_LABEL:
        if word in label:
            raise PinError(
                f"{path}: release.label {label!r} contains {word!r}, by which vLLM would take itself for another build",
                cure="choose another label",
            )
    number = release.number("number")
    release.end()
    projects = {name: _project(path, name, table, label, number) for name, table in data.items()}
    if not projects:
        raise PinError(f"{path}: no project is pinned", cure=_CURE)
    return Pins(label, number, projects)


def _project(path: Path, name: str, value: object, label: str, number: int) -> Project:
    if not _NAME.fullmatch(name):
        raise PinError(f"{path}: [{name}] is not a normalised project name", cure=_CURE)
    table = _Table(path, name, value)
    version = table.text("version")
    try:
        normalised = str(Version(version))
    except InvalidVersion:
        normalised = ""
    if version != normalised:
        raise PinError(f"{path}: {name}.version {version!r} is not a normalised PEP 440 version", cure=_CURE)
    tag = table.text("tag")
    if tag.removeprefix("v") != version:
        raise PinError(f"{path}: {name}.tag {tag!r} does not name version {version}", cure=f"expected v{version}")
    wheels = _Table(path, f"{name}.wheel", table.take("wheel"))
    hashes = {platform: wheels.text(platform, _SHA256) for platform in PLATFORMS}
    wheels.end()
    project = Project(
        name=name,
        version=version,
        tag=tag,
        commit=table.text("commit", _COMMIT, default=""),
        repository=table.text("repository"),
        sdist=table.text("sdist", _SHA256),
        wheels=hashes,
        local_version=local_version(version, label, number),
    )
    table.end()
    return project


class _Table:
    """A TOML table whose keys are taken one by one, so that a misspelt one is noticed."""

    def __init__(self, path: Path, name: str, value: object) -> None:
        if not isinstance(value, dict):
            raise PinError(f"{path}: table [{name}] is missing", cure=_CURE)
        self._path, self._name, self._values = path, name, dict(value)

    def take(self, key: str, default: object = None) -> Any:
        value = self._values.pop(key, default)
        if value is None:
            raise PinError(f"{self._path}: {self._name}.{key} is missing", cure=_CURE)
        return value

    def text(self, key: str, pattern: re.Pattern[str] | None = None, default: str | None = None) -> str:
        value = self.take(key, default)
        if value == default and default is not None:
            return default
        if not isinstance(value, str) or not value or (pattern and not pattern.fullmatch(value)):
            wanted = f"text matching {pattern.pattern}" if pattern else "non-empty text"
            raise PinError(f"{self._path}: {self._name}.{key} is {value!r}, expected {wanted}", cure=_CURE)
        return value

    def number(self, key: str) -> int:
        value = self.take(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PinError(f"{self._path}: {self._name}.{key} is {value!r}, expected a number from 1", cure=_CURE)
        return value

    def end(self) -> None:
        if self._values:
            unknown = ", ".join(sorted(self._values))
            raise PinError(f"{self._path}: unknown key in [{self._name}]: {unknown}", cure=_CURE)


def record_commit(path: Path, project: Project, commit: str) -> None:
    """Replace a pinned commit prefix by the full id that a clone has, leaving the rest of the file as it is."""
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    table = document[project.name]
    assert isinstance(table, tomlkit.items.Table)
    table["commit"] = commit
    write(path, tomlkit.dumps(document).encode())


def record(path: Path, project: Project) -> None:
    """Pin another release of a project, leaving the rest of the file as it is."""
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    table = document[project.name]
    assert isinstance(table, tomlkit.items.Table)
    for key in ("version", "tag", "commit", "sdist"):
        if value := getattr(project, key):
            table[key] = value
        else:
            table.pop(key, None)
    wheels = table["wheel"]
    assert isinstance(wheels, tomlkit.items.Table)
    for platform, sha256 in project.wheels.items():
        wheels[platform] = sha256
    write(path, tomlkit.dumps(document).encode())


def bump(path: Path) -> int:
    """Raise release.number by one and return it."""
    number = load(path).number + 1
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    release = document["release"]
    assert isinstance(release, tomlkit.items.Table)
    release["number"] = number
    write(path, tomlkit.dumps(document).encode())
    return number
