"""upstream.toml: each kind of mistake is named, and what the tool writes leaves the rest as it is."""

from __future__ import annotations

import pytest

from scripts import pins
from scripts.errors import PinError
from scripts.pins import FORBIDDEN_IN_LABEL
from tests.tool.miniature import Checkout

WHEEL = "[vllm.wheel]\n"


def test_valid(checkout: Checkout) -> None:
    loaded = pins.load(checkout.layout.pins)
    project = loaded.project("vllm-gguf-plugin")
    assert (loaded.label, loaded.number, list(loaded.projects)) == ("sm120", 1, ["vllm", "vllm-gguf-plugin"])
    assert (project.package, project.local_version, project.commit) == ("vllm_gguf_plugin", "0.0.5+sm120.1", "")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('label = "sm120"', 'label = "sm 120"', "release.label"),
        ('label = "sm120"', 'label = "SM120"', "release.label"),
        ('label = "sm120"', 'label = ""', "release.label"),
        ("number = 1", "number = 0", "release.number"),
        ("number = 1", "number = true", "release.number"),
        ("number = 1", 'number = "1"', "release.number"),
        ("number = 1", "", "release.number is missing"),
        ("[release]", "[realease]", "[release] is missing"),
        ('version = "0.33.0"', 'version = "0.33-zero"', "vllm.version"),
        ('version = "0.33.0"', 'version = "0.33.0 "', "vllm.version"),
        ('version = "0.33.0"', 'version = "0.33.1"', "vllm.tag 'v0.33.0' does not name version 0.33.1"),
        ('tag = "v0.33.0"', "", "vllm.tag is missing"),
        ('tag = "v0.33.0"', 'tag = "v0.33.0"\ncommit = "4BA787EC9"', "vllm.commit"),
        ('tag = "v0.33.0"', 'tag = "v0.33.0"\ncommit = "4ba78"', "vllm.commit"),
        ('tag = "v0.33.0"', 'tag = "v0.33.0"\ncomit = "4ba787ec9"', "unknown key in [vllm]: comit"),
        ('sdist = "', 'sdist = "ABC', "vllm.sdist"),
        ('sdist = "', 'sdist = "sha256:', "vllm.sdist"),
        ("sdist =", "sdst =", "vllm.sdist is missing"),
        ('x86_64 = "', 'x86_64 = "0', "vllm.wheel.x86_64"),
        ("aarch64 =", "arm64 =", "vllm.wheel.aarch64 is missing"),
        (WHEEL, f"{WHEEL}ppc64le = 'no'\n", "unknown key in [vllm.wheel]: ppc64le"),
        (WHEEL, "[vllm.wheels]\n", "vllm.wheel is missing"),
        ("[vllm]", "[vLLM]", "[vLLM]"),
        ("[vllm]", "[vllm", "not valid TOML"),
        ("[vllm]\n", "[vllm]\nversion = '1'\n", "not valid TOML"),
    ],
)
def test_mistake_is_named(checkout: Checkout, old: str, new: str, named: str) -> None:
    path = checkout.layout.pins
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(PinError) as refused:
        pins.load(path)
    assert str(path) in str(refused.value)
    assert named in str(refused.value)
    assert refused.value.cure


@pytest.mark.parametrize("word", FORBIDDEN_IN_LABEL)
def test_label_that_vllm_would_take_for_a_platform(checkout: Checkout, word: str) -> None:
    path = checkout.layout.pins
    path.write_text(path.read_text().replace("sm120", f"sm{word}"))
    with pytest.raises(PinError, match=word):
        pins.load(path)


@pytest.mark.parametrize("content", [None, b"\xff", b"", b"[release]\nlabel = 'x'\nnumber = 1\n"])
def test_no_pins(checkout: Checkout, content: bytes | None) -> None:
    checkout.layout.pins.unlink()
    if content is not None:
        checkout.layout.pins.write_bytes(content)
    with pytest.raises(PinError, match=r"upstream\.toml"):
        pins.load(checkout.layout.pins)


def test_unknown_project(checkout: Checkout) -> None:
    with pytest.raises(PinError, match="'vlm'") as refused:
        pins.load(checkout.layout.pins).project("vlm")
    assert "vllm, vllm-gguf-plugin" in refused.value.cure


@pytest.mark.parametrize(
    ("version", "expected"), [("0.33.0", "0.33.0+sm120.2"), ("0.33.0+cu130", "0.33.0+cu130.sm120.2")]
)
def test_local_version(version: str, expected: str) -> None:
    assert pins.local_version(version, "sm120", 2) == expected


def test_writing_keeps_the_rest(checkout: Checkout) -> None:
    path = checkout.layout.pins
    text = path.read_text().replace('tag = "v0.33.0"\n', 'tag = "v0.33.0"\ncommit = "4ba787ec9" # stated\n')
    path.write_text(text)
    assert pins.bump(path) == 2
    assert path.read_text() == text.replace("number = 1", "number = 2")
    commit = "4ba787ec9" + 31 * "0"
    pins.record_commit(path, checkout.project, commit)
    assert path.read_text() == text.replace("number = 1", "number = 2").replace("4ba787ec9", commit)
    assert checkout.project.commit == commit


def test_bump_of_broken_pins(checkout: Checkout) -> None:
    checkout.layout.pins.write_text("release = 1\n")
    outcome = checkout.run("bump")
    assert outcome.code == PinError.exit_code
    assert checkout.layout.pins.read_text() == "release = 1\n"
