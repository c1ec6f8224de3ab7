# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The unions of the lists of neighbouring tokens, for sparse MLA prefills, in Gluon.

In Gluon because joining two lists takes hash tables, and Triton lets a kernel read
shared memory at any place, but not write it there. Through L2 it takes eight times
as long.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    TritonWarmupTensor,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.triton_utils import triton

_NUM_WARPS = 8
# Four entries a thread: with fewer, several threads would hold the same one.
_MIN_BLOCK_K = 4 * 32 * _NUM_WARPS
# Two tokens that share less than this part of their entries, one in so many, are left
# alone: their union has more columns to multiply than it saves rows to read.
_MIN_SHARED = gl.constexpr(8)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _slot(row, used, level: gl.constexpr, SLOTS: gl.constexpr):
    """Return the place of a row in one of the hash tables; the last is for others."""
    factor: gl.constexpr = 0x9E3779B1 if level == 0 else 0x85EBCA6B
    slot = (row.to(gl.uint32) * factor).to(gl.uint32) // (0x100000000 // SLOTS)
    return gl.where(used, gl.minimum(slot.to(gl.int32), SLOTS - 2), SLOTS - 1)


@gluon.jit(do_not_specialize=["num_tokens", "num_topk"])
def union_rows_kernel(
    topk_ptr,  # int32 [T, num_topk], rows of kv
    valid_count_ptr,  # int32 [T], used entries of each topk row
    union_ptr,  # int32 [T / 2, 2 * num_topk]: row << 2 | bits of its tokens
    count_ptr,  # int32 [T / 2], used entries of each union, or -1
    alone_count_ptr,  # int32 [T], used entries of the tokens left alone, or -1
    num_tokens,  # T
    num_topk,
    BLOCK_K: gl.constexpr,  # a power of two, at least num_topk
):
    # grid: (T / 2). Each program joins the lists of two neighbours: the entries
    # of the first, then those of the second that the first does not have; or it
    # leaves the two alone.
    SLOTS: gl.constexpr = 2 * BLOCK_K
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pair = gl.program_id(0).to(gl.int64)
    offs = gl.arange(0, BLOCK_K, layout=LAYOUT)
    first = topk_ptr + 2 * pair * num_topk
    has_second = 2 * pair + 1 < num_tokens
    count0 = gl.minimum(gl.load(valid_count_ptr + 2 * pair), num_topk)
    count1 = gl.load(valid_count_ptr + 2 * pair + 1, mask=has_second, other=0)
    count1 = gl.minimum(count1, num_topk)
    row0 = gl.load(first + offs, mask=offs < count0, other=-1)
    row1 = gl.load(first + num_topk + offs, mask=offs < count1, other=-1)

    # Hash tables from row to position in the first list. Where rows collide one
    # stays, and the others go to the second table. A row lost there costs time
    # only: both tokens keep an entry of their own. Positions are checked when
    # they are read, so the tables need no clearing.
    table = gl.allocate_shared_memory(gl.int32, [SLOTS], SHARED)
    rows = gl.allocate_shared_memory(gl.int32, [BLOCK_K], SHARED, row0)
    zeros = gl.zeros([BLOCK_K], gl.int32, LAYOUT)
    takers = gl.allocate_shared_memory(gl.int32, [BLOCK_K], SHARED, zeros)
    pending = row0 >= 0
    match = gl.full([BLOCK_K], -1, gl.int32, LAYOUT)
    for level in gl.static_range(2):
        own_slot = _slot(row0, pending, level, SLOTS)
        table.scatter(offs, own_slot, 0)
        gl.barrier()
        pending = pending & (table.gather(own_slot, 0) != offs)
        searching = (row1 >= 0) & (match < 0)
        position = table.gather(_slot(row1, searching, level, SLOTS), 0)
        is_position = searching & (position >= 0) & (position < count0)
        candidate = rows.gather(gl.where(is_position, position, 0), 0)
        match = gl.where(is_position & (candidate == row1), position, match)
        gl.barrier()

    # Rows that a token lists twice stay as they are: they count twice alone, too.
    matched = match >= 0
    position = gl.maximum(match, 0)
    takers.atomic_scatter_add(zeros + 1, position, 0, mask=matched)
    gl.barrier()
    matched = matched & (takers.gather(position, 0) == 1)
    members = gl.where(takers.load(LAYOUT) == 1, 3, 1)

    num_shared = gl.sum(matched.to(gl.int32), 0)
    is_union = num_shared * _MIN_SHARED >= count0 + count1
    alone_count = alone_count_ptr + 2 * pair
    gl.store(alone_count, gl.where(is_union, -1, count0))
    gl.store(alone_count + 1, gl.where(is_union, -1, count1), mask=has_second)

    union = union_ptr + pair * (2 * num_topk)
    entries0 = gl.where(row0 >= 0, row0 << 2 | members, -1)
    gl.store(union + offs, entries0, mask=offs < count0)
    alone = ((row1 >= 0) & ~matched).to(gl.int32)
    position = count0 + gl.associative_scan(alone, 0, _add) - 1
    gl.store(union + position, row1 << 2 | 2, mask=alone != 0)
    gl.store(count_ptr + pair, gl.where(is_union, count0 + gl.sum(alone, 0), -1))


def _warmup_inputs(num_topk: int) -> list[dict[str, TritonWarmupTensor]]:
    """Return the one launch."""
    lists = TritonWarmupTensor(torch.int32, shape=(1, num_topk))
    count = TritonWarmupTensor(torch.int32)
    return [
        {
            "topk": lists,
            "valid_count": count,
            "union": lists,
            "count": count,
            "alone_count": count,
        }
    ]


@triton_kernel_dispatcher_with_warmup(
    kernel=union_rows_kernel, warmup_inputs=_warmup_inputs
)
def union_rows(
    topk: torch.Tensor,
    valid_count: torch.Tensor,
    union: torch.Tensor,
    count: torch.Tensor,
    alone_count: torch.Tensor,
) -> DispatchSpec:
    """Launch `union_rows_kernel`; see there for the shapes."""
    num_tokens, num_topk = topk.shape
    return (triton.cdiv(num_tokens, 2),), {
        "num_tokens": num_tokens,
        "num_topk": num_topk,
        "BLOCK_K": max(triton.next_power_of_2(num_topk), _MIN_BLOCK_K),
        "num_warps": _NUM_WARPS,
    }
