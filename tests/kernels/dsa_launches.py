"""The Triton kernels that surround DSA attention in GLM-5 and DeepSeek-V3.2, launched as the models launch them.

Imports the installed vLLM, so it is for the processes in which those kernels are interpreted, compiled or run. Not
here: the sparse MLA and MQA logits kernels, which have tests of their own, and what vLLM launches for any model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from tests.kernels.overlay import load_overlay

load_overlay("vllm.v1.attention.ops.e4m3")  # before anything imports the installed one

from vllm.model_executor.kernels.attention.dsa import dcp_indexer_cutedsl  # noqa: E402
from vllm.models.deepseek_v32.common import kernels  # noqa: E402
from vllm.models.deepseek_v32.nvidia.ops import fused_q_cutedsl  # noqa: E402, F401
from vllm.v1.attention.backends.mla import indexer, sparse_utils  # noqa: E402
from vllm.v1.attention.ops import common, dcp  # noqa: E402

Outputs = dict[str, torch.Tensor]
FP16, BF16 = torch.float16, torch.bfloat16

RANK, ROPE, INDEX_DIM, TOPK, BLOCK = 512, 64, 128, 2048, 64
EPSILON = 1e-6
Q_SCALE = 2.0**-6
ROW_BYTES = {"fp8": RANK + ROPE, "fp8_ds_mla": 656}


@dataclass(frozen=True)
class Model:
    """Sizes of a model's attention on one rank of TP 8, and how its indexer rotates."""

    hidden_size: int
    q_lora_rank: int
    num_heads: int
    num_index_heads: int
    interleaved: bool


GLM = Model(6144, 2048, 8, 32, interleaved=True)
DEEPSEEK = Model(7168, 1536, 16, 64, interleaved=False)


class Inputs:
    """Reproducible random tensors, the same on every device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(4)

    def normal(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self._device)

    def spread(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Of magnitudes from 1e-4 to 10, so that fp8 values come out subnormal, and too large as well."""
        exponents = torch.rand(shape, generator=self._generator) * 5 - 4
        return (torch.randn(shape, generator=self._generator) * 10**exponents).to(dtype).to(self._device)

    def permutation(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self._generator).to(self._device)

    def cos_sin(self, num_positions: int) -> torch.Tensor:
        """[positions, ROPE], fp32."""
        frequencies = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE)
        angles = torch.arange(num_positions)[:, None] * frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=-1).to(self._device)


def norm_rope(
    model: Model,
    dtype: torch.dtype,
    kv_cache_dtype: str,
    device: str = "cpu",
    *,
    num_tokens: int = 70,
    k_scale: float = 0.004,
    has_indexer: bool = True,
    is_cached: bool = True,
    keep_index_k: bool = False,
) -> Outputs:
    """Launch what writes both caches.

    Without `is_cached` it leaves that to others, as in a prefill over several ranks, and then keeps the indexer's keys.
    """
    inputs = Inputs(device)
    num_blocks = num_tokens // BLOCK + 2
    lora = inputs.normal(num_tokens, model.q_lora_rank + RANK + ROPE, dtype=dtype)
    q_c, kv_c, k_pe = lora.split([model.q_lora_rank, RANK, ROPE], dim=-1)
    index_k = inputs.normal(num_tokens, INDEX_DIM + model.num_index_heads, dtype=dtype)[:, :INDEX_DIM]
    if kv_cache_dtype == "auto":
        mla_cache = torch.zeros(num_blocks, BLOCK, RANK + ROPE, dtype=dtype, device=device)
    else:
        mla_cache = torch.zeros(num_blocks, BLOCK, ROW_BYTES[kv_cache_dtype], dtype=torch.uint8, device=device)
    indexer_cache = torch.zeros(num_blocks, BLOCK, INDEX_DIM + 4, dtype=torch.uint8, device=device)
    slots = inputs.permutation(num_blocks * BLOCK)[:num_tokens]
    slots[num_tokens // 2] = -1  # padding
    topk = torch.zeros(num_tokens, TOPK, dtype=torch.int32, device=device)
    positions = inputs.permutation(4096)[:num_tokens]
    cos_sin = inputs.cos_sin(4096)
    kv_c_out, k_pe_out = torch.zeros_like(kv_c), torch.zeros_like(k_pe)
    keep_index_k = has_indexer and (keep_index_k or not is_cached)
    index_k_out = torch.zeros(num_tokens, INDEX_DIM, dtype=dtype, device=device) if keep_index_k else None
    q_c_out = kernels.fused_norm_rope(
        positions,
        q_c,
        inputs.normal(model.q_lora_rank, dtype=dtype),
        EPSILON,
        kv_c,
        inputs.spread(RANK, dtype=dtype),
        EPSILON,
        k_pe,
        cos_sin,
        index_k if has_indexer else None,
        inputs.spread(INDEX_DIM, dtype=torch.float32) if has_indexer else None,
        inputs.spread(INDEX_DIM, dtype=torch.float32) if has_indexer else None,
        EPSILON,
        cos_sin if has_indexer else None,
        topk,
        slot_mapping=slots if is_cached else None,
        indexer_slot_mapping=slots if is_cached else None,
        indexer_k_cache=indexer_cache if is_cached and has_indexer else None,
        mla_kv_cache=mla_cache if is_cached else None,
        mla_kv_cache_dtype=kv_cache_dtype,
        mla_k_scale=torch.tensor([k_scale], device=device) if is_cached else None,
        skip_scale=k_scale == 1.0,
        has_indexer=has_indexer,
        index_rope_interleave=model.interleaved,
        kv_c_out=kv_c_out,
        k_pe_out=k_pe_out,
        index_k_out=index_k_out,
    )
    outputs = {"q_c": q_c_out, "kv_c": kv_c_out, "k_pe": k_pe_out, "topk": topk, "slots": slots}
    if is_cached:
        outputs |= {"mla_cache": mla_cache, "indexer_cache": indexer_cache}
    if index_k_out is not None:
        outputs["index_k"] = index_k_out
    return outputs


def query(
    model: Model,
    dtype: torch.dtype,
    device: str = "cpu",
    *,
    num_tokens: int = 70,
    has_indexer: bool = True,
    quantize_mqa: bool = False,
    rotated: bool = True,
) -> Outputs:
    """Launch what rotates (by nothing without `rotated`) and quantizes the queries of attention and indexer."""
    q_pe, ql_nope, index_q, index_weights = query_inputs(model, dtype, device, num_tokens)
    inputs = Inputs(device)
    cos_sin = inputs.cos_sin(4096)
    positions = inputs.permutation(4096)[:num_tokens]
    index_q_fp8, index_weights_out, mqa_q = kernels.fused_q(
        positions if rotated else torch.zeros_like(positions),
        q_pe,
        cos_sin,
        index_q if has_indexer else None,
        cos_sin if has_indexer else None,
        ql_nope,
        torch.tensor([Q_SCALE], device=device),
        index_weights if has_indexer else None,
        INDEX_DIM**-0.5,
        model.num_index_heads**-0.5,
        has_indexer=has_indexer,
        index_rope_interleave=model.interleaved,
        quantize_mqa=quantize_mqa,
    )
    assert index_q_fp8.dtype == torch.float8_e4m3fn
    assert mqa_q.dtype == (torch.float8_e4m3fn if quantize_mqa else dtype)
    outputs = {"mqa_q": mqa_q}
    if has_indexer:
        outputs |= {"index_q": index_q_fp8, "index_weights": index_weights_out}
    return outputs


def query_inputs(
    model: Model, dtype: torch.dtype, device: str, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q_pe, ql_nope, index_q and index_weights, with the strides that they have in the model."""
    inputs = Inputs(device)
    q_pe = inputs.spread(num_tokens, model.num_heads, 192 + ROPE, dtype=dtype)[..., 192:]
    ql_nope = inputs.spread(model.num_heads, num_tokens, RANK, dtype=dtype).transpose(0, 1)
    index_q = inputs.spread(num_tokens, model.num_index_heads, INDEX_DIM, dtype=dtype)
    index_weights = inputs.normal(num_tokens, INDEX_DIM + model.num_index_heads, dtype=dtype)[:, INDEX_DIM:]
    return q_pe, ql_nope, index_q, index_weights


def mtp_input(model: Model, dtype: torch.dtype, device: str = "cpu", *, num_tokens: int = 70) -> Outputs:
    """Launch the norms in front of an MTP layer."""
    inputs = Inputs(device)
    hidden = [inputs.normal(num_tokens, model.hidden_size, dtype=dtype) for _ in range(2)]
    weights = [inputs.normal(model.hidden_size, dtype=dtype) for _ in range(2)]
    positions = torch.arange(num_tokens, device=device)
    return {"embeddings": kernels.fused_eh_norm(positions, *hidden, *weights, EPSILON)}


def pack_queries(device: str = "cpu") -> Outputs:
    """Launch what pads queries of different lengths to one length, and takes top-k lists apart again."""
    inputs = Inputs(device)
    lengths = torch.tensor([1, 3, 2], device=device)
    q = inputs.spread(6, 16, INDEX_DIM, dtype=torch.float32).to(torch.float8_e4m3fn)
    packed = common.pack_seq_triton(q, lengths)
    assert packed.dtype == torch.float8_e4m3fn
    lists = inputs.permutation(3 * 3 * 64).view(3, 3, 64).int()
    return {"queries": q, "packed": packed, "unpacked": common.unpack_seq_triton(lists, lengths)}


def pool_keys(device: str = "cpu") -> Outputs:
    """Launch what GLM-5.3-Flash does instead: it rotates queries, and writes one key for several tokens."""
    from vllm.models.glm5next.nvidia.ops import kpool_compress  # needs a transformers that knows the model

    inputs = Inputs(device)
    pool_size = 4
    q, q_scale = kpool_compress.fwht128_quant_fp8(inputs.spread(64, INDEX_DIM, dtype=BF16))
    bias = inputs.normal(pool_size, INDEX_DIM, dtype=torch.float32)
    prefill_cache, decode_cache = torch.zeros(2, 2, BLOCK, INDEX_DIM + 4, dtype=torch.uint8, device=device)
    k, k_scale = kpool_compress.kpool_compress_and_write_cache(
        prefill_cache,
        inputs.spread(6, pool_size, INDEX_DIM, dtype=BF16),
        inputs.normal(6, pool_size, INDEX_DIM, dtype=BF16),
        bias,
        inputs.permutation(2 * BLOCK)[:6],
        pool_size,
        return_compressed=True,
    )
    # Two requests, two tokens each, of which the second is the last of its pool.
    kpool_compress.kpool_decode_update_and_maybe_write_cache_batched(
        decode_cache,
        inputs.normal(2, 2, pool_size, INDEX_DIM, dtype=BF16),
        torch.tensor([[2, 3], [6, 7]], dtype=torch.int32, device=device),
        inputs.spread(2, 2, INDEX_DIM, dtype=BF16),
        inputs.normal(2, 2, INDEX_DIM, dtype=BF16),
        bias,
        torch.tensor([[-1, 5], [-1, 70]], dtype=torch.int32, device=device),
        torch.tensor([[2, 3], [10, 11]], dtype=torch.int32, device=device),
        pool_size,
    )
    return {
        "q": q,
        "q_scale": q_scale,
        "k": k,
        "k_scale": k_scale,
        "prefill_cache": prefill_cache,
        "decode_cache": decode_cache,
    }


def decode_context_parallel(dtype: torch.dtype, device: str = "cpu") -> Outputs:
    """Launch what several ranks with a part of the KV cache each do before and after they exchange it."""
    inputs = Inputs(device)
    num_tokens, num_heads, ranks = 5, 16, 2
    out = inputs.normal(num_tokens, num_heads, RANK, dtype=dtype)
    lse = inputs.normal(num_tokens, num_heads, dtype=torch.float32)
    lses = inputs.normal(ranks, num_tokens, num_heads, dtype=torch.float32)
    corrected, _ = dcp.correct_attn_out(out.clone(), lses, 1, dcp.CPTritonContext())
    heads = num_heads // ranks
    send = torch.zeros(ranks, num_tokens, heads, RANK + 2, dtype=dtype, device=device)
    lengths = torch.tensor([2, 3], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    grid = (num_tokens, heads)
    dcp._dcp_a2a_pack_send_kernel[grid](
        *(out, lse, send, lengths, starts, 2, *out.stride(), *lse.stride(), *send.stride()),
        N=ranks,
        HEAD_DIM=RANK,
        H_PER_RANK=heads,
        LSE_PACK_DIM=2,
        HAS_MASK=True,
        NUM_SEQS_POW2=2,
    )
    combined = torch.zeros(num_tokens, heads, RANK, dtype=dtype, device=device)
    combined_lse = torch.zeros(num_tokens, heads, device=device)
    dcp._dcp_a2a_unpack_combine_kernel[grid](
        *(send, combined, combined_lse, *send.stride(), *combined.stride(), *combined_lse.stride()),
        N=ranks,
        HEAD_DIM=RANK,
        IS_BASE_E=True,
        RETURN_LSE=True,
        LSE_PACK_DIM=2,
    )
    logits = inputs.normal(num_tokens, 4096, dtype=torch.float32)
    topk = inputs.permutation(num_tokens * TOPK).view(num_tokens, TOPK).int() % 4096
    candidates = torch.zeros(num_tokens, TOPK, 2, device=device)
    dcp_indexer_cutedsl.pack_dcp_topk_candidates_cutedsl(logits, topk, candidates, 1, ranks, 1, None)
    return {"corrected": corrected, "combined": combined, "candidates": candidates}


# The fused kernels, which convert to fp8: name -> launch(device=...)
FUSED: dict[str, Callable[..., Outputs]] = {
    "norm-rope-fp16": partial(norm_rope, GLM, FP16, "auto"),
    "norm-rope-bf16": partial(norm_rope, DEEPSEEK, BF16, "auto"),
    "norm-rope-fp8": partial(norm_rope, GLM, BF16, "fp8"),
    "norm-rope-fp8-unscaled": partial(norm_rope, DEEPSEEK, FP16, "fp8", k_scale=1.0),
    "norm-rope-ds-mla-fp16": partial(norm_rope, GLM, FP16, "fp8_ds_mla"),
    "norm-rope-ds-mla-bf16": partial(norm_rope, DEEPSEEK, BF16, "fp8_ds_mla"),
    "norm-rope-shared": partial(norm_rope, GLM, FP16, "fp8_ds_mla", has_indexer=False),
    "norm-rope-uncached": partial(norm_rope, GLM, BF16, "auto", is_cached=False),
    "query-fp16": partial(query, GLM, FP16),
    "query-bf16": partial(query, DEEPSEEK, BF16),
    "query-shared": partial(query, GLM, FP16, has_indexer=False),
    "query-fp8": partial(query, GLM, BF16, quantize_mqa=True),
    "pack-queries": pack_queries,
    "pool-keys": pool_keys,
}
# Their neighbours.
OTHERS: dict[str, Callable[..., Outputs]] = {
    "mtp-input-fp16": partial(mtp_input, GLM, FP16),
    "mtp-input-bf16": partial(mtp_input, DEEPSEEK, BF16),
    "dcp-fp16": partial(decode_context_parallel, FP16),
    "dcp-bf16": partial(decode_context_parallel, BF16),
}


def warmed_up() -> Iterator[tuple[Any, Any]]:
    """Yield (kernel, key) of what vLLM compiles for this path at start-up, for a GLM-5 on one rank."""
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=BLOCK),
        model_config=SimpleNamespace(
            max_model_len=200_000, hf_text_config=SimpleNamespace(index_topk=TOPK, model_type="glm_moe_dsa")
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, cp_kv_cache_interleave_size=1, prefill_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    arguments: list[tuple[Any, dict[str, Any]]] = [
        (common._PACK_SEQ_TRITON_KERNEL, {"dtype": torch.float8_e4m3fn, "pad_value": -float("inf")}),
        (common._UNPACK_SEQ_TRITON_KERNEL, {}),
        (indexer.PrepareUniformDecodeKernel(), {}),
        (indexer.BuildPrefillChunkMetadataKernel(), {"vllm_config": config}),
        (sparse_utils.ConvertReqIndexToGlobalIndexKernel(), {"vllm_config": config, "block_stride_rows": BLOCK}),
    ]
    for kernel, options in arguments:
        # What follows differs in nothing but alignments.
        for key in kernel.get_warmup_keys(**options)[:6]:
            yield kernel, key
