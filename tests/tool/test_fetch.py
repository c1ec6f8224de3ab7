"""Upstream's files come through pip's indexes into the cache: whole, checked, once."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts import fetch
from scripts.errors import HashError, SourceError, StorageError
from scripts.pipconfig import PipConfig
from tests.tool.index_server import Index, serve
from tests.tool.miniature import Checkout, sha256

SDIST = "vllm-0.33.0.tar.gz"

Configure = Callable[..., None]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Configure:
    """Stand in for `pip config list`, which takes half a second; test_pipconfig.py asks the real one."""

    def set_options(**options: str) -> None:
        merged = {name.replace("_", "-"): value for name, value in options.items()}
        monkeypatch.setattr(PipConfig, "load", lambda: PipConfig(merged))

    return set_options


@pytest.fixture
def index(cold: Checkout, configure: Configure) -> Iterator[Index]:
    """An index that has the upstream files, and that pip is configured with."""
    files = {path.name: path.read_bytes() for path in cold.files.iterdir()}
    with serve(Index(files)) as served:
        configure(index_url=served.url)
        yield served


def unused_url() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/simple/"


def partial(checkout: Checkout) -> Path:
    return checkout.cache / "partial" / checkout.project.sdist


def get(checkout: Checkout) -> bytes:
    return fetch.sdist(checkout.layout, checkout.project).read_bytes()


def test_sdist_and_wheel_from_an_index(cold: Checkout, index: Index) -> None:
    paths = [fetch.sdist(cold.layout, cold.project), fetch.wheel(cold.layout, cold.project, "x86_64")]
    for path, digest in zip(paths, (cold.project.sdist, cold.project.wheels["x86_64"]), strict=True):
        assert path == cold.cache / "files" / digest / path.name
        assert sha256(path) == digest
        assert path.read_bytes() == index.files[path.name]
    assert [name for name, _ in index.downloads] == [path.name for path in paths]
    assert not [path for path in (cold.cache / "partial").iterdir() if path.suffix != ".lock"]


def test_from_a_folder(cold: Checkout, configure: Configure) -> None:
    configure(no_index="1", find_links=str(cold.files))
    assert get(cold) == (cold.files / SDIST).read_bytes()


def test_cached_files_need_no_index(checkout: Checkout, configure: Configure) -> None:
    configure(index_url=unused_url())
    assert get(checkout) == (checkout.files / SDIST).read_bytes()


def test_wheel_of_the_platform(cold: Checkout, index: Index) -> None:
    """Among the wheels of one version the platform decides, and `any` or another system is none of them."""
    name = next(name for name in index.files if name.startswith("vllm-") and name.endswith(".whl"))
    stem = name.rsplit("-", 1)[0]
    for tag in ("manylinux_2_28_aarch64", "macosx_11_0_x86_64", "win_amd64"):
        index.files[f"{stem}-{tag}.whl"] = tag.encode()
    index.files["vllm-0.33.1.tar.gz"] = b"another version"
    for path in (fetch.wheel(cold.layout, cold.project, "x86_64"), fetch.sdist(cold.layout, cold.project)):
        assert path.name in (name, SDIST)
    with pytest.raises(HashError, match="manylinux_2_28_aarch64"):
        fetch.wheel(cold.layout, replace(cold.project, wheels={"aarch64": 64 * "0"}), "aarch64")


# -- broken transfers --------------------------------------------------------------------------------


def test_resumed_where_it_broke_off(cold: Checkout, index: Index) -> None:
    index.cuts = [100, 200]
    assert get(cold) == index.files[SDIST]
    assert index.downloads == [(SDIST, ""), (SDIST, "bytes=100-"), (SDIST, "bytes=300-")]


def test_started_anew_by_a_server_without_ranges(cold: Checkout, index: Index) -> None:
    index.cuts, index.ranges = [100], False
    assert get(cold) == index.files[SDIST]
    assert len(index.downloads) == 2


def test_given_up_and_gone_on_with_later(cold: Checkout, index: Index) -> None:
    index.cuts = [10] * fetch.ATTEMPTS
    with pytest.raises(SourceError, match=f"{SDIST}: the download broke off") as broken:
        get(cold)
    assert "run the command again" in broken.value.cure
    assert not (cold.cache / "files").exists()
    assert partial(cold).read_bytes() == index.files[SDIST][: 10 * fetch.ATTEMPTS]
    index.downloads.clear()
    assert get(cold) == index.files[SDIST]
    assert index.downloads == [(SDIST, f"bytes={10 * fetch.ATTEMPTS}-")]


@pytest.mark.parametrize("left", [b"not what was downloaded", b"longer than the file" * 10_000])
def test_what_an_earlier_run_left_may_be_bad(cold: Checkout, index: Index, left: bytes) -> None:
    partial(cold).parent.mkdir(parents=True)
    partial(cold).write_bytes(left)
    assert get(cold) == index.files[SDIST]
    assert not partial(cold).exists()


# -- wrong content -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["other content", "truncated"])
def test_wrong_content(cold: Checkout, index: Index, wrong: str) -> None:
    content = {"other content": b"something else", "truncated": index.files[SDIST][:-1]}[wrong]
    index.hashes[SDIST] = "none"
    index.files[SDIST] = content
    with pytest.raises(HashError, match=f"{SDIST}: sha256 is .*, pinned is {cold.project.sdist}"):
        get(cold)
    assert not (cold.cache / "files").exists()
    assert not partial(cold).exists()


def test_index_that_says_another_hash(cold: Checkout, index: Index) -> None:
    index.hashes[SDIST] = 64 * "0"
    with pytest.raises(HashError, match=f"offers {SDIST} sha256 {64 * '0'}"):
        get(cold)
    assert index.downloads == []


def test_damaged_cache_entry(own_cache: Checkout, configure: Configure, capsys: pytest.CaptureFixture[str]) -> None:
    configure(no_index="1", find_links=str(own_cache.files))
    path = fetch.sdist(own_cache.layout, own_cache.project)
    good = path.read_bytes()
    path.write_bytes(good[:100])
    assert get(own_cache) == good
    assert f"{path}: damaged" in capsys.readouterr().err


def test_damaged_cache_entry_without_an_index(own_cache: Checkout, configure: Configure) -> None:
    configure(index_url=unused_url())
    path = fetch.sdist(own_cache.layout, own_cache.project)
    path.write_bytes(b"")
    with pytest.raises(SourceError, match="unreachable"):
        get(own_cache)


# -- indexes that do not answer ----------------------------------------------------------------------


def test_unreachable(cold: Checkout, configure: Configure) -> None:
    url = unused_url()
    configure(index_url=url)
    with pytest.raises(SourceError, match=r"unreachable or refused: .*refused") as refused:
        get(cold)
    assert url in str(refused.value)
    assert cold.project.sdist in refused.value.cure


@pytest.mark.parametrize("status", [403, 500])
def test_refused(cold: Checkout, index: Index, status: int) -> None:
    index.status = status
    with pytest.raises(SourceError, match=f"unreachable or refused: .*{status}"):
        get(cold)


def test_not_there(cold: Checkout, index: Index) -> None:
    for name in list(index.files):
        if name.startswith("vllm-0"):
            index.files["vllm-0.1.0.tar.gz"] = index.files.pop(name)
    with pytest.raises(SourceError, match=r"none of the package indexes .* has it"):
        get(cold)
    index.files.clear()  # a project that the index does not know: 404
    with pytest.raises(SourceError, match=r"none of the package indexes .* has it"):
        get(cold)


def test_one_index_of_two_is_enough(cold: Checkout, index: Index, configure: Configure) -> None:
    configure(index_url=unused_url(), extra_index_url=index.url)
    assert get(cold) == index.files[SDIST]


def test_http_without_trust(cold: Checkout, configure: Configure) -> None:
    configure(index_url="http://example.invalid/simple/")
    with pytest.raises(SourceError, match=r"refused: .*example\.invalid.*trusted"):
        get(cold)


def test_no_index_and_no_folder(cold: Checkout, configure: Configure) -> None:
    configure(no_index="true")
    with pytest.raises(SourceError, match="no-index"):
        get(cold)


def test_certificate_that_is_not_there(cold: Checkout, configure: Configure) -> None:
    configure(cert="/nonexistent.pem")
    with pytest.raises(SourceError, match=r"/nonexistent\.pem"):
        get(cold)


# -- disks -------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(cold: Checkout) -> Iterator[Path]:
    """The cache as a file system of 64 KiB."""
    cold.cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(cold.cache)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted: not root, or in a container that may not")
    yield cold.cache
    subprocess.run(["umount", str(cold.cache)], check=True)


def test_full_disk(cold: Checkout, index: Index, small_disk: Path) -> None:
    index.hashes[SDIST] = cold.project.sdist
    index.files[SDIST] += os.urandom(1 << 18)
    with pytest.raises(StorageError, match=f"{partial(cold)}: cannot be written: No space left") as full:
        get(cold)
    assert "free some space" in full.value.cure
    assert not (small_disk / "files").exists()


def test_full_disk_at_the_end(cold: Checkout, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where no file system can be mounted: the rename into the cache fails."""

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        with pytest.raises(StorageError, match="No space left"):
            get(cold)
    assert get(cold) == index.files[SDIST]
    assert len(index.downloads) == 1


def test_read_only_cache_that_is_cold(cold: Checkout, index: Index, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    outcome = cold.run("fetch", "--platform=x86_64")
    assert outcome.code == StorageError.exit_code
    assert "Read-only file system" in outcome.err
    assert "VLLM_SM120_CACHE" in outcome.err


# -- twice at once -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_runs_at_once_download_once(cold: Checkout, index: Index) -> None:
    index.wait = 1.0
    pip = {"PIP_NO_INDEX": "", "PIP_FIND_LINKS": "", "PIP_INDEX_URL": index.url}
    runs = [cold.start("fetch", "--project=vllm", "--platform=x86_64", **pip) for _ in range(2)]
    outcomes = [(run.communicate(timeout=60), run.returncode) for run in runs]
    assert [code for _, code in outcomes] == [0, 0], outcomes
    assert sorted(name for name, _ in index.downloads) == sorted(
        name for name in index.files if name.startswith("vllm-")
    )
    assert outcomes[0][0][0] == outcomes[1][0][0]
    assert "another run holds" in "".join(err for (_, err), _ in outcomes)
