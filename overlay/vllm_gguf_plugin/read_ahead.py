# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files read into the page cache ahead of who copies from their mappings.

A mapped page that is not in memory is read when it is touched, with as much after
it as the device's read-ahead says, often 128 KiB: the disk waits while a tensor is
copied to the GPU, and the copy waits for the disk. So threads ask the kernel for
what comes next. It reads that in the background, and nothing is copied.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .gguf_files import Tensor

# What a thread takes on at a time, and ranks share files by.
CHUNK_BYTES = 8 << 20
# The kernel reads no more for one request than the device's read-ahead or its
# largest transfer; 128 KiB is the least of usual values.
REQUEST_BYTES = 128 << 10
# Enough for any disk, and little beside the memory of a host that loads such a model:
# pages must not be evicted before their use.
AHEAD_BYTES = 1 << 30
NUM_THREADS = 4


class Chunk(NamedTuple):
    position: int
    """How many bytes of the tensors are in front of it."""
    file: str
    offset: int
    size: int


def split(tensors: Iterable[Tensor]) -> Iterator[Chunk]:
    position = 0
    for tensor in tensors:
        for start in range(0, tensor.size, CHUNK_BYTES):
            size = min(CHUNK_BYTES, tensor.size - start)
            offset = tensor.offset + start
            yield Chunk(position + start, str(tensor.file), offset, size)
        position += tensor.size


class ReadAhead:
    """Has tensors read in the order in which they are used, up to AHEAD_BYTES early.

    Use it as a context manager, and tell it what has been used. Ranks that load the
    same files at the same time share the chunks among them. That is a matter of
    speed alone: what nobody has read ahead is read when it is touched.
    """

    def __init__(
        self, tensors: Iterable[Tensor], rank: int = 0, num_ranks: int = 1
    ) -> None:
        tensors = list(tensors)
        chunks = enumerate(split(tensors))
        self._chunks = (chunk for i, chunk in chunks if i % num_ranks == rank)
        self._files = {str(tensor.file): -1 for tensor in tensors}
        self._used = 0
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._read, name="gguf-read-ahead", daemon=True)
            for _ in range(NUM_THREADS)
        ]

    def __enter__(self) -> ReadAhead:
        for file in self._files:
            self._files[file] = os.open(file, os.O_RDONLY)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for descriptor in self._files.values():
            os.close(descriptor)

    def advance(self, size: int) -> None:
        """Say that `size` bytes more have been used."""
        with self._changed:
            self._used += size
            self._changed.notify_all()

    def _next(self) -> Chunk | None:
        with self._changed:
            for chunk in self._chunks:
                if chunk.position + chunk.size <= self._used:
                    continue  # too late
                self._changed.wait_for(
                    lambda end=chunk.position + chunk.size: (
                        self._closed or end <= self._used + AHEAD_BYTES
                    )
                )
                return None if self._closed else chunk
            return None

    def _read(self) -> None:
        # Who touches the mapping meets the same error, and there it has a cause.
        with contextlib.suppress(OSError):
            while (chunk := self._next()) is not None:
                descriptor, end = self._files[chunk.file], chunk.offset + chunk.size
                for offset in range(chunk.offset, end, REQUEST_BYTES):
                    size = min(REQUEST_BYTES, end - offset)
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
