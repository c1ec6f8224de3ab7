# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA attention for the matrix instructions of SM80 to SM121, in Gluon.

What `sparse_mla_kernel` of triton_mla_sparse.py computes, from the same arguments.
Most GPUs that it is for have 100 KB of shared memory per SM, and a program that fits
only once leaves the SM idle whenever it waits. So a program works on few KV rows at
a time and keeps the query in registers. Heads stand in columns, of which a matrix
instruction takes eight:

    s[key, head] = k[key, :] . q[head, :]      out[:, head] = v[key, :]^T p[key, head]

The 512 values of a row are shared out among the warps in four parts, the scale tiles
of fp8_ds_mla. A warp multiplies its part of the scores, which are added up through
shared memory, and computes its part of the output. Tensors of rows are therefore
[part, key, column].
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.v1.attention.ops.e4m3 import _FP16_ASM
from vllm.v1.attention.ops.triton_mla_sparse import (
    _FP8,
    _LOG2E,
    _LOGE2,
    _MASKED,
    _MODEL,
    _RANK,
    _ROPE_BYTES,
    _SCALES,
    _TILE,
    attention_launch,
    attention_warmup_inputs,
)
from vllm.v1.attention.ops.triton_mla_sparse_config import KVFormat, SparseMLAConfig

_PARTS = gl.constexpr(4)
# The columns of a part: latent values, half of them, and RoPE.
_HALF = gl.constexpr(64)
_ROPE_TILE = gl.constexpr(16)

# Probabilities are relative to the largest score seen when the accumulators were
# last rescaled: up to 2^8, which float16 holds as exactly as numbers up to 1.
_MAX_GROWTH = gl.constexpr(0x41000000)  # 8.0 in bits

# Four e4m3 bytes ($2) to two pairs of float16 ($0, $1), times a pair of factors: by
# the instruction, and where there is none, which leaves 2^8 to the factors.
DECODE_ASM = gl.constexpr("""{
.reg .b16 a, b;
.reg .b32 c, d;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 c, a;
cvt.rn.f16x2.e4m3x2 d, b;
mul.rn.f16x2 $0, c, $3;
mul.rn.f16x2 $1, d, $3;
}""")
_SOFTWARE_DECODE_ASM = gl.constexpr(_FP16_ASM.value.replace("$5", "$3"))
_SOFTWARE_FACTOR = gl.constexpr(256.0)
# A float32 to a pair of the same float16, and the pairs of 1 and of 2^8.
TWICE_ASM = gl.constexpr("cvt.rn.f16x2.f32 $0, $1, $1;")
TWICE_ONE = gl.constexpr(0x3C003C00)
_TWICE_SOFTWARE_FACTOR = gl.constexpr(0x5C005C00)
# A pair of bfloat16 ($1) to a pair of float16 ($0).
BF16_TO_FP16_ASM = gl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $1, 16;
and.b32 b, $1, 0xffff0000;
cvt.rn.f16x2.f32 $0, b, a;
}""")
# A query of a bfloat16 model in float16. The factor is a power of two and so
# rounds nothing: it moves float16's range, which then ends at 1.0e6.
QUERY_FACTOR = gl.constexpr(0.0625)
_MAX_FP16 = gl.constexpr(65504.0)


@gluon.jit
def pdl(INSTRUCTION: gl.constexpr):
    """Run an instruction of programmatic dependent launch. Gluon has none yet."""
    gl.inline_asm_elementwise(
        INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def place_of_program(num_heads, HEADS_PER_BLOCK: gl.constexpr):
    """Return the token group and the head block of this program."""
    num_head_blocks = gl.cdiv(num_heads, HEADS_PER_BLOCK)
    group = (gl.program_id(0) // num_head_blocks).to(gl.int64)
    return group, gl.program_id(0) % num_head_blocks


@gluon.jit
def load_entries(row_list, start, end, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Return a tile of a list, -1 from `end` on."""
    offs = start + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(row_list + offs, mask=offs < end, other=-1)


@gluon.jit
def part_of_list(count, num_splits, split, BLOCK_N: gl.constexpr):
    """Return where a split of a list starts and ends: whole tiles, but the last."""
    size = gl.cdiv(gl.cdiv(count, num_splits), BLOCK_N) * BLOCK_N
    return split * size, gl.minimum((split + 1) * size, count)


@gluon.jit
def row_pointers(kv_ptr, entries, STRIDE: gl.constexpr, GROUP: gl.constexpr):
    """Return where the rows of the entries start."""
    rows = entries if GROUP == 1 else entries >> 2
    return kv_ptr + rows.to(gl.int64) * STRIDE


@gluon.jit
def query_rows(
    group, head_block, num_tokens, num_heads, GROUP: gl.constexpr,
    BLOCK_H: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return token, head and whether they exist, for each row of the query tile."""
    # A row of the query is a head of a token of the group.
    HEADS_PER_BLOCK: gl.constexpr = BLOCK_H // GROUP
    offs_h = gl.arange(0, BLOCK_H, layout=layout)
    token = group * GROUP + offs_h // HEADS_PER_BLOCK
    head = head_block * HEADS_PER_BLOCK + offs_h % HEADS_PER_BLOCK
    return token, head, (head < num_heads) & (token < num_tokens)


@gluon.jit
def query_to_fp16(value):
    """Return the query of a bfloat16 model, times a factor, in float16."""
    value = value.to(gl.float32) * QUERY_FACTOR
    return gl.minimum(gl.maximum(value, -_MAX_FP16), _MAX_FP16).to(gl.float16)


@gluon.jit
def end_of_softmax(row_max, row_sum):
    """Return by what to multiply the accumulators, and the log-sum-exp."""
    # A token without rows gives (0, -inf), the identity of the merge.
    is_empty = row_sum == 0.0
    norm = 1.0 / gl.where(is_empty, 1.0, row_sum)
    lse = (row_max + gl.log2(row_sum)) * _LOGE2
    return norm, gl.where(is_empty, float("-inf"), lse)


# Layouts of one dimension of tensors [part, key or column, column or head].
@gluon.constexpr_function
def _dim0(layout):
    return gl.SliceLayout(1, gl.SliceLayout(2, layout))


@gluon.constexpr_function
def _dim1(layout):
    return gl.SliceLayout(0, gl.SliceLayout(2, layout))


@gluon.constexpr_function
def _dim2(layout):
    return gl.SliceLayout(0, gl.SliceLayout(1, layout))


@gluon.constexpr_function
def _entries_layout(block_n):
    """Return how a warp holds a tile of a list: an entry a thread."""
    keys = [[1 << bit] for bit in range(block_n.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=keys + [[0]] * (5 - len(keys)),
        warp_bases=[[0], [0]],
        block_bases=[],
        shape=[block_n],
    )


@gluon.constexpr_function
def _output_layout(block_h):
    """Return how threads store [4, 128, block_h] values of the output: 16 bytes each.

    A matrix instruction leaves a thread with single values of a head. Only threads
    of the same warp have to exchange theirs: every warp keeps its part.
    """
    columns = [[0, 1 << bit, 0] for bit in range(7)]
    heads = [[0, 0, 1 << bit] for bit in range(block_h.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=columns[:3] + heads[1:],
        lane_bases=columns[3:] + heads[:1],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 128, block_h],
    )


@gluon.constexpr_function
def _partial_layout(block_n, block_h):
    """Return how threads load partial scores: all parts of what is theirs of the sum.

    Which is, of [block_n, block_h], the right operand of a matrix instruction.
    """
    keys = [[0, 1 << bit, 0] for bit in range(block_n.bit_length() - 1)]
    heads = [[0, 0, 1 << bit] for bit in range(block_h.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=keys[:1] + keys[3:] + heads[3:] + [[1, 0, 0], [2, 0, 0]],
        lane_bases=keys[1:3] + heads[:3],
        warp_bases=[[0, 0, 0], [0, 0, 0]],
        block_bases=[],
        shape=[4, block_n, block_h],
    )


@gluon.jit
def _row_columns(WIDTH: gl.constexpr, layout: gl.constexpr):
    """Return the places [4, 1, WIDTH] of the values of all parts in a row."""
    part = gl.arange(0, _PARTS, layout=_dim0(layout))
    column = gl.arange(0, WIDTH, layout=_dim2(layout))
    return part[:, None, None] * WIDTH + column[None, None, :]


@gluon.jit
def _copy_rows(
    kv_ptr,
    rows,
    rows_rope,
    latent,  # shared [4, BLOCK_N, 128]
    rope,  # shared [4, BLOCK_N, 16]
    KV_STRIDE: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    COPY: gl.constexpr,
    COPY_ROPE: gl.constexpr,
):
    """Start copying 16-bit rows. Those below 0 become 0."""
    row_ptr = row_pointers(kv_ptr, rows, KV_STRIDE, GROUP)[None, :, None]
    ptr = row_ptr + _row_columns(_TILE, COPY)
    used = (rows >= 0)[None, :, None]
    async_copy.async_copy_global_to_shared(latent, ptr, mask=used)
    if HAS_ROPE:
        row_ptr = row_pointers(kv_ptr, rows_rope, KV_STRIDE, GROUP)[None, :, None]
        ptr = row_ptr + _RANK + _row_columns(_ROPE_TILE, COPY_ROPE)
        used = (rows_rope >= 0)[None, :, None]
        async_copy.async_copy_global_to_shared(rope, ptr, mask=used)
    async_copy.commit_group()


@gluon.jit
def _load_packed(
    kv_ptr,
    rows,
    rows_rope,
    KV_STRIDE: gl.constexpr,
    KV_FORMAT: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    PACKED: gl.constexpr,
    PACKED_ROPE: gl.constexpr,
):
    """Return fp8 rows in words: latent values, RoPE; and scales [4, BLOCK_N]."""
    # Bytes would take a register each.
    words = kv_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    row_ptr = row_pointers(words, rows, KV_STRIDE // 4, GROUP)
    used = rows >= 0
    ptr = row_ptr[None, :, None] + _row_columns(_TILE // 4, PACKED)
    latent = gl.load(ptr, mask=used[None, :, None], other=0)
    rope = latent
    if HAS_ROPE:
        rope_ptr = row_pointers(words, rows_rope, KV_STRIDE // 4, GROUP)
        if KV_FORMAT == _FP8:
            columns = _RANK // 4 + _row_columns(_ROPE_TILE // 4, PACKED_ROPE)
        else:
            columns = _ROPE_BYTES // 4 + _row_columns(_ROPE_TILE // 2, PACKED_ROPE)
        used_rope = (rows_rope >= 0)[None, :, None]
        rope = gl.load(rope_ptr[None, :, None] + columns, mask=used_rope, other=0)
    scales = rows  # of fp8_e4m3 there are none
    if KV_FORMAT != _FP8:
        floats = kv_ptr.to(gl.pointer_type(gl.float32), bitcast=True)
        row_ptr = row_pointers(floats, rows, KV_STRIDE // 4, GROUP)
        part = gl.arange(0, _PARTS, layout=_dim0(PACKED))
        ptr = row_ptr[None, :] + (_SCALES // 4 + part)[:, None]
        scales = gl.load(ptr, mask=used[None, :], other=0.0)
    return latent, rope, scales


@gluon.jit
def _decode(words, twice, HAS_E4M3: gl.constexpr):
    """Return [4, N, 2 M] pairs of float16 for [4, N, M] words of four e4m3 values."""
    low, high = gl.inline_asm_elementwise(
        DECODE_ASM if HAS_E4M3 else _SOFTWARE_DECODE_ASM,
        "=r,=r,r,r",
        [words, twice],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    pairs = gl.join(low, high)
    return gl.reshape(pairs, [words.shape[0], words.shape[1], 2 * words.shape[2]])


@gluon.jit
def _store_decoded(
    packed,
    latent,
    rope,
    KV_FORMAT: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    HAS_E4M3: gl.constexpr,
    LATENT_WORDS: gl.constexpr,
    ROPE_WORDS: gl.constexpr,
):
    """Store what `_load_packed` returned as float16 [4, N, 128] and [4, N, 16]."""
    words, words_rope, scales = packed
    ONE: gl.constexpr = TWICE_ONE if HAS_E4M3 else _TWICE_SOFTWARE_FACTOR
    if KV_FORMAT == _FP8:
        twice = gl.full_like(words, ONE)
    else:
        if not HAS_E4M3:
            scales *= _SOFTWARE_FACTOR
        twice = gl.inline_asm_elementwise(
            TWICE_ASM, "=r,r", [scales], dtype=gl.int32, is_pure=True, pack=1
        )[:, :, None]
    pairs = _decode(words, twice, HAS_E4M3)
    latent._reinterpret(gl.int32, pairs.shape, LATENT_WORDS).store(pairs)
    if HAS_ROPE:
        if KV_FORMAT == _FP8:
            pairs = _decode(words_rope, gl.full_like(words_rope, ONE), HAS_E4M3)
        else:
            pairs = gl.inline_asm_elementwise(
                BF16_TO_FP16_ASM, "=r,r", [words_rope], dtype=gl.int32,
                is_pure=True, pack=1,
            )  # fmt: skip
        rope._reinterpret(gl.int32, pairs.shape, ROPE_WORDS).store(pairs)


@gluon.jit
def _load_query(
    q_ptr, stride0, stride1, token, head, mask, FIRST: gl.constexpr,
    WIDTH: gl.constexpr, STEP: gl.constexpr, DTYPE: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return WIDTH columns from FIRST on, of every STEP: [4, WIDTH, BLOCK_H]."""
    part = gl.arange(0, _PARTS, layout=_dim0(layout))[:, None, None]
    column = gl.arange(0, WIDTH, layout=_dim1(layout))[None, :, None]
    ptr = q_ptr + (token * stride0 + head * stride1)[None, None, :]
    ptr += part * STEP + FIRST + column
    value = gl.load(ptr, mask=mask[None, None, :], other=0.0)
    if q_ptr.dtype.element_ty != DTYPE:
        value = query_to_fp16(value)
    return value


@gluon.jit(do_not_specialize=["num_tokens", "num_heads", "list_width"])
def sparse_mla_mma_kernel(
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
    BLOCK_H: gl.constexpr,  # 8 or 16
    BLOCK_N: gl.constexpr,  # 16 or 32
    NUM_BUFFERS: gl.constexpr,  # tiles of KV rows in shared memory: 1, or 2 of 16-bit
    HAS_E4M3: gl.constexpr,  # whether there is an instruction that decodes e4m3
    LAUNCH_PDL: gl.constexpr,
):
    # grid: (token groups * head blocks, splits), as for `sparse_mla_kernel`.
    HEADS_PER_BLOCK: gl.constexpr = BLOCK_H // GROUP
    # fp8 values are exact in float16.
    DTYPE: gl.constexpr = (
        q_nope_ptr.dtype.element_ty if KV_FORMAT == _MODEL else gl.float16
    )
    # Each of the four warps has a part, which it also brings, 16 bytes a thread.
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    COPY: gl.constexpr = gl.BlockedLayout(
        [1, BLOCK_N // 2, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0]
    )
    COPY_ROPE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]
    )
    PACKED: gl.constexpr = gl.BlockedLayout(
        [1, BLOCK_N // 4, 4], [1, 4, 8], [4, 1, 1], [2, 1, 0]
    )
    PACKED_ROPE: gl.constexpr = gl.BlockedLayout(
        [1, 1, 2 if KV_FORMAT == _FP8 else 4], [1, 16, 2], [4, 1, 1], [2, 1, 0]
    )
    ROWS: gl.constexpr = _dim1(COPY if KV_FORMAT == _MODEL else PACKED)
    ROWS_ROPE: gl.constexpr = _dim1(COPY_ROPE if KV_FORMAT == _MODEL else PACKED_ROPE)
    ENTRIES: gl.constexpr = _entries_layout(BLOCK_N)
    # Scores and probabilities, as the second product takes them, in every warp.
    PROBS: gl.constexpr = gl.SliceLayout(0, RIGHT)
    PROBS_KEYS: gl.constexpr = gl.SliceLayout(1, PROBS)
    PROBS_HEADS: gl.constexpr = gl.SliceLayout(0, PROBS)
    PARTIAL: gl.constexpr = _partial_layout(BLOCK_N, BLOCK_H)
    # The rows that a matrix instruction takes at once lie in different banks.
    LATENT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
    LATENT_WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
    ROPE_WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 4, 2, [2, 1, 0])

    group, head_block = place_of_program(num_heads, HEADS_PER_BLOCK)
    split = gl.program_id(1)
    num_splits = gl.num_programs(1)

    if LAUNCH_PDL:
        # What wrote the query may still run.
        pdl("griddepcontrol.wait; // $0")
    row_list = lists_ptr + group * list_width
    count = gl.minimum(gl.load(counts_ptr + group), list_width)
    start, end = part_of_list(count, num_splits, split, BLOCK_N)
    rows = load_entries(row_list, start, end, BLOCK_N, ROWS)
    rows_rope = load_entries(row_list, start, end, BLOCK_N, ROWS_ROPE)
    next_n = start + BLOCK_N
    next_rows = load_entries(row_list, next_n, end, BLOCK_N, ROWS)
    next_rows_rope = load_entries(row_list, next_n, end, BLOCK_N, ROWS_ROPE)

    latent = gl.allocate_shared_memory(
        DTYPE, [NUM_BUFFERS, _PARTS, BLOCK_N, _TILE], LATENT
    )
    rope = gl.allocate_shared_memory(
        DTYPE, [NUM_BUFFERS, _PARTS, BLOCK_N, _ROPE_TILE], ROPE
    )
    if KV_FORMAT == _MODEL:
        _copy_rows(
            kv_ptr, rows, rows_rope, latent.index(0), rope.index(0),
            KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
        )  # fmt: skip
        if NUM_BUFFERS > 1:
            _copy_rows(
                kv_ptr, next_rows, next_rows_rope, latent.index(1), rope.index(1),
                KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
            )  # fmt: skip
    else:
        packed = _load_packed(
            kv_ptr, rows, rows_rope,
            KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, PACKED, PACKED_ROPE,
        )  # fmt: skip
        _store_decoded(
            packed, latent.index(0), rope.index(0),
            KV_FORMAT, HAS_ROPE, HAS_E4M3, LATENT_WORDS, ROPE_WORDS,
        )  # fmt: skip
        packed = _load_packed(
            kv_ptr, next_rows, next_rows_rope,
            KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, PACKED, PACKED_ROPE,
        )  # fmt: skip

    token, head, mask_q = query_rows(
        group, head_block, num_tokens, num_heads, GROUP, BLOCK_H, _dim2(RIGHT)
    )
    q_low = _load_query(
        q_nope_ptr, q_nope_stride0, q_nope_stride1, token, head, mask_q,
        0, _HALF, _TILE, DTYPE, RIGHT,
    )  # fmt: skip
    q_high = _load_query(
        q_nope_ptr, q_nope_stride0, q_nope_stride1, token, head, mask_q,
        _HALF, _HALF, _TILE, DTYPE, RIGHT,
    )  # fmt: skip
    if HAS_ROPE:
        q_pe = _load_query(
            q_pe_ptr, q_pe_stride0, q_pe_stride1, token, head, mask_q,
            0, _ROPE_TILE, _ROPE_TILE, DTYPE, RIGHT,
        )  # fmt: skip

    # exp2 is the hardware's exponential. Scaling after the fp32 products keeps
    # q . k from overflowing fp16.
    scale_log2 = sm_scale * _LOG2E
    if q_nope_ptr.dtype.element_ty != DTYPE:
        scale_log2 *= 1.0 / QUERY_FACTOR
    if KV_FORMAT == _FP8:
        kv_scale = gl.load(kv_scale_ptr)
        scale_log2 *= kv_scale
    member = gl.arange(0, BLOCK_H, layout=PROBS_HEADS) // HEADS_PER_BLOCK
    acc = gl.zeros([_PARTS, _TILE, BLOCK_H], gl.float32, MMA)
    row_max = gl.full([BLOCK_H], _MASKED, gl.float32, PROBS_HEADS)
    # Summed over the keys at the end.
    sums = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, PROBS)
    zeros = gl.zeros([_PARTS, BLOCK_N, BLOCK_H], gl.float32, MMA)
    all_parts = gl.zeros([_PARTS, BLOCK_N, BLOCK_H], DTYPE, RIGHT)

    # Where registers allow it, a tile is read for both products before the warps wait
    # for each other, and its memory is free for another one after that.
    EARLY: gl.constexpr = BLOCK_N * BLOCK_H <= 256
    # Rows are asked for one or two tiles before they are multiplied. A thread holds
    # one entry of each tile, and gets those that it needs from shared memory.
    TWO_AHEAD: gl.constexpr = NUM_BUFFERS > 1 or KV_FORMAT != _MODEL
    entries = load_entries(row_list, start, end, BLOCK_N, ENTRIES)
    next_entries = load_entries(row_list, next_n, end, BLOCK_N, ENTRIES)
    last_entries = load_entries(row_list, next_n + BLOCK_N, end, BLOCK_N, ENTRIES)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    keys_shared = gl.allocate_shared_memory(gl.int32, [BLOCK_N], plain)
    rows_shared = gl.allocate_shared_memory(gl.int32, [BLOCK_N], plain)
    partial_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 2, 0])
    partial = gl.allocate_shared_memory(
        gl.float32, [_PARTS, BLOCK_N, BLOCK_H], partial_layout
    )

    buffer = 0
    for n in range(start, end, BLOCK_N):
        keys_latent = latent.index(buffer)
        keys_rope = rope.index(buffer)
        if KV_FORMAT == _MODEL:
            async_copy.wait_group(NUM_BUFFERS - 1)
        gl.barrier()
        keys_shared.store(entries)
        rows_shared.store(last_entries if TWO_AHEAD else next_entries)

        # Two chains of dependent matrix instructions, half as long as one.
        scores = mma_v2(keys_latent.slice(0, _HALF, 2).load(LEFT), q_low, zeros)
        other = mma_v2(keys_latent.slice(_HALF, _HALF, 2).load(LEFT), q_high, zeros)
        if HAS_ROPE:
            scores = mma_v2(keys_rope.load(LEFT), q_pe, scores)
        if EARLY:
            values = keys_latent.permute((0, 2, 1)).load(LEFT)
        partial.store(scores + other)
        # Every warp waits here for every other's part.
        scores = gl.sum(partial.load(PARTIAL), 0)
        scores = gl.convert_layout(scores, PROBS, assert_trivial=True) * scale_log2
        keys = keys_shared.load(PROBS_KEYS)
        if EARLY and KV_FORMAT == _MODEL:
            _copy_rows(
                kv_ptr, rows_shared.load(ROWS), rows_shared.load(ROWS_ROPE),
                keys_latent, keys_rope, KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
            )  # fmt: skip

        allowed = (keys >= 0)[:, None]
        if GROUP > 1:
            # An entry of a union is its row and, in the low bits, its tokens.
            allowed = allowed & ((keys[:, None] >> member[None, :]) & 1 != 0)
        scores = gl.where(allowed, scores, _MASKED)
        # Positive floats are ordered as their bits are, and above all negative ones.
        growth = (scores - row_max[None, :]).to(gl.int32, bitcast=True)
        has_grown = gl.max(gl.reshape(growth, [BLOCK_N * BLOCK_H]), 0) > _MAX_GROWTH
        old_max = row_max
        if has_grown:
            row_max = gl.maximum(row_max, gl.max(scores, 0))
            sums = sums * gl.exp2(old_max - row_max)[None, :]
        probs = gl.exp2(scores - row_max[None, :])
        probs = gl.where(allowed, probs, 0.0)
        sums += probs

        probs, _ = gl.broadcast(probs.to(DTYPE)[None, :, :], all_parts)
        if not EARLY:
            values = keys_latent.permute((0, 2, 1)).load(LEFT)
        # Two products, since the assembler copies accumulators that one of two ways has
        # changed to other registers and back.
        if has_grown:
            rescale = gl.exp2(old_max - row_max)
            rescale = gl.convert_layout(rescale, _dim2(MMA))[None, None, :]
            acc = mma_v2(values, probs, acc * rescale)
        else:
            acc = mma_v2(values, probs, acc)

        if KV_FORMAT != _MODEL:
            _store_decoded(
                packed, keys_latent, keys_rope,
                KV_FORMAT, HAS_ROPE, HAS_E4M3, LATENT_WORDS, ROPE_WORDS,
            )  # fmt: skip
            packed = _load_packed(
                kv_ptr, rows_shared.load(ROWS), rows_shared.load(ROWS_ROPE),
                KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, PACKED, PACKED_ROPE,
            )  # fmt: skip
        elif not EARLY:
            _copy_rows(
                kv_ptr, rows_shared.load(ROWS), rows_shared.load(ROWS_ROPE),
                keys_latent, keys_rope, KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
            )  # fmt: skip
        entries = next_entries
        next_entries = last_entries
        last_entries = load_entries(row_list, n + 3 * BLOCK_N, end, BLOCK_N, ENTRIES)
        buffer = (buffer + 1) % NUM_BUFFERS
    if KV_FORMAT == _MODEL:
        async_copy.wait_group(0)

    if LAUNCH_PDL:
        pdl("griddepcontrol.launch_dependents; // $0")

    norm, lse = end_of_softmax(row_max, gl.sum(sums, 0))
    if KV_FORMAT == _FP8:
        norm *= kv_scale

    token, head, mask_h = query_rows(
        group, head_block, num_tokens, num_heads, GROUP, BLOCK_H, PROBS_HEADS
    )
    out_rows = (token * num_heads + head) * num_splits + split
    gl.store(lse_ptr + out_rows, lse, mask=mask_h)

    norm = gl.convert_layout(norm, _dim2(MMA))
    value = (acc * norm[None, None, :]).to(out_ptr.dtype.element_ty)
    OUT: gl.constexpr = _output_layout(BLOCK_H)
    token, head, mask_h = query_rows(
        group, head_block, num_tokens, num_heads, GROUP, BLOCK_H, _dim2(OUT)
    )
    out_rows = (token * num_heads + head) * num_splits + split
    part = gl.arange(0, _PARTS, layout=_dim0(OUT))[:, None, None]
    column = gl.arange(0, _TILE, layout=_dim1(OUT))[None, :, None]
    out = out_ptr + out_rows[None, None, :] * _RANK + (part * _TILE + column)
    gl.store(out, gl.convert_layout(value, OUT), mask=mask_h[None, None, :])


@triton_kernel_dispatcher_with_warmup(
    kernel=sparse_mla_mma_kernel, warmup_inputs=attention_warmup_inputs
)
def sparse_mla_mma(
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
    """Launch `sparse_mla_mma_kernel`; see there for the shapes."""
    grid, arguments = attention_launch(
        q_nope, kv, lists, num_splits, kv_format, has_rope, config
    )
    return grid, arguments | {
        "BLOCK_N": config.block_n,
        "NUM_BUFFERS": config.num_stages,
        "HAS_E4M3": config.has_e4m3,
    }
