"""`make verify-wheel`: is a finished wheel what pins, patches and overlay say it should be?

Nothing here looks at how the wheel was written: it is read with the standard library, and what must be in it is
derived from upstream's wheel and the sources anew. Every finding is collected.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import stat
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from scripts import metadata, provenance, sbom
from scripts.errors import VerifyError
from scripts.pins import Pins, Project
from scripts.sources import Build, Sources

_TEST_MODULES = {"twine": "twine", "check_wheel_contents": "check-wheel-contents", "jsonschema": "jsonschema"}
_CHUNK = 1 << 20


def verify(pins: Pins, project: Project, platform: str, wheel: Path, sources: Sources, upstream_wheel: Path) -> None:
    """Check the file `wheel` against upstream's wheel, whose hash the caller has checked, and against the sources.

    Raises:
        VerifyError: lists every finding.
        WheelError: upstream's wheel is not the one that the pins mean.
    """
    missing = [name for module, name in _TEST_MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise VerifyError(
            f"verifying needs {', '.join(missing)}", cure="pip install --requirement tests/requirements.txt"
        )
    build = Build(pins, project, platform, upstream_wheel, sources)
    problems = [*content_problems(build, wheel), *linter_problems(build, wheel)]
    if problems:
        raise VerifyError(
            "\n  ".join([f"{wheel}: {len(problems)} findings:", *problems]),
            cure="build it again with `make wheel`; if the findings stay, the tool has a defect",
        )


def content_problems(build: Build, wheel: Path) -> list[str]:
    """What is wrong with the file itself."""
    if wheel.name != build.file_name:
        return [f"file name: expected {build.file_name}"]
    try:
        with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(build.upstream_wheel) as upstream:
            return list(_Check(build, ours, upstream).problems())
    except (OSError, zipfile.BadZipFile) as error:
        return [f"not readable as a zip file: {error}"]


class _Check:
    """The checks of one wheel; each yields its findings."""

    def __init__(self, build: Build, ours: zipfile.ZipFile, upstream: zipfile.ZipFile) -> None:
        self.build, self.ours, self.upstream = build, ours, upstream
        self.info, self.upstream_info = f"{build.info}/", f"{build.upstream_info}/"
        self.names = set(ours.namelist())
        self.upstream_names = set(upstream.namelist())
        self.version_module = f"{build.project.package}/_version.py"

    def problems(self) -> Iterator[str]:
        for check in (
            self.members,
            self.record,
            self.sources,
            self.core_metadata,
            self.tags,
            self.version,
            self.provenance,
            self.notice,
            self.bill_of_materials,
        ):
            try:
                yield from check()
            except Exception as error:  # a member is missing, or so broken that the check could not end
                causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
                yield from (f"{check.__name__}: {type(cause).__name__}: {cause}" for cause in causes)

    def members(self) -> Iterator[str]:
        """The wheel has upstream's members without the deleted ones, the new ones, and no other; modes are right."""
        sources = self.build.sources
        expected = {self._our_name(name) for name in self.upstream_names - sources.deleted}
        expected |= {name for name in sources.changed if name.startswith(f"{self.build.project.package}/")}
        expected |= {
            provenance.path(self.build.project),
            f"{self.info}licenses/{provenance.NOTICE}",
            f"{self.info}sboms/{sbom.FILE_NAME}",
        }
        if len(self.names) != len(self.ours.namelist()):
            yield "a member is there twice"
        yield from (f"{name}: missing" for name in sorted(expected - self.names))
        yield from (f"{name}: not expected" for name in sorted(self.names - expected))
        modes = {name: stat.S_IFREG | (0o755 if file.executable else 0o644) for name, file in sources.changed.items()}
        modes |= {self._our_name(info.filename): info.external_attr >> 16 for info in self.upstream.infolist()}
        for info in self.ours.infolist():
            found, mode = info.external_attr >> 16, modes.get(info.filename, stat.S_IFREG | 0o644)
            if found != mode:
                yield f"{info.filename}: has the mode {found:o}, expected {mode:o}"

    def record(self) -> Iterator[str]:
        """RECORD lists every member but itself with its digest and size; what nobody changed is upstream's."""
        record_name = f"{self.info}RECORD"
        record = metadata.read_record(self.ours.read(record_name))
        upstream_record = metadata.read_record(self.upstream.read(f"{self.upstream_info}RECORD"))
        rewritten = {f"{self.info}METADATA", f"{self.info}WHEEL", record_name, self.version_module}
        rewritten |= self.build.sources.changed.keys()
        upstream_names = {self._our_name(name): name for name in self.upstream_names}
        yield from (f"RECORD: lists {name}, which is not there" for name in sorted(record.keys() - self.names))
        for name in sorted(self.names):
            if name == record_name:
                if record.get(name) != ("", ""):
                    yield "RECORD: must list itself without digest and size"
                continue
            try:
                digest, size = self._digest(name)
            except (zipfile.BadZipFile, zlib.error) as error:
                yield f"{name}: damaged: {error}"
                continue
            if name not in record:
                yield f"RECORD: does not list {name}"
            elif record[name] != (digest, size):
                yield f"{name}: is not what RECORD says"
            if name in upstream_names and name not in rewritten:
                upstream_name = upstream_names[name]
                same = self.ours.getinfo(name).CRC == self.upstream.getinfo(upstream_name).CRC
                if not same or upstream_record[upstream_name] != (digest, size):
                    yield f"{name}: is not upstream's file, and no patch changes it"

    def sources(self) -> Iterator[str]:
        """Every changed file has the content of the sources."""
        for name, file in sorted(self.build.sources.changed.items()):
            if name in self.names and self.ours.read(name) != file.data:
                yield f"{name}: is not what patches and overlay make it"

    def core_metadata(self) -> Iterator[str]:
        """METADATA is valid, names this version, and differs from upstream's in nothing but what it must."""
        build, pins = self.build, self.build.pins
        ours = Metadata.from_email(self.ours.read(f"{self.info}METADATA"), validate=True)
        upstream = Metadata.from_email(self.upstream.read(f"{self.upstream_info}METADATA"), validate=True)
        extras = metadata.EXTRAS.get(build.project.name, {})
        requirements = set()
        for requirement in upstream.requires_dist or []:
            name = canonicalize_name(requirement.name)
            pinned = name in pins.projects and name != build.project.name
            requirements.add(_exact(requirement, pins.projects[name]) if pinned else str(requirement))
        for extra, brought in extras.items():
            requirements.add(_exact(Requirement(f'{brought}; extra == "{extra}"'), pins.projects[brought]))
        licences = [*(upstream.license_files or []), *([provenance.NOTICE] if upstream.license_files else [])]
        for what, found, expected in (
            ("Name", ours.name, upstream.name),
            ("Version", str(ours.version), build.project.local_version),
            ("Requires-Dist", {str(one) for one in ours.requires_dist or []}, requirements),
            ("Provides-Extra", set(ours.provides_extra or []), {*(upstream.provides_extra or []), *extras}),
            ("Requires-Python", ours.requires_python, upstream.requires_python),
            ("License-Expression", ours.license_expression, upstream.license_expression),
            ("License-File", ours.license_files or [], licences),
            ("Description", ours.description, upstream.description),
        ):
            if found != expected:
                yield f"METADATA: {what} is {_short(found)}, expected {_short(expected)}"

    def tags(self) -> Iterator[str]:
        """WHEEL has the tags of the file name."""
        found = set(message_from_bytes(self.ours.read(f"{self.info}WHEEL")).get_all("Tag", []))
        expected = {str(tag) for tag in parse_wheel_filename(self.build.file_name)[3]}
        if found != expected:
            yield f"WHEEL: Tag is {_short(found)}, expected {_short(expected)}"

    def version(self) -> Iterator[str]:
        """`_version.py` gives the version of METADATA and upstream's commit."""
        if self.version_module not in self.upstream_names:
            return
        expected = _assignments(self.upstream.read(self.version_module))
        version = self.build.project.local_version
        expected |= dict.fromkeys(("version", "__version__"), version)
        expected |= dict.fromkeys(("version_tuple", "__version_tuple__"), metadata.version_tuple(version))
        found = _assignments(self.ours.read(self.version_module))
        for name, value in expected.items():
            if found.get(name) != value:
                yield f"{self.version_module}: {name} is {found.get(name)!r}, expected {value!r}"

    def provenance(self) -> Iterator[str]:
        """The provenance is that of this repository."""
        name = provenance.path(self.build.project)
        found = json.loads(self.ours.read(name))
        for patch in self.build.sources.patches:
            if hashlib.sha256(patch.text).hexdigest() != patch.sha256:
                yield f"{patch.name}: its recorded sha256 is not that of its text"
        for key, value in provenance.document(self.build).items():
            if found.get(key) != value:
                yield f"{name}: {key} is {_short(found.get(key))}, expected {_short(value)}"

    def notice(self) -> Iterator[str]:
        """Licence files are there, and the notice of changes names every changed file and its patch."""
        name = f"{self.info}licenses/{provenance.NOTICE}"
        lines = self.ours.read(name).decode().splitlines()
        for path in sorted(self.build.sources.changed.keys() | self.build.sources.deleted):
            by = [patch.name for patch in self.build.sources.patches if path in provenance.touched(patch)]
            by += ["overlay"] if path in self.build.sources.overlay else []
            line = next((line for line in lines if line.startswith(f"  {path}  (")), "")
            if path.startswith(f"{self.build.project.package}/") and not (line and all(one in line for one in by)):
                yield f"{name}: does not say that {', '.join(by) or 'something'} changes {path}"
        core = Metadata.from_email(self.ours.read(f"{self.info}METADATA"), validate=False)
        for licence in core.license_files or []:
            if not self.ours.read(f"{self.info}licenses/{licence}").strip():
                yield f"{self.info}licenses/{licence}: is empty"

    def bill_of_materials(self) -> Iterator[str]:
        """The SBOM names this build, its ancestor and the patches."""
        name = f"{self.info}sboms/{sbom.FILE_NAME}"
        project = self.build.project
        component = json.loads(self.ours.read(name))["metadata"]["component"]
        ancestor = component["pedigree"]["ancestors"][0]
        patches = {
            (issue["name"], issue["description"])
            for patch in component["pedigree"].get("patches", [])
            for issue in patch["resolves"]
        }
        for what, found, expected in (
            ("version", component["version"], project.local_version),
            ("ancestor", ancestor["version"], project.version),
            ("hash of the ancestor", ancestor["hashes"][0]["content"], project.wheels[self.build.platform]),
            ("patches", patches, {(patch.name, patch.subject) for patch in self.build.sources.patches}),
        ):
            if found != expected:
                yield f"{name}: {what} is {_short(found)}, expected {_short(expected)}"

    def _our_name(self, name: str) -> str:
        return self.info + name.removeprefix(self.upstream_info) if name.startswith(self.upstream_info) else name

    def _digest(self, name: str) -> tuple[str, str]:
        """Digest and size of a member, as RECORD writes them; reading it checks its CRC as well."""
        digest, size = hashlib.sha256(), 0
        with self.ours.open(name) as file:
            while piece := file.read(_CHUNK):
                digest.update(piece)
                size += len(piece)
        return metadata.record_digest(digest.digest()), str(size)


def linter_problems(build: Build, wheel: Path) -> list[str]:
    """What the linters of the packaging world find; upstream's own findings are not ours to mend."""
    problems = schema_problems(wheel, f"{build.info}/sboms/{sbom.FILE_NAME}")
    status, output = _run("twine", "--no-color", "check", "--strict", str(wheel))
    if status:
        problems.append(f"twine: {' '.join(output)}")
    new = contents_findings(wheel) - contents_findings(build.upstream_wheel)
    return [*problems, *(f"check-wheel-contents: {line}" for line in sorted(new))]


def contents_findings(wheel: Path) -> set[str]:
    """What check-wheel-contents says of a wheel, as lines without the file name.

    Raises:
        VerifyError: it could not work at all.
    """
    # W002 (equal files) is left out: vLLM has many `__init__.py` with nothing but the licence line, and so have we.
    status, output = _run("check_wheel_contents", "--no-config", "--ignore", "W002", str(wheel))
    if status not in (0, 1):
        raise VerifyError(f"check-wheel-contents failed: {' '.join(output)}", cure="see what it says")
    return {line.removeprefix(f"{wheel}: ") for line in output} - {"OK"}


def schema_problems(wheel: Path, name: str) -> list[str]:
    """Where the SBOM departs from CycloneDX's schema."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    with zipfile.ZipFile(wheel) as archive:
        if name not in archive.namelist():
            return []  # reported already
        errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(archive.read(name).decode(), all_errors=True)
    return [f"{name}: {error}" for error in errors or []]


def _run(module: str, *arguments: str) -> tuple[int, list[str]]:
    result = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    return result.returncode, (result.stdout + result.stderr).splitlines()


def _exact(requirement: Requirement, project: Project) -> str:
    marker = f"; {requirement.marker}" if requirement.marker else ""
    return f"{requirement.name}=={project.local_version}{marker}"


def _assignments(data: bytes) -> dict[str, Any]:
    """The names that a module assigns literals to."""
    statements = [node for node in ast.parse(data).body if isinstance(node, ast.Assign)]
    return {
        target.id: ast.literal_eval(node.value)
        for node in statements
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _short(value: object) -> str:
    text = str(sorted(value) if isinstance(value, set) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."
