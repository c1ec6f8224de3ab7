"""A patched wheel: the finished tree's differences poured over upstream's wheel, everything else copied as it lies.

That is sound only where the tree that the patches were made for and the wheel have the same files, so every file
that they share is compared first.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_wheel_filename

from scripts import metadata, provenance, sbom
from scripts.archive import Archive, Writer
from scripts.errors import WheelError
from scripts.pins import Pins, Project
from scripts.sources import NOT_PACKAGED, Build, Sources, blob_id, is_native
from scripts.storage import replace, scratch, writable

_LISTED = 20


@dataclass(frozen=True)
class BuiltWheel:
    """A finished wheel and its hash."""

    path: Path
    sha256: str


def assemble(
    pins: Pins, project: Project, platform: str, upstream_wheel: Path, sources: Sources, target_folder: Path
) -> BuiltWheel:
    """Build the project's wheel for `platform` from upstream's, whose hash the caller has checked.

    The same input gives the same bytes: members keep upstream's order, new ones follow sorted, and the time of
    every member that is not copied is that of upstream's METADATA.

    Raises:
        WheelError: tree and wheel do not belong together, or the tree has changes that the wheel cannot carry.
        StorageError: the target folder cannot be written.
    """
    build = Build(pins, project, platform, upstream_wheel, sources)
    target = target_folder / build.file_name
    with Archive(upstream_wheel) as upstream:
        _check_base(build, upstream)
        _check_identity(build, upstream)
        packaged = packaged_changes(build, upstream.members.keys())
        content = {name: sources.changed[name].data for name in packaged - sources.deleted}
        content |= _generated(build, upstream, packaged)
        with scratch(target_folder, ".wheel-") as folder:
            finished = folder / target.name
            with writable(target), finished.open("wb") as file:
                sha256 = _pour(build, upstream, content, Writer(file))
            replace(finished, target)
    return BuiltWheel(target, sha256)


def packaged_changes(build: Build, upstream_members: Set[str]) -> frozenset[str]:
    """The changed and removed files that concern the wheel.

    Raises:
        WheelError: there is a change that a wheel with upstream's binaries cannot carry.
    """
    sources, package = build.sources, f"{build.project.package}/"
    generated = {f"{package}_version.py", provenance.path(build.project)}
    problems = [f"{patch.name}: its scope is {patch.scope}" for patch in sources.patches if patch.scope != "python"]
    packaged = set()
    for name in sorted(sources.changed.keys() | sources.deleted):
        in_tree, in_wheel = name in sources.upstream, name in upstream_members
        if name.startswith(NOT_PACKAGED):
            continue
        if is_native(name, build.project.package):
            problems.append(f"{name}: belongs to the compiled code, which comes from upstream's wheel as it is")
            continue
        packaged.add(name)
        if name in generated:
            problems.append(f"{name}: is written by the build")
        elif name in sources.overlay and (in_tree or in_wheel):
            problems.append(f"{name}: is in the overlay and in upstream too")
        elif in_wheel and not in_tree:
            problems.append(f"{name}: is in upstream's wheel only, so no patch can change it")
        elif in_tree and not in_wheel:
            problems.append(f"{name}: is not in upstream's wheel")
    if problems:
        raise WheelError(
            f"{build.project.name}: changes that a wheel with upstream's binaries cannot carry:\n  "
            + "\n  ".join(problems),
            cure="move the change into Python code of the package",
        )
    return frozenset(packaged)


def _check_base(build: Build, upstream: Archive) -> None:
    """Refuse a base that is more than one package folder and its dist-info."""
    folders = (f"{build.project.package}/", f"{build.upstream_info}/")
    strange = [name for name in upstream.members if not name.startswith(folders)]
    if strange:
        raise WheelError(
            f"{upstream.path}: has members outside {' and '.join(folders)}: {_listed(strange)}",
            cure="a .data folder would have to be renamed with the version, which this tool does not do",
        )


def _check_identity(build: Build, upstream: Archive) -> None:
    """Compare every file that tree and wheel share."""
    expected = build.sources.upstream
    shared = [name for name in upstream.members if name in expected]
    differing = [name for name in shared if blob_id(upstream.read(name)) != expected[name]]
    if differing or not shared:
        raise WheelError(
            f"{upstream.path}: of {len(shared)} files shared with the source tree {len(differing)} differ: "
            + _listed(differing),
            cure="tree and wheel must be of one release: see upstream.toml",
        )


def _generated(build: Build, upstream: Archive, packaged: frozenset[str]) -> dict[str, bytes]:
    """The members whose content follows from pins and sources, all but RECORD."""
    old, new = build.upstream_info, build.info
    bill = f"{new}/sboms/{sbom.FILE_NAME}"
    tags = parse_wheel_filename(build.file_name)[3]
    content = {
        f"{new}/METADATA": metadata.core_metadata(
            upstream.read(f"{old}/METADATA"), build.pins, build.project, provenance.NOTICE
        ),
        f"{new}/WHEEL": metadata.wheel_metadata(upstream.read(f"{old}/WHEEL"), tags),
        f"{new}/licenses/{provenance.NOTICE}": provenance.modifications(build, packaged, bill),
        bill: sbom.document(build, upstream.members[f"{old}/METADATA"].date_time),
        provenance.path(build.project): provenance.render(provenance.document(build)),
    }
    version_module = f"{build.project.package}/_version.py"
    if version_module in upstream.members:
        content[version_module] = metadata.version_module(upstream.read(version_module), build.project.local_version)
    return content


def _pour(build: Build, upstream: Archive, content: Mapping[str, bytes], writer: Writer) -> str:
    """Write every member, the package first and RECORD last, and return the hash of the file."""
    old_info, info = f"{build.upstream_info}/", f"{build.info}/"
    date_time = upstream.members[f"{old_info}METADATA"].date_time
    upstream_record = metadata.read_record(upstream.read(f"{old_info}RECORD"))
    # Our name of every member of upstream's wheel that stays.
    kept = {
        info + name.removeprefix(old_info) if name.startswith(old_info) else name: name
        for name in upstream.members
        if name != f"{old_info}RECORD" and name not in build.sources.deleted
    }
    rows = []
    for name in sorted([*kept, *sorted(content.keys() - kept.keys())], key=lambda name: name.startswith(info)):
        if name in content:
            writer.add(name, content[name], _mode(build, upstream, name, kept.get(name)), date_time)
            rows.append(metadata.record_row(name, content[name]))
        elif kept[name] in upstream_record:
            writer.copy(upstream, kept[name], name)
            rows.append((name, *upstream_record[kept[name]]))
        else:
            raise WheelError(f"{upstream.path}: RECORD does not list {kept[name]}", cure="fetch the wheel again")
    record = metadata.write_record([*rows, (f"{info}RECORD", "", "")])
    writer.add(f"{info}RECORD", record, _mode(build, upstream, f"{info}RECORD", f"{old_info}RECORD"), date_time)
    return writer.close()


def _mode(build: Build, upstream: Archive, name: str, old_name: str | None) -> int:
    """Upstream's mode where upstream has the file (its wheel drops execute bits that its tree has), else the tree's."""
    if old_name is not None:
        return stat.S_IMODE(upstream.members[old_name].external_attr >> 16)
    file = build.sources.changed.get(name)
    return 0o755 if file and file.executable else 0o644


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
