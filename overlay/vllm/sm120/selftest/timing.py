# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stage that times the kernels: python -m vllm.sm120.selftest.timing EVENTS

A call is timed in a CUDA graph of many. Decoding calls read rows or pages of their
own, more than four times the L2 cache in all, so that they come from memory. Nothing
can be faster than its floor: the bytes that a call must read and write over the rate
of a large copy (which counts both), or its products over the rate of a large matrix
product, whichever is longer.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch

from vllm.sm120.selftest import attention, indexer
from vllm.sm120.selftest.cases import Target
from vllm.sm120.selftest.child import Events
from vllm.sm120.selftest.kernels import target
from vllm.sm120.selftest.reference import E4M3, RANK, ROPE, store
from vllm.sm120.selftest.report import Timing
from vllm.v1.attention.ops import triton_mla_sparse, triton_mqa_logits
from vllm.v1.attention.ops.e4m3 import SOFTWARE_E4M3
from vllm.v1.attention.ops.triton_mla_sparse_config import KVFormat

NUM_TOPK = attention.NUM_TOPK
MAX_CALLS = 256
BUDGET_US = 60e3  # of replays for one timing
MATMUL_SIZE = 8192
MAX_ROWS = 1 << 21  # of the pool: 2.4 GB in 16 bits
DRAWN_ROWS = 1 << 16  # of them
PREFILL_ROWS = 1 << 17  # the context of a prefill
DRAWN_PAGES = 1 << 12
CONTEXT = 32_768
SHAPES = [
    attention.Shape(tokens, heads, dtype, kv_format, is_prefill=tokens > 512)
    for dtype, kv_format in (
        (torch.float16, KVFormat.MODEL),
        (torch.bfloat16, KVFormat.MODEL),
        (torch.float16, KVFormat.FP8_DS_MLA),
        (torch.bfloat16, KVFormat.FP8),
    )
    for heads in (8, 64)
    for tokens in (1, 8, 32, 128, 2048)
]


def graph_time(calls: Sequence[Callable[[], object]]) -> float:
    """Return the microseconds of one call: the median over replays of all calls."""
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
    return median(replay() for _ in range(number)) / len(calls)


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the GPU reaches at its best."""

    copy: float  # bytes a second, read and written
    matmul: float  # 16-bit operations a second
    fp8_matmul: float  # where e4m3 is done in software, that of `matmul`

    def floor(
        self, num_bytes: float, flop: float, matmul: float | None = None
    ) -> tuple[float, str]:
        """Return the microseconds of a floor, and what sets it."""
        memory = num_bytes / self.copy * 1e6
        compute = flop / (matmul or self.matmul) * 1e6
        return (memory, "memory") if memory >= compute else (compute, "compute")


def measure_rates() -> Rates:
    size = min(2**30, torch.cuda.mem_get_info()[0] // 8)
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    copy_us = graph_time([partial(copy.copy_, source)] * 4)
    del source, copy

    a = torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.float16, device="cuda")
    out = torch.empty_like(a)
    matmul_us = graph_time([partial(torch.matmul, a, a, out=out)] * 2)
    fp8_us = matmul_us
    if not SOFTWARE_E4M3.value:
        one, b = torch.ones((), device="cuda"), a.to(E4M3)
        operands = b, b.t(), one, one
        multiply = partial(torch._scaled_mm, *operands, out_dtype=torch.bfloat16)
        try:
            fp8_us = graph_time([multiply] * 2)
        except RuntimeError as error:  # the library has none for this GPU
            print(f"no e4m3 matrix product: {error}", flush=True)
    flop = 2 * MATMUL_SIZE**3
    return Rates(2 * size / copy_us * 1e6, flop / matmul_us * 1e6, flop / fp8_us * 1e6)


def num_calls(bytes_per_call: int, most: int) -> int:
    """Return how many calls read four times the L2 cache, of at most `most`."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, MAX_CALLS, max(2, 4 * l2 // bytes_per_call + 1)))


class Pool:
    """The KV rows of one format at a time; they repeat, which does not change times."""

    def __init__(self, num_rows: int) -> None:
        self._order = torch.randperm(num_rows, device="cuda").int()
        self._key: tuple[KVFormat, torch.dtype] | None = None
        self._stored: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __len__(self) -> int:
        return len(self._order)

    def rows(self, shape: attention.Shape) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows and, for a per-tensor format, their scale."""
        if self._stored is None or self._key != (shape.kv_format, shape.dtype):
            self._key, self._stored = (shape.kv_format, shape.dtype), None
            few = torch.randn(DRAWN_ROWS, RANK + ROPE, dtype=shape.dtype, device="cuda")
            rows, scale = store(few, shape.kv_format.value)
            self._stored = rows.repeat(len(self) // DRAWN_ROWS + 1, 1), scale
        return self._stored

    def lists(self, shape: attention.Shape, row_bytes: int) -> list[torch.Tensor]:
        """Return int32 [tokens, NUM_TOPK] for each call."""
        if shape.is_prefill:  # all tokens read one context
            size = shape.tokens, NUM_TOPK
            num_rows = min(PREFILL_ROWS, len(self))
            return [
                torch.randint(num_rows, size, dtype=torch.int32, device="cuda")
                for _ in range(2)
            ]
        entries = shape.tokens * NUM_TOPK
        calls = num_calls(entries * row_bytes, len(self) // entries)
        return list(self._order[: calls * entries].view(calls, shape.tokens, NUM_TOPK))


def attention_timing(
    shape: attention.Shape, gpu: Target, pool: Pool, rates: Rates
) -> Timing:
    """Time sparse MLA attention with full lists."""
    kv, kv_scale = pool.rows(shape)
    row_bytes = kv.shape[1] * kv.element_size()
    size = shape.tokens, shape.heads
    q_nope, q_pe = (
        torch.randn(*size, width, dtype=shape.dtype, device="cuda")
        for width in (RANK, ROPE)
    )
    counts = torch.full((shape.tokens,), NUM_TOPK, dtype=torch.int32, device="cuda")
    lists = pool.lists(shape, row_bytes)

    def call(topk: torch.Tensor) -> object:
        return triton_mla_sparse.sparse_mla_attention(
            q_nope,
            q_pe,
            kv,
            topk,
            counts,
            attention.SM_SCALE,
            kv_scale=kv_scale,
            config=shape.config(gpu),
            num_splits=shape.num_splits(gpu),
        )

    us = graph_time([partial(call, topk) for topk in lists])
    num_rows = shape.tokens * NUM_TOPK
    num_bytes = 4 * num_rows + 2 * q_nope.nbytes + q_pe.nbytes  # lists, out and q
    if shape.is_prefill:
        num_rows = min(PREFILL_ROWS, len(pool))
    num_bytes += num_rows * row_bytes
    # Fewer than 16 heads count as 16, the smallest tile of the tensor cores.
    heads = max(shape.heads, 16)
    flop = 2 * (2 * RANK + ROPE) * heads * shape.tokens * NUM_TOPK
    kind = "prefill" if shape.is_prefill else "decode"
    return Timing(
        f"{attention.STAGE} {kind}",
        str(shape).removeprefix(f"{kind} "),
        us,
        *rates.floor(num_bytes, flop),
    )


def paged_timing(requests: int, heads: int, gpu: Target, rates: Rates) -> Timing:
    """Time the indexer's logits of decoding requests with CONTEXT keys each."""
    source = indexer.Source("cuda")
    pages = CONTEXT // indexer.PAGE
    calls = num_calls(requests * pages * indexer.PAGE_BYTES, MAX_CALLS)
    num_pages = calls * requests * pages
    few = source.e4m3(DRAWN_PAGES, indexer.PAGE_BYTES).view(torch.uint8)
    few[:, indexer.PAGE * indexer.HEAD_DIM :] = 0x3C  # scales that are finite
    cache = few.repeat(num_pages // DRAWN_PAGES + 1, 1)
    order = torch.randperm(num_pages, device="cuda").int()
    q = source.e4m3(requests, 1, heads, indexer.HEAD_DIM)
    weights = source.normal(requests, heads)
    lengths = torch.full((requests, 1), CONTEXT, dtype=torch.int32, device="cuda")
    schedule = triton_mqa_logits.paged_mqa_schedule(lengths, indexer.PAGE, gpu.num_sms)
    kv_cache = cache.view(-1, indexer.PAGE, 1, indexer.HEAD_DIM + 4)

    def call(table: torch.Tensor) -> object:
        return triton_mqa_logits.paged_mqa_logits(
            q, kv_cache, weights, lengths, table, schedule, CONTEXT
        )

    tables = order.view(calls, requests, pages)
    us = graph_time([partial(call, table) for table in tables])
    num_bytes = requests * (pages * indexer.PAGE_BYTES + 4 * CONTEXT)
    flop = 2 * indexer.HEAD_DIM * heads * requests * CONTEXT
    shape = f"{requests} x {CONTEXT} keys, {heads} heads"
    floor = rates.floor(num_bytes, flop, rates.fp8_matmul)
    return Timing("indexer decode", shape, us, *floor)


def contiguous_timing(tokens: int, heads: int, rates: Rates) -> Timing:
    """Time the indexer's logits of a prefill in which all tokens see CONTEXT keys."""
    source = indexer.Source("cuda")
    q = source.e4m3(tokens, heads, indexer.HEAD_DIM)
    k, k_scale = source.e4m3(CONTEXT, indexer.HEAD_DIM), source.scales(CONTEXT)
    weights = source.normal(tokens, heads)
    starts = torch.zeros(tokens, dtype=torch.int32, device="cuda")
    ends = torch.full_like(starts, CONTEXT)
    arguments = q, k, k_scale, weights, starts, ends, CONTEXT
    us = graph_time([partial(triton_mqa_logits.mqa_logits, *arguments)] * 2)
    num_bytes = 4 * tokens * CONTEXT + k.nbytes + k_scale.nbytes + q.nbytes
    flop = 2 * indexer.HEAD_DIM * heads * tokens * CONTEXT
    floor = rates.floor(num_bytes, flop, rates.fp8_matmul)
    return Timing(
        "indexer prefill", f"{tokens} x {CONTEXT} keys, {heads} heads", us, *floor
    )


def topk_timing(requests: int, rates: Rates) -> Timing:
    """Time the top-k of decoding requests, by the kernel that vLLM chooses."""
    from vllm.model_executor.layers.indexer_topk import get_indexer_topk

    calls = num_calls(4 * requests * CONTEXT, 64)
    logits = torch.randn(calls, requests, CONTEXT, device="cuda")
    lengths = torch.full((requests, 1), CONTEXT, dtype=torch.int32, device="cuda")
    found = torch.empty(requests, NUM_TOPK, dtype=torch.int32, device="cuda")
    topk = get_indexer_topk("auto")
    us = graph_time(
        [partial(topk, each, lengths, 1, found, NUM_TOPK, CONTEXT) for each in logits]
    )
    floor = rates.floor(4 * requests * (CONTEXT + NUM_TOPK), 0)
    return Timing("top-k decode", f"{requests} x {CONTEXT} keys", us, *floor)


def timings(gpu: Target, rates: Rates) -> Iterator[Callable[[], Timing]]:
    """Yield what to time; one after the other, as the memory is not for all."""
    free = torch.cuda.mem_get_info()[0]
    pool = Pool(min(MAX_ROWS, free // 4 // (2 * (RANK + ROPE))))
    for shape in SHAPES:
        yield partial(attention_timing, shape, gpu, pool, rates)
    del pool
    for heads in indexer.HEADS:
        for requests in (1, 8, 32):
            yield partial(paged_timing, requests, heads, gpu, rates)
        yield partial(contiguous_timing, 1024, heads, rates)
    for requests in (1, 32):
        yield partial(topk_timing, requests, rates)


def main() -> None:
    from vllm.v1.worker.workspace import init_workspace_manager

    events = Events(sys.argv[1])
    init_workspace_manager(torch.device("cuda"))
    rates = measure_rates()
    named = {
        "GB/s copied": rates.copy / 1e9,
        "TFLOP/s in 16 bits": rates.matmul / 1e12,
        "TFLOP/s in e4m3": rates.fp8_matmul / 1e12,
    }
    events.emit("rates", content={key: round(named[key], 1) for key in named})
    for time in timings(target(), rates):
        events.emit("doing", what=f"timing {time.func.__name__} {time.args[0]}")
        try:
            events.emit("timing", **dataclasses.asdict(time()))
        except torch.OutOfMemoryError as error:
            print(f"not timed: {error}", flush=True)
        torch.cuda.empty_cache()
    events.emit("done")


if __name__ == "__main__":
    main()
