"""Assembly of a wheel from upstream's and the sources."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import metadata, wheel
from scripts.errors import StorageError, WheelError
from scripts.sources import Build, SourceFile, Sources, blob_id
from tests.wheel.synthetic import (
    DATE_TIME,
    PACKAGE,
    PATCH,
    TAGS,
    UpstreamWheel,
    patch_info,
    plugin_sources,
    plugin_wheel,
    small_build,
    small_pins,
    small_sources,
)

INFO = "vllm-0.33.0+sm120.1.dist-info"
ROOT = Path(__file__).resolve().parents[2]


def assemble(build: Build, folder: Path) -> wheel.BuiltWheel:
    return wheel.assemble(build.pins, build.project, build.platform, build.upstream_wheel, build.sources, folder)


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


def test_members_and_their_content(finished: Path) -> None:
    assert finished.name == f"vllm-0.33.0+sm120.1-{TAGS}.whl"
    members = contents(finished)
    assert list(members) == [
        "vllm/_C.abi3.so",
        "vllm/__init__.py",
        "vllm/_version.py",
        "vllm/envs.py",
        "vllm/kernel.cu",
        "vllm/numa_wrapper.sh",
        "vllm/vllm_flash_attn/cute.py",
        "vllm/sm120/__init__.py",
        "vllm/sm120/provenance.json",
        "vllm/sm120/run.sh",
        f"{INFO}/licenses/LICENSE",
        f"{INFO}/METADATA",
        f"{INFO}/WHEEL",
        f"{INFO}/licenses/MODIFICATIONS.txt",
        f"{INFO}/sboms/vllm-sm120.cdx.json",
        f"{INFO}/RECORD",
    ]
    for name in ("vllm/_C.abi3.so", "vllm/__init__.py", "vllm/kernel.cu", "vllm/vllm_flash_attn/cute.py"):
        assert members[name] == PACKAGE[name]
    assert members["vllm/envs.py"] == b"A = 1\nB = 20\nC = 3\n"
    assert members["vllm/sm120/run.sh"] == b"#!/bin/sh\nexit\n"
    assert b"version = '0.33.0+sm120.1'" in members["vllm/_version.py"]
    assert b"\nVersion: 0.33.0+sm120.1\n" in members[f"{INFO}/METADATA"]
    assert b"\nTag: cp38-abi3-manylinux_2_28_x86_64\n" in members[f"{INFO}/WHEEL"]


def test_unchanged_members_are_copied_raw(finished: Path, upstream_wheel: Path) -> None:
    with zipfile.ZipFile(finished) as ours, zipfile.ZipFile(upstream_wheel) as theirs:
        for name in ("vllm/_C.abi3.so", "vllm/__init__.py", "vllm/numa_wrapper.sh"):
            our, their = ours.getinfo(name), theirs.getinfo(name)
            assert (our.compress_type, our.compress_size) == (zipfile.ZIP_DEFLATED, their.compress_size)
            assert (our.date_time, our.external_attr) == (their.date_time, their.external_attr)
        written = ours.getinfo("vllm/envs.py")
        assert (written.compress_type, written.date_time) == (zipfile.ZIP_STORED, DATE_TIME)


def test_modes(finished: Path) -> None:
    with zipfile.ZipFile(finished) as archive:
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    executable = {name for name, mode in modes.items() if mode & 0o111}
    # Not envs.py: the wheel of upstream has it without the execute bit of the tree.
    assert executable == {"vllm/_C.abi3.so", "vllm/numa_wrapper.sh", "vllm/sm120/run.sh"}
    assert all(stat.S_ISREG(mode) for mode in modes.values())


def test_record_is_complete_and_right(finished: Path) -> None:
    members = contents(finished)
    record = metadata.read_record(members.pop(f"{INFO}/RECORD"))
    assert record.pop(f"{INFO}/RECORD") == ("", "")
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        assert record.pop(name) == (f"sha256={digest}", str(len(data)))
    assert not record


def test_returned_hash_is_that_of_the_file(build: Build, tmp_path: Path) -> None:
    built = assemble(build, tmp_path / "dist")
    assert built.sha256 == hashlib.sha256(built.path.read_bytes()).hexdigest()
    assert list((tmp_path / "dist").iterdir()) == [built.path]


def test_same_bytes_in_another_process(finished: Path, build: Build, tmp_path: Path) -> None:
    code = """
import sys, tempfile
from pathlib import Path
from scripts import wheel
from tests.wheel.synthetic import small_build
b = small_build(Path(sys.argv[1]))
print(wheel.assemble(b.pins, b.project, b.platform, b.upstream_wheel, b.sources, Path(sys.argv[2])).sha256)
"""
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LC_ALL": "C", "SOURCE_DATE_EPOCH": "0"}
    command = [sys.executable, "-c", code, str(build.upstream_wheel), str(tmp_path / "again")]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True, umask=0o077)
    assert result.stdout.strip() == hashlib.sha256(finished.read_bytes()).hexdigest()


def test_plugin_wheel(tmp_path: Path) -> None:
    pins = small_pins()
    base = plugin_wheel().write(tmp_path)
    build = Build(pins, pins.project("vllm-gguf-plugin"), "x86_64", base, plugin_sources())
    built = assemble(build, tmp_path / "dist")
    assert built.path.name == f"vllm_gguf_plugin-0.0.5+sm120.1-{TAGS}.whl"
    members = contents(built.path)
    assert json.loads(members["vllm_gguf_plugin/sm120/provenance.json"])["version"] == "0.0.5+sm120.1"
    info = "vllm_gguf_plugin-0.0.5+sm120.1.dist-info"
    assert b"\nRequires-Dist: vllm==0.33.0+sm120.1\n" in members[f"{info}/METADATA"]
    assert "vllm_gguf_plugin/_version.py" not in members


def test_a_source_tree_without_version_module_will_do(build: Build, tmp_path: Path) -> None:
    """A git clone has none."""
    upstream = {name: blob for name, blob in build.sources.upstream.items() if name != "vllm/_version.py"}
    without = replace(build, sources=replace(build.sources, upstream=upstream))
    assert assemble(without, tmp_path / "1").sha256 == assemble(build, tmp_path / "2").sha256


def test_changes_beside_the_package_that_no_wheel_has(build: Build, tmp_path: Path) -> None:
    changed = {**build.sources.changed, "tests/test_envs.py": SourceFile(b"", False)}
    built = assemble(replace(build, sources=replace(build.sources, changed=changed)), tmp_path / "dist")
    assert "tests/test_envs.py" not in contents(built.path)


# Provenance, notice and bill of materials


def test_provenance(finished: Path, build: Build) -> None:
    document = json.loads(contents(finished)["vllm/sm120/provenance.json"])
    project = build.project
    assert document == {
        "schema": 1,
        "name": "vllm",
        "version": "0.33.0+sm120.1",
        "platform": "x86_64",
        "release": {"label": "sm120", "number": 1},
        "upstream": {
            "version": "0.33.0",
            "repository": "https://github.com/vllm-project/vllm",
            "tag": "v0.33.0",
            "commit": "4ba787ec9",
            "sdist": {"sha256": project.sdist},
            "wheel": {"file": f"vllm-0.33.0-{TAGS}.whl", "sha256": project.wheels["x86_64"]},
        },
        "tree": "5" * 40,
        "patches": [
            {
                "name": "raise-b.patch",
                "sha256": hashlib.sha256(PATCH).hexdigest(),
                "subject": "Raise B, drop old",
                "upstream_status": "Submitted",
                "upstream_link": "https://github.com/vllm-project/vllm/pull/1",
                "remove_when": "upstream raises B",
            }
        ],
        "overlay": [
            {"path": "vllm/sm120/__init__.py", "sha256": hashlib.sha256(b"").hexdigest()},
            {"path": "vllm/sm120/run.sh", "sha256": hashlib.sha256(b"#!/bin/sh\nexit\n").hexdigest()},
        ],
    }


def test_patches_keep_the_order_of_the_series(build: Build, tmp_path: Path) -> None:
    patches = tuple(patch_info(name=name) for name in ("z.patch", "a.patch", "m.patch"))
    built = assemble(replace(build, sources=replace(build.sources, patches=patches)), tmp_path)
    document = json.loads(contents(built.path)["vllm/sm120/provenance.json"])
    assert [patch["name"] for patch in document["patches"]] == ["z.patch", "a.patch", "m.patch"]


def test_files_are_listed_in_the_order_of_their_names(build: Build, tmp_path: Path) -> None:
    overlay = {f"vllm/sm120/{letter}.py": SourceFile(b"", False) for letter in "abcdefghij"}
    sources = replace(build.sources, changed=overlay, overlay=frozenset(overlay), deleted=frozenset())
    members = contents(assemble(replace(build, sources=sources), tmp_path).path)
    document = json.loads(members["vllm/sm120/provenance.json"])
    assert [file["path"] for file in document["overlay"]] == list(overlay)
    notice = members[f"{INFO}/licenses/MODIFICATIONS.txt"].decode()
    assert [line.split()[0] for line in notice.splitlines() if line.endswith("(overlay)")] == list(overlay)


def test_notice_names_each_changed_file_and_its_cause(finished: Path) -> None:
    notice = contents(finished)[f"{INFO}/licenses/MODIFICATIONS.txt"].decode()
    assert notice.startswith("vllm 0.33.0+sm120.1 is a modified build of vllm 0.33.0\n")
    sections = notice.split("\n\n")
    assert "Modified:\n  vllm/envs.py  (raise-b.patch)" in sections
    assert "Added:\n  vllm/sm120/__init__.py  (overlay)\n  vllm/sm120/run.sh  (overlay)" in sections
    assert "Removed:\n  vllm/old.py  (raise-b.patch)" in sections


def bill(path: Path) -> Any:
    return json.loads(contents(path)[f"{INFO}/sboms/vllm-sm120.cdx.json"])


def test_bill_of_materials(finished: Path, build: Build) -> None:
    document = bill(finished)
    component = document["metadata"]["component"]
    assert document["specVersion"] == "1.6"
    assert document["metadata"]["timestamp"] == "2026-11-01T09:43:12+00:00"
    assert component["purl"] == "pkg:pypi/vllm@0.33.0%2Bsm120.1"
    (ancestor,) = component["pedigree"]["ancestors"]
    assert ancestor["purl"].startswith("pkg:pypi/vllm@0.33.0?")
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": build.project.wheels["x86_64"]}]
    (patch,) = component["pedigree"]["patches"]
    assert base64.b64decode(patch["diff"]["text"]["content"]) == PATCH
    assert patch["type"] == "unofficial"
    assert patch["resolves"][0]["name"] == "raise-b.patch"


@pytest.mark.parametrize(
    ("link", "source"),
    [
        ("https://example.org/1 (open, by others)", {"url": "https://example.org/1"}),
        ("", None),
        ("none: upstream has no such GPU", None),
    ],
)
def test_link_of_a_patch_in_the_bill(link: str, source: object, build: Build, tmp_path: Path) -> None:
    patch = replace(patch_info(), upstream_link=link, upstream_status="Backport")
    built = assemble(replace(build, sources=replace(build.sources, patches=(patch,))), tmp_path)
    (entry,) = bill(built.path)["metadata"]["component"]["pedigree"]["patches"]
    assert entry["resolves"][0].get("source") == source
    assert entry["type"] == "backport"


def test_serial_number_is_one_for_each_content(build: Build, finished: Path, tmp_path: Path) -> None:
    other_patch = patch_info(PATCH.replace(b"caf", b"Caf"))
    others = (
        replace(build, sources=replace(build.sources, patches=(other_patch,))),
        replace(build, sources=replace(build.sources, tree="7" * 40)),
        small_build(build.upstream_wheel, pins=replace(build.pins, label="other")),
    )
    serials = {bill(finished)["serialNumber"]}
    for number, other in enumerate(others):
        serials.add(bill(assemble(other, tmp_path / str(number)).path)["serialNumber"])
    assert len(serials) == 1 + len(others)


# Refusals


def refused(build: Build, folder: Path) -> WheelError:
    with pytest.raises(WheelError) as raised:
        assemble(build, folder)
    assert raised.value.cure
    assert not folder.exists() or not list(folder.iterdir())
    return raised.value


def test_refuses_a_wheel_that_differs_from_the_tree(build: Build, tmp_path: Path) -> None:
    upstream = {**build.sources.upstream, "vllm/envs.py": blob_id(b"A"), "vllm/numa_wrapper.sh": blob_id(b"")}
    error = refused(replace(build, sources=replace(build.sources, upstream=upstream)), tmp_path / "dist")
    assert "shared with the source tree 2 differ: vllm/envs.py, vllm/numa_wrapper.sh" in str(error)


def test_refuses_a_tree_that_shares_nothing(build: Build, tmp_path: Path) -> None:
    error = refused(replace(build, sources=replace(small_sources(), upstream={})), tmp_path / "dist")
    assert "of 0 files shared" in str(error)


def with_file(name: str, *, overlay: bool = False) -> Sources:
    sources = small_sources()
    return replace(
        sources,
        changed={**sources.changed, name: SourceFile(b"x", False)},
        overlay=sources.overlay | {name} if overlay else sources.overlay,
    )


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (with_file("vllm/vllm_flash_attn/cute.py"), "cute.py: is in upstream's wheel only"),
        (with_file("vllm/vllm_flash_attn/cute.py", overlay=True), "cute.py: is in the overlay and in upstream too"),
        (with_file("vllm/__init__.py", overlay=True), "__init__.py: is in the overlay and in upstream too"),
        (with_file("vllm/kernel.cu"), "kernel.cu: belongs to the compiled code"),
        (with_file("csrc/kernel.cu"), "csrc/kernel.cu: belongs to the compiled code"),
        (with_file("setup.py"), "setup.py: belongs to the compiled code"),
        (with_file("vllm_other/a.py"), "vllm_other/a.py: belongs to the compiled code"),
        (with_file("vllm/_version.py"), "_version.py: is written by the build"),
        (with_file("vllm/sm120/provenance.json", overlay=True), "provenance.json: is written by the build"),
        (replace(small_sources(), patches=(patch_info(scope="native"),)), "raise-b.patch: its scope is native"),
        (replace(small_sources(), deleted=frozenset({"vllm/_C.abi3.so"})), "_C.abi3.so: belongs to the compiled code"),
    ],
)
def test_refuses_what_a_wheel_cannot_carry(sources: Sources, message: str, build: Build, tmp_path: Path) -> None:
    assert message in str(refused(replace(build, sources=sources), tmp_path / "dist"))


def test_names_every_such_change(build: Build, tmp_path: Path) -> None:
    sources = with_file("setup.py")
    sources = replace(sources, changed={**sources.changed, "csrc/a.cu": SourceFile(b"", False)})
    message = str(refused(replace(build, sources=sources), tmp_path / "dist"))
    assert "setup.py" in message
    assert "csrc/a.cu" in message


def test_refuses_a_change_to_a_file_that_upstream_does_not_package(build: Build, tmp_path: Path) -> None:
    sources = with_file("vllm/unpackaged.txt")
    sources = replace(sources, upstream={**sources.upstream, "vllm/unpackaged.txt": blob_id(b"")})
    message = str(refused(replace(build, sources=sources), tmp_path / "dist"))
    assert "unpackaged.txt: is not in upstream's wheel" in message


@pytest.mark.parametrize("member", ["vllm-0.33.0.data/scripts/vllm", "other/__init__.py"])
def test_refuses_a_base_with_other_folders(member: str, tmp_path: Path) -> None:
    base = UpstreamWheel(package={**PACKAGE, member: b""}).write(tmp_path)
    assert member in str(refused(small_build(base), tmp_path / "dist"))


def test_refuses_a_base_whose_record_is_incomplete(tmp_path: Path) -> None:
    base = UpstreamWheel(unrecorded=frozenset({"vllm/_C.abi3.so"})).write(tmp_path)
    assert "RECORD does not list vllm/_C.abi3.so" in str(refused(small_build(base), tmp_path / "dist"))


@pytest.mark.parametrize(
    "file_name",
    [
        f"vllm-0.32.0-{TAGS}.whl",
        f"other-0.33.0-{TAGS}.whl",
        "vllm-0.33.0-cp38-abi3-manylinux_2_28_aarch64.whl",
        "vllm-0.33.0.whl",
    ],
)
def test_refuses_another_wheel(file_name: str, tmp_path: Path) -> None:
    base = UpstreamWheel(file_name=file_name).write(tmp_path)
    with pytest.raises(WheelError) as raised:
        small_build(base)
    assert file_name in str(raised.value)
    assert raised.value.cure == "expected vllm-0.33.0-<tags>_x86_64.whl"


def test_an_earlier_wheel_survives_a_failed_build(build: Build, finished: Path) -> None:
    before = finished.read_bytes()
    broken = replace(build, sources=replace(build.sources, tree="8" * 40))
    data = bytearray(broken.upstream_wheel.read_bytes())
    with zipfile.ZipFile(broken.upstream_wheel) as archive:
        # RECORD, of all members, is read after the output was begun.
        offset = archive.getinfo("vllm-0.33.0.dist-info/RECORD").header_offset
    data[offset + 70] ^= 0xFF
    broken.upstream_wheel.write_bytes(data)
    with pytest.raises(WheelError, match="RECORD is damaged"):
        assemble(broken, finished.parent)
    assert finished.read_bytes() == before
    assert list(finished.parent.iterdir()) == [finished]


def test_a_full_disk_leaves_nothing(build: Build, tmp_path: Path) -> None:
    code = """
import resource, sys
from pathlib import Path
from scripts import errors, wheel
from tests.wheel.synthetic import small_build
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
b = small_build(Path(sys.argv[1]))
try:
    wheel.assemble(b.pins, b.project, b.platform, b.upstream_wheel, b.sources, Path(sys.argv[2]))
except errors.StorageError as error:
    print(error)
"""
    folder = tmp_path / "dist"
    command = [sys.executable, "-c", code, str(build.upstream_wheel), str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "cannot be written: File too large" in result.stdout
    assert not list(folder.iterdir())


def test_a_target_that_is_no_folder(build: Build, tmp_path: Path) -> None:
    (tmp_path / "dist").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        assemble(build, tmp_path / "dist")
