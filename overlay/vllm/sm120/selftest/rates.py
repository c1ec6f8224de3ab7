# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What this GPU reaches at its best, and the floors that follow from it.

A floor is the time that a call takes at least: the bytes that it must read from
memory over the best rate of memory, or its products over the rate of a large matrix
product, whichever is longer. What may be in the cache already, or stay in it, is not
counted. Rates are those of the fastest of several tries, times are medians.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from vllm.sm120.selftest.reference import E4M3
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.e4m3 import SOFTWARE_E4M3

BUDGET_US = 60e3  # of replays for one timing
# What is to come from memory is so many times as large as the L2 cache.
CACHE_TIMES = 8
LARGE = 2**32  # bytes, of which the cache holds next to nothing
MATMUL_SIZE = 8192
# Ways to read: int32 values of a tile, tiles of a program, its warps; a thread's part
# of a tile is 64 to 256 bytes. Which is the fastest depends on the GPU.
READS = [
    (2048, 1, 4),
    (2048, 4, 4),
    (4096, 1, 4),
    (4096, 4, 4),
    (8192, 1, 4),
    (8192, 4, 8),
]
MOST_READ = max(tile * num_tiles for tile, num_tiles, _ in READS)


@triton.jit
def read_kernel(source, sums, NUM_TILES: tl.constexpr, TILE: tl.constexpr):
    """Store the sum of the program's NUM_TILES * TILE values: loads, and one store."""
    program = tl.program_id(0)
    values = source + program.to(tl.int64) * (NUM_TILES * TILE) + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(NUM_TILES):
        total += tl.load(values + tile * TILE)
    tl.store(sums + program, tl.sum(total))


def graph_time(
    calls: Sequence[Callable[[], object]],
    of: Callable[[Iterable[float]], float] = median,
) -> float:
    """Return the microseconds of one call: of replays of all calls, in a CUDA graph."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def replay() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    replay()
    number = max(5, min(30, int(BUDGET_US / max(replay(), 1.0))))
    return of([replay() for _ in range(number)]) / len(calls)


@dataclass(frozen=True)
class Rates:
    """What the GPU reaches at its best."""

    read: float  # bytes a second, by a kernel that does nothing else
    copy: float  # bytes a second, read and written
    matmul: float  # 16-bit operations a second
    fp8_matmul: float  # where e4m3 is done in software, that of `matmul`

    def floor(
        self, num_bytes: float, flop: float, matmul: float | None = None
    ) -> tuple[float, str]:
        """Return the microseconds of a floor, and what sets it."""
        memory = num_bytes / max(self.read, self.copy) * 1e6
        compute = flop / (matmul or self.matmul) * 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")

    def named(self) -> dict[str, float]:
        """Return the rates in the units of a report."""
        return {
            "GB/s read": self.read / 1e9,
            "GB/s copied": self.copy / 1e9,
            "TFLOP/s in 16 bits": self.matmul / 1e12,
            "TFLOP/s in e4m3": self.fp8_matmul / 1e12,
        }


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(0).L2_cache_size


def measure_rates() -> Rates:
    memory = measure_memory()
    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.float16, device="cuda")
    out = torch.empty_like(a)
    matmul_us = graph_time([partial(torch.matmul, a, a, out=out)] * 2, min)
    fp8_us = matmul_us
    if not SOFTWARE_E4M3.value:
        one, b = torch.ones((), device="cuda"), a.to(E4M3)
        operands = b, b.t(), one, one
        multiply = partial(torch._scaled_mm, *operands, out_dtype=torch.bfloat16)
        try:
            fp8_us = graph_time([multiply] * 2, min)
        except RuntimeError as error:  # the library has none for this GPU
            print(f"no e4m3 matrix product: {error}", flush=True)
    flop = 2 * MATMUL_SIZE**3
    return Rates(*memory, flop / matmul_us * 1e6, flop / fp8_us * 1e6)


def measure_memory() -> tuple[float, float]:
    """Return the rates of reading and of copying, in bytes a second.

    Read is so much that neither the cache nor the launch counts, and as much as the
    timed calls read, so that what the cache keeps of it helps both.
    """
    large = min(LARGE, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(large // 4, dtype=torch.int32, device="cuda")
    sizes = {large, min(large, CACHE_TIMES * l2_bytes())}
    read = max(
        read_rate(source[: size // 4], *options) for size in sizes for options in READS
    )
    one, other = source[: len(source) // 2 * 2].chunk(2)
    copy_us = graph_time([partial(other.copy_, one)] * 4, min)
    return read, 2 * one.nbytes / copy_us * 1e6


def read_rate(source: torch.Tensor, tile: int, num_tiles: int, num_warps: int) -> float:
    """Return the bytes a second at which `source`, of ones, is read in this way."""
    source = source[: len(source) // MOST_READ * MOST_READ]
    sums = source.new_empty(len(source) // (tile * num_tiles))
    call = partial(read, source, sums, tile, num_tiles, num_warps)
    us = graph_time([call] * 4, min)
    if not (sums == tile * num_tiles).all():
        raise RuntimeError("the kernel that reads has not read all")
    return source.nbytes / us * 1e6


def read(
    source: torch.Tensor,
    sums: torch.Tensor,
    tile: int,
    num_tiles: int,
    num_warps: int,
) -> None:
    """Add up int32 `source`, whose length is that of `sums` times tile * num_tiles."""
    read_kernel[(len(sums),)](
        source, sums, NUM_TILES=num_tiles, TILE=tile, num_warps=num_warps
    )
