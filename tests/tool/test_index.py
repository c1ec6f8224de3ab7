"""What releases the package indexes have, and the pin that one of them makes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts import index
from scripts.errors import HashError, SourceError
from scripts.pipconfig import PipConfig
from tests.tool.index_server import Index, serve
from tests.tool.miniature import Checkout

TAGS = "cp38-abi3-manylinux_2_28"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that pip is configured with."""
    names = [
        "vllm-0.9.0.tar.gz",
        "vllm-0.9.0-cp311-cp311-manylinux1_x86_64.whl",
        "vllm-0.9.0-cp312-cp312-manylinux1_x86_64.whl",
        "vllm-0.33.0.tar.gz",
        f"vllm-0.33.0-{TAGS}_x86_64.whl",
        f"vllm-0.33.0-{TAGS}_aarch64.whl",
        "vllm-0.33.0-cp38-abi3-macosx_11_0_arm64.whl",
        "vllm-0.34.0rc1.tar.gz",
        f"vllm-0.34.0-{TAGS}_x86_64.whl",
    ]
    with serve(Index({name: name.encode() for name in names})) as server:
        monkeypatch.setattr(PipConfig, "load", lambda: PipConfig({"index-url": server.url}))
        yield server


def test_releases(served: Index) -> None:
    """In order; without a source distribution it is none, and of several wheels none is the wheel."""
    found = index.releases("vllm")
    assert [(str(one.version), sorted(one.wheels)) for one in found] == [
        ("0.9.0", []),
        ("0.33.0", ["aarch64", "x86_64"]),
        ("0.34.0rc1", []),
    ]
    newest = index.latest(found)
    assert newest
    assert str(newest.version) == "0.33.0"
    assert served.downloads == []


def test_pin(served: Index, checkout: Checkout) -> None:
    release = index.releases("vllm")[1]
    pin = release.pin(checkout.project)
    assert (pin.tag, pin.local_version, pin.sdist, pin.wheels) == (
        "v0.33.0",
        "0.33.0+sm120.1",
        release.sdist,
        release.wheels,
    )
    with pytest.raises(SourceError, match=r"0\.9\.0 has no wheel of known hash for x86_64, aarch64"):
        index.releases("vllm")[0].pin(checkout.project)


def test_file_without_a_hash_is_passed_over(served: Index) -> None:
    served.hashes["vllm-0.33.0.tar.gz"] = "none"
    assert [str(one.version) for one in index.releases("vllm")] == ["0.9.0", "0.34.0rc1"]


def test_indexes_that_disagree(served: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(Index({"vllm-0.33.0.tar.gz": b"other"})) as second:
        options = {"index-url": served.url, "extra-index-url": second.url}
        monkeypatch.setattr(PipConfig, "load", lambda: PipConfig(options))
        with pytest.raises(HashError, match=r"vllm-0\.33\.0\.tar\.gz: the indexes disagree"):
            index.releases("vllm")


def test_index_that_refuses(served: Index) -> None:
    served.status = 500
    with pytest.raises(SourceError, match=r"vllm: no release found: .*500"):
        index.releases("vllm")
