# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stage that times the kernels: python -m vllm.sm120.selftest.timing EVENTS

A call is timed in a CUDA graph of many. Decoding calls read rows or pages of their
own, in all CACHE_TIMES the L2 cache (but no more than MAX_CALLS calls), so that they
come from memory; their floor (`rates`) counts these, and neither queries nor outputs,
which may stay in the cache. So may the context of a prefill: its floor is that of its
products.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from vllm.sm120.selftest import attention, indexer
from vllm.sm120.selftest.cases import Target
from vllm.sm120.selftest.child import Events
from vllm.sm120.selftest.kernels import target
from vllm.sm120.selftest.rates import (
    CACHE_TIMES,
    Rates,
    graph_time,
    l2_bytes,
    measure_rates,
)
from vllm.sm120.selftest.reference import RANK, ROPE, store
from vllm.sm120.selftest.report import Timing
from vllm.v1.attention.ops import triton_mla_sparse, triton_mqa_logits
from vllm.v1.attention.ops.triton_mla_sparse_config import KVFormat

NUM_TOPK = attention.NUM_TOPK
MAX_CALLS = 256
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


def num_calls(bytes_per_call: int, most: int) -> int:
    """Return how many calls read CACHE_TIMES the L2 cache, of at most `most`."""
    wanted = max(2, CACHE_TIMES * l2_bytes() // bytes_per_call + 1)
    return max(1, min(most, MAX_CALLS, wanted))


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
    num_entries = shape.tokens * NUM_TOPK
    num_bytes = 0 if shape.is_prefill else num_entries * (4 + row_bytes)
    # Fewer than 16 heads count as 16, the smallest tile of the tensor cores.
    heads = max(shape.heads, 16)
    flop = 2 * (2 * RANK + ROPE) * heads * num_entries
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
    num_bytes = requests * pages * (4 + indexer.PAGE_BYTES)
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
    flop = 2 * indexer.HEAD_DIM * heads * tokens * CONTEXT
    floor = rates.floor(0, flop, rates.fp8_matmul)
    return Timing(
        "indexer prefill", f"{tokens} x {CONTEXT} keys, {heads} heads", us, *floor
    )


def topk_timing(requests: int, rates: Rates) -> Timing:
    """Time the top-k of decoding requests, by the kernel that vLLM chooses."""
    from vllm.model_executor.layers.indexer_topk import get_indexer_topk

    calls = num_calls(4 * requests * CONTEXT, MAX_CALLS)
    logits = torch.randn(calls, requests, CONTEXT, device="cuda")
    lengths = torch.full((requests, 1), CONTEXT, dtype=torch.int32, device="cuda")
    found = torch.empty(requests, NUM_TOPK, dtype=torch.int32, device="cuda")
    topk = get_indexer_topk("auto")
    us = graph_time(
        [partial(topk, each, lengths, 1, found, NUM_TOPK, CONTEXT) for each in logits]
    )
    floor = rates.floor(4 * requests * CONTEXT, 0)
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
    torch.cuda.empty_cache()  # what is free decides what is timed
    named = {name: round(value, 1) for name, value in rates.named().items()}
    events.emit("rates", content=named)
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
