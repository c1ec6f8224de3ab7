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

fp8 rows are copied to shared memory as they are. Decoded there, they would take more
of its bandwidth than they save in reading; so each product decodes its own operand on
the way to registers. A thread loads neighbouring bytes, and what it gets of a row
decides the order of columns: the query is loaded in that order, and the output put
back in the true one.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.v1.attention.ops.triton_mla_sparse import (
    _FP8,
    _LOG2E,
    _LOGE2,
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

_PARTS = gl.constexpr(4)
# The columns of a part: latent values, half of them, and RoPE.
_HALF = gl.constexpr(64)
_ROPE_TILE = gl.constexpr(16)

# Probabilities are relative to the largest score seen when the accumulators were
# last rescaled: up to 2^8, which float16 holds as exactly as numbers up to 1.
_MAX_GROWTH = gl.constexpr(0x41000000)  # 8.0 in bits

# Four e4m3 bytes of a key ($2) to two pairs of float16 ($0, $1): by the instruction,
# and where there is none by moving bits, which divides by 2^8. An operand of inline
# assembly stands there for each of the four results.
_KEYS_ASM = gl.constexpr("""{
.reg .b16 a, b;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
_KEYS_SOFTWARE_ASM = gl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 1;
shr.u32 d, b, 1;
and.b32 c, c, 0x3f803f80;
and.b32 d, d, 0x3f803f80;
lop3.b32 $0, a, 0x80008000, c, 0xEA;
lop3.b32 $1, b, 0x80008000, d, 0xEA;
}""")
# Four e4m3 bytes of each of two keys ($4, $12) to four pairs of float16 ($0 to $3),
# one value of each key, times a pair of factors ($20).
_VALUES_ASM = gl.constexpr("""{
.reg .b32 a, b;
.reg .b16 c, d, e, f;
prmt.b32 a, $4, $12, 0x5140;
prmt.b32 b, $4, $12, 0x7362;
mov.b32 {c, d}, a;
mov.b32 {e, f}, b;
cvt.rn.f16x2.e4m3x2 $0, c;
cvt.rn.f16x2.e4m3x2 $1, d;
cvt.rn.f16x2.e4m3x2 $2, e;
cvt.rn.f16x2.e4m3x2 $3, f;
mul.rn.f16x2 $0, $0, $20;
mul.rn.f16x2 $1, $1, $20;
mul.rn.f16x2 $2, $2, $20;
mul.rn.f16x2 $3, $3, $20;
}""")
_VALUES_SOFTWARE_ASM = gl.constexpr("""{
.reg .b32 a, b, c, d, e, f;
prmt.b32 a, $4, $12, 0x5140;
prmt.b32 b, $4, $12, 0x7362;
prmt.b32 c, a, 0, 0x1404;
prmt.b32 d, a, 0, 0x3424;
prmt.b32 e, b, 0, 0x1404;
prmt.b32 f, b, 0, 0x3424;
shr.u32 $0, c, 1;
shr.u32 $1, d, 1;
shr.u32 $2, e, 1;
shr.u32 $3, f, 1;
and.b32 $0, $0, 0x3f803f80;
and.b32 $1, $1, 0x3f803f80;
and.b32 $2, $2, 0x3f803f80;
and.b32 $3, $3, 0x3f803f80;
lop3.b32 $0, c, 0x80008000, $0, 0xEA;
lop3.b32 $1, d, 0x80008000, $1, 0xEA;
lop3.b32 $2, e, 0x80008000, $2, 0xEA;
lop3.b32 $3, f, 0x80008000, $3, 0xEA;
mul.rn.f16x2 $0, $0, $20;
mul.rn.f16x2 $1, $1, $20;
mul.rn.f16x2 $2, $2, $20;
mul.rn.f16x2 $3, $3, $20;
}""")
_SOFTWARE_FACTOR = gl.constexpr(256.0)
# Pairs of float16: of 1 and of that factor.
TWICE_ONE = gl.constexpr(0x3C003C00)
_TWICE_SOFTWARE_FACTOR = gl.constexpr(0x5C005C00)
# Two float32 to a pair of float16.
_PAIR_ASM = gl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")
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


# How a warp holds words of fp8 rows, so that once decoded they are operands of matrix
# instructions, but in another order: a thread of a group of four has 32 bytes of a key,
# and one of eight groups 16 bytes of each value. The last dimension is that of the
# results of a word.
@gluon.constexpr_function
def _keys_layout(block_n):
    rows = [[0, 1 << bit, 0, 0] for bit in range(block_n.bit_length() - 1)]
    words = [[0, 0, 1 << bit, 0] for bit in range(5)]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1], [0, 0, 0, 2], *words[:3], *rows[3:]],
        lane_bases=words[3:] + rows[:3],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, block_n, 32, 4],
    )


@gluon.constexpr_function
def _values_layout(block_n):
    """Return that of [4, block_n / 2, 32, 8]: words of two keys."""
    pairs = [[0, 1 << bit, 0, 0] for bit in range(block_n.bit_length() - 2)]
    words = [[0, 0, 1 << bit, 0] for bit in range(5)]
    results = [[0, 0, 0, 1 << bit] for bit in range(3)]
    return gl.DistributedLinearLayout(
        reg_bases=results + words[:2] + pairs[2:],
        lane_bases=pairs[:2] + words[2:],
        warp_bases=[[1, 0, 0, 0], [2, 0, 0, 0]],
        block_bases=[],
        shape=[4, block_n // 2, 32, 8],
    )


@gluon.constexpr_function
def _value_words_layout(block_n):
    """Return that of [4, block_n, 32]: the words, key by key."""
    rows = [[0, 1 << bit, 0] for bit in range(block_n.bit_length() - 1)]
    words = [[0, 0, 1 << bit] for bit in range(5)]
    return gl.DistributedLinearLayout(
        reg_bases=words[:2] + rows[:1] + rows[3:],
        lane_bases=rows[1:3] + words[2:],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, block_n, 32],
    )


@gluon.constexpr_function
def _rope_layout(block_n, words):
    """Return that of [block_n, words, results of a word]: the RoPE values of a part."""
    rows = [[1 << bit, 0, 0] for bit in range(block_n.bit_length() - 1)]
    bits = [[0, 1 << bit, 0] for bit in range(words.bit_length() - 1)]
    results = [[0, 0, 1], [0, 0, 2]][: 7 - len(bits) - 1]
    return gl.DistributedLinearLayout(
        reg_bases=results + bits[:-4] + rows[3:],
        lane_bases=bits[-4:-2] + rows[:3],
        warp_bases=bits[-2:],
        block_bases=[],
        shape=[block_n, words, 64 // words],
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
def _copy_packed(
    kv_ptr,
    rows,
    rows_rope,
    rows_scales,
    latent,  # shared [4, BLOCK_N, 32]
    rope,  # shared [BLOCK_N, 16] or [BLOCK_N, 32]
    scales,  # shared [BLOCK_N, 4]
    KV_STRIDE: gl.constexpr,
    KV_FORMAT: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_ROPE: gl.constexpr,
    COPY: gl.constexpr,
    COPY_ROPE: gl.constexpr,
    COPY_SCALES: gl.constexpr,
):
    """Start copying fp8 rows as they are, in words. Those below 0 become 0."""
    words = kv_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    row_ptr = row_pointers(words, rows, KV_STRIDE // 4, GROUP)[None, :, None]
    ptr = row_ptr + _row_columns(_TILE // 4, COPY)
    used = (rows >= 0)[None, :, None]
    async_copy.async_copy_global_to_shared(latent, ptr, mask=used)
    if HAS_ROPE:
        FIRST: gl.constexpr = _RANK // 4 if KV_FORMAT == _FP8 else _ROPE_BYTES // 4
        row_ptr = row_pointers(words, rows_rope, KV_STRIDE // 4, GROUP)[:, None]
        offs = gl.arange(0, rope.shape[1], layout=gl.SliceLayout(0, COPY_ROPE))
        used = (rows_rope >= 0)[:, None]
        async_copy.async_copy_global_to_shared(
            rope, row_ptr + (FIRST + offs)[None, :], mask=used
        )
    if KV_FORMAT != _FP8:
        floats = kv_ptr.to(gl.pointer_type(gl.float32), bitcast=True)
        row_ptr = row_pointers(floats, rows_scales, KV_STRIDE // 4, GROUP)[:, None]
        offs = gl.arange(0, _PARTS, layout=gl.SliceLayout(0, COPY_SCALES))
        used = (rows_scales >= 0)[:, None]
        async_copy.async_copy_global_to_shared(
            scales, row_ptr + (_SCALES // 4 + offs)[None, :], mask=used
        )
    async_copy.commit_group()


@gluon.jit
def _decode_keys(words, HAS_E4M3: gl.constexpr):
    """Return float16 [..., 4] for words [..., 1] of four e4m3 values."""
    return gl.inline_asm_elementwise(
        _KEYS_ASM if HAS_E4M3 else _KEYS_SOFTWARE_ASM,
        "=r,=r,r,r,r,r",
        [words],
        dtype=gl.float16,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _load_keys(latent, BLOCK_N: gl.constexpr, HAS_E4M3: gl.constexpr):
    """Return the halves of the keys, float16 [4, BLOCK_N, 64], without their scales."""
    WIDE: gl.constexpr = _keys_layout(BLOCK_N)
    words = latent.load(gl.SliceLayout(3, WIDE))[:, :, :, None]
    words, _ = gl.broadcast(
        words, gl.zeros([_PARTS, BLOCK_N, _TILE // 4, 4], gl.int32, WIDE)
    )
    value = _decode_keys(words, HAS_E4M3)
    # [.., thread, half, word, pair, value]
    value = gl.reshape(value, [_PARTS, BLOCK_N, 4, 2, 4, 2, 2])
    value = gl.permute(value, (0, 1, 4, 5, 2, 6, 3))
    return gl.split(gl.reshape(value, [_PARTS, BLOCK_N, _HALF, 2]))


@gluon.jit
def _load_rope_keys(
    rope, BLOCK_N: gl.constexpr, KV_FORMAT: gl.constexpr, HAS_E4M3: gl.constexpr
):
    """Return the RoPE values of the keys, float16 [4, BLOCK_N, 16]."""
    WORDS: gl.constexpr = rope.shape[1]
    WIDE: gl.constexpr = _rope_layout(BLOCK_N, WORDS)
    words = rope.load(gl.SliceLayout(2, WIDE))[:, :, None]
    words, _ = gl.broadcast(
        words, gl.zeros([BLOCK_N, WORDS, _ROPE // WORDS], gl.int32, WIDE)
    )
    if KV_FORMAT == _FP8:
        value = _decode_keys(words, HAS_E4M3)
    else:
        value = gl.inline_asm_elementwise(
            BF16_TO_FP16_ASM, "=r,r,r", [words], dtype=gl.float16, is_pure=True, pack=2
        )
    # [.., part, thread, pair, value]
    value = gl.reshape(value, [BLOCK_N, _PARTS, 4, 2, 2])
    value = gl.permute(value, (1, 0, 3, 2, 4))
    return gl.reshape(value, [_PARTS, BLOCK_N, _ROPE_TILE])


@gluon.jit
def _split_keys(value, layout: gl.constexpr):
    """Return [4, BLOCK_N / 2, ...] of the even keys and of the odd ones."""
    if len(value.shape) == 2:
        value = gl.reshape(value, [_PARTS, value.shape[1] // 2, 2])
    else:
        shape: gl.constexpr = [_PARTS, value.shape[1] // 2, 2, value.shape[2]]
        value = gl.permute(gl.reshape(value, shape), (0, 1, 3, 2))
    even, odd = gl.split(value)
    return gl.convert_layout(even, layout), gl.convert_layout(odd, layout)


@gluon.jit
def _decode_values(words, factors, BLOCK_N: gl.constexpr, HAS_E4M3: gl.constexpr):
    """Return the values, float16 [4, 128, BLOCK_N], of words [4, BLOCK_N, 32].

    The factors [4, BLOCK_N / 2] are pairs of float16. Columns are those of
    `_in_order`.
    """
    WIDE: gl.constexpr = _values_layout(BLOCK_N)
    even, odd = _split_keys(words, gl.SliceLayout(3, WIDE))
    zeros = gl.zeros([_PARTS, BLOCK_N // 2, _TILE // 4, 8], gl.int32, WIDE)
    even, _ = gl.broadcast(even[:, :, :, None], zeros)
    odd, _ = gl.broadcast(odd[:, :, :, None], zeros)
    factors, _ = gl.broadcast(factors[:, :, None, None], zeros)
    value = gl.inline_asm_elementwise(
        _VALUES_ASM if HAS_E4M3 else _VALUES_SOFTWARE_ASM,
        "=&r,=&r,=&r,=&r" + ",r" * 24,
        [even, odd, factors],
        dtype=gl.float16,
        is_pure=True,
        pack=8,
    )
    # [.., thread, word, pair, value, key]
    value = gl.reshape(value, [_PARTS, BLOCK_N // 2, 8, 4, 2, 2, 2])
    value = gl.permute(value, (0, 3, 4, 5, 2, 1, 6))
    return gl.reshape(value, [_PARTS, _TILE, BLOCK_N])


@gluon.jit
def _in_order(value):
    """Return accumulators [4, 128, BLOCK_H] over decoded values in their true order."""
    value = gl.reshape(value, [_PARTS, 8, 2, 8, value.shape[2]])
    value = gl.permute(value, (0, 3, 1, 2, 4))
    return gl.reshape(value, [_PARTS, _TILE, value.shape[4]])


@gluon.jit
def _load_query(
    q_ptr, stride0, stride1, token, head, mask, FIRST: gl.constexpr,
    WIDTH: gl.constexpr, STEP: gl.constexpr, DTYPE: gl.constexpr,
    KV_FORMAT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return WIDTH columns from FIRST on, of every STEP: [4, WIDTH, BLOCK_H].

    For fp8 they come in the order of decoded keys, whose second half starts with
    column 16.
    """
    part = gl.arange(0, _PARTS, layout=_dim0(layout))[:, None, None]
    column = gl.arange(0, WIDTH, layout=_dim1(layout))[None, :, None]
    if KV_FORMAT != _MODEL:
        pair = column // 2
        column = (
            pair % 4 * (STEP // 4) + column // 16 * 4 + pair // 4 % 2 * 2 + column % 2
        )
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
    NUM_BUFFERS: gl.constexpr,  # tiles of KV rows in shared memory: 1 or 2
    HAS_E4M3: gl.constexpr,  # whether there is an instruction that decodes e4m3
    MAY_SKIP: gl.constexpr,
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
    if KV_FORMAT == _MODEL:
        COPY: gl.constexpr = gl.BlockedLayout(
            [1, BLOCK_N // 2, 8], [1, 2, 16], [4, 1, 1], [2, 1, 0]
        )
        COPY_ROPE: gl.constexpr = gl.BlockedLayout(
            [1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0]
        )
        ROWS_ROPE: gl.constexpr = _dim1(COPY_ROPE)
    else:
        COPY: gl.constexpr = gl.BlockedLayout(
            [1, BLOCK_N // 4, 4], [1, 4, 8], [4, 1, 1], [2, 1, 0]
        )
        # Whole rows, since a piece of a row costs as much as 128 bytes of it.
        ROPE_WORDS: gl.constexpr = _ROPE // (4 if KV_FORMAT == _FP8 else 2)
        COPY_ROPE: gl.constexpr = gl.BlockedLayout(
            [1, 4], [128 // ROPE_WORDS, ROPE_WORDS // 4], [4, 1], [1, 0]
        )
        ROWS_ROPE: gl.constexpr = gl.SliceLayout(1, COPY_ROPE)
        COPY_SCALES: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
        ROWS_SCALES: gl.constexpr = gl.SliceLayout(1, COPY_SCALES)
    ROWS: gl.constexpr = _dim1(COPY)
    ENTRIES: gl.constexpr = _entries_layout(BLOCK_N)
    # Scores and probabilities, as the second product takes them, in every warp.
    PROBS: gl.constexpr = gl.SliceLayout(0, RIGHT)
    PROBS_KEYS: gl.constexpr = gl.SliceLayout(1, PROBS)
    PROBS_HEADS: gl.constexpr = gl.SliceLayout(0, PROBS)
    PARTIAL: gl.constexpr = _partial_layout(BLOCK_N, BLOCK_H)
    VALUE_WORDS: gl.constexpr = _value_words_layout(BLOCK_N)
    FACTORS: gl.constexpr = gl.SliceLayout(
        2, gl.SliceLayout(3, _values_layout(BLOCK_N))
    )
    group, head_block = place_of_program(num_heads, HEADS_PER_BLOCK)
    split = gl.program_id(1)
    num_splits = gl.num_programs(1)

    if LAUNCH_PDL:
        # What wrote the query may still run.
        pdl("griddepcontrol.wait; // $0")
    row_list = lists_ptr + group * list_width
    count = gl.load(counts_ptr + group)
    if MAY_SKIP and count < 0:
        return
    count = gl.minimum(count, list_width)
    start, end = part_of_list(count, num_splits, split, BLOCK_N)
    # The rows that a matrix instruction takes at once lie in different banks.
    if KV_FORMAT == _MODEL:
        LATENT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        ROPE: gl.constexpr = gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0])
        latent = gl.allocate_shared_memory(
            DTYPE, [NUM_BUFFERS, _PARTS, BLOCK_N, _TILE], LATENT
        )
        rope = gl.allocate_shared_memory(
            DTYPE, [NUM_BUFFERS, _PARTS, BLOCK_N, _ROPE_TILE], ROPE
        )
    else:
        LATENT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
        ROPE: gl.constexpr = gl.SwizzledSharedLayout(ROPE_WORDS // 4, 1, 4, [1, 0])
        SCALES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        latent = gl.allocate_shared_memory(
            gl.int32, [NUM_BUFFERS, _PARTS, BLOCK_N, _TILE // 4], LATENT
        )
        rope = gl.allocate_shared_memory(
            gl.int32, [NUM_BUFFERS, BLOCK_N, ROPE_WORDS], ROPE
        )
        scales = gl.allocate_shared_memory(
            gl.float32, [NUM_BUFFERS, BLOCK_N, _PARTS], SCALES
        )
    for ahead in gl.static_range(NUM_BUFFERS):
        n = start + ahead * BLOCK_N
        rows = load_entries(row_list, n, end, BLOCK_N, ROWS)
        rows_rope = load_entries(row_list, n, end, BLOCK_N, ROWS_ROPE)
        if KV_FORMAT == _MODEL:
            _copy_rows(
                kv_ptr, rows, rows_rope, latent.index(ahead), rope.index(ahead),
                KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
            )  # fmt: skip
        else:
            _copy_packed(
                kv_ptr, rows, rows_rope,
                load_entries(row_list, n, end, BLOCK_N, ROWS_SCALES),
                latent.index(ahead), rope.index(ahead), scales.index(ahead),
                KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, COPY, COPY_ROPE, COPY_SCALES,
            )  # fmt: skip

    token, head, mask_q = query_rows(
        group, head_block, num_tokens, num_heads, GROUP, BLOCK_H, _dim2(RIGHT)
    )
    q_low = _load_query(
        q_nope_ptr, q_nope_stride0, q_nope_stride1, token, head, mask_q,
        0, _HALF, _TILE, DTYPE, KV_FORMAT, RIGHT,
    )  # fmt: skip
    q_high = _load_query(
        q_nope_ptr, q_nope_stride0, q_nope_stride1, token, head, mask_q,
        _HALF if KV_FORMAT == _MODEL else 16, _HALF, _TILE, DTYPE, KV_FORMAT, RIGHT,
    )  # fmt: skip
    if HAS_ROPE:
        q_pe = _load_query(
            q_pe_ptr, q_pe_stride0, q_pe_stride1, token, head, mask_q,
            0, _ROPE_TILE, _ROPE_TILE, DTYPE, KV_FORMAT, RIGHT,
        )  # fmt: skip

    # exp2 is the hardware's exponential. Scaling after the fp32 products keeps
    # q . k from overflowing fp16.
    scale_log2 = sm_scale * _LOG2E
    if q_nope_ptr.dtype.element_ty != DTYPE:
        scale_log2 *= 1.0 / QUERY_FACTOR
    if KV_FORMAT == _FP8:
        kv_scale = gl.load(kv_scale_ptr)
        scale_log2 *= kv_scale if HAS_E4M3 else kv_scale * _SOFTWARE_FACTOR
    member = gl.arange(0, BLOCK_H, layout=PROBS_HEADS) // HEADS_PER_BLOCK
    acc = gl.zeros([_PARTS, _TILE, BLOCK_H], gl.float32, MMA)
    row_max = gl.full([BLOCK_H], _MASKED, gl.float32, PROBS_HEADS)
    # Summed over the keys at the end.
    sums = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, PROBS)
    zeros = gl.zeros([_PARTS, BLOCK_N, BLOCK_H], gl.float32, MMA)
    all_parts = gl.zeros([_PARTS, BLOCK_N, BLOCK_H], DTYPE, RIGHT)

    # Where registers allow it, a tile is read for both products before the warps wait
    # for each other, and its memory is free for another one after that.
    EARLY: gl.constexpr = KV_FORMAT != _MODEL or BLOCK_N * BLOCK_H <= 256
    # Rows are asked for one or two tiles before they are multiplied. A thread holds
    # one entry of each tile, and gets those that it needs from shared memory.
    entries = load_entries(row_list, start, end, BLOCK_N, ENTRIES)
    next_n = start + BLOCK_N
    next_entries = load_entries(row_list, next_n, end, BLOCK_N, ENTRIES)
    last_entries = load_entries(row_list, next_n + BLOCK_N, end, BLOCK_N, ENTRIES)
    far_entries = load_entries(row_list, next_n + 2 * BLOCK_N, end, BLOCK_N, ENTRIES)
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
        async_copy.wait_group(NUM_BUFFERS - 1)
        gl.barrier()
        keys_shared.store(entries)
        rows_shared.store(last_entries if NUM_BUFFERS > 1 else next_entries)

        # Two chains of dependent matrix instructions, half as long as one.
        if KV_FORMAT == _MODEL:
            scores = mma_v2(keys_latent.slice(0, _HALF, 2).load(LEFT), q_low, zeros)
            other = mma_v2(keys_latent.slice(_HALF, _HALF, 2).load(LEFT), q_high, zeros)
            if HAS_ROPE:
                scores = mma_v2(keys_rope.load(LEFT), q_pe, scores)
            scores += other
            if EARLY:
                values = keys_latent.permute((0, 2, 1)).load(LEFT)
        else:
            low, high = _load_keys(keys_latent, BLOCK_N, HAS_E4M3)
            scores = mma_v2(gl.convert_layout(low, LEFT), q_low, zeros)
            other = mma_v2(gl.convert_layout(high, LEFT), q_high, zeros)
            scores += other
            if KV_FORMAT != _FP8:
                factor = (
                    scales.index(buffer).permute((1, 0)).load(gl.SliceLayout(2, MMA))
                )
                if not HAS_E4M3:
                    factor *= _SOFTWARE_FACTOR
                scores *= factor[:, :, None]
            if HAS_ROPE:
                rope_keys = _load_rope_keys(keys_rope, BLOCK_N, KV_FORMAT, HAS_E4M3)
                rope_keys = gl.convert_layout(rope_keys, LEFT)
                scores = mma_v2(rope_keys, q_pe, scores)
            words = keys_latent.load(VALUE_WORDS)
            if KV_FORMAT == _FP8:
                ONE: gl.constexpr = TWICE_ONE if HAS_E4M3 else _TWICE_SOFTWARE_FACTOR
                factors = gl.full([_PARTS, BLOCK_N // 2], ONE, gl.int32, FACTORS)
            else:
                factor = (
                    scales.index(buffer)
                    .permute((1, 0))
                    .load(gl.SliceLayout(2, VALUE_WORDS))
                )
                if not HAS_E4M3:
                    factor *= _SOFTWARE_FACTOR
                even, odd = _split_keys(factor, FACTORS)
                factors = gl.inline_asm_elementwise(
                    _PAIR_ASM, "=r,r,r", [even, odd],
                    dtype=gl.int32, is_pure=True, pack=1,
                )  # fmt: skip
        partial.store(scores)
        # Every warp waits here for every other's part.
        scores = gl.sum(partial.load(PARTIAL), 0)
        scores = gl.convert_layout(scores, PROBS, assert_trivial=True) * scale_log2
        keys = keys_shared.load(PROBS_KEYS)
        if EARLY:
            rows = rows_shared.load(ROWS)
            rows_rope = rows_shared.load(ROWS_ROPE)
            if KV_FORMAT == _MODEL:
                _copy_rows(
                    kv_ptr, rows, rows_rope, keys_latent, keys_rope,
                    KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
                )  # fmt: skip
            else:
                _copy_packed(
                    kv_ptr, rows, rows_rope, rows_shared.load(ROWS_SCALES),
                    keys_latent, keys_rope, scales.index(buffer),
                    KV_STRIDE, KV_FORMAT, GROUP, HAS_ROPE, COPY, COPY_ROPE, COPY_SCALES,
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
        if KV_FORMAT != _MODEL:
            values = _decode_values(words, factors, BLOCK_N, HAS_E4M3)
            values = gl.convert_layout(values, LEFT)
        elif not EARLY:
            values = keys_latent.permute((0, 2, 1)).load(LEFT)
        # Two products, since the assembler copies accumulators that one of two ways has
        # changed to other registers and back.
        if has_grown:
            rescale = gl.exp2(old_max - row_max)
            rescale = gl.convert_layout(rescale, _dim2(MMA))[None, None, :]
            acc = mma_v2(values, probs, acc * rescale)
        else:
            acc = mma_v2(values, probs, acc)

        if not EARLY:
            _copy_rows(
                kv_ptr, rows_shared.load(ROWS), rows_shared.load(ROWS_ROPE),
                keys_latent, keys_rope, KV_STRIDE, GROUP, HAS_ROPE, COPY, COPY_ROPE,
            )  # fmt: skip
        entries = next_entries
        next_entries = last_entries
        last_entries = far_entries
        far_entries = load_entries(row_list, n + 4 * BLOCK_N, end, BLOCK_N, ENTRIES)
        buffer = (buffer + 1) % NUM_BUFFERS
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
    if KV_FORMAT != _MODEL:
        value = _in_order(value)
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
