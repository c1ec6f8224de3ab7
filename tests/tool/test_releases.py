"""A version stands for one content: releases.toml is the gate."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import releases
from scripts.errors import ReleaseError
from tests.tool.miniature import Checkout, sha256

NAME = "vllm-0.33.0+sm120.1-cp38-abi3-manylinux_2_28_x86_64.whl"


def test_first_build_is_recorded_and_the_second_compared(tmp_path: Path) -> None:
    path = tmp_path / "releases.toml"
    assert releases.settle(path, {NAME: 64 * "a"}) == [NAME]
    text = path.read_text()
    assert releases.settle(path, {NAME: 64 * "a"}) == []
    with pytest.raises(ReleaseError, match="content is not what") as refused:
        releases.settle(path, {NAME: 64 * "b", "other.whl": 64 * "c"})
    assert "make bump" in refused.value.cure
    assert path.read_text() == text


def test_a_recorded_line_never_changes(tmp_path: Path) -> None:
    path = tmp_path / "releases.toml"
    releases.settle(path, {NAME: 64 * "a"})
    before = path.read_text()
    releases.settle(path, {"other-1+sm120.2.whl": 64 * "b"})
    assert path.read_text().startswith(before)


@pytest.mark.parametrize("content", [b"not toml", b"\xff"])
def test_broken_record(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "releases.toml"
    path.write_bytes(content)
    with pytest.raises(ReleaseError, match=r"releases\.toml: not valid TOML"):
        releases.settle(path, {NAME: 64 * "a"})
    assert path.read_bytes() == content


def test_gate_of_the_build(checkout: Checkout) -> None:
    """Changed content under an old number is refused and changes nothing; a new number is accepted."""
    assert checkout.run("wheel", "--platform=x86_64").code == 0
    wheels = {path.name: sha256(path) for path in checkout.layout.dist.rglob("*.whl")}
    recorded = checkout.layout.releases.read_text()
    assert len(wheels) == 2
    assert all(f'"{name}" = "{digest}"' in recorded for name, digest in wheels.items())

    (checkout.root / "overlay" / "vllm" / "ours" / "backend.py").write_text("changed = True\n")
    outcome = checkout.run("wheel", "--platform=x86_64")
    assert outcome.code == ReleaseError.exit_code
    assert "vllm-0.33.0+sm120.1" in outcome.err
    assert "vllm_gguf_plugin" not in outcome.err.partition("error:")[2].partition("cure:")[0]
    assert {path.name: sha256(path) for path in checkout.layout.dist.rglob("*.whl")} == wheels
    assert checkout.layout.releases.read_text() == recorded

    assert checkout.run("bump").out == "release.number is now 2\n"
    assert checkout.run("wheel", "--platform=x86_64").code == 0
    names = sorted(path.name for path in checkout.layout.dist.rglob("*.whl"))
    assert [name.split("-")[1] for name in names] == ["0.33.0+sm120.2", "0.0.5+sm120.2"]
    assert checkout.layout.releases.read_text().startswith(recorded)
