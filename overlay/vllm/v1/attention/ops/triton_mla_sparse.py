# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA attention over a 16-bit KV cache, in Triton.

Every query token t attends to its own list of KV cache rows R_t, chosen by the
DSA indexer. MLA stores one latent row c (512 values) and one RoPE key r (64
values, absent in NoPE models) per token, shared by all heads:

    s[t, h, j] = sm_scale * (q_nope[t, h] . c[j] + q_pe[t, h] . r[j])   j in R_t
    out[t, h]  = sum_j softmax_j(s[t, h, :]) * c[j]
    lse[t, h]  = ln sum_j exp(s[t, h, j])

The list of a token is cut into `num_splits` parts so that a small decode batch
still fills the GPU; a second kernel merges the parts by their log-sum-exp.
"""

from dataclasses import dataclass
from typing import Any

import torch

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    TritonWarmupTensor,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.triton_utils import LOG2E, LOGE2, tl, triton

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
MAX_SPLITS = 32

_LOG2E = tl.constexpr(LOG2E)
_LOGE2 = tl.constexpr(LOGE2)
# Masked scores and the initial row maximum. Finite, because (-inf) - (-inf) is
# NaN; its exponentials are masked, so no key can be mistaken for it.
_MASKED = tl.constexpr(-1.0e30)
# The 512 latent values are four tiles of 128: one 512-wide accumulator spills.
_TILE = tl.constexpr(128)
_RANK = tl.constexpr(KV_LORA_RANK)
_ROPE = tl.constexpr(QK_ROPE_HEAD_DIM)


@dataclass(frozen=True)
class SparseMLAConfig:
    """Tile sizes and launch options of the attention kernel."""

    block_h: int  # query heads per program
    block_n: int  # KV rows per loop iteration
    num_warps: int
    num_stages: int


# Largest head count -> configuration. Each fits the 99 KB of shared memory of
# SM86, SM89, SM120 and SM121, the smallest of the supported GPUs.
CONFIGS: dict[int, SparseMLAConfig] = {
    8: SparseMLAConfig(block_h=8, block_n=64, num_warps=4, num_stages=2),
    128: SparseMLAConfig(block_h=16, block_n=64, num_warps=4, num_stages=2),
}


def get_config(num_heads: int) -> SparseMLAConfig:
    """Return the configuration for `num_heads` query heads on this rank."""
    return next(config for heads, config in CONFIGS.items() if num_heads <= heads)


def get_num_splits(num_tokens: int, num_head_blocks: int, num_sms: int) -> int:
    """Return into how many parts each token's row list is cut.

    The largest power of two, at most MAX_SPLITS, that keeps the grid within two
    programs per SM. It may depend only on what a CUDA graph fixes: the padded
    token count, never the row counts.
    """
    parts = 2 * num_sms // max(num_tokens * num_head_blocks, 1)
    return min(MAX_SPLITS, 1 << (parts.bit_length() - 1)) if parts > 1 else 1


def get_workspace_shapes(
    num_heads: int, num_sms: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the fp32 shapes of the scratch for any token count.

    `get_num_splits` bounds the partial results: tokens * splits * heads is at
    most 2 * num_sms * heads, rounded up to whole head blocks.
    """
    rows = 2 * num_sms * min(num_heads, get_config(num_heads).block_h)
    return (rows, KV_LORA_RANK), (rows,)


@triton.jit(do_not_specialize=["num_heads", "num_topk"])
def sparse_mla_kernel(
    q_nope_ptr,  # fp16/bf16 [T, H, 512], unit last stride
    q_pe_ptr,  # fp16/bf16 [T, H, 64], unit last stride; unread without HAS_ROPE
    kv_ptr,  # fp16/bf16 [rows, KV_STRIDE]: 512 latent values, then 64 RoPE values
    topk_ptr,  # int32 [T, num_topk], physical rows of kv
    valid_count_ptr,  # int32 [T], used entries of each topk row
    out_ptr,  # fp16/bf16 [T, H, 512], or fp32 [T, H, splits, 512]
    lse_ptr,  # fp32 [T, H, splits], natural log
    sm_scale,  # fp32
    num_heads,  # H
    num_topk,
    q_nope_stride0,
    q_nope_stride1,
    q_pe_stride0,
    q_pe_stride1,
    # A run-time row stride would hide the 16-byte alignment of the rows, and
    # without it the gather is neither vectorized nor asynchronous.
    KV_STRIDE: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # grid: (T * head blocks, splits). The head blocks of one token are adjacent,
    # so they find each other's KV rows in L2.
    num_head_blocks = tl.cdiv(num_heads, BLOCK_H)
    token = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    head_block = tl.program_id(0) % num_head_blocks
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)

    offs_h = head_block * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, _TILE)
    offs_r = tl.arange(0, _ROPE)
    offs_n = tl.arange(0, BLOCK_N)
    mask_h = (offs_h < num_heads)[:, None]

    q_nope = q_nope_ptr + token * q_nope_stride0
    q_nope += offs_h[:, None] * q_nope_stride1 + offs_d[None, :]
    q0 = tl.load(q_nope, mask=mask_h, other=0.0)
    q1 = tl.load(q_nope + _TILE, mask=mask_h, other=0.0)
    q2 = tl.load(q_nope + 2 * _TILE, mask=mask_h, other=0.0)
    q3 = tl.load(q_nope + 3 * _TILE, mask=mask_h, other=0.0)
    if HAS_ROPE:
        q_pe = q_pe_ptr + token * q_pe_stride0
        q_pe += offs_h[:, None] * q_pe_stride1 + offs_r[None, :]
        qr = tl.load(q_pe, mask=mask_h, other=0.0)

    acc0 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    acc1 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    acc2 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    acc3 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    row_max = tl.full([BLOCK_H], _MASKED, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    # exp2 is the hardware's exponential. Scaling after the fp32 dot keeps q . k
    # from overflowing fp16.
    scale_log2 = sm_scale * _LOG2E

    # Whole tiles of the used entries, in equal parts; the last may be short.
    valid_count = tl.minimum(tl.load(valid_count_ptr + token), num_topk)
    part = tl.cdiv(tl.cdiv(valid_count, num_splits), BLOCK_N) * BLOCK_N
    start = split * part
    end = tl.minimum(start + part, valid_count)

    # The indices are loaded one iteration ahead, so that the KV loads of an
    # iteration do not wait for them and the pipeliner can overlap them.
    topk_row = topk_ptr + token * num_topk
    next_rows = tl.load(topk_row + start + offs_n, mask=start + offs_n < end, other=-1)
    for n in tl.range(start, end, BLOCK_N):
        rows = next_rows
        next_n = n + BLOCK_N + offs_n
        next_rows = tl.load(topk_row + next_n, mask=next_n < end, other=-1)

        # Rows outside the list are never read: they may hold NaN.
        used = rows >= 0
        mask_n = used[:, None]
        # rows * stride passes 2^31 in a cache of 3.7 million tokens.
        kv = kv_ptr + rows.to(tl.int64)[:, None] * KV_STRIDE
        k0 = tl.load(kv + offs_d[None, :], mask=mask_n, other=0.0)
        k1 = tl.load(kv + _TILE + offs_d[None, :], mask=mask_n, other=0.0)
        k2 = tl.load(kv + 2 * _TILE + offs_d[None, :], mask=mask_n, other=0.0)
        k3 = tl.load(kv + 3 * _TILE + offs_d[None, :], mask=mask_n, other=0.0)

        scores = tl.dot(q0, tl.trans(k0))
        scores = tl.dot(q1, tl.trans(k1), scores)
        scores = tl.dot(q2, tl.trans(k2), scores)
        scores = tl.dot(q3, tl.trans(k3), scores)
        if HAS_ROPE:
            kr = tl.load(kv + _RANK + offs_r[None, :], mask=mask_n, other=0.0)
            scores = tl.dot(qr, tl.trans(kr), scores)

        scores = tl.where(used[None, :], scores * scale_log2, _MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2(row_max - new_max)
        probs = tl.where(used[None, :], tl.exp2(scores - new_max[:, None]), 0.0)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max

        p = probs.to(k0.dtype)
        acc0 = tl.dot(p, k0, acc0 * rescale[:, None])
        acc1 = tl.dot(p, k1, acc1 * rescale[:, None])
        acc2 = tl.dot(p, k2, acc2 * rescale[:, None])
        acc3 = tl.dot(p, k3, acc3 * rescale[:, None])

    # A token without rows gives (0, -inf), the identity of the merge.
    is_empty = row_sum == 0.0
    norm = (1.0 / tl.where(is_empty, 1.0, row_sum))[:, None]
    lse = (row_max + tl.log2(row_sum)) * _LOGE2
    lse = tl.where(is_empty, float("-inf"), lse)

    out_rows = (token * num_heads + offs_h) * num_splits + split
    tl.store(lse_ptr + out_rows, lse, mask=offs_h < num_heads)
    out = out_ptr + out_rows[:, None] * _RANK + offs_d[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out, (acc0 * norm).to(dtype), mask=mask_h)
    tl.store(out + _TILE, (acc1 * norm).to(dtype), mask=mask_h)
    tl.store(out + 2 * _TILE, (acc2 * norm).to(dtype), mask=mask_h)
    tl.store(out + 3 * _TILE, (acc3 * norm).to(dtype), mask=mask_h)


@triton.jit
def merge_splits_kernel(
    partial_out_ptr,  # fp32 [T * H, NUM_SPLITS, 512]
    partial_lse_ptr,  # fp32 [T * H, NUM_SPLITS], natural log
    out_ptr,  # fp16/bf16 [T * H, 512]
    lse_ptr,  # fp32 [T * H], natural log
    NUM_SPLITS: tl.constexpr,
):
    # grid: (T * H, 512 / 128)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    offs_d = tile * _TILE + tl.arange(0, _TILE)

    lse = tl.load(partial_lse_ptr + splits)
    max_lse = tl.max(lse, 0)
    # With no rows at all every difference would be (-inf) - (-inf).
    max_lse = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    weights = tl.exp2((lse - max_lse) * _LOG2E)
    total = tl.sum(weights, 0)

    partial = tl.load(partial_out_ptr + splits[:, None] * _RANK + offs_d[None, :])
    out = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * _RANK + offs_d, out.to(out_ptr.dtype.element_ty))
    if tile == 0:
        # log2(0) is -inf, the log-sum-exp of a token without rows.
        tl.store(lse_ptr + row, max_lse + tl.log2(total) * _LOGE2)


def _attention_warmup_inputs(
    num_heads: int, dtype: torch.dtype, has_rope: bool
) -> list[dict[str, Any]]:
    """Return one launch per compiled variant: splits change only the output."""
    kv_width = KV_LORA_RANK + (QK_ROPE_HEAD_DIM if has_rope else 0)
    q_nope = TritonWarmupTensor(dtype, shape=(1, num_heads, KV_LORA_RANK))
    q_pe = TritonWarmupTensor(dtype, shape=(1, num_heads, QK_ROPE_HEAD_DIM))
    return [
        {
            "q_nope": q_nope,
            "q_pe": q_pe if has_rope else q_nope,
            "kv": TritonWarmupTensor(dtype, shape=(1, kv_width)),
            "topk": TritonWarmupTensor(torch.int32, shape=(1, 1)),
            "valid_count": TritonWarmupTensor(torch.int32),
            "out": TritonWarmupTensor(out_dtype),
            "lse": TritonWarmupTensor(torch.float32),
            "sm_scale": 1.0,
            "num_splits": num_splits,
            "has_rope": has_rope,
            "config": get_config(num_heads),
        }
        for num_splits, out_dtype in ((1, dtype), (2, torch.float32))
    ]


@triton_kernel_dispatcher_with_warmup(
    kernel=sparse_mla_kernel, warmup_inputs=_attention_warmup_inputs
)
def sparse_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    valid_count: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sm_scale: float,
    num_splits: int,
    has_rope: bool,
    config: SparseMLAConfig,
) -> DispatchSpec:
    """Launch `sparse_mla_kernel`; see there for the shapes."""
    num_tokens, num_heads, _ = q_nope.shape
    grid = (num_tokens * triton.cdiv(num_heads, config.block_h), num_splits)
    return grid, {
        "num_heads": num_heads,
        "num_topk": topk.shape[1],
        "KV_STRIDE": kv.stride(0),
        "HAS_ROPE": has_rope,
        "BLOCK_H": config.block_h,
        "BLOCK_N": config.block_n,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _merge_warmup_inputs(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return one launch per split count above one."""
    return [
        {
            "partial_out": TritonWarmupTensor(torch.float32),
            "partial_lse": TritonWarmupTensor(torch.float32),
            "out": TritonWarmupTensor(dtype, shape=(1, 1, KV_LORA_RANK)),
            "lse": TritonWarmupTensor(torch.float32),
            "num_splits": 1 << log2_splits,
        }
        for log2_splits in range(1, MAX_SPLITS.bit_length())
    ]


@triton_kernel_dispatcher_with_warmup(
    kernel=merge_splits_kernel, warmup_inputs=_merge_warmup_inputs
)
def merge_splits(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_splits: int,
) -> DispatchSpec:
    """Launch `merge_splits_kernel`; see there for the shapes."""
    num_tokens, num_heads, _ = out.shape
    grid = (num_tokens * num_heads, KV_LORA_RANK // 128)
    return grid, {"NUM_SPLITS": num_splits, "num_warps": 4}


def sparse_mla_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    valid_count: torch.Tensor,
    sm_scale: float,
    *,
    num_splits: int = 1,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: SparseMLAConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend every token to its own list of KV cache rows.

    Args:
        q_nope: fp16/bf16 [T, H, 512], absorbed latent part of the query. Any
            strides with a unit last one.
        q_pe: [T, H, 64] of the same dtype, RoPE part; [T, H, 0] for NoPE.
        kv: [rows, 576] (512 for NoPE) of the same dtype, one row per cached
            token. The row stride may be larger.
        topk: int32 [T, K], contiguous: row numbers in kv, used ones first.
            Entries below 0 are skipped.
        valid_count: int32 [T], how many entries of each topk row are used.
        sm_scale: softmax scale, applied to the fp32 scores.
        num_splits: parts per token, a power of two up to MAX_SPLITS; see
            `get_num_splits`.
        workspace: fp32 scratch of at least T * H * num_splits rows, [rows, 512]
            and [rows]; allocated here when None. Unused with one split.
        config: tile sizes; by default those of `get_config`.

    Returns:
        The output [T, H, 512] in the dtype of q_nope, and its log-sum-exp, fp32
        [T, H], natural log. Tokens without rows give 0 and -inf.

    Raises:
        ValueError: the shapes or dtypes are not those above.

    """
    num_tokens, num_heads, rank = q_nope.shape
    rope_dim = q_pe.shape[-1]
    has_rope = rope_dim > 0
    if rank != KV_LORA_RANK or rope_dim not in (0, QK_ROPE_HEAD_DIM):
        raise ValueError(
            f"sparse MLA needs a latent width of {KV_LORA_RANK} and a RoPE width of "
            f"{QK_ROPE_HEAD_DIM} or 0, got {rank} and {rope_dim}"
        )
    if kv.shape[-1] != rank + rope_dim:
        raise ValueError(
            f"KV rows are {kv.shape[-1]} wide, the query needs {rank + rope_dim}"
        )
    if q_nope.dtype not in (torch.float16, torch.bfloat16) or not (
        q_nope.dtype == q_pe.dtype == kv.dtype
    ):
        raise ValueError(
            "sparse MLA needs query and KV cache in the same 16-bit dtype, got "
            f"{q_nope.dtype}, {q_pe.dtype} and {kv.dtype}"
        )

    out = q_nope.new_empty(q_nope.shape)
    lse = q_nope.new_empty((num_tokens, num_heads), dtype=torch.float32)
    partial_out, partial_lse = out, lse
    if num_splits > 1:
        num_rows = num_tokens * num_heads * num_splits
        if workspace is None:
            workspace = (
                q_nope.new_empty((num_rows, rank), dtype=torch.float32),
                q_nope.new_empty(num_rows, dtype=torch.float32),
            )
        partial_out, partial_lse = (scratch[:num_rows] for scratch in workspace)
    sparse_mla(
        q_nope,
        q_pe if has_rope else q_nope,
        kv,
        topk,
        valid_count,
        partial_out,
        partial_lse,
        sm_scale,
        num_splits,
        has_rope,
        config or get_config(num_heads),
    )
    if num_splits > 1:
        merge_splits(partial_out, partial_lse, out, lse, num_splits)
    return out, lse
