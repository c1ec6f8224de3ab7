# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA attention for the matrix instructions of SM90, in Gluon.

What `sparse_mla_kernel` of triton_mla_sparse.py computes, from the same arguments.
SM90 multiplies 64 rows at a time, and a few heads do not fill them; keys and
values do. So scores and accumulators have the heads in their columns:

    s[key, head] = k[key, :] . q[head, :]      out[:, head] = v[key, :]^T p[key, head]

Keys and values are the same tile of shared memory, which holds every KV row once
as 16-bit numbers. Gluon, other than Triton, lets a kernel say which memory holds
what and when its copies start: 16-bit rows are copied there one tile ahead or, with
one buffer, while the SM's other program computes; fp8 rows wait in registers,
packed, and are decoded on their way.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.v1.attention.ops.gluon_mla_sparse import (
    BF16_TO_FP16_ASM,
    QUERY_FACTOR,
    TWICE_ONE,
    end_of_softmax,
    load_entries,
    part_of_list,
    pdl,
    place_of_program,
    query_rows,
    query_to_fp16,
    row_pointers,
)
from vllm.v1.attention.ops.triton_mla_sparse import (
    _FP8,
    _LOG2E,
    _MASKED,
    _MODEL,
    _RANK,
    _ROPE,
    _ROPE_BYTES,
    _SCALES,
    _TILE,
    attention_launch,
    attention_warmup_inputs,
)
from vllm.v1.attention.ops.triton_mla_sparse_config import KVFormat, SparseMLAConfig

# Four e4m3 bytes ($2) to two pairs of float16 ($0, $1), times a pair of
# factors.
_DECODE_ASM = gl.constexpr("""{
.reg .b16 a, b;
.reg .b32 c, d;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 c, a;
cvt.rn.f16x2.e4m3x2 d, b;
mul.rn.f16x2 $0, c, $3;
mul.rn.f16x2 $1, d, $3;
}""")
# A float32 to a pair of the same float16.
_TWICE_ASM = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")

# The rows of a matrix instruction.
BLOCK_N = gl.constexpr(64)


@gluon.constexpr_function
def _output_layout(block_h, num_warps):
    """Return how threads store [512, block_h] values of the output: 16 bytes each.

    A matrix instruction leaves a thread with single values of a head. Only threads
    of the same warp have to exchange theirs: every warp keeps its rows.
    """
    warps = num_warps.bit_length() - 1
    rows = [[1 << bit, 0] for bit in range(9)]
    heads = [[0, 1 << bit] for bit in range(block_h.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=rows[:3] + rows[4 + warps :] + heads[4:],
        lane_bases=[rows[3], *heads[:4]],
        warp_bases=rows[4 : 4 + warps],
        block_bases=[],
        shape=[512, block_h],
    )


@gluon.jit
def _copy_rows(
    kv_ptr,
    entries,
    latent,  # shared [64, 512]
    rope,  # shared [64, 64]
    KV_STRIDE: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    layout: gl.constexpr,
):
    """Start copying 16-bit rows. Those of unused entries become 0."""
    row_ptr = row_pointers(kv_ptr, entries, KV_STRIDE, GROUP)[:, None]
    used = (entries >= 0)[:, None]
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    ptr = row_ptr + gl.arange(0, _RANK, layout=columns)[None, :]
    async_copy.async_copy_global_to_shared(latent, ptr, mask=used)
    if HAS_ROPE:
        ptr = row_ptr + _RANK + gl.arange(0, _ROPE, layout=columns)[None, :]
        async_copy.async_copy_global_to_shared(rope, ptr, mask=used)
    async_copy.commit_group()


@gluon.jit
def _load_packed(
    kv_ptr,
    entries,
    KV_STRIDE: gl.constexpr,
    KV_FORMAT: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    layout: gl.constexpr,
):
    """Return fp8 rows in words: four tiles of latent values, and RoPE."""
    # Bytes would take a register each.
    words = kv_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    row_ptr = row_pointers(words, entries, KV_STRIDE // 4, GROUP)
    used = entries >= 0
    mask = used[:, None]
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    ptr = row_ptr[:, None] + gl.arange(0, _TILE // 4, layout=columns)[None, :]
    tile0 = gl.load(ptr, mask=mask, other=0)
    tile1 = gl.load(ptr + _TILE // 4, mask=mask, other=0)
    tile2 = gl.load(ptr + 2 * _TILE // 4, mask=mask, other=0)
    tile3 = gl.load(ptr + 3 * _TILE // 4, mask=mask, other=0)
    rope = tile0
    if HAS_ROPE:
        if KV_FORMAT == _FP8:
            ptr = row_ptr + _RANK // 4
            offs = gl.arange(0, _ROPE // 4, layout=columns)
        else:
            ptr = row_ptr + _ROPE_BYTES // 4
            offs = gl.arange(0, _ROPE // 2, layout=columns)
        rope = gl.load(ptr[:, None] + offs[None, :], mask=mask, other=0)
    return tile0, tile1, tile2, tile3, rope


@gluon.jit
def _decode(words, twice):
    """Return [N, 2 M] pairs of float16 for [N, M] words of four e4m3 values.

    `twice` [N] is the factor of each row, as a pair of float16.
    """
    low, high = gl.inline_asm_elementwise(
        _DECODE_ASM,
        "=r,=r,r,r",
        [words, twice[:, None]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    return gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]])


@gluon.jit
def _load_scales(
    kv_ptr, entries, KV_STRIDE: gl.constexpr, GROUP: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the four scales of fp8_ds_mla rows as pairs of float16, each [N]."""
    # The threads of a row all load its 16 bytes at once, and exchange nothing.
    WHOLE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    entries = gl.convert_layout(entries, gl.SliceLayout(1, WHOLE))
    scales = kv_ptr.to(gl.pointer_type(gl.float32), bitcast=True)
    ptr = row_pointers(scales, entries, KV_STRIDE // 4, GROUP)[:, None] + _SCALES // 4
    ptr += gl.arange(0, 4, layout=gl.SliceLayout(0, WHOLE))[None, :]
    four = gl.load(ptr, mask=(entries >= 0)[:, None], other=0.0)
    twice = gl.inline_asm_elementwise(
        _TWICE_ASM, "=r,r", [four], dtype=gl.int32, is_pure=True, pack=1
    )
    even, odd = gl.split(gl.reshape(twice, [BLOCK_N, 2, 2]))
    twice0, twice2 = gl.split(even)
    twice1, twice3 = gl.split(odd)
    return (
        gl.convert_layout(twice0, layout),
        gl.convert_layout(twice1, layout),
        gl.convert_layout(twice2, layout),
        gl.convert_layout(twice3, layout),
    )


@gluon.jit
def _store_decoded(
    packed,
    kv_ptr,
    entries,
    latent,
    rope,
    KV_STRIDE: gl.constexpr,
    KV_FORMAT: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    layout: gl.constexpr,
):
    """Store what `_load_packed` returned as float16 [64, 512] and [64, 64]."""
    tile0, tile1, tile2, tile3, raw = packed
    if KV_FORMAT == _FP8:
        twice0 = gl.full([BLOCK_N], TWICE_ONE, gl.int32, layout)
        twice1, twice2, twice3 = twice0, twice0, twice0
    else:
        # Beside the RoPE values, which have brought them into L1: waiting in
        # registers as well, they would not fit there.
        twice0, twice1, twice2, twice3 = _load_scales(
            kv_ptr, entries, KV_STRIDE, GROUP, layout
        )
    in_words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    out = latent._reinterpret(gl.int32, [BLOCK_N, _RANK // 2], in_words)
    out.slice(0, _TILE // 2, 1).store(_decode(tile0, twice0))
    out.slice(_TILE // 2, _TILE // 2, 1).store(_decode(tile1, twice1))
    out.slice(2 * _TILE // 2, _TILE // 2, 1).store(_decode(tile2, twice2))
    out.slice(3 * _TILE // 2, _TILE // 2, 1).store(_decode(tile3, twice3))
    if HAS_ROPE:
        out = rope._reinterpret(gl.int32, [BLOCK_N, _ROPE // 2], in_words)
        if KV_FORMAT == _FP8:
            out.store(_decode(raw, twice0))
        else:
            pairs = gl.inline_asm_elementwise(
                BF16_TO_FP16_ASM, "=r,r", [raw], dtype=gl.int32, is_pure=True, pack=1
            )
            out.store(pairs)


@gluon.jit
def _load_query(
    q_ptr, stride0, stride1, token, head, mask, WIDTH: gl.constexpr,
    DTYPE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return shared memory [BLOCK_H, WIDTH] with the query in DTYPE."""
    offs = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    ptr = q_ptr + (token * stride0 + head * stride1)[:, None] + offs[None, :]
    value = gl.load(ptr, mask=mask[:, None], other=0.0)
    if q_ptr.dtype.element_ty != DTYPE:
        value = query_to_fp16(value)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    return gl.allocate_shared_memory(DTYPE, [mask.shape[0], WIDTH], shared, value)


@gluon.jit(do_not_specialize=["num_tokens", "num_heads", "list_width"])
def sparse_mla_wgmma_kernel(
    # The arguments of `sparse_mla_kernel`; see there.
    q_nope_ptr,
    q_pe_ptr,
    kv_ptr,
    lists_ptr,
    counts_ptr,
    kv_scale_ptr,
    out_ptr,
    lse_ptr,
    sm_scale,
    num_tokens,
    num_heads,
    list_width,
    q_nope_stride0,
    q_nope_stride1,
    q_pe_stride0,
    q_pe_stride1,
    KV_STRIDE: gl.constexpr,
    KV_FORMAT: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_H: gl.constexpr,  # 16, 32 or 64
    NUM_BUFFERS: gl.constexpr,  # tiles of KV rows in shared memory: 1, or 2 of 16-bit
    MAY_SKIP: gl.constexpr,
    LAUNCH_PDL: gl.constexpr,
):
    # grid: (token groups * head blocks, splits), as for `sparse_mla_kernel`.
    HEADS_PER_BLOCK: gl.constexpr = BLOCK_H // GROUP
    # fp8 values are exact in float16, and one instruction decodes two.
    DTYPE: gl.constexpr = (
        q_nope_ptr.dtype.element_ty if KV_FORMAT == _MODEL else gl.float16
    )
    # Scores: the 64 keys in one warpgroup, the heads shared out among them.
    # Accumulators: the 512 values shared out among all warps.
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[4, WARPS // 4],
        instr_shape=[16, BLOCK_H // (WARPS // 4), 16],
    )
    VALUES: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_H, 16]
    )
    SCORE_KEYS: gl.constexpr = gl.SliceLayout(1, SCORES)
    SCORE_HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    VALUE_HEADS: gl.constexpr = gl.SliceLayout(0, VALUES)
    # Eight threads write 128 bytes of a row: every bank of shared memory once.
    # Two words of fp8 are 16 bytes once decoded.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    PACKED: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY if KV_FORMAT == _MODEL else PACKED)

    group, head_block = place_of_program(num_heads, HEADS_PER_BLOCK)
    split = gl.program_id(1)
    num_splits = gl.num_programs(1)

    if LAUNCH_PDL:
        # What wrote the query may still run.
        pdl("griddepcontrol.wait; // $0")
    row_list = lists_ptr + group * list_width
    count = gl.load(counts_ptr + group)
    if BLOCK_H <= 32:
        if MAY_SKIP and count < 0:
            return
        count = gl.minimum(count, list_width)
        start, end = part_of_list(count, num_splits, split, BLOCK_N)
        entries = load_entries(row_list, start, end, BLOCK_N, ROWS)
    else:
        # Alone on its SM, a program has its start hidden by no other: it does not
        # wait for the count of a list that is full.
        start, end = part_of_list(list_width, num_splits, split, BLOCK_N)
        entries = load_entries(row_list, start, end, BLOCK_N, ROWS)
        if MAY_SKIP and count < 0:
            return
        if count < list_width:
            start, end = part_of_list(count, num_splits, split, BLOCK_N)
            entries = load_entries(row_list, start, end, BLOCK_N, ROWS)

    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    latent = gl.allocate_shared_memory(DTYPE, [NUM_BUFFERS, BLOCK_N, _RANK], shared)
    rope = gl.allocate_shared_memory(DTYPE, [NUM_BUFFERS, BLOCK_N, _ROPE], shared)
    if KV_FORMAT == _MODEL:
        _copy_rows(
            kv_ptr, entries, latent.index(0), rope.index(0),
            KV_STRIDE, GROUP, HAS_ROPE, COPY,
        )  # fmt: skip
    else:
        packed = _load_packed(
            kv_ptr, entries, KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, PACKED
        )
        packed_entries = entries
    entries = load_entries(row_list, start + BLOCK_N, end, BLOCK_N, ROWS)

    token, head, mask_q = query_rows(
        group,
        head_block,
        num_tokens,
        num_heads,
        GROUP,
        BLOCK_H,
        gl.SliceLayout(1, COPY),
    )
    q = _load_query(
        q_nope_ptr, q_nope_stride0, q_nope_stride1, token, head, mask_q,
        _RANK, DTYPE, COPY,
    )  # fmt: skip
    if HAS_ROPE:
        q_pe = _load_query(
            q_pe_ptr, q_pe_stride0, q_pe_stride1, token, head, mask_q,
            _ROPE, DTYPE, COPY,
        )  # fmt: skip
    probs_layout: gl.constexpr = gl.NVMMASharedLayout(2 * BLOCK_H, 16, 2)
    probs_shared = gl.allocate_shared_memory(DTYPE, [BLOCK_N, BLOCK_H], probs_layout)

    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rescale_shared = gl.allocate_shared_memory(gl.float32, [BLOCK_H], plain)

    # exp2 is the hardware's exponential. Scaling after the fp32 products keeps
    # q . k from overflowing fp16.
    scale_log2 = sm_scale * _LOG2E
    if q_nope_ptr.dtype.element_ty != DTYPE:
        scale_log2 *= 1.0 / QUERY_FACTOR
    if KV_FORMAT == _FP8:
        kv_scale = gl.load(kv_scale_ptr)
        scale_log2 *= kv_scale
    member = gl.arange(0, BLOCK_H, layout=SCORE_HEADS) // HEADS_PER_BLOCK
    acc = gl.zeros([_RANK, BLOCK_H], gl.float32, VALUES)
    row_max = gl.full([BLOCK_H], _MASKED, gl.float32, SCORE_HEADS)
    # Summed over the keys at the end: every such sum goes through shared memory.
    sums = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)
    zeros = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, SCORES)

    # Few heads wait for copies, which start as soon as a buffer is free. Many are
    # bound by the products: the copy of the next tile starts beside the scores.
    LATE: gl.constexpr = BLOCK_H > 32 and NUM_BUFFERS > 1

    buffer = 0
    for n in range(start, end, BLOCK_N):
        keys = load_entries(row_list, n, end, BLOCK_N, SCORE_KEYS)
        keys_latent = latent.index(buffer)
        keys_rope = rope.index(buffer)
        if LATE:
            async_copy.wait_group(0)
        elif KV_FORMAT == _MODEL:
            if NUM_BUFFERS > 1:
                _copy_rows(
                    kv_ptr, entries, latent.index(1 - buffer), rope.index(1 - buffer),
                    KV_STRIDE, GROUP, HAS_ROPE, COPY,
                )  # fmt: skip
                entries = load_entries(row_list, n + 2 * BLOCK_N, end, BLOCK_N, ROWS)
            async_copy.wait_group(NUM_BUFFERS - 1)
        else:
            _store_decoded(
                packed, kv_ptr, packed_entries, keys_latent, keys_rope,
                KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, ROWS,
            )  # fmt: skip
            packed = _load_packed(
                kv_ptr, entries, KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, PACKED
            )
            packed_entries = entries
            entries = load_entries(row_list, n + 2 * BLOCK_N, end, BLOCK_N, ROWS)
        fence_async_shared()
        gl.barrier()

        if BLOCK_H <= 32:
            # Two chains of dependent matrix instructions, half as long as one.
            HALF: gl.constexpr = _RANK // 2
            scores = warpgroup_mma(
                keys_latent.slice(0, HALF, 1),
                q.slice(0, HALF, 1).permute((1, 0)),
                zeros,
                is_async=True,
            )
            other = warpgroup_mma(
                keys_latent.slice(HALF, HALF, 1),
                q.slice(HALF, HALF, 1).permute((1, 0)),
                zeros,
                is_async=True,
            )
            if HAS_ROPE:
                scores = warpgroup_mma(
                    keys_rope, q_pe.permute((1, 0)), scores, is_async=True
                )
            scores, other = warpgroup_mma_wait(0, deps=(scores, other))
            scores += other
        else:
            scores = warpgroup_mma(keys_latent, q.permute((1, 0)), zeros, is_async=True)
            if HAS_ROPE:
                scores = warpgroup_mma(
                    keys_rope, q_pe.permute((1, 0)), scores, is_async=True
                )
            if LATE:
                _copy_rows(
                    kv_ptr, entries, latent.index(1 - buffer), rope.index(1 - buffer),
                    KV_STRIDE, GROUP, HAS_ROPE, COPY,
                )  # fmt: skip
                entries = load_entries(row_list, n + 2 * BLOCK_N, end, BLOCK_N, ROWS)
            scores = warpgroup_mma_wait(0, deps=(scores,))

        allowed = (keys >= 0)[:, None]
        if GROUP > 1:
            # An entry of a union is its row and, in the low bits, its tokens.
            allowed = allowed & ((keys[:, None] >> member[None, :]) & 1 != 0)
        scores = gl.where(allowed, scores * scale_log2, _MASKED)
        new_max = gl.maximum(row_max, gl.max(scores, 0))
        rescale = gl.exp2(row_max - new_max)
        probs = gl.exp2(scores - new_max[None, :])
        probs = gl.where(allowed, probs, 0.0)
        sums = sums * rescale[None, :] + probs
        row_max = new_max

        probs_shared.store(probs.to(DTYPE))
        if WARPS == 4:
            acc = acc * gl.convert_layout(rescale, VALUE_HEADS)[None, :]
        else:  # the factors go to other threads, beside the probabilities
            rescale_shared.store(rescale)
        fence_async_shared()
        gl.barrier()
        if WARPS > 4:
            acc = acc * rescale_shared.load(VALUE_HEADS)[None, :]
        acc = warpgroup_mma(
            keys_latent.permute((1, 0)), probs_shared, acc, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=(acc,))
        gl.barrier()
        if KV_FORMAT == _MODEL and NUM_BUFFERS == 1:
            _copy_rows(
                kv_ptr, entries, keys_latent, keys_rope,
                KV_STRIDE, GROUP, HAS_ROPE, COPY,
            )  # fmt: skip
            entries = load_entries(row_list, n + 2 * BLOCK_N, end, BLOCK_N, ROWS)
        buffer = (buffer + 1) % NUM_BUFFERS
    if KV_FORMAT == _MODEL:
        async_copy.wait_group(0)

    if LAUNCH_PDL:
        pdl("griddepcontrol.launch_dependents; // $0")

    norm, lse = end_of_softmax(row_max, gl.sum(sums, 0))
    if KV_FORMAT == _FP8:
        norm *= kv_scale

    token, head, mask_h = query_rows(
        group, head_block, num_tokens, num_heads, GROUP, BLOCK_H, SCORE_HEADS
    )
    out_rows = (token * num_heads + head) * num_splits + split
    gl.store(lse_ptr + out_rows, lse, mask=mask_h)

    norm = gl.convert_layout(norm, VALUE_HEADS)
    value = (acc * norm[None, :]).to(out_ptr.dtype.element_ty)
    OUT: gl.constexpr = _output_layout(BLOCK_H, WARPS)
    token, head, mask_h = query_rows(
        group, head_block, num_tokens, num_heads, GROUP, BLOCK_H, gl.SliceLayout(0, OUT)
    )
    out_rows = (token * num_heads + head) * num_splits + split
    offs_d = gl.arange(0, _RANK, layout=gl.SliceLayout(1, OUT))
    out = out_ptr + out_rows[None, :] * _RANK + offs_d[:, None]
    gl.store(out, gl.convert_layout(value, OUT), mask=mask_h[None, :])


@triton_kernel_dispatcher_with_warmup(
    kernel=sparse_mla_wgmma_kernel, warmup_inputs=attention_warmup_inputs
)
def sparse_mla_wgmma(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    kv_scale: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int,
    kv_format: KVFormat,
    has_rope: bool,
    config: SparseMLAConfig,
) -> DispatchSpec:
    """Launch `sparse_mla_wgmma_kernel`; see there for the shapes."""
    grid, arguments = attention_launch(
        q_nope, kv, lists, num_splits, kv_format, has_rope, config
    )
    return grid, arguments | {"NUM_BUFFERS": config.num_stages}
