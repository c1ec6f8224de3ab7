"""Files read ahead of who uses them: everything once, not too early, shared among ranks, and never in the way."""

import ctypes
import mmap
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def read_ahead(monkeypatch):
    from vllm_gguf_plugin import read_ahead

    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", 100)
    monkeypatch.setattr(read_ahead, "REQUEST_BYTES", 100)
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 500)
    monkeypatch.setattr(read_ahead, "NUM_THREADS", 3)
    return read_ahead


@pytest.fixture
def reads(monkeypatch) -> list[tuple[str, int, int]]:
    """What the kernel is asked for: the file's name, offset, size."""
    found = []

    def record(descriptor, offset, size, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        found.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, size))

    monkeypatch.setattr(os, "posix_fadvise", record)
    return found


@pytest.fixture
def tensors(tmp_path) -> list[SimpleNamespace]:
    """Three tensors in two files, and bytes between them that nobody needs."""
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(5000))
    places = [("a", 40, 1050), ("a", 2000, 30), ("b", 7, 800)]
    return [SimpleNamespace(file=tmp_path / name, offset=offset, size=size) for name, offset, size in places]


def wait_until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def settle(reads: list) -> None:
    """Wait until nothing has been read for a while."""
    count = -1
    while count != len(reads):
        count = len(reads)
        time.sleep(0.1)


def places(tensors, chunk: int) -> list[tuple[str, int, int]]:
    return [
        (tensor.file.name, tensor.offset + start, min(chunk, tensor.size - start))
        for tensor in tensors
        for start in range(0, tensor.size, chunk)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_chunk_is_read_once_by_one_of_the_ranks(num_ranks, read_ahead, reads, tensors, monkeypatch):
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1 << 20)
    expected = places(tensors, 100)
    for rank in range(num_ranks):
        before = len(reads)
        with read_ahead.ReadAhead(tensors, rank, num_ranks):
            wait_until(lambda: len(reads) >= before + len(expected[rank::num_ranks]))  # noqa: B023
        assert sorted(reads[before:]) == sorted(expected[rank::num_ranks])
    assert sorted(reads) == sorted(expected)


def test_a_request_is_no_larger_than_the_kernel_takes(read_ahead, reads, tensors, monkeypatch):
    monkeypatch.setattr(read_ahead, "REQUEST_BYTES", 40)
    with read_ahead.ReadAhead(tensors[:1]):
        settle(reads)
    assert sorted(reads) == [
        ("a", 40 + chunk + start, min(40, 100 - start)) for chunk in range(0, 500, 100) for start in (0, 40, 80)
    ]


def test_no_more_is_read_than_the_distance(read_ahead, reads, tensors):
    expected = places(tensors, 100)
    with read_ahead.ReadAhead(tensors) as ahead:
        settle(reads)
        assert sorted(reads) == sorted(expected[:5])
        ahead.advance(250)
        settle(reads)
        assert sorted(reads) == sorted(expected[:7])
        ahead.advance(10_000)
        settle(reads)
    # Of the next chunks each thread had taken one; the others were used by then.
    assert 7 <= len(reads) <= 7 + 3


def test_who_stops_early_waits_for_nothing(read_ahead, reads, tensors):
    before = threading.active_count()
    with read_ahead.ReadAhead(tensors):
        settle(reads)
        assert threading.active_count() == before + 3
    assert threading.active_count() == before
    assert len(reads) == 5


def test_a_file_that_cannot_be_read_is_left_to_who_uses_it(read_ahead, tensors, monkeypatch):
    def fail(*args):
        raise OSError

    monkeypatch.setattr(os, "posix_fadvise", fail)
    with read_ahead.ReadAhead(tensors) as ahead:
        ahead.advance(1)


def test_what_is_asked_for_is_in_memory(tmp_path):
    """Pages of a file that is on a disk; a file system in memory has them always."""
    from vllm_gguf_plugin.read_ahead import ReadAhead

    size = 4 << 20
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with ReadAhead([SimpleNamespace(file=path, offset=0, size=size)]):
        wait_until(lambda: pages_in_memory(path) == size // mmap.PAGESIZE)


def pages_in_memory(path: Path) -> int:
    """Return how many pages of a file are in the page cache."""
    libc = ctypes.CDLL(None)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        flags = (ctypes.c_ubyte * (len(mapping) // mmap.PAGESIZE))()
        address = ctypes.addressof(first := ctypes.c_char.from_buffer(mapping))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(mapping)), flags) == 0
        del first
        return sum(flag & 1 for flag in flags)
