"""The texts by which a wheel describes itself."""

from __future__ import annotations

import hashlib
from base64 import urlsafe_b64decode

import pytest
from packaging.metadata import Metadata
from packaging.tags import parse_tag

from scripts import metadata
from scripts.errors import WheelError
from tests.wheel.synthetic import METADATA, PLUGIN_METADATA, VERSION_MODULE, WHEEL, small_pins

PINS = small_pins()
VLLM = PINS.project("vllm")
PLUGIN = PINS.project("vllm-gguf-plugin")


def edited(text: str) -> str:
    return metadata.core_metadata(text.encode(), PINS, VLLM, "MODIFICATIONS.txt").decode()


def test_metadata_changes_nothing_but_what_it_must() -> None:
    expected = (
        METADATA.replace("Version: 0.33.0\nSummary", "Version: 0.33.0+sm120.1\nSummary")
        .replace("License-File: LICENSE\n", "License-File: LICENSE\nLicense-File: MODIFICATIONS.txt\n")
        .replace(
            'vllm-gguf-plugin>=0.0.2; extra == "extra-quant"\n',
            'vllm-gguf-plugin==0.0.5+sm120.1; extra == "extra-quant"\n'
            "Provides-Extra: gguf\n"
            'Requires-Dist: vllm-gguf-plugin==0.0.5+sm120.1; extra == "gguf"\n',
        )
    )
    assert edited(METADATA) == expected
    Metadata.from_email(expected, validate=True)


def test_the_plugin_requires_our_vllm_and_has_no_extra() -> None:
    text = metadata.core_metadata(PLUGIN_METADATA.encode(), PINS, PLUGIN, "MODIFICATIONS.txt").decode()
    assert "Requires-Dist: vllm==0.33.0+sm120.1\n" in text
    assert "\nVersion: 0.0.5+sm120.1\n" in text
    assert "Provides-Extra" not in text


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("vllm_gguf_plugin", "vllm_gguf_plugin==0.0.5+sm120.1"),
        (
            "VLLM.GGUF-Plugin[x]~=0.0.2 ; python_version > '3'",
            'VLLM.GGUF-Plugin[x]==0.0.5+sm120.1; python_version > "3"',
        ),
        ("vllm-gguf-plugin-tools>=1", "vllm-gguf-plugin-tools>=1"),
        ("vllm[audio]; extra == 'all'", "vllm[audio]; extra == 'all'"),  # a project's extra that names itself
    ],
)
def test_requirements_on_pinned_projects(requirement: str, expected: str) -> None:
    text = METADATA.replace("Requires-Dist: numpy", f"Requires-Dist: {requirement}")
    assert f"\nRequires-Dist: {expected}\n" in edited(text)


def test_metadata_without_description_dynamic_or_licence_files() -> None:
    lines = ("Metadata-Version: 2.1", "Name: vllm", "Version: 0.33.0", "")
    assert edited("\n".join(lines)).splitlines() == [
        "Metadata-Version: 2.1",
        "Name: vllm",
        "Version: 0.33.0+sm120.1",
        "Provides-Extra: gguf",
        'Requires-Dist: vllm-gguf-plugin==0.0.5+sm120.1; extra == "gguf"',
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (METADATA.replace("Version: 0.33.0\n", "Version: 0.33.1\n", 1), "expected one line 'Version: 0.33.0', found 0"),
        (METADATA.replace("\n", "\r\n"), "CR line ends"),
        (METADATA.replace("numpy", "numpy >=> 1"), "numpy >=> 1"),
        (METADATA.replace("extra-quant", "gguf"), "has an extra 'gguf' itself"),
    ],
)
def test_metadata_that_is_not_upstreams_is_refused(text: str, message: str) -> None:
    with pytest.raises(WheelError, match="METADATA: ") as raised:
        edited(text)
    assert message in str(raised.value)
    assert raised.value.cure


def test_wheel_gets_the_tags_of_the_file_name() -> None:
    tags = parse_tag("py2.py3-none-manylinux_2_28_x86_64")
    text = metadata.wheel_metadata((WHEEL + "Tag: cp39-abi3-linux_x86_64\n").encode(), tags).decode()
    tag_lines = "Tag: py2-none-manylinux_2_28_x86_64\nTag: py3-none-manylinux_2_28_x86_64\n"
    assert text == WHEEL.replace("Tag: cp38-abi3-linux_x86_64\n", tag_lines)
    with pytest.raises(WheelError, match="no Tag line"):
        metadata.wheel_metadata(b"Wheel-Version: 1.0\n", tags)


def test_version_module() -> None:
    text = metadata.version_module(VERSION_MODULE.encode(), "0.33.0+sm120.1").decode()
    assert text == VERSION_MODULE.replace("'0.33.0'", "'0.33.0+sm120.1'").replace("33, 0)", "33, 0, 'sm120.1')")
    with pytest.raises(WheelError, match=r"_version\.py: expected one line .*, found 0"):
        metadata.version_module(b"version = 1\n", "0.33.0+sm120.1")


@pytest.mark.parametrize(
    ("version", "expected"),
    [  # as setuptools-scm 10.3.4 gives them
        ("0.33.0", (0, 33, 0)),
        ("0.33.0+sm120.1", (0, 33, 0, "sm120.1")),
        ("0.33.0+cu130.sm120.2", (0, 33, 0, "cu130.sm120.2")),
        ("1!2.0rc1", ("1!", 2, 0, "rc1")),
        ("1.0.post2.dev3", (1, 0, "post2", "dev3")),
    ],
)
def test_version_tuple(version: str, expected: tuple[int | str, ...]) -> None:
    assert metadata.version_tuple(version) == expected


def test_record() -> None:
    data = b"\xff\xfe content"
    rows = [metadata.record_row('a,"b".py', data), metadata.record_row("empty", b""), ("RECORD", "", "")]
    text = metadata.write_record(rows)
    assert metadata.read_record(text) == {name: (digest, size) for name, digest, size in rows}
    assert text.endswith(b"\nRECORD,,\n")
    digest = rows[0][1].removeprefix("sha256=")
    assert "=" not in digest
    assert urlsafe_b64decode(digest + "=") == hashlib.sha256(data).digest()
    assert rows[0][2] == "10"


@pytest.mark.parametrize("text", [b"a.py,sha256=x\n", b"a.py,,\na.py,,\n"])
def test_malformed_record_is_refused(text: bytes) -> None:
    with pytest.raises(WheelError, match="RECORD: line"):
        metadata.read_record(text)
