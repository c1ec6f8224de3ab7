# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MQA logits of the DSA indexer in Triton, over e4m3 queries and keys.

The indexer scores every key n that a query token m may attend to; the best become
the rows of sparse MLA attention:

    logits[m, n] = k_scale[n] * sum_h weights[m, h] * relu(q[m, h] . k[n])

The scale of q is part of the weights. The functions have the contract of the three
wrappers of DeepGEMM in vllm/utils/deep_gemm.py, which they stand in for.

Both kernels multiply a tile of keys with the heads of a few tokens at once and add
up the heads in registers. The keys stream by while the queries stay.
"""

from collections.abc import Iterable
from typing import Any

import torch

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    TritonWarmupTensor,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.v1.attention.ops.e4m3 import SOFTWARE_E4M3, decode_e4m3
from vllm.v1.attention.ops.triton_mqa_logits_config import (
    ContiguousConfig,
    PagedConfig,
    get_contiguous_config,
    get_paged_config,
)

# Rows of the logits begin at multiples of so many elements: 256 bytes. The cooperative
# top-k kernel refuses other multiples than of four, and the others read faster.
_ROW_ALIGNMENT = 64
# A grid of fewer programs leaves a GPU idle.
_MIN_PROGRAMS = 512
_MIN_KEYS_PER_PROGRAM = 512
# Rows that a program of the scheduler looks at in one go.
_SCHEDULE_ROWS = 1024

_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _as_operand(raw, SOFTWARE_E4M3: tl.constexpr):
    """Return loaded e4m3 values as something that `tl.dot` takes."""
    if SOFTWARE_E4M3:
        return decode_e4m3(raw, tl.full([1, 1], 1.0, tl.float32), tl.float16)
    else:
        return raw


@triton.jit
def _load_query(
    q_ptr,  # [tokens, NUM_HEADS, HEAD_DIM]
    first,  # the first token
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    SOFTWARE_E4M3: tl.constexpr,
):
    """Return all heads of some tokens, [BLOCK_Q, HEAD_DIM]; past the end, the last."""
    row = tl.arange(0, BLOCK_Q)
    token = tl.minimum(first + row // NUM_HEADS, num_tokens - 1)
    offset = (token.to(tl.int64) * NUM_HEADS + row % NUM_HEADS) * HEAD_DIM
    q = tl.load(q_ptr + offset[:, None] + tl.arange(0, HEAD_DIM)[None, :])
    return _as_operand(q, SOFTWARE_E4M3)


@triton.jit
def _load_weights(
    weights_ptr,  # fp32 [tokens, NUM_HEADS], unit last stride
    pitch,
    first,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Return the weights [BLOCK_Q] of what `_load_query` returns."""
    row = tl.arange(0, BLOCK_Q)
    token = tl.minimum(first + row // NUM_HEADS, num_tokens - 1)
    return tl.load(weights_ptr + token.to(tl.int64) * pitch + row % NUM_HEADS)


@triton.jit
def _split_heads(x, NUM_HEADS: tl.constexpr):
    """Split [N, tokens * NUM_HEADS] into four of [N, tokens, NUM_HEADS / 4].

    The accumulators of the matrix instructions hold eight columns in four threads,
    two in each: the parts differ in what one thread has, and nothing moves.
    """
    ROWS: tl.constexpr = x.shape[0]
    TOKENS: tl.constexpr = x.shape[1] // NUM_HEADS
    x = tl.reshape(x, [ROWS, TOKENS, NUM_HEADS // 16, 2, 4, 2])
    x = tl.permute(x, [0, 1, 4, 2, 3, 5])
    even, odd = tl.split(x)
    part0, part2 = tl.split(even)
    part1, part3 = tl.split(odd)
    return part0, part1, part2, part3


@triton.jit
def _score(q, weights, k, k_scale, NUM_HEADS: tl.constexpr):
    """Return the logits [BLOCK_N, BLOCK_Q / NUM_HEADS] of a tile of keys."""
    BLOCK_Q: tl.constexpr = q.shape[0]
    BLOCK_N: tl.constexpr = k.shape[0]
    TOKENS: tl.constexpr = BLOCK_Q // NUM_HEADS
    scores = tl.maximum(tl.dot(k, tl.trans(q)), 0.0)
    # Parts are added up by fused multiply-adds, which `tl.sum` alone would not use.
    s0, s1, s2, s3 = _split_heads(scores, NUM_HEADS)
    w0, w1, w2, w3 = _split_heads(weights[None, :], NUM_HEADS)
    total = s0 * w0
    total = total + s1 * w1
    total = total + s2 * w2
    total = total + s3 * w3
    total = tl.reshape(total, [BLOCK_N, TOKENS, NUM_HEADS // 4])
    return tl.sum(total, 2) * k_scale[:, None]


# Views at any token have pointers of any alignment, and those of single numbers need
# none. Pitches are strides that no wide access depends on.
@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_keys",
        "max_seqlen_k",
        "keys_per_program",
        "weights_pitch",
        "out_pitch",
    ],
    do_not_specialize_on_alignment=[
        "k_scale_ptr",
        "weights_ptr",
        "cu_seqlen_ks_ptr",
        "cu_seqlen_ke_ptr",
    ],
)
def mqa_logits_kernel(
    q_ptr,  # e4m3 or uint8 [M, NUM_HEADS, HEAD_DIM]
    k_ptr,  # e4m3 or uint8 [N, HEAD_DIM], unit last stride
    k_scale_ptr,  # fp32 [N]
    weights_ptr,  # fp32 [M, NUM_HEADS], unit last stride
    cu_seqlen_ks_ptr,  # int32 [M], first key of each token
    cu_seqlen_ke_ptr,  # int32 [M], end of its keys
    out_ptr,  # fp32 [M, max_seqlen_k], from the token's first key on
    num_tokens,  # M
    num_keys,  # N
    max_seqlen_k,
    keys_per_program,  # a multiple of BLOCK_N
    weights_pitch,
    out_pitch,
    k_stride0,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTWARE_E4M3: tl.constexpr,
):
    # grid: (token groups, parts of their keys). Programs of different groups that
    # run at the same time read the same part of the keys, out of L2.
    TOKENS: tl.constexpr = BLOCK_Q // NUM_HEADS
    first = tl.program_id(0) * TOKENS
    token = first + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    start = tl.load(cu_seqlen_ks_ptr + token, mask=is_token, other=0)
    end = tl.load(cu_seqlen_ke_ptr + token, mask=is_token, other=0)
    end = tl.minimum(tl.minimum(end, num_keys), start + max_seqlen_k)
    has_keys = start < end
    lowest = tl.min(tl.where(has_keys, start, _INT32_MAX), 0)
    highest = tl.max(tl.where(has_keys, end, 0), 0)

    q = _load_query(
        q_ptr, first, num_tokens, NUM_HEADS, HEAD_DIM, BLOCK_Q, SOFTWARE_E4M3
    )
    weights = _load_weights(
        weights_ptr, weights_pitch, first, num_tokens, NUM_HEADS, BLOCK_Q
    )
    out_row = out_ptr + token.to(tl.int64) * out_pitch - start
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)

    # A program has several parts only where the tokens of its group belong to several
    # requests, whose keys may lie far apart: a part between them is passed over.
    num_parts = tl.cdiv(highest - lowest, keys_per_program)
    for part in tl.range(tl.program_id(1), num_parts, tl.num_programs(1)):
        part_start = lowest + part * keys_per_program
        part_end = tl.minimum(part_start + keys_per_program, highest)
        is_seen = has_keys & (start < part_end) & (part_start < end)
        is_seen = tl.max(is_seen.to(tl.int32), 0) > 0
        part_end = tl.where(is_seen, part_end, part_start)
        for first_key in tl.range(part_start, part_end, BLOCK_N):
            n = first_key + offs_n
            # A clamp is cheaper than a mask; what is read twice is not stored.
            key = tl.minimum(n, highest - 1)
            k_row = k_ptr + key.to(tl.int64) * k_stride0
            k = tl.load(k_row[:, None] + offs_d[None, :])
            k_scale = tl.load(k_scale_ptr + key)
            k = _as_operand(k, SOFTWARE_E4M3)
            logits = _score(q, weights, k, k_scale, NUM_HEADS)
            n = n[:, None]
            mask = (n >= start[None, :]) & (n < end[None, :])
            tl.store(out_row[None, :] + n, logits, mask=mask)


@triton.jit
def _load_blocks(blocks, first, last, PAGES: tl.constexpr):
    """Return the numbers of one, two or four blocks; past the last, again the last."""
    block0 = tl.load(blocks + tl.minimum(first, last))
    block1 = block0
    block2 = block0
    block3 = block0
    if PAGES > 1:
        block1 = tl.load(blocks + tl.minimum(first + 1, last))
    if PAGES > 2:
        block2 = tl.load(blocks + tl.minimum(first + 2, last))
        block3 = tl.load(blocks + tl.minimum(first + 3, last))
    return block0, block1, block2, block3


@triton.jit(
    do_not_specialize=[
        "next_n",
        "max_model_len",
        "weights_pitch",
        "context_lens_pitch",
        "context_lens_step",
        "block_tables_pitch",
        "out_pitch",
    ],
    do_not_specialize_on_alignment=[
        "weights_ptr",
        "context_lens_ptr",
        "block_tables_ptr",
        "schedule_ptr",
    ],
)
def paged_mqa_logits_kernel(
    q_ptr,  # e4m3 or uint8 [B, next_n, NUM_HEADS, HEAD_DIM]
    # e4m3 or uint8 [blocks, BLOCK_SIZE * (HEAD_DIM + 4)]: all values of a block, then
    # its fp32 scales
    kv_cache_ptr,
    weights_ptr,  # fp32 [B * next_n, NUM_HEADS], unit last stride
    context_lens_ptr,  # int32 [B, next_n], keys of each token
    block_tables_ptr,  # int32 [B, max_blocks]
    schedule_ptr,  # int32 [slots + 1, 2], see paged_mqa_schedule_kernel
    out_ptr,  # fp32 [B * next_n, max_model_len]
    next_n,
    max_model_len,
    weights_pitch,
    context_lens_pitch,
    context_lens_step,
    block_tables_pitch,
    out_pitch,
    kv_cache_stride0,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PROGRAMS_PER_SLOT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SOFTWARE_E4M3: tl.constexpr,
):
    # grid: (slots * PROGRAMS_PER_SLOT, token groups). The programs of a slot take
    # turns with its tiles of keys. It never depends on the lengths, which change
    # when a CUDA graph is replayed.
    TOKENS: tl.constexpr = BLOCK_Q // NUM_HEADS
    STEP: tl.constexpr = BLOCK_N * PROGRAMS_PER_SLOT
    VALUE_BYTES: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    slot = schedule_ptr + tl.program_id(0) // PROGRAMS_PER_SLOT * 2
    first_row = tl.load(slot)
    first_block = tl.load(slot + 1)
    last_row = tl.load(slot + 2)
    end_block = tl.load(slot + 3)
    offset = tl.program_id(0) % PROGRAMS_PER_SLOT * BLOCK_N
    first = tl.program_id(1) * TOKENS
    token = first + tl.arange(0, TOKENS)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)
    page = offs_n // BLOCK_SIZE
    position = offs_n % BLOCK_SIZE

    for row in tl.range(first_row, last_row + (end_block > 0).to(tl.int32)):
        row64 = tl.zeros([], tl.int64) + row
        length = tl.load(
            context_lens_ptr + row64 * context_lens_pitch + token * context_lens_step,
            mask=token < next_n,
            other=0,
        )
        length = tl.minimum(length, max_model_len)
        block_end = tl.where(row == last_row, end_block * BLOCK_SIZE, _INT32_MAX)
        length = tl.minimum(length, block_end)
        key_end = tl.max(length, 0)
        key_start = tl.where(row == first_row, first_block * BLOCK_SIZE, 0) + offset
        blocks = block_tables_ptr + row64 * block_tables_pitch
        last_block = tl.maximum(key_end - 1, 0) // BLOCK_SIZE
        # Block numbers are loaded one iteration ahead, so that the loads of the keys
        # do not wait for them and the pipeliner can overlap them.
        next0, next1, next2, next3 = _load_blocks(
            blocks, key_start // BLOCK_SIZE, last_block, BLOCK_N // BLOCK_SIZE
        )
        q = _load_query(
            q_ptr + row64 * next_n * (NUM_HEADS * HEAD_DIM),
            first,
            next_n,
            NUM_HEADS,
            HEAD_DIM,
            BLOCK_Q,
            SOFTWARE_E4M3,
        )
        weights = _load_weights(
            weights_ptr + row64 * next_n * weights_pitch,
            weights_pitch,
            first,
            next_n,
            NUM_HEADS,
            BLOCK_Q,
        )
        out_row = out_ptr + (row64 * next_n + token) * out_pitch
        for first_key in tl.range(key_start, key_end, STEP, num_stages=NUM_STAGES):
            block = next0
            if BLOCK_N > BLOCK_SIZE:
                block = tl.where(page == 1, next1, block)
            if BLOCK_N > 2 * BLOCK_SIZE:
                block = tl.where(page == 2, next2, block)
                block = tl.where(page == 3, next3, block)
            next0, next1, next2, next3 = _load_blocks(
                blocks,
                (first_key + STEP) // BLOCK_SIZE,
                last_block,
                BLOCK_N // BLOCK_SIZE,
            )
            # int32 would overflow in a cache of 2 GiB.
            block_ptr = kv_cache_ptr + block.to(tl.int64) * kv_cache_stride0
            k_row = block_ptr + position * HEAD_DIM
            k = tl.load(k_row[:, None] + offs_d[None, :])
            scale_ptr = (block_ptr + VALUE_BYTES).to(tl.pointer_type(tl.float32))
            k_scale = tl.load(scale_ptr + position)
            k = _as_operand(k, SOFTWARE_E4M3)
            logits = _score(q, weights, k, k_scale, NUM_HEADS)
            n = (first_key + offs_n)[:, None]
            tl.store(out_row[None, :] + n, logits, mask=n < length[None, :])


@triton.jit
def _num_blocks(
    context_lens_ptr,
    pitch,
    row,
    num_rows,
    next_n,
    block_size,
):
    """Return how many blocks the longest context of each row has; 0 past the end."""
    length = tl.zeros_like(row)
    for i in tl.range(next_n):
        pointers = context_lens_ptr + row.to(tl.int64) * pitch + i
        length = tl.maximum(length, tl.load(pointers, mask=row < num_rows, other=0))
    return tl.cdiv(length, block_size)


@triton.jit(
    do_not_specialize=["num_rows", "next_n", "block_size", "context_lens_pitch"],
    do_not_specialize_on_alignment=["context_lens_ptr"],
)
def paged_mqa_schedule_kernel(
    context_lens_ptr,  # int32 [num_rows, next_n], unit last stride
    schedule_ptr,  # int32 [slots + 1, 2]: row and block at which each slot begins
    num_rows,
    next_n,
    block_size,
    context_lens_pitch,
    BLOCK_ROWS: tl.constexpr,
):
    # grid: (slots + 1). All blocks of all rows, one after the other, are cut into
    # equal shares.
    slot = tl.program_id(0)
    num_slots = tl.num_programs(0) - 1
    offs = tl.arange(0, BLOCK_ROWS)
    total = 0
    for first in tl.range(0, num_rows, BLOCK_ROWS):
        blocks = _num_blocks(
            context_lens_ptr,
            context_lens_pitch,
            first + offs,
            num_rows,
            next_n,
            block_size,
        )
        total += tl.sum(blocks, 0)

    # The first of the share, and where there is none, one past the last block of all.
    # Rows without blocks at the end of a padded batch then are in nobody's share.
    begin = slot * (total // num_slots) + tl.minimum(slot, total % num_slots)
    past_end = (begin >= total).to(tl.int32)
    begin -= past_end
    row = 0
    before = 0  # blocks of the rows before `row`
    passed = 0
    for first in tl.range(0, num_rows, BLOCK_ROWS):
        blocks = _num_blocks(
            context_lens_ptr,
            context_lens_pitch,
            first + offs,
            num_rows,
            next_n,
            block_size,
        )
        ends = passed + tl.cumsum(blocks, 0)
        is_before = (ends <= begin) & (first + offs < num_rows)
        row += tl.sum(is_before.to(tl.int32), 0)
        before = tl.maximum(before, tl.max(tl.where(is_before, ends, 0), 0))
        passed += tl.sum(blocks, 0)
    tl.store(schedule_ptr + 2 * slot, row)
    tl.store(schedule_ptr + 2 * slot + 1, begin - before + past_end)


def _storage_dtype(software_e4m3: bool) -> torch.dtype:
    """Return the dtype in which the kernels see e4m3 tensors."""
    return torch.uint8 if software_e4m3 else torch.float8_e4m3fn


def _contiguous_warmup_inputs(
    num_heads: int, head_dim: int, config: ContiguousConfig
) -> list[dict[str, Any]]:
    """Return the one launch."""
    dtype = _storage_dtype(config.software_e4m3)
    bounds = TritonWarmupTensor(torch.int32)
    return [
        {
            "q": TritonWarmupTensor(dtype, shape=(1, num_heads, head_dim)),
            "k": TritonWarmupTensor(dtype, shape=(1, head_dim)),
            "k_scale": TritonWarmupTensor(torch.float32),
            "weights": TritonWarmupTensor(torch.float32, shape=(1, num_heads)),
            "cu_seqlen_ks": bounds,
            "cu_seqlen_ke": bounds,
            "out": TritonWarmupTensor(torch.float32, shape=(1, 1)),
            "config": config,
        }
    ]


@triton_kernel_dispatcher_with_warmup(
    kernel=mqa_logits_kernel, warmup_inputs=_contiguous_warmup_inputs
)
def contiguous_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor,
    config: ContiguousConfig,
) -> DispatchSpec:
    """Launch `mqa_logits_kernel`; see there for the shapes."""
    num_tokens, num_heads, head_dim = q.shape
    max_seqlen_k = out.shape[1]
    num_groups = triton.cdiv(num_tokens, config.block_q // num_heads)
    keys = config.keys_per_program
    while (
        num_groups * triton.cdiv(max_seqlen_k, keys) < _MIN_PROGRAMS
        and keys > _MIN_KEYS_PER_PROGRAM
    ):
        keys //= 2
    return (num_groups, triton.cdiv(max_seqlen_k, keys)), {
        "num_tokens": num_tokens,
        "num_keys": k.shape[0],
        "max_seqlen_k": max_seqlen_k,
        "keys_per_program": keys,
        "weights_pitch": weights.stride(0),
        "out_pitch": out.stride(0),
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_Q": config.block_q,
        "BLOCK_N": config.block_n,
        "SOFTWARE_E4M3": config.software_e4m3,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.maxnreg,
    }


def _paged_warmup_inputs(
    num_heads: int,
    head_dim: int,
    block_sizes: Iterable[int],
    next_n: Iterable[int],
    config: PagedConfig,
) -> list[dict[str, Any]]:
    """Return one launch per block size and number of tokens."""
    dtype = _storage_dtype(config.software_e4m3)
    return [
        {
            "q": TritonWarmupTensor(dtype, shape=(1, tokens, num_heads, head_dim)),
            "kv_cache": TritonWarmupTensor(
                dtype, shape=(1, block_size, 1, head_dim + 4)
            ),
            "weights": TritonWarmupTensor(torch.float32, shape=(1, num_heads)),
            "context_lens": TritonWarmupTensor(torch.int32, shape=(1, tokens)),
            "block_tables": TritonWarmupTensor(torch.int32, shape=(1, 1)),
            "schedule": TritonWarmupTensor(torch.int32, shape=(2, 2)),
            "out": TritonWarmupTensor(torch.float32, shape=(tokens, 1)),
            "config": config,
        }
        for block_size in block_sizes
        for tokens in next_n
    ]


@triton_kernel_dispatcher_with_warmup(
    kernel=paged_mqa_logits_kernel, warmup_inputs=_paged_warmup_inputs
)
def paged_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule: torch.Tensor,
    out: torch.Tensor,
    config: PagedConfig,
) -> DispatchSpec:
    """Launch `paged_mqa_logits_kernel`; see there for the shapes.

    `context_lens` of one column count for all tokens of a request.
    """
    _, next_n, num_heads, head_dim = q.shape
    tokens = min(triton.next_power_of_2(next_n), config.block_q // num_heads)
    num_slots = schedule.shape[0] - 1
    grid = (num_slots * config.programs_per_slot, triton.cdiv(next_n, tokens))
    return grid, {
        "next_n": next_n,
        "max_model_len": out.shape[1],
        "weights_pitch": weights.stride(0),
        "context_lens_pitch": context_lens.stride(0),
        "context_lens_step": 1 if context_lens.shape[1] > 1 else 0,
        "block_tables_pitch": block_tables.stride(0),
        "out_pitch": out.stride(0),
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": kv_cache.shape[1],
        "BLOCK_Q": tokens * num_heads,
        "BLOCK_N": config.block_n,
        "PROGRAMS_PER_SLOT": config.programs_per_slot,
        "NUM_STAGES": config.num_stages,
        "SOFTWARE_E4M3": config.software_e4m3,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": config.maxnreg,
    }


def _schedule_warmup_inputs() -> list[dict[str, Any]]:
    """Return the one launch."""
    return [
        {
            "context_lens": TritonWarmupTensor(torch.int32, shape=(1, 1)),
            "schedule": TritonWarmupTensor(torch.int32, shape=(2, 2)),
            "block_size": 64,
        }
    ]


@triton_kernel_dispatcher_with_warmup(
    kernel=paged_mqa_schedule_kernel, warmup_inputs=_schedule_warmup_inputs
)
def make_schedule(
    context_lens: torch.Tensor, schedule: torch.Tensor, block_size: int
) -> DispatchSpec:
    """Launch `paged_mqa_schedule_kernel`; see there for the shapes."""
    return (schedule.shape[0],), {
        "num_rows": context_lens.shape[0],
        "next_n": context_lens.shape[1],
        "context_lens_pitch": context_lens.stride(0),
        "BLOCK_ROWS": _SCHEDULE_ROWS,
        "num_warps": 4,
    }


def register_warmup(
    num_heads: int,
    head_dim: int,
    next_n: Iterable[int] = (1,),
    block_sizes: Iterable[int] = (32, 64),
) -> None:
    """Have every variant that these arguments can reach compiled at start-up.

    Args:
        num_heads: heads of the indexer.
        head_dim: width of its queries and keys.
        next_n: how many tokens a request may have in a decode.
        block_sizes: of the paged cache.

    """
    launch = num_heads, _capability(), bool(SOFTWARE_E4M3)
    contiguous_logits.register_warmup(
        num_heads=num_heads, head_dim=head_dim, config=get_contiguous_config(*launch)
    )
    paged_logits.register_warmup(
        num_heads=num_heads,
        head_dim=head_dim,
        block_sizes=tuple(block_sizes),
        next_n=tuple(next_n),
        config=get_paged_config(*launch),
    )
    make_schedule.register_warmup()


def _capability() -> tuple[int, int]:
    capability = current_platform.get_device_capability()
    return (0, 0) if capability is None else (capability.major, capability.minor)


def _check(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_dim: int
) -> None:
    """Refuse what the kernels would read wrongly; `keys` are rows of `key_dim`."""
    num_heads, head_dim = q.shape[-2:]
    num_tokens = q.numel() // (num_heads * head_dim)
    if num_heads not in (16, 32, 64, 128) or head_dim not in (32, 64, 128):
        raise ValueError(
            "MQA logits need 16, 32, 64 or 128 heads and a head dimension of 32, 64 or "
            f"128, got {num_heads} and {head_dim}"
        )
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"MQA logits need a query in float8_e4m3fn, got {q.dtype}")
    if weights.dtype != torch.float32 or weights.stride(-1) != 1:
        raise ValueError(
            "MQA logits need fp32 weights with heads next to each other, got "
            f"{weights.dtype} with strides {weights.stride()}"
        )
    if weights.shape[0] < num_tokens or weights.shape[1] != num_heads:
        raise ValueError(
            f"MQA logits need weights [{num_tokens}, {num_heads}] for this query, got "
            f"{list(weights.shape)}"
        )
    if keys.shape[-1] != key_dim or keys.stride(-1) != 1 or keys.stride(0) % 16:
        raise ValueError(
            f"MQA logits need keys of {key_dim} bytes, aligned to 16, got "
            f"{list(keys.shape)} with strides {keys.stride()}"
        )


def _new_logits(q: torch.Tensor, num_tokens: int, width: int) -> torch.Tensor:
    """Return an uninitialized [num_tokens, width] with aligned rows."""
    pitch = triton.cdiv(width, _ROW_ALIGNMENT) * _ROW_ALIGNMENT
    return q.new_empty((num_tokens, pitch), dtype=torch.float32)[:, :width]


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    max_seqlen_k: int,
    *,
    config: ContiguousConfig | None = None,
) -> torch.Tensor:
    """Score the keys of every token, all keys being in one tensor.

    Args:
        q: e4m3 [M, H, D]; copied unless contiguous.
        k: e4m3 [N, D]. The row stride may be larger.
        k_scale: fp32 [N].
        weights: fp32 [M, H], with the scale of q folded in.
        cu_seqlen_ks: int32 [M], the first key of each token.
        cu_seqlen_ke: int32 [M], the end of its keys.
        max_seqlen_k: most keys of a token.
        config: tile sizes; by default those of `get_contiguous_config` for this GPU.

    Returns:
        Compressed logits, fp32 [M, max_seqlen_k]: row i holds keys
        [cu_seqlen_ks[i], cu_seqlen_ke[i]) from column 0 on. The rest is whatever was
        there. The row stride may be larger.

    Raises:
        ValueError: the shapes or dtypes are not those above.

    """
    num_tokens, num_heads, head_dim = q.shape
    _check(q, weights, k, head_dim)
    if config is None:
        config = get_contiguous_config(num_heads, _capability(), bool(SOFTWARE_E4M3))
    out = _new_logits(q, num_tokens, max_seqlen_k)
    if out.numel() > 0 and k.shape[0] > 0:
        dtype = _storage_dtype(config.software_e4m3)
        contiguous_logits(
            q.contiguous().view(dtype),
            k.view(dtype),
            k_scale,
            weights,
            cu_seqlen_ks,
            cu_seqlen_ke,
            out,
            config,
        )
    return out


def paged_mqa_schedule(
    context_lens: torch.Tensor,
    block_size: int,
    num_slots: int,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Share the blocks of all contexts equally among slots.

    Args:
        context_lens: int32 [B] or [B, next_n]: keys of each request, or of each of its
            tokens. Below 0 is 0.
        block_size: keys per block of the cache.
        num_slots: shares to make, such as the GPU's multiprocessors.
        indices: accepted for DeepGEMM's sake. It says which rows belong to one request;
            every row brings a length and a block table of its own.

    Returns:
        int32 [num_slots + 1, 2]: the row and the block at which each share begins, and
        where the last one ends. Computed without waiting for the GPU.

    """
    if context_lens.dim() == 1:
        context_lens = context_lens[:, None]
    if context_lens.shape[1] > 1 and context_lens.stride(1) != 1:
        context_lens = context_lens.contiguous()
    schedule = context_lens.new_empty((num_slots + 1, 2))
    make_schedule(context_lens, schedule, block_size)
    return schedule


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    *,
    indices: torch.Tensor | None = None,
    config: PagedConfig | None = None,
) -> torch.Tensor:
    """Score the keys of every token, the keys being in a paged cache.

    Args:
        q: e4m3 [B, next_n, H, D]; copied unless contiguous.
        kv_cache: uint8 [blocks, block_size, 1, D + 4]. The memory of a block is not as
            the shape says: all values come first, then all fp32 scales. The block
            stride may be larger.
        weights: fp32 [B * next_n, H], with the scale of q folded in.
        context_lens: int32 [B] or [B, next_n]: keys of each request, or of each of its
            tokens. Below 0 is 0.
        block_tables: int32 [B, max_blocks].
        schedule_metadata: what `paged_mqa_schedule` returns for these lengths.
        max_model_len: width of the result.
        indices: as in `paged_mqa_schedule`.
        config: tile sizes; by default those of `get_paged_config` for this GPU.

    Returns:
        Logits, fp32 [B * next_n, max_model_len]. Columns past a row's context are
        whatever was there. The row stride may be larger.

    Raises:
        ValueError: the shapes or dtypes are not those above.

    """
    num_requests, next_n, num_heads, head_dim = q.shape
    _check(q, weights, kv_cache, head_dim + 4)
    if config is None:
        config = get_paged_config(num_heads, _capability(), bool(SOFTWARE_E4M3))
    block_size = kv_cache.shape[1]
    if config.block_n % block_size or config.block_n > 4 * block_size:
        raise ValueError(
            f"MQA logits in tiles of {config.block_n} keys need blocks of one, half or "
            f"a quarter of that, got {block_size}"
        )
    if context_lens.dim() == 1:
        context_lens = context_lens[:, None]
    if context_lens.shape[1] > 1 and context_lens.stride(1) != 1:
        context_lens = context_lens.contiguous()
    if block_tables.shape[1] > 1 and block_tables.stride(1) != 1:
        block_tables = block_tables.contiguous()
    out = _new_logits(q, num_requests * next_n, max_model_len)
    if out.numel() > 0:
        dtype = _storage_dtype(config.software_e4m3)
        paged_logits(
            q.contiguous().view(dtype),
            kv_cache.view(dtype),
            weights,
            context_lens,
            block_tables,
            schedule_metadata,
            out,
            config,
        )
    return out
