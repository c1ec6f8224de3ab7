"""The texts by which a wheel describes itself: METADATA, WHEEL, RECORD and the package's `_version.py`.

Upstream's text is edited line by line, so that whatever we do not mean to change stays byte for byte.
Formats: core metadata 2.4 (PEP 643, PEP 639), WHEEL and RECORD (PEP 427, PEP 376), versions (PEP 440).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Iterable, Mapping

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.errors import WheelError
from scripts.pins import Pins, Project

#: Extras that our wheels add: project -> extra -> the pinned project that it brings.
EXTRAS: Mapping[str, Mapping[str, str]] = {"vllm": {"gguf": "vllm-gguf-plugin"}}


def core_metadata(data: bytes, pins: Pins, project: Project, license_file: str) -> bytes:
    """Upstream's METADATA for our build.

    The version becomes the local one, a requirement on a pinned project becomes one on exactly our build of it
    (upstream's own specifier would let pip bring the unpatched project), our extras are added, and
    `license_file`, a path below `licenses/`, joins the License-File lines.

    Raises:
        WheelError: the text is not what upstream's wheels contain.
    """
    header, separator, description = _text(data, "METADATA").partition("\n\n")
    lines = [_pinned(line, pins, project) for line in header.rstrip("\n").split("\n")]
    _replace_line(lines, f"Version: {project.version}", f"Version: {project.local_version}")
    licences = [number for number, line in enumerate(lines) if line.startswith("License-File: ")]
    if licences:
        lines.insert(licences[-1] + 1, f"License-File: {license_file}")
    extras = []
    for extra, name in EXTRAS.get(project.name, {}).items():
        if f"Provides-Extra: {extra}" in lines:
            raise WheelError(
                f"METADATA: upstream has an extra {extra!r} itself now", cure="drop it from metadata.EXTRAS"
            )
        version = pins.project(name).local_version
        extras += [f"Provides-Extra: {extra}", f'Requires-Dist: {name}=={version}; extra == "{extra}"']
    # The Dynamic lines come last in what setuptools writes.
    end = next((number for number, line in enumerate(lines) if line.startswith("Dynamic: ")), len(lines))
    lines[end:end] = extras
    return ("\n".join(lines) + (separator or "\n") + description).encode()


def wheel_metadata(data: bytes, tags: Iterable[Tag]) -> bytes:
    """Upstream's WHEEL with the tags of the file name.

    auditwheel was not run on vLLM's wheel: it says `linux_x86_64` inside and `manylinux_2_28_x86_64` outside.

    Raises:
        WheelError: there is no Tag line.
    """
    lines = _text(data, "WHEEL").split("\n")
    first = next((number for number, line in enumerate(lines) if line.startswith("Tag: ")), None)
    if first is None:
        raise WheelError("WHEEL: has no Tag line", cure="expected a wheel as upstream releases it")
    lines = [line for line in lines if not line.startswith("Tag: ")]
    lines[first:first] = sorted(f"Tag: {tag}" for tag in tags)
    return "\n".join(lines).encode()


def version_module(data: bytes, version: str) -> bytes:
    """Upstream's `_version.py` with another version; the commit id stays upstream's.

    Raises:
        WheelError: it does not have the two assignments that setuptools-scm writes.
    """
    text = _text(data, "_version.py")
    for names, value in (
        ("__version__ = version", version),
        ("__version_tuple__ = version_tuple", version_tuple(version)),
    ):
        text, count = re.subn(rf"^{re.escape(names)} = .*$", lambda _: f"{names} = {value!r}", text, flags=re.MULTILINE)  # noqa: B023
        if count != 1:
            raise WheelError(f"_version.py: expected one line `{names} = ...`, found {count}", cure="see its new form")
    return text.encode()


def version_tuple(version: str) -> tuple[int | str, ...]:
    """A version as setuptools-scm writes it into `version_tuple`: the release, then the other segments as text."""
    parsed = Version(version)
    fields: tuple[int | str, ...] = parsed.release
    if parsed.epoch:
        fields = (f"{parsed.epoch}!", *fields)
    if parsed.pre:
        fields += (f"{parsed.pre[0]}{parsed.pre[1]}",)
    if parsed.post is not None:
        fields += (f"post{parsed.post}",)
    if parsed.dev is not None:
        fields += (f"dev{parsed.dev}",)
    if parsed.local:
        fields += (parsed.local,)
    return fields


def record_row(name: str, data: bytes) -> tuple[str, str, str]:
    """A member's line of RECORD: path, digest, size."""
    return name, record_digest(hashlib.sha256(data).digest()), str(len(data))


def record_digest(sha256: bytes) -> str:
    """A digest as RECORD writes it: urlsafe base64 without padding."""
    return f"sha256={base64.urlsafe_b64encode(sha256).rstrip(b'=').decode()}"


def read_record(data: bytes) -> dict[str, tuple[str, str]]:
    """RECORD as path -> (digest, size).

    Raises:
        WheelError: a line has not three fields, or a path comes twice.
    """
    record: dict[str, tuple[str, str]] = {}
    for number, row in enumerate(csv.reader(io.StringIO(data.decode(), newline="")), start=1):
        if len(row) != 3 or row[0] in record:
            raise WheelError(f"RECORD: line {number} is malformed or repeats a path: {row}", cure="see PEP 376")
        record[row[0]] = (row[1], row[2])
    return record


def write_record(rows: Iterable[tuple[str, str, str]]) -> bytes:
    """RECORD from its rows."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _pinned(line: str, pins: Pins, project: Project) -> str:
    field, _, value = line.partition(": ")
    if field != "Requires-Dist":
        return line
    try:
        requirement = Requirement(value)
    except InvalidRequirement as error:
        raise WheelError(f"METADATA: {line!r}: {error}", cure="expected a wheel as upstream releases it") from None
    name = canonicalize_name(requirement.name)
    if name == project.name or name not in pins.projects:
        return line
    requirement.specifier = SpecifierSet(f"=={pins.project(name).local_version}")
    return f"Requires-Dist: {requirement}"


def _replace_line(lines: list[str], old: str, new: str) -> None:
    if lines.count(old) != 1:
        raise WheelError(f"METADATA: expected one line {old!r}, found {lines.count(old)}", cure="see upstream.toml")
    lines[lines.index(old)] = new


def _text(data: bytes, name: str) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise WheelError(f"{name}: not UTF-8: {error}", cure="expected a wheel as upstream releases it") from None
    if "\r" in text:
        raise WheelError(f"{name}: has CR line ends", cure="expected a wheel as upstream releases it")
    return text
