"""The other kernels that can do the same work: vLLM's native ones, which set the ratio, and its Triton ones.

An adapter is a function of a shape, the KV pool and one call's inputs, for the query that all calls share. It returns
a function that makes a call and gives back [T, H, 512], or the reason why the kernel does not serve this shape. What
vLLM does in every layer to call the kernel, joining and padding the query included, is inside the call; what it does
once a step is not.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from benchmarks.workload import RANK, WIDTH, Pool, Shape
from tests.kernels.reference import Inputs

Call = Callable[[Inputs], torch.Tensor]
PAGE = 64


@dataclass(frozen=True)
class Unavailable:
    """Why a kernel does not serve a shape."""

    reason: str


def _is_sm90() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def flash_attention(shape: Shape, pool: Pool, query: Inputs) -> Call | Unavailable:
    """FlashAttention 3 as FLASH_ATTN_MLA_SPARSE calls it: every KV row is a page of one token."""
    if pool.kv != "16-bit":
        return Unavailable("takes a 16-bit KV cache only")
    if not _is_sm90():
        return Unavailable("is compared on SM90 only")
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    cu_seqlens_q = torch.arange(shape.tokens + 1, dtype=torch.int32, device="cuda")
    k = pool.rows[:, RANK:].unsqueeze(1).unsqueeze(1)
    v = pool.rows[:, :RANK].unsqueeze(1).unsqueeze(1)
    return lambda inputs: flash_attn_varlen_func(
        q=inputs.q_pe,
        k=k,
        v=v,
        q_v=inputs.q_nope,
        max_seqlen_q=1,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_k=inputs.topk.shape[1],
        seqused_k=inputs.valid_count,
        block_table=inputs.topk,
        softmax_scale=inputs.sm_scale,
        causal=True,
        fa_version=3,
    )


def flashmla(shape: Shape, pool: Pool, query: Inputs) -> Call | Unavailable:
    """FlashMLA's sparse forward over bfloat16 as FLASHMLA_SPARSE calls it: heads padded to a multiple of 64."""
    if pool.kv != "16-bit" or shape.dtype != "bfloat16":
        return Unavailable("takes bfloat16 only")
    if not _is_sm90():
        return Unavailable("is compared on SM90 only")
    from vllm import _custom_ops as ops
    from vllm.v1.attention.ops.flashmla import flash_mla_sparse_fwd

    padded_heads = -(-shape.heads // 64) * 64
    q = torch.zeros(shape.tokens, padded_heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    kv = pool.rows.unsqueeze(1)

    def call(inputs: Inputs) -> torch.Tensor:
        ops.concat_mla_q(inputs.q_nope, inputs.q_pe, q)
        out, _, _ = flash_mla_sparse_fwd(
            q, kv, inputs.topk.unsqueeze(1), inputs.sm_scale, topk_length=inputs.valid_count
        )
        return out[:, : shape.heads]

    return call


def flashmla_fp8(shape: Shape, pool: Pool, query: Inputs) -> Call | Unavailable:
    """FlashMLA's fp8 sparse decode as FLASHMLA_SPARSE calls it: heads are padded to 64 or 128."""
    return _flashmla_fp8(shape, pool, query, pad=True)


def flashmla_fp8_alone(shape: Shape, pool: Pool, query: Inputs) -> Call | Unavailable:
    """The same kernel on a query that is joined and padded beforehand, so that neither costs anything."""
    return _flashmla_fp8(shape, pool, query, pad=False)


def _flashmla_fp8(shape: Shape, pool: Pool, query: Inputs, pad: bool) -> Call | Unavailable:
    if pool.kv != "fp8_ds_mla" or shape.dtype != "bfloat16":
        return Unavailable("takes an fp8_ds_mla KV cache under a bfloat16 query only")
    if not _is_sm90():
        return Unavailable("is compared on SM90 only")
    from vllm import _custom_ops as ops
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    tokens, heads = shape.tokens, shape.heads
    padded_heads = 64 if heads <= 64 else 128
    # vLLM takes the batch for one request below 32 heads and in a prefill, else every token for a request.
    batch = 1 if heads < 32 or shape.is_prefill else tokens
    metadata, _ = get_mla_metadata()
    cache_lens = torch.full((batch,), len(pool.rows), dtype=torch.int32, device="cuda")
    block_table = torch.zeros(batch, 1, dtype=torch.int32, device="cuda")
    pages = pool.rows.view(-1, PAGE, pool.rows.shape[1]).unsqueeze(-2)
    joined = torch.zeros(tokens, heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    padded = torch.zeros(tokens, padded_heads, WIDTH, dtype=torch.bfloat16, device="cuda")
    padded[:, :heads] = torch.cat((query.q_nope, query.q_pe), dim=-1)

    def call(inputs: Inputs) -> torch.Tensor:
        q = padded
        if pad:
            q = joined
            ops.concat_mla_q(inputs.q_nope, inputs.q_pe, joined)
            if padded_heads > heads:
                q = joined.new_zeros(padded.shape)
                q[:, :heads] = joined
        out, _ = flash_mla_with_kvcache(
            q=q.view(batch, tokens // batch, padded_heads, WIDTH),
            k_cache=pages,
            block_table=block_table,
            head_dim_v=RANK,
            cache_seqlens=cache_lens,
            tile_scheduler_metadata=metadata,
            is_fp8_kvcache=True,
            indices=inputs.topk.view(batch, tokens // batch, -1),
            softmax_scale=inputs.sm_scale,
        )
        return out.view(tokens, padded_heads, RANK)[:, :heads]

    return call


def triton_mla_dense(shape: Shape, pool: Pool, query: Inputs) -> Call | Unavailable:
    """TRITON_MLA's dense decode over as many tokens as top-k has: as many bytes, but not the same rows.

    Its inputs are those of `dense_inputs`.
    """
    if shape.is_prefill:
        return Unavailable("is a decode kernel")
    if pool.kv == "fp8_ds_mla":
        return Unavailable("takes no fp8_ds_mla KV cache")
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    rows = pool.rows if pool.kv == "16-bit" else pool.rows.view(torch.float8_e4m3fn)
    cache = rows.view(-1, PAGE, 1, WIDTH)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    splits = _compute_num_kv_splits(query.topk.shape[1], num_sms)
    scale = torch.ones((), dtype=torch.float32, device="cuda") if pool.scale is None else pool.scale

    def call(inputs: Inputs) -> torch.Tensor:
        q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
        out = torch.zeros_like(inputs.q_nope)
        lse = torch.zeros(q.shape[:2], dtype=q.dtype, device="cuda")
        logits = torch.empty(*q.shape[:2], splits, RANK + 1, dtype=torch.float32, device="cuda")
        decode_attention_fwd(
            q,
            cache,
            cache[..., :RANK],
            out,
            lse,
            inputs.topk,
            inputs.valid_count,
            logits,
            splits,
            inputs.sm_scale,
            PAGE,
            k_scale=scale,
            v_scale=scale,
            is_mla=True,
        )
        return out

    return call


def dense_rows(inputs: Inputs) -> Inputs:
    """Return inputs whose lists are rows that follow each other, near the first row of each list."""
    num_topk = inputs.topk.shape[1]
    start = inputs.topk[:, :1] // num_topk * num_topk
    return replace(inputs, topk=start + torch.arange(num_topk, dtype=torch.int32, device=inputs.topk.device))


def dense_inputs(inputs: Inputs) -> Inputs:
    """Return `dense_rows` as a dense kernel wants them: a block table, int32 [T, K / 64], in place of the lists."""
    return replace(inputs, topk=dense_rows(inputs).topk[:, ::PAGE] // PAGE)


def xpu_triton(shape: Shape, pool: Pool, query: Inputs) -> Call | Unavailable:
    """The sparse Triton kernel of XPU_MLA_SPARSE: one program for 16 heads of a token, no splitting."""
    if pool.kv != "16-bit":
        return Unavailable("takes a 16-bit KV cache only")
    from vllm.v1.attention.ops.xpu_mla_sparse import triton_bf16_mla_sparse_interface

    kv = pool.rows.unsqueeze(1)

    def call(inputs: Inputs) -> torch.Tensor:
        q = torch.cat((inputs.q_nope, inputs.q_pe), dim=-1)
        return triton_bf16_mla_sparse_interface(q, kv, inputs.topk.unsqueeze(1), inputs.sm_scale)[0]

    return call


@dataclass(frozen=True)
class Peer:
    """A kernel to compare with."""

    name: str
    make_call: Callable[[Shape, Pool, Inputs], Call | Unavailable]
    native: bool = False  # whether it counts as the native kernel of the ratio
    dense: bool = False  # whether it takes `dense_inputs`


PEERS = [
    Peer("FLASH_ATTN_MLA_SPARSE", flash_attention, native=True),
    Peer("FLASHMLA_SPARSE", flashmla, native=True),
    Peer("FLASHMLA_SPARSE fp8", flashmla_fp8, native=True),
    Peer("FLASHMLA_SPARSE fp8, padding free", flashmla_fp8_alone),
    Peer("TRITON_MLA dense", triton_mla_dense, dense=True),
    Peer("XPU_MLA_SPARSE", xpu_triton),
]


def never_run() -> dict[str, str]:
    """Return the peers that cannot be run at all, with the reason."""
    installed = importlib.util.find_spec("tilelang") is not None
    state = "installed, but it" if installed else "not installed; it"
    return {"tilelang": f"{state} ships no sparse MLA kernel to call, only an example to copy"}
