"""How long GPU work takes, and the two floors that no kernel can go below: reading the rows, and multiplying."""

from collections.abc import Callable, Sequence
from functools import cache
from statistics import median

import torch
import triton
import triton.language as tl

from benchmarks.workload import NUM_TOPK, RANK, WIDTH, Shape

MIN_REPLAYS, MAX_REPLAYS = 7, 40
MATMUL_SIZE = 8192
#: Variants of the gather kernel; the fastest is the floor. Rows at once, warps.
GATHER_TILES = [(32, 4), (64, 4), (32, 8), (64, 8)]
GATHER_PROGRAMS_PER_SM = [2, 4, 8, 16]


def graph_time(calls: Sequence[Callable[[], object]], budget_ms: float = 60.0, replays: int | None = None) -> float:
    """Return the time of one call in microseconds: the median over replays of a CUDA graph of all calls.

    Without a number of `replays`, as many as fit the budget.
    """
    calls[0]()
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
        return start.elapsed_time(end)

    replay()
    first = replay()
    count = replays or max(MIN_REPLAYS, min(MAX_REPLAYS, int(budget_ms / max(first, 1e-3))))
    return median(replay() for _ in range(count)) * 1e3 / len(calls)


@cache
def matmul_rate(dtype: torch.dtype) -> float:
    """Return the rate of a large matrix product in FLOP/s."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=dtype, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    seconds = graph_time([lambda: torch.matmul(a, b, out=out)] * 4) * 1e-6
    return 2 * MATMUL_SIZE**3 / seconds


def compute_floor(shape: Shape, rate: float) -> float:
    """Return the microseconds that the two products of the attention take at `rate` FLOP/s.

    Fewer than 16 heads count as 16, the smallest tile of the tensor cores.
    """
    return 2 * (WIDTH + RANK) * max(shape.heads, 16) * shape.tokens * NUM_TOPK / rate * 1e6


@triton.jit
def gather_kernel(
    kv_ptr,  # int32 [rows, WORDS]
    topk_ptr,  # int32 [T, num_topk]
    out_ptr,  # int32 [T, parts, 32]
    num_topk,
    WORDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Read the listed rows and store sums over them, so that no load can be dropped. Grid: (T, parts)."""
    token, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    size = tl.cdiv(num_topk, parts)
    end = tl.minimum((part + 1) * size, num_topk)
    offs_n = tl.arange(0, BLOCK_N)
    offs_w = tl.arange(0, 32)  # a cache line
    total = tl.zeros([BLOCK_N, 32], tl.int32)
    for n in range(part * size, end, BLOCK_N):
        mask = n + offs_n < end
        rows = tl.load(topk_ptr + token * num_topk + n + offs_n, mask=mask, other=0)
        row_ptr = kv_ptr + rows.to(tl.int64)[:, None] * WORDS
        for word in tl.static_range(0, WORDS, 32):
            words = word + offs_w[None, :]
            total += tl.load(row_ptr + words, mask=mask[:, None] & (words < WORDS), other=0)
    tl.store(out_ptr + (token * parts + part) * 32 + offs_w, tl.sum(total, 0))


def gather(kv: torch.Tensor, topk: torch.Tensor, parts: int, block_n: int, num_warps: int) -> torch.Tensor:
    """Return int32 [T, parts, 32]: sums over the listed rows, taken as int32 words, and over every 32nd word."""
    num_tokens, num_topk = topk.shape
    words = kv.view(torch.int32)
    out = torch.empty(num_tokens, parts, 32, dtype=torch.int32, device=kv.device)
    gather_kernel[num_tokens, parts](words, topk, out, num_topk, words.shape[1], block_n, num_warps=num_warps)
    return out


def memory_floor(kv: torch.Tensor, lists: list[torch.Tensor]) -> float:
    """Return the microseconds that reading the rows takes at best, once the sums have been found right."""
    num_tokens, num_topk = lists[0].shape
    num_sms = torch.cuda.get_device_properties(kv.device).multi_processor_count
    parts = {max(1, min(num_topk // 32, factor * num_sms // num_tokens)) for factor in GATHER_PROGRAMS_PER_SM}
    some = slice(0, 4)
    expected = kv.view(torch.int32)[lists[0][some].long()].long().sum((1, 2)).to(torch.int32)
    times = []
    for block_n, num_warps in GATHER_TILES:
        for count in sorted(parts):
            options = count, block_n, num_warps
            sums = gather(kv, lists[0], *options)[some].long().sum((1, 2)).to(torch.int32)
            if not torch.equal(sums, expected):
                raise RuntimeError(f"the gather kernel {options} reads wrong rows")
            calls = [lambda topk=topk, options=options: gather(kv, topk, *options) for topk in lists]
            times.append(graph_time(calls, budget_ms=15.0))
    return min(times)
