# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA attention in Triton, over a 16-bit or fp8 KV cache.

Every query token t attends to its own list of KV cache rows R_t, chosen by the
DSA indexer. MLA stores one latent row c (512 values) and one RoPE key r (64
values, absent in NoPE models) per token, shared by all heads:

    s[t, h, j] = sm_scale * (q_nope[t, h] . c[j] + q_pe[t, h] . r[j])   j in R_t
    out[t, h]  = sum_j softmax_j(s[t, h, :]) * c[j]
    lse[t, h]  = ln sum_j exp(s[t, h, j])

The list of a token is cut into `num_splits` parts so that a small decode batch
still fills the GPU; a second kernel merges the parts by their log-sum-exp. In a
prefill, neighbouring tokens share most of their rows: one program then takes two
of them and walks over the union of their lists (gluon_union_rows.py). For more than
a few tokens there are faster attention kernels in Gluon: gluon_mla_sparse.py, and
gluon_mla_sparse_sm90.py for SM90.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm.model_executor.warmup.jit_warmup_triton_helper import (
    DispatchSpec,
    TritonWarmupTensor,
    triton_kernel_dispatcher_with_warmup,
)
from vllm.platforms import current_platform
from vllm.triton_utils import LOG2E, LOGE2, tl, triton
from vllm.v1.attention.ops.e4m3 import decode_e4m3
from vllm.v1.attention.ops.triton_mla_sparse_config import (
    MAX_SPLITS,
    MAX_UNION_TOKENS,
    KVFormat,
    SparseMLAConfig,
    get_alone_config,
    get_config,
    get_num_programs,
    get_num_splits,
    get_reachable_configs,
    get_union_specs,
)

KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
DS_MLA_ROW_BYTES = 656
_MAX_UNION_ROWS = 1 << 27

_LOG2E = tl.constexpr(LOG2E)
_LOGE2 = tl.constexpr(LOGE2)
# Masked scores and the initial row maximum. Finite, because (-inf) - (-inf) is
# NaN; its exponentials are masked, so no key can be mistaken for it.
_MASKED = tl.constexpr(-1.0e30)
# The 512 latent values are four tiles of 128: one 512-wide accumulator spills.
_TILE = tl.constexpr(128)
_RANK = tl.constexpr(KV_LORA_RANK)
_ROPE = tl.constexpr(QK_ROPE_HEAD_DIM)
# An fp8_ds_mla row: 512 e4m3 values, 4 fp32 scales (one for each tile of 128
# values), then 64 RoPE values in bf16, also in NoPE models.
_SCALES = tl.constexpr(512)
_ROPE_BYTES = tl.constexpr(528)

_MODEL = tl.constexpr(KVFormat.MODEL.value)
_FP8 = tl.constexpr(KVFormat.FP8.value)


@triton.jit
def _part(count, num_splits, split, BLOCK_N: tl.constexpr):
    """Return where a split of a list starts and ends: whole tiles, but the last."""
    size = tl.cdiv(tl.cdiv(count, num_splits), BLOCK_N) * BLOCK_N
    return split * size, tl.minimum((split + 1) * size, count)


@triton.jit
def _load_entries(row_list, start, end, BLOCK_N: tl.constexpr):
    """Return a tile of a list, -1 from `end` on."""
    offs = start + tl.arange(0, BLOCK_N)
    return tl.load(row_list + offs, mask=offs < end, other=-1)


@triton.jit
def _load_latent(
    row_ptr,  # [N], start of each KV row
    used,  # bool [N]
    TILE_INDEX: tl.constexpr,
    DTYPE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Return 128 latent values of each row in DTYPE, 0 for unused rows."""
    offsets = TILE_INDEX * _TILE + tl.arange(0, _TILE)
    # Rows outside the list are never read: they may hold NaN.
    tile = tl.load(row_ptr[:, None] + offsets[None, :], mask=used[:, None], other=0)
    if KV_FORMAT == _MODEL:
        return tile
    elif KV_FORMAT == _FP8:
        one = tl.full([1, 1], 1.0, tl.float32)
        return decode_e4m3(tile, one, DTYPE)
    else:
        scale_ptr = (row_ptr + _SCALES).to(tl.pointer_type(tl.float32)) + TILE_INDEX
        scale = tl.load(scale_ptr, mask=used, other=0.0)
        return decode_e4m3(tile, scale[:, None], DTYPE)


@triton.jit
def _load_rope(
    row_ptr,
    used,
    DTYPE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
):
    """Return the 64 RoPE values of each row in DTYPE, 0 for unused rows."""
    offsets = tl.arange(0, _ROPE)[None, :]
    mask = used[:, None]
    if KV_FORMAT == _MODEL:
        return tl.load(row_ptr[:, None] + _RANK + offsets, mask=mask, other=0.0)
    elif KV_FORMAT == _FP8:
        raw = tl.load(row_ptr[:, None] + _RANK + offsets, mask=mask, other=0)
        one = tl.full([1, 1], 1.0, tl.float32)
        return decode_e4m3(raw, one, DTYPE)
    else:
        rope_ptr = (row_ptr + _ROPE_BYTES).to(tl.pointer_type(tl.bfloat16))
        return tl.load(rope_ptr[:, None] + offsets, mask=mask, other=0.0).to(DTYPE)


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "list_width"])
def sparse_mla_kernel(
    q_nope_ptr,  # fp16/bf16 [T, H, 512], unit last stride
    q_pe_ptr,  # fp16/bf16 [T, H, 64], unit last stride; unread without HAS_ROPE
    kv_ptr,  # [rows, KV_STRIDE], as KV_FORMAT says; bytes unless 16-bit
    lists_ptr,  # int32 [T / GROUP, list_width]: rows of kv, or entries of unions
    counts_ptr,  # int32 [T / GROUP], used entries of each list
    kv_scale_ptr,  # fp32 scalar, the scale of the whole cache; read for FP8 only
    out_ptr,  # fp16/bf16 [T, H, splits, 512]
    lse_ptr,  # fp32 [T, H, splits], natural log
    sm_scale,  # fp32
    num_tokens,  # T
    num_heads,  # H
    list_width,  # K, or 2 K for unions
    q_nope_stride0,
    q_nope_stride1,
    q_pe_stride0,
    q_pe_stride1,
    # A run-time row stride would hide the 16-byte alignment of the rows, and
    # without it the gather is neither vectorized nor asynchronous.
    KV_STRIDE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MAY_SKIP: tl.constexpr,  # counts below 0 are of lists that another launch serves
    LAUNCH_PDL: tl.constexpr,
):
    # grid: (token groups * head blocks, splits). The head blocks of one group
    # are adjacent, so they find each other's KV rows in L2.
    HEADS_PER_BLOCK: tl.constexpr = BLOCK_H // GROUP
    num_head_blocks = tl.cdiv(num_heads, HEADS_PER_BLOCK)
    group = (tl.program_id(0) // num_head_blocks).to(tl.int64)
    head_block = tl.program_id(0) % num_head_blocks
    split = tl.program_id(1)
    num_splits = tl.num_programs(1)

    if LAUNCH_PDL:
        # What wrote the query may still run.
        tl.extra.cuda.gdc_wait()
    # The indices are loaded one iteration ahead, so that the KV loads of an
    # iteration do not wait for them and the pipeliner can overlap them.
    row_list = lists_ptr + group * list_width
    count = tl.load(counts_ptr + group)
    if MAY_SKIP and count < 0:
        return
    start, end = _part(tl.minimum(count, list_width), num_splits, split, BLOCK_N)
    next_entries = _load_entries(row_list, start, end, BLOCK_N)

    # A row of the query tile is a head of a token of the group.
    offs_h = tl.arange(0, BLOCK_H)
    member = offs_h // HEADS_PER_BLOCK
    token = group * GROUP + member
    head = head_block * HEADS_PER_BLOCK + offs_h % HEADS_PER_BLOCK
    mask_q = (head < num_heads) & (token < num_tokens)
    mask_h = mask_q[:, None]
    offs_d = tl.arange(0, _TILE)
    q_nope = q_nope_ptr + (token * q_nope_stride0 + head * q_nope_stride1)[:, None]
    q_nope += offs_d[None, :]
    q0 = tl.load(q_nope, mask=mask_h, other=0.0)
    q1 = tl.load(q_nope + _TILE, mask=mask_h, other=0.0)
    q2 = tl.load(q_nope + 2 * _TILE, mask=mask_h, other=0.0)
    q3 = tl.load(q_nope + 3 * _TILE, mask=mask_h, other=0.0)
    if HAS_ROPE:
        q_pe = q_pe_ptr + (token * q_pe_stride0 + head * q_pe_stride1)[:, None]
        qr = tl.load(q_pe + tl.arange(0, _ROPE)[None, :], mask=mask_h, other=0.0)
    DTYPE: tl.constexpr = q_nope_ptr.dtype.element_ty

    acc0 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    acc1 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    acc2 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    acc3 = tl.zeros([BLOCK_H, _TILE], tl.float32)
    row_max = tl.full([BLOCK_H], _MASKED, tl.float32)
    row_sum = tl.zeros([BLOCK_H], tl.float32)
    # exp2 is the hardware's exponential. Scaling after the fp32 dot keeps q . k
    # from overflowing fp16.
    scale_log2 = sm_scale * _LOG2E
    if KV_FORMAT == _FP8:
        kv_scale = tl.load(kv_scale_ptr)
        scale_log2 *= kv_scale

    for n in tl.range(start, end, BLOCK_N):
        entries = next_entries
        next_entries = _load_entries(row_list, n + BLOCK_N, end, BLOCK_N)

        used = entries >= 0
        if GROUP == 1:
            rows = entries
            allowed = used[None, :]
        else:
            # An entry of a union is its row and, in the low bits, its tokens.
            rows = entries >> 2
            allowed = (entries[None, :] >> member[:, None]) & 1 != 0
            allowed = allowed & used[None, :]
        # rows * stride passes 2^31 in a cache of 3.7 million tokens.
        row_ptr = kv_ptr + rows.to(tl.int64) * KV_STRIDE
        k0 = _load_latent(row_ptr, used, 0, DTYPE, KV_FORMAT)
        k1 = _load_latent(row_ptr, used, 1, DTYPE, KV_FORMAT)
        k2 = _load_latent(row_ptr, used, 2, DTYPE, KV_FORMAT)
        k3 = _load_latent(row_ptr, used, 3, DTYPE, KV_FORMAT)

        # Two chains of dependent matrix instructions, half as long as one.
        zeros = tl.zeros([BLOCK_H, BLOCK_N], tl.float32)
        scores = tl.dot(q0, tl.trans(k0), zeros)
        scores = tl.dot(q1, tl.trans(k1), scores)
        other = tl.dot(q2, tl.trans(k2), zeros)
        other = tl.dot(q3, tl.trans(k3), other)
        if HAS_ROPE:
            kr = _load_rope(row_ptr, used, DTYPE, KV_FORMAT)
            other = tl.dot(qr, tl.trans(kr), other)
        scores = (scores + other) * scale_log2

        scores = tl.where(allowed, scores, _MASKED)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2(row_max - new_max)
        probs = tl.exp2(scores - new_max[:, None])
        probs = tl.where(allowed, probs, 0.0)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max

        p = probs.to(DTYPE)
        acc0 = tl.dot(p, k0, acc0 * rescale[:, None])
        acc1 = tl.dot(p, k1, acc1 * rescale[:, None])
        acc2 = tl.dot(p, k2, acc2 * rescale[:, None])
        acc3 = tl.dot(p, k3, acc3 * rescale[:, None])

    if LAUNCH_PDL:
        tl.extra.cuda.gdc_launch_dependents()

    # A token without rows gives (0, -inf), the identity of the merge.
    is_empty = row_sum == 0.0
    norm = 1.0 / tl.where(is_empty, 1.0, row_sum)
    if KV_FORMAT == _FP8:
        norm *= kv_scale
    norm = norm[:, None]
    lse = (row_max + tl.log2(row_sum)) * _LOGE2
    lse = tl.where(is_empty, float("-inf"), lse)

    out_rows = (token * num_heads + head) * num_splits + split
    tl.store(lse_ptr + out_rows, lse, mask=mask_q)
    out = out_ptr + out_rows[:, None] * _RANK + offs_d[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out, (acc0 * norm).to(dtype), mask=mask_h)
    tl.store(out + _TILE, (acc1 * norm).to(dtype), mask=mask_h)
    tl.store(out + 2 * _TILE, (acc2 * norm).to(dtype), mask=mask_h)
    tl.store(out + 3 * _TILE, (acc3 * norm).to(dtype), mask=mask_h)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits_kernel(
    partial_out_ptr,  # fp16/bf16 [T * H, num_splits, 512]
    partial_lse_ptr,  # fp32 [T * H, num_splits], natural log
    out_ptr,  # fp16/bf16 [T * H, 512]
    lse_ptr,  # fp32 [T * H], natural log
    num_splits,
    BLOCK_S: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    # grid: (T * H, 512 / 128)
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    offs_s = tl.arange(0, BLOCK_S)
    mask_s = offs_s < num_splits
    splits = row * num_splits + offs_s
    offs_d = tile * _TILE + tl.arange(0, _TILE)

    if LAUNCH_PDL:
        # Everything before has run beside the end of the attention kernel.
        tl.extra.cuda.gdc_wait()
    lse = tl.load(partial_lse_ptr + splits, mask=mask_s, other=float("-inf"))
    partial_out = partial_out_ptr + splits[:, None] * _RANK + offs_d[None, :]
    partial = tl.load(partial_out, mask=mask_s[:, None], other=0.0).to(tl.float32)

    max_lse = tl.max(lse, 0)
    # With no rows at all every difference would be (-inf) - (-inf).
    max_lse = tl.where(max_lse == float("-inf"), 0.0, max_lse)
    weights = tl.exp2((lse - max_lse) * _LOG2E)
    total = tl.sum(weights, 0)

    out = tl.sum(partial * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * _RANK + offs_d, out.to(out_ptr.dtype.element_ty))
    if tile == 0:
        # log2(0) is -inf, the log-sum-exp of a token without rows.
        tl.store(lse_ptr + row, max_lse + tl.log2(total) * _LOGE2)


def attention_warmup_inputs(
    num_heads: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    has_rope: bool,
    config: SparseMLAConfig,
) -> list[dict[str, Any]]:
    """Return one launch: splits are compiled alike."""
    if kv_format is KVFormat.MODEL:
        kv = TritonWarmupTensor(dtype, shape=(1, 576 if has_rope else 512))
    elif kv_format is KVFormat.FP8:
        kv = TritonWarmupTensor(torch.uint8, shape=(1, 576 if has_rope else 512))
    else:
        kv = TritonWarmupTensor(torch.uint8, shape=(1, DS_MLA_ROW_BYTES))
    q_nope = TritonWarmupTensor(dtype, shape=(1, num_heads, KV_LORA_RANK))
    q_pe = TritonWarmupTensor(dtype, shape=(1, num_heads, QK_ROPE_HEAD_DIM))
    return [
        {
            "q_nope": q_nope,
            "q_pe": q_pe if has_rope else q_nope,
            "kv": kv,
            "lists": TritonWarmupTensor(torch.int32, shape=(1, 1)),
            "counts": TritonWarmupTensor(torch.int32),
            "kv_scale": TritonWarmupTensor(torch.float32),
            "out": TritonWarmupTensor(dtype),
            "lse": TritonWarmupTensor(torch.float32),
            "sm_scale": 1.0,
            "num_splits": 1,
            "kv_format": kv_format,
            "has_rope": has_rope,
            "config": config,
        }
    ]


def attention_launch(
    q_nope: torch.Tensor,
    kv: torch.Tensor,
    lists: torch.Tensor,
    num_splits: int,
    kv_format: KVFormat,
    has_rope: bool,
    config: SparseMLAConfig,
) -> DispatchSpec:
    """Return the grid, and the arguments that all attention kernels take."""
    num_tokens, num_heads, _ = q_nope.shape
    grid = (get_num_programs(num_tokens, num_heads, config), num_splits)
    return grid, {
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "list_width": lists.shape[1],
        "KV_STRIDE": kv.stride(0),
        "KV_FORMAT": kv_format.value,
        "HAS_ROPE": has_rope,
        "GROUP": config.group,
        "BLOCK_H": config.block_h,
        "MAY_SKIP": config.group > 1 or config.alone,
        "LAUNCH_PDL": config.launch_pdl,
        "launch_pdl": config.launch_pdl,
        "num_warps": config.num_warps,
        "maxnreg": config.maxnreg,
    }


@triton_kernel_dispatcher_with_warmup(
    kernel=sparse_mla_kernel, warmup_inputs=attention_warmup_inputs
)
def sparse_mla(
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
    """Launch `sparse_mla_kernel`; see there for the shapes."""
    grid, arguments = attention_launch(
        q_nope, kv, lists, num_splits, kv_format, has_rope, config
    )
    tile = {"BLOCK_N": config.block_n, "num_stages": config.num_stages}
    return grid, arguments | tile


# The modules in Gluon are imported where their kernels are needed: Gluon belongs to
# Triton's NVIDIA part, and the interpreter does not know it.


def attention_launcher(config: SparseMLAConfig) -> Any:
    """Return what launches the attention kernel of a configuration."""
    if config.gluon == "wgmma":
        from vllm.v1.attention.ops.gluon_mla_sparse_sm90 import sparse_mla_wgmma

        return sparse_mla_wgmma
    if config.gluon == "mma":
        from vllm.v1.attention.ops.gluon_mla_sparse import sparse_mla_mma

        return sparse_mla_mma
    return sparse_mla


def union_launcher() -> Any:
    """Return what launches the kernel that joins the lists of neighbours."""
    from vllm.v1.attention.ops.gluon_union_rows import union_rows

    return union_rows


def _merge_warmup_inputs(dtype: torch.dtype, launch_pdl: bool) -> list[dict[str, Any]]:
    """Return one launch per compiled variant."""
    return [
        {
            "partial_out": TritonWarmupTensor(dtype),
            "partial_lse": TritonWarmupTensor(torch.float32),
            "out": TritonWarmupTensor(dtype, shape=(1, 1, KV_LORA_RANK)),
            "lse": TritonWarmupTensor(torch.float32),
            "num_splits": 1 << log2_splits,
            "launch_pdl": launch_pdl,
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
    launch_pdl: bool,
) -> DispatchSpec:
    """Launch `merge_splits_kernel`; see there for the shapes."""
    num_tokens, num_heads, _ = out.shape
    grid = (num_tokens * num_heads, KV_LORA_RANK // 128)
    return grid, {
        "BLOCK_S": triton.next_power_of_2(num_splits),
        "LAUNCH_PDL": launch_pdl,
        "num_warps": 4,
        "launch_pdl": launch_pdl,
    }


def register_warmup(
    num_heads: int,
    num_topk: int,
    dtype: torch.dtype,
    kv_format: KVFormat,
    has_rope: bool,
    capability: tuple[int, int],
) -> None:
    """Have every variant that these arguments can reach compiled at start-up."""
    configs = get_reachable_configs(num_heads, kv_format, capability)
    for config in configs:
        attention_launcher(config).register_warmup(
            num_heads=num_heads,
            dtype=dtype,
            kv_format=kv_format,
            has_rope=has_rope,
            config=config,
        )
    if any(config.group > 1 for config in configs):
        union_launcher().register_warmup(num_topk=num_topk)
    for launch_pdl in {config.launch_pdl for config in configs}:
        merge_splits.register_warmup(dtype=dtype, launch_pdl=launch_pdl)


def get_kv_format(kv: torch.Tensor, dtype: torch.dtype, rope_dim: int) -> KVFormat:
    """Return what KV rows hold, told by their dtype and width.

    Raises:
        ValueError: no format has such rows.

    """
    width = kv.shape[-1]
    if kv.dtype == dtype and width == KV_LORA_RANK + rope_dim:
        return KVFormat.MODEL
    if kv.dtype in (torch.uint8, torch.float8_e4m3fn):
        if width == KV_LORA_RANK + rope_dim:
            return KVFormat.FP8
        if width == DS_MLA_ROW_BYTES:
            return KVFormat.FP8_DS_MLA
    raise ValueError(
        f"no KV format for rows of {width} x {kv.dtype} under a query of {dtype} with "
        f"{rope_dim} RoPE values: expected {KV_LORA_RANK + rope_dim} values of the "
        f"query's dtype, {KV_LORA_RANK + rope_dim} fp8_e4m3 bytes or "
        f"{DS_MLA_ROW_BYTES} fp8_ds_mla bytes"
    )


def sparse_mla_attention(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv: torch.Tensor,
    topk: torch.Tensor,
    valid_count: torch.Tensor,
    sm_scale: float,
    *,
    kv_scale: torch.Tensor | None = None,
    is_prefill: bool = False,
    config: SparseMLAConfig | None = None,
    num_splits: int | None = None,
    workspace: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend every token to its own list of KV cache rows.

    Args:
        q_nope: fp16/bf16 [T, H, 512], absorbed latent part of the query. Any
            strides with a unit last one.
        q_pe: [T, H, 64] of the same dtype, RoPE part; [T, H, 0] for NoPE.
        kv: one row per cached token, told apart by dtype and width: [rows, 576]
            (512 for NoPE) in the query's dtype; the same in e4m3, or its bytes;
            or [rows, 656] bytes of fp8_ds_mla, whose scales must be powers of
            two up to 2^7, as vLLM writes them (below 2^-24 they may count as 0),
            and whose RoPE values are unread in NoPE models. The row stride may be
            larger.
        topk: int32 [T, K], contiguous: row numbers in kv, used ones first.
            Entries below 0 are skipped.
        valid_count: int32 [T], how many entries of each topk row are used.
        sm_scale: softmax scale, applied to the fp32 scores.
        kv_scale: fp32 scalar, the scale of a per-tensor e4m3 cache.
        is_prefill: whether neighbouring tokens probably share rows.
        config: tile sizes; by default those of `get_config` for this GPU.
        num_splits: parts per list; by default those of `get_num_splits`.
        workspace: scratch as `get_workspace_specs` says; allocated here if None.

    Returns:
        The output [T, H, 512] in the dtype of q_nope, and its log-sum-exp, fp32
        [T, H], natural log. Tokens without rows give 0 and -inf.

    Raises:
        ValueError: the shapes or dtypes are not those above.

    """
    num_tokens, num_heads, rank = q_nope.shape
    num_topk = topk.shape[1]
    rope_dim = q_pe.shape[-1]
    if rank != KV_LORA_RANK or rope_dim not in (0, QK_ROPE_HEAD_DIM):
        raise ValueError(
            f"sparse MLA needs a latent width of {KV_LORA_RANK} and a RoPE width of "
            f"{QK_ROPE_HEAD_DIM} or 0, got {rank} and {rope_dim}"
        )
    if (
        q_nope.dtype not in (torch.float16, torch.bfloat16)
        or q_pe.dtype != q_nope.dtype
    ):
        raise ValueError(
            "sparse MLA needs a query in one 16-bit dtype, got "
            f"{q_nope.dtype} and {q_pe.dtype}"
        )
    kv_format = get_kv_format(kv, q_nope.dtype, rope_dim)
    if kv_format is KVFormat.FP8 and kv_scale is None:
        raise ValueError("a per-tensor fp8 KV cache needs kv_scale")
    if kv_format is not KVFormat.MODEL:
        kv = kv.view(torch.uint8)

    if config is None:
        # An entry of a union packs a row and its tokens into 31 bits.
        is_prefill = is_prefill and kv.shape[0] <= _MAX_UNION_ROWS
        capability = current_platform.get_device_capability()
        config = get_config(
            num_tokens, num_heads, kv_format, tuple(capability or (0, 0)), is_prefill
        )
    out = q_nope.new_empty(q_nope.shape)
    lse = q_nope.new_empty((num_tokens, num_heads), dtype=torch.float32)

    def attend(
        tokens: slice,
        launches: Sequence[tuple[SparseMLAConfig, torch.Tensor, torch.Tensor]],
    ) -> None:
        """Launch the attention of some tokens and, for several splits, the merge.

        Each launch has its configuration, lists and counts, and leaves some tokens to
        the others. All cut their lists into as many splits.
        """
        part_out, part_lse = out[tokens], lse[tokens]
        splits = num_splits or get_num_splits(
            part_lse.shape[0],
            num_heads,
            num_topk,
            config,
            current_platform.num_compute_units(),
        )
        partial_out, partial_lse = part_out, part_lse
        if splits > 1:
            num_rows = part_lse.numel() * splits
            if workspace is None:
                partial_out = out.new_empty((num_rows, KV_LORA_RANK))
                partial_lse = lse.new_empty(num_rows)
            else:
                partial_out, partial_lse = (s[:num_rows] for s in workspace[:2])
        for one, lists, counts in launches:
            attention_launcher(one)(
                q_nope[tokens],
                q_pe[tokens] if rope_dim else q_nope[tokens],
                kv,
                lists,
                counts,
                lse if kv_scale is None else kv_scale,
                partial_out,
                partial_lse,
                sm_scale,
                splits,
                kv_format,
                rope_dim > 0,
                one,
            )
        if splits > 1:
            merge_splits(
                partial_out, partial_lse, part_out, part_lse, splits, config.launch_pdl
            )

    if config.group == 1:
        attend(slice(None), [(config, topk, valid_count)])
        return out, lse

    alone_config = get_alone_config(config)
    for first in range(0, num_tokens, MAX_UNION_TOKENS):
        tokens = slice(first, first + MAX_UNION_TOKENS)
        lists, list_counts = topk[tokens], valid_count[tokens]
        specs = get_union_specs(list_counts.shape[0], num_topk)
        if workspace is None:
            scratch = [topk.new_empty(shape, dtype=dtype) for shape, dtype in specs]
        else:
            sizes = [shape[0] for shape, _ in specs]
            scratch = [s[:n] for s, n in zip(workspace[2:], sizes, strict=True)]
        union, union_counts, alone_counts = scratch
        union_launcher()(lists, list_counts, *scratch)
        attend(
            tokens, [(config, union, union_counts), (alone_config, lists, alone_counts)]
        )
    return out, lse
