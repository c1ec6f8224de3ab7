# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The indexer: logits over keys in one tensor and in a paged cache, and their top-k."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from vllm.sm120.selftest.cases import Case, Target, need_memory
from vllm.sm120.selftest.reference import E4M3, WrongError, relative_error, score
from vllm.v1.attention.ops import triton_mqa_logits as kernels
from vllm.v1.attention.ops.e4m3 import SOFTWARE_E4M3
from vllm.v1.attention.ops.triton_mqa_logits_config import (
    get_contiguous_config,
    get_paged_config,
)

STAGE = "indexer"
LIMIT = 1e-3  # relative L2 error: products of e4m3 are exact in fp32
HEAD_DIM = 128
PAGE = 64
PAGE_BYTES = PAGE * (HEAD_DIM + 4)  # all values, then an fp32 scale for each key
HEADS = (32, 64)  # GLM-5, DeepSeek-V3.2
NEXT_N = (1, 2, 4)  # tokens of a request in a decode: speculative ones, too
NUM_TOPK = 2048
# Beyond top-k, at it, below it, a block and a key more, one, none.
LENGTHS = [5003, 2049, 2048, 2047, 64, 65, 1, 0]


def cases(target: Target) -> Iterator[Case]:
    """Yield the cases of the logits; on a GPU those of the top-k as well."""
    for heads in HEADS:
        for tokens in (1, 70):
            name = f"keys in one tensor: {tokens} x {heads} heads"
            run = partial(check_contiguous, tokens, heads, target)
            yield Case(STAGE, name, run, LIMIT)
        for next_n in NEXT_N:
            name = f"keys in pages: {len(LENGTHS)} x {next_n} x {heads} heads"
            run = partial(check_paged, LENGTHS, heads, next_n, target)
            yield Case(STAGE, name, run, LIMIT)
        name = f"one request, one key more than a page: {heads} heads"
        yield Case(STAGE, name, partial(check_paged, [65], heads, 1, target), LIMIT)
        name = f"negative products count as 0: {heads} heads"
        yield Case(STAGE, name, partial(check_relu, heads, target), 0.0)
    if target.device == "cpu":
        return
    name = f"pages past 2^31 bytes: {HEADS[0]} heads"
    run = partial(check_paged, LENGTHS, HEADS[0], 1, target, far=True)
    yield Case(STAGE, name, run, LIMIT)
    for kind in ("random", "ties", "mostly zeros"):
        for requests in (1, 8, 80):
            name = f"decode of {requests}, {kind}"
            run = partial(check_topk, kind, requests, False)
            yield Case("top-k", name, run, 0.0)
        run = partial(check_topk, kind, 300, True)
        yield Case("top-k", f"prefill of 300, {kind}", run, 0.0)


def warmup_keys(target: Target) -> dict[Any, Any]:
    """Return what the cases launch as vLLM's warm-up knows it: key -> dispatcher."""
    keys = {}
    for heads in HEADS:
        arguments = heads, target.capability, bool(SOFTWARE_E4M3.value)
        size = {"num_heads": heads, "head_dim": HEAD_DIM}
        config = get_contiguous_config(*arguments)
        for key in kernels.contiguous_logits.get_warmup_keys(**size, config=config):
            keys[key] = kernels.contiguous_logits
        for key in kernels.paged_logits.get_warmup_keys(
            **size,
            block_sizes=(PAGE,),
            next_n=NEXT_N,
            config=get_paged_config(*arguments),
        ):
            keys[key] = kernels.paged_logits
    return keys


class Source:
    """Random tensors."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self._generator, device=self._device)

    def e4m3(self, *size: int) -> torch.Tensor:
        return self.normal(*size).to(E4M3)

    def scales(self, *size: int) -> torch.Tensor:
        """Powers of two, as vLLM's writer of the cache rounds them."""
        return self.normal(*size).clamp_(-2, 2).round_().exp2_()


def logits_of(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: list[int],
    ends: list[int],
    target: Target,
) -> torch.Tensor:
    """Launch the kernel for keys in one tensor as the target does."""
    config = get_contiguous_config(
        q.shape[1], target.capability, bool(SOFTWARE_E4M3.value)
    )
    bounds = [
        torch.tensor(each, dtype=torch.int32, device=q.device)
        for each in (starts, ends)
    ]
    widest = max(end - start for start, end in zip(starts, ends, strict=True))
    return kernels.mqa_logits(q, k, k_scale, weights, *bounds, widest, config=config)


def check_contiguous(tokens: int, heads: int, target: Target) -> float:
    """Two requests: some tokens see no key, some one, others all of their request."""
    source = Source(target.device)
    num_keys, border = 3000, 1000
    q = source.e4m3(tokens, heads, HEAD_DIM)
    k, k_scale = source.e4m3(num_keys, HEAD_DIM), source.scales(num_keys)
    weights = source.normal(tokens, heads)
    starts = [border * (token % 2) for token in range(tokens)]
    ends = [num_keys if start else border for start in starts]
    for token, length in enumerate((0, 1, 63, 64, 65, 129), start=2):
        if token < tokens:
            ends[token] = starts[token] + length
    logits = logits_of(q, k, k_scale, weights, starts, ends, target)
    found, expected = [], []
    for token, (start, end) in enumerate(zip(starts, ends, strict=True)):
        keys = slice(start, end)
        found.append(logits[token, : end - start])
        right = score(q[token], k[keys], k_scale[keys], weights[token])
        expected.append(right)
    return relative_error(torch.cat(found), torch.cat(expected))


def check_relu(heads: int, target: Target) -> float:
    """Products that are all negative: with a lost ReLU they would not be 0."""
    source = Source(target.device)
    q = source.normal(3, heads, HEAD_DIM).abs().to(E4M3)
    k = (-source.normal(200, HEAD_DIM).abs()).to(E4M3)
    weights = source.normal(3, heads)
    logits = logits_of(
        q, k, source.scales(200), weights, [0, 0, 0], [200, 200, 200], target
    )
    return logits[:, :200].abs().max().item()


def check_paged(
    lengths: list[int], heads: int, next_n: int, target: Target, far: bool = False
) -> float:
    """Requests of these lengths; each has `next_n` tokens, the last sees all keys."""
    source = Source(target.device)
    device = target.device
    num_pages = sum(-(-length // PAGE) for length in lengths) + 1
    first = 2**31 // PAGE_BYTES + 1 if far else 0
    if far:
        need_memory((first + num_pages) * PAGE_BYTES)
    pages = torch.empty(first + num_pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    k = source.e4m3(num_pages, PAGE, HEAD_DIM)
    k_scale = source.scales(num_pages, PAGE)
    pages[first:] = torch.cat(
        (k.view(torch.uint8).flatten(1), k_scale.view(torch.uint8)), dim=1
    )

    tables = torch.full((len(lengths), -(-max(lengths) // PAGE)), 2**30)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0))
    taken = 0
    for table, length in zip(tables, lengths, strict=True):
        count = -(-length // PAGE)
        table[:count] = order[taken : taken + count]
        taken += count
    context = torch.tensor(lengths)[:, None] + torch.arange(1 - next_n, 1)
    q = source.e4m3(len(lengths), next_n, heads, HEAD_DIM)
    weights = source.normal(len(lengths) * next_n, heads)
    context_lens = context.int().to(device)
    logits = kernels.paged_mqa_logits(
        q,
        pages.view(len(pages), PAGE, 1, HEAD_DIM + 4),
        weights,
        context_lens,
        (tables + first).int().to(device),
        kernels.paged_mqa_schedule(context_lens, PAGE, target.num_sms),
        max(lengths) + 1,
        config=get_paged_config(heads, target.capability, bool(SOFTWARE_E4M3.value)),
    )
    found, expected = [], []
    for request, table in enumerate(tables):
        own = table[: -(-lengths[request] // PAGE)].to(device)
        keys, scales = k[own].flatten(0, 1), k_scale[own].flatten()
        for token in range(next_n):
            row, count = request * next_n + token, max(int(context[request, token]), 0)
            right = score(q[request, token], keys[:count], scales[:count], weights[row])
            found.append(logits[row, :count])
            expected.append(right)
    return relative_error(torch.cat(found), torch.cat(expected))


def draw_logits(kind: str, rows: int, width: int, device: str) -> torch.Tensor:
    """Return fp32 [rows, width]: unequal, of eight values, or 99 % zeros."""
    generator = torch.Generator(device).manual_seed(0)
    values = torch.rand(rows, width, generator=generator, device=device)
    if kind == "ties":
        return (values * 8).floor_()
    return values if kind == "random" else (values - 0.99).clamp_min_(0)


def check_topk(kind: str, rows: int, is_prefill: bool) -> float:
    """Return 0, or how many of the selected values differ from torch's.

    Ties make the indices arbitrary, but not the values.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.indexer_topk import get_indexer_topk

    width = 32_768
    of_rows = [width, *LENGTHS]
    ends = torch.tensor([of_rows[row % len(of_rows)] for row in range(rows)])
    ends = ends.int().cuda()
    logits = draw_logits(kind, rows, width, "cuda")
    outside = torch.arange(width, device="cuda") >= ends[:, None]
    logits.masked_fill_(outside, torch.inf)  # kernels leave anything there
    found = torch.full((rows, NUM_TOPK), -2, dtype=torch.int32, device="cuda")
    if is_prefill:
        starts = torch.zeros_like(ends)
        strides = logits.stride()
        ops.top_k_per_row_prefill(logits, starts, ends, found, rows, *strides, NUM_TOPK)
    else:
        topk = get_indexer_topk("auto")
        topk(logits, ends[:, None], 1, found, NUM_TOPK, width)
    return float(wrong_selections(logits.masked_fill(outside, -torch.inf), ends, found))


def wrong_selections(
    logits: torch.Tensor, ends: torch.Tensor, found: torch.Tensor
) -> int:
    """Return how many selected values are not among the largest of their row.

    Args:
        logits: fp32 [rows, width], -inf from `ends` [rows] on.
        ends: int32 [rows], how many columns a row has.
        found: int32 [rows, k], columns in any order, -1 for those that a row lacks.

    Raises:
        WrongError: a column is outside its row, named twice or missing.
    """
    num_topk = found.shape[1]
    chosen = found >= 0
    if not torch.equal(chosen.sum(1), ends.long().clamp(max=num_topk)):
        raise WrongError("rows with the wrong number of columns")
    if (found >= ends[:, None]).any() or (found < -1).any():
        raise WrongError("columns outside their row")
    ordered = found.sort(1).values
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise WrongError("columns that are named twice")
    expected = logits.topk(num_topk).values
    picked = logits.gather(1, found.long().clamp(min=0))
    picked = picked.masked_fill(~chosen, -torch.inf).sort(1, descending=True).values
    return int((picked != expected).sum())
