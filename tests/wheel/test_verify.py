"""Every fault planted into a finished wheel is found."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import verify, wheel
from scripts.errors import VerifyError
from scripts.sources import Build, SourceFile, Sources
from tests.wheel.synthetic import patch_info, plugin_sources, plugin_wheel, rewritten, small_pins, small_sources

INFO = "vllm-0.33.0+sm120.1.dist-info"
PROVENANCE = "vllm/sm120/provenance.json"
NOTICE = f"{INFO}/licenses/MODIFICATIONS.txt"
BILL = f"{INFO}/sboms/vllm-sm120.cdx.json"


def read(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name)


def run(build: Build, path: Path) -> None:
    verify.verify(build.pins, build.project, build.platform, path, build.sources, build.upstream_wheel)


@pytest.mark.slow
def test_a_right_wheel_passes_everything(finished: Path, build: Build) -> None:
    run(build, finished)


@pytest.mark.slow
def test_the_plugins_wheel_passes(tmp_path: Path) -> None:
    pins = small_pins()
    project = pins.project("vllm-gguf-plugin")
    base = plugin_wheel().write(tmp_path)
    build = Build(pins, project, "x86_64", base, plugin_sources())
    built = wheel.assemble(pins, project, "x86_64", base, build.sources, tmp_path / "dist")
    assert verify.content_problems(build, built.path) == []


def test_rewriting_alone_is_no_fault(finished: Path, build: Build) -> None:
    """The faults below are found for what they are, not for how they were planted."""
    rewritten(finished, {})
    assert verify.content_problems(build, finished) == []


def replaced(name: str, old: str, new: str) -> Callable[[Path], Mapping[str, bytes | None]]:
    def plant(path: Path) -> Mapping[str, bytes | None]:
        data = read(path, name)
        assert old.encode() in data
        return {name: data.replace(old.encode(), new.encode())}

    return plant


def member(name: str, data: bytes | None) -> Callable[[Path], Mapping[str, bytes | None]]:
    return lambda path: {name: data}


FAULTS = {
    "compiled code of another build": (member("vllm/_C.abi3.so", b"\x7fELF"), "_C.abi3.so: is not upstream's file"),
    "upstream file changed": (member("vllm/__init__.py", b""), "vllm/__init__.py: is not upstream's file"),
    "upstream's licence changed": (member(f"{INFO}/licenses/LICENSE", b"MIT"), "LICENSE: is not upstream's file"),
    "patch not applied": (member("vllm/envs.py", b"A = 1\n"), "vllm/envs.py: is not what patches and overlay make it"),
    "overlay file of another state": (member("vllm/sm120/run.sh", b""), "run.sh: is not what patches and overlay make"),
    "overlay file missing": (member("vllm/sm120/run.sh", None), "vllm/sm120/run.sh: missing"),
    "upstream file missing": (member("vllm/kernel.cu", None), "vllm/kernel.cu: missing"),
    "deleted file still there": (member("vllm/old.py", b"gone = True\n"), "vllm/old.py: not expected"),
    "stray file": (member("vllm/stray.py", b""), "vllm/stray.py: not expected"),
    "licence missing": (member(f"{INFO}/licenses/LICENSE", None), "LICENSE"),
    "licence empty": (member(f"{INFO}/licenses/LICENSE", b"\n"), "LICENSE: is empty"),
    "metadata missing": (member(f"{INFO}/METADATA", None), "METADATA: missing"),
    "version of upstream": (
        replaced(f"{INFO}/METADATA", "Version: 0.33.0+sm120.1", "Version: 0.33.0"),
        "Version is 0.33.0",
    ),
    "not metadata": (replaced(f"{INFO}/METADATA", "Requires-Python: >=3.11", "Requires-Python: 3"), "requires-python"),
    "other Python": (
        replaced(f"{INFO}/METADATA", "Requires-Python: >=3.11", "Requires-Python: >=3.10"),
        "Requires-Python is >=3.10, expected >=3.11",
    ),
    "other name": (replaced(f"{INFO}/METADATA", "Name: vllm\n", "Name: wllm\n"), "Name is wllm"),
    "extra missing": (
        replaced(f"{INFO}/METADATA", "Provides-Extra: gguf\n", ""),
        "Provides-Extra is ['extra-quant'], ",
    ),
    "plugin of upstream": (
        replaced(f"{INFO}/METADATA", '==0.0.5+sm120.1; extra == "extra-quant"', '>=0.0.2; extra == "extra-quant"'),
        "Requires-Dist is ",
    ),
    "requirement lost": (replaced(f"{INFO}/METADATA", "Requires-Dist: numpy\n", ""), "Requires-Dist is "),
    "notice not declared": (
        replaced(f"{INFO}/METADATA", "License-File: MODIFICATIONS.txt\n", ""),
        "License-File is ['LICENSE'], ",
    ),
    "licence expression": (replaced(f"{INFO}/METADATA", "Apache-2.0", "MIT"), "License-Expression is MIT"),
    "description lost": (replaced(f"{INFO}/METADATA", "# vLLM", "# other"), "Description is # other"),
    "tag of upstream": (
        replaced(f"{INFO}/WHEEL", "manylinux_2_28_x86_64", "linux_x86_64"),
        "WHEEL: Tag is ['cp38-abi3-linux_x86_64'], expected ['cp38-abi3-manylinux_2_28_x86_64']",
    ),
    "version module of upstream": (replaced("vllm/_version.py", "0.33.0+sm120.1", "0.33.0"), "version is '0.33.0'"),
    "version tuple": (replaced("vllm/_version.py", ", 'sm120.1')", ")"), "version_tuple is (0, 33, 0)"),
    "commit": (replaced("vllm/_version.py", "g4ba787ec9", "gaaaaaaaaa"), "commit_id is 'gaaaaaaaaa'"),
    "version module broken": (replaced("vllm/_version.py", "= version = ", "= version = ("), "version: SyntaxError"),
    "provenance of another patch": (replaced(PROVENANCE, "raise-b", "raise-c"), f"{PROVENANCE}: patches is "),
    "provenance of another pin": (replaced(PROVENANCE, "v0.33.0", "v0.32.0"), f"{PROVENANCE}: upstream is "),
    "provenance of another tree": (replaced(PROVENANCE, "5" * 40, "6" * 40), f"{PROVENANCE}: tree is "),
    "provenance missing": (member(PROVENANCE, None), f"{PROVENANCE}: missing"),
    "provenance not JSON": (member(PROVENANCE, b"{"), "provenance: JSONDecodeError"),
    "notice missing": (member(NOTICE, None), "MODIFICATIONS.txt: missing"),
    "notice without a file": (
        replaced(NOTICE, "  vllm/envs.py  (raise-b.patch)\n", ""),
        "raise-b.patch changes vllm/envs.py",
    ),
    "notice without a removal": (replaced(NOTICE, "  vllm/old.py  (", "  vllm/elder.py  ("), "changes vllm/old.py"),
    "notice with another cause": (
        replaced(NOTICE, "__init__.py  (overlay)", "__init__.py  ()"),
        "overlay changes vllm/sm120",
    ),
    "SBOM missing": (member(BILL, None), "vllm-sm120.cdx.json: missing"),
    "SBOM of another version": (
        replaced(BILL, '"version": "0.33.0+sm120.1"', '"version": "1"'),
        "version is 1, expected",
    ),
    "SBOM of another patch": (replaced(BILL, '"raise-b.patch"', '"raise-c.patch"'), "cdx.json: patches is"),
    "SBOM of another ancestor": (replaced(BILL, '"version": "0.33.0"', '"version": "1"'), "ancestor is 1, expected"),
    "SBOM of another upstream wheel": (
        replaced(BILL, small_pins().project("vllm").wheels["x86_64"], "0" * 64),
        "hash of the ancestor is 000",
    ),
    "SBOM without ancestor": (replaced(BILL, '"ancestors"', '"variants"'), "bill_of_materials: KeyError: 'ancestors'"),
}


@pytest.mark.parametrize(("plant", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_finds(plant: Callable[[Path], Mapping[str, bytes | None]], message: str, finished: Path, build: Build) -> None:
    rewritten(finished, plant(finished))
    problems = verify.content_problems(build, finished)
    assert any(message in problem for problem in problems), problems


def test_finds_a_flipped_bit(finished: Path, build: Build) -> None:
    for name in ("vllm/_C.abi3.so", "vllm/envs.py"):  # deflated and stored
        data = bytearray(finished.read_bytes())
        with zipfile.ZipFile(finished) as archive:
            info = archive.getinfo(name)
        data[info.header_offset + 30 + len(name) + info.compress_size // 2] ^= 4
        path = finished.with_name("flipped") / finished.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        problems = verify.content_problems(build, path)
        assert any(problem.startswith(f"{name}: damaged") for problem in problems), problems


def test_finds_a_member_that_comes_twice(finished: Path, build: Build) -> None:
    with zipfile.ZipFile(finished, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(archive.getinfo("vllm/envs.py"), archive.read("vllm/envs.py"))
    assert verify.content_problems(build, finished) == ["a member is there twice"]


def record_without(path: Path, pattern: str, replacement: str = "") -> None:
    name = f"{INFO}/RECORD"
    text, count = re.subn(pattern, replacement, read(path, name).decode(), flags=re.MULTILINE)
    assert count == 1
    rewritten(path, {name: text.encode()}, record=False)


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r"^vllm/envs\.py,.*\n", "", "RECORD: does not list vllm/envs.py"),
        (r"^(vllm/envs\.py,.*),19$", r"\1,20", "vllm/envs.py: is not what RECORD says"),
        (r"^(vllm/envs\.py,sha256=).{6}", r"\1AAAAAA", "vllm/envs.py: is not what RECORD says"),
        (r"^(vllm/envs)\.py(,.*)$", r"\1.py\2\n\1x.py\2", "RECORD: lists vllm/envsx.py, which is not there"),
        (r"^(vllm/envs\.py,.*)$", r"\1\n\1", "repeats a path"),
        (r"/RECORD,,$", "/RECORD,sha256=x,1", "RECORD: must list itself without digest"),
    ],
)
def test_finds_a_wrong_record(pattern: str, replacement: str, message: str, finished: Path, build: Build) -> None:
    record_without(finished, pattern, replacement)
    problems = verify.content_problems(build, finished)
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("vllm/numa_wrapper.sh", 0o644),
        ("vllm/sm120/run.sh", 0o644),
        ("vllm/envs.py", 0o755),
        ("vllm/__init__.py", 0o000),
    ],
)
def test_finds_a_wrong_mode(name: str, mode: int, finished: Path, build: Build) -> None:
    data = bytearray(finished.read_bytes())
    # The external attributes lie 8 bytes before the name in the member's entry of the directory.
    entry = data.rindex(name.encode())
    data[entry - 8 : entry - 4] = ((0o100000 | mode) << 16).to_bytes(4, "little")
    finished.write_bytes(data)
    problems = verify.content_problems(build, finished)
    expected = "100755" if name.endswith(".sh") else "100644"
    assert problems == [f"{name}: has the mode {0o100000 | mode:o}, expected {expected}"]


def other(sources: Sources, name: str, data: bytes) -> Sources:
    return replace(sources, changed={**sources.changed, name: SourceFile(data, False)})


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (other(small_sources(), "vllm/envs.py", b"A = 2\n"), "vllm/envs.py: is not what patches and overlay make it"),
        (other(small_sources(), "vllm/new.py", b""), "vllm/new.py: missing"),
        (replace(small_sources(), patches=()), f"{PROVENANCE}: patches is "),
        (replace(small_sources(), deleted=frozenset()), "vllm/old.py: missing"),
        (
            replace(small_sources(), patches=(replace(patch_info(), text=patch_info().text + b"\n"),)),
            "raise-b.patch: its recorded sha256 is not that of its text",
        ),
    ],
)
def test_finds_that_the_repository_moved_on(sources: Sources, message: str, finished: Path, build: Build) -> None:
    problems = verify.content_problems(replace(build, sources=sources), finished)
    assert any(message in problem for problem in problems), problems


def test_finds_the_wheel_of_another_upstream(finished: Path, build: Build) -> None:
    rewritten(build.upstream_wheel, {"vllm/_C.abi3.so": b"\x7fELF other"})
    problems = verify.content_problems(build, finished)
    assert problems == ["vllm/_C.abi3.so: is not upstream's file, and no patch changes it"]


def test_finds_that_it_is_no_zip_or_has_another_name(finished: Path, build: Build) -> None:
    other_name = finished.rename(finished.with_name(finished.name.replace("sm120.1", "sm120.2")))
    assert verify.content_problems(build, other_name) == [f"file name: expected {finished.name}"]
    finished.write_bytes(b"no zip")
    assert "not readable as a zip file" in verify.content_problems(build, finished)[0]


@pytest.mark.slow
def test_all_findings_are_in_the_error(finished: Path, build: Build) -> None:
    rewritten(finished, {"vllm/__init__.py": b"", "vllm/envs.py": b"", BILL: None})
    with pytest.raises(VerifyError) as raised:
        run(build, finished)
    for name in ("vllm/__init__.py", "vllm/envs.py", BILL):
        assert name in str(raised.value)
    assert str(finished) in str(raised.value)


# Linters


@pytest.mark.slow
def test_linters_report_what_upstream_does_not_have(finished: Path, build: Build) -> None:
    document = json.loads(read(finished, BILL))
    document["metadata"]["component"]["type"] = "engine"
    text = read(finished, f"{INFO}/METADATA").decode().replace("markdown", "x-rst")
    broken = text.replace("# vLLM\n", "# vLLM\n\n.. code-block::\n\n  x\n ===\ny `\n")
    rewritten(
        finished,
        {
            BILL: json.dumps(document).encode(),
            f"{INFO}/METADATA": broken.encode(),
            "vllm/__pycache__/envs.cpython-311.pyc": b"",
        },
    )
    problems = verify.linter_problems(build, finished)
    assert any(problem.startswith(f"{BILL}: ") and "engine" in problem for problem in problems)
    assert any(problem.startswith("twine: ") for problem in problems)
    assert any(problem.startswith("check-wheel-contents: W001: ") for problem in problems)


@pytest.mark.slow
def test_linters_leave_out_what_upstream_has_too(finished: Path, build: Build) -> None:
    stray = {"vllm/__pycache__/envs.cpython-311.pyc": b""}
    rewritten(build.upstream_wheel, stray)
    rewritten(finished, stray)
    assert verify.contents_findings(finished)
    assert verify.linter_problems(build, finished) == []


def test_a_missing_linter_is_said_with_its_cure(finished: Path, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify._TEST_MODULES, "no_such_module", "no-such-linter")
    with pytest.raises(VerifyError, match="needs no-such-linter") as raised:
        run(build, finished)
    assert raised.value.cure == "pip install --requirement tests/requirements.txt"
