"""What vLLM selects for GLM-5 and DeepSeek-V3.2; import it after fake_gpu.install() only."""

from dataclasses import replace
from types import SimpleNamespace

import torch
import vllm.config.vllm
import vllm.utils.flashinfer
from vllm.model_executor.layers.attention.mla_attention import _canonicalize_sparse_mla_kv_cache_dtype
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.experts import flashinfer_cutlass_moe
from vllm.model_executor.layers.fused_moe.oracle.fp8 import select_fp8_moe_backend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    select_nvfp4_moe_backend,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kNvfp4Dynamic,
    kNvfp4Static,
)
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig


def glm5_config(index_topk: int, use_dcp: bool = False, use_pcp: bool = False) -> SimpleNamespace:
    """What the backends read of the config of a GLM-5 at TP 1."""
    text_config = SimpleNamespace(
        model_type="glm_moe_dsa",
        index_topk=index_topk,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=text_config, get_num_attention_heads=lambda parallel_config: 64),
        parallel_config=SimpleNamespace(
            prefill_context_parallel_size=1 + use_pcp, decode_context_parallel_size=1 + use_dcp
        ),
    )


def attention_backend(dtype, kv_cache_dtype, index_topk, flashinfer_api, use_dcp, use_pcp, backend) -> str:
    vllm.config.vllm._current_vllm_config = glm5_config(index_topk, use_dcp, use_pcp)
    vllm.utils.flashinfer.has_flashinfer_sparse_mla_sm120 = lambda: flashinfer_api
    config = AttentionSelectorConfig(
        head_size=576,
        dtype=getattr(torch, dtype),
        kv_cache_dtype=kv_cache_dtype,
        block_size=None,
        use_mla=True,
        use_sparse=True,
        use_dcp=use_dcp,
        use_pcp=use_pcp,
    )
    requested = AttentionBackendEnum[backend] if backend else None
    path = current_platform.get_attn_backend_cls(requested, config, num_heads=64)
    return {member.value: member.name for member in AttentionBackendEnum}[path]


def kv_cache_format(kv_cache_dtype, backend) -> str:
    """What --kv-cache-dtype stands for once `backend` is selected."""
    backend_class = AttentionBackendEnum[backend].get_class()
    return _canonicalize_sparse_mla_kv_cache_dtype(backend_class, kv_cache_dtype)


def moe_config(dtype, all2all_backend=None, moe_backend="auto") -> FusedMoEConfig:
    parallel = FusedMoEParallelConfig.make_no_parallel()
    if all2all_backend:
        parallel = replace(parallel, use_ep=True, ep_size=2, dp_size=2, all2all_backend=all2all_backend)
    return FusedMoEConfig(
        num_experts=256,
        num_local_experts=256,
        num_logical_experts=256,
        experts_per_token=8,
        hidden_dim=6144,
        intermediate_size=2048,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.DeepSeekV3,
        moe_parallel_config=parallel,
        in_dtype=getattr(torch, dtype),
        moe_backend=moe_backend,
    )


def fp8_moe_backend(dtype, all2all_backend, moe_backend) -> str:
    """For the block-quantized FP8 checkpoints of DeepSeek-V3.2 and GLM-5."""
    vllm.config.vllm._current_vllm_config = glm5_config(2048)
    config = moe_config(dtype, all2all_backend, moe_backend)
    return select_fp8_moe_backend(config, kFp8Static128BlockSym, kFp8Dynamic128Sym)[0].name


def nvfp4_moe_backend(dtype, flashinfer) -> str:
    """For the NVFP4 checkpoints; `flashinfer`: whether its CUTLASS experts are there."""
    flashinfer_cutlass_moe.has_flashinfer_cutlass_fused_moe = lambda: flashinfer
    return select_nvfp4_moe_backend(moe_config(dtype), kNvfp4Static, kNvfp4Dynamic)[0].name


SELECTORS = {
    "attention": attention_backend,
    "kv_cache_format": kv_cache_format,
    "fp8_moe": fp8_moe_backend,
    "nvfp4_moe": nvfp4_moe_backend,
}
