# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA backend that runs on every NVIDIA GPU since Ampere."""

from typing import Any, ClassVar

import torch

from vllm.config import VllmConfig, get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.triton_utils import triton
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    AttentionType,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_utils import (
    align_blocks_to_rows,
    flat_kv_row_view,
)
from vllm.v1.attention.ops.triton_mla_sparse import (
    KV_LORA_RANK,
    get_config,
    get_num_splits,
    get_workspace_shapes,
    merge_splits,
    sparse_mla,
    sparse_mla_attention,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager


class TritonMLASparseBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
    ]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(64)]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return align_blocks_to_rows(spec)

    @staticmethod
    def get_name() -> str:
        return "TRITON_MLA_SPARSE"

    @staticmethod
    def get_builder_cls() -> type["TritonMLASparseMetadataBuilder"]:
        return TritonMLASparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[MLAAttentionImpl[Any]]:
        return TritonMLASparseImpl

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        # 512 latent values, with 64 RoPE values or (NoPE models) without.
        return [576, 512]

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        # The cache writers copy 16-bit values bit for bit, so a bfloat16 cache
        # under a float16 model would hold float16 bits.
        if (
            kv_cache_dtype in ("float16", "bfloat16")
            and STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype] != dtype
        ):
            model_dtype = str(dtype).removeprefix("torch.")
            return (
                f"TRITON_MLA_SPARSE requires a KV cache in the model's dtype, got "
                f"kv_cache_dtype={kv_cache_dtype} and dtype={model_dtype}"
            )
        return None


class TritonMLASparseMetadataBuilder(
    SparseMLACommonMetadataBuilder[SparseMLACommonMetadata]
):
    metadata_cls = SparseMLACommonMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # The kernel treats every query token alike, so only true decodes (and
        # speculative ones) are worth keeping from dense MHA prefill.
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)


class TritonMLASparseImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    group_conversion_decode_only: ClassVar[bool] = True
    supports_pcp: bool = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        if any([alibi_slopes, sliding_window, logits_soft_cap]):
            raise NotImplementedError(
                "TritonMLASparseImpl does not support alibi, sliding window, "
                "or logits soft cap."
            )
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                "TritonMLASparseImpl only supports decoder self-attention."
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            **mla_args,
        )
        if self.kv_lora_rank != KV_LORA_RANK:
            raise NotImplementedError(
                f"TritonMLASparseImpl requires kv_lora_rank {KV_LORA_RANK}, got "
                f"{self.kv_lora_rank}."
            )
        assert self.topk_indices_buffer is not None, (
            "Indexer or topk_indices_buffer required for sparse MLA"
        )
        self.supports_quant_query_input = False
        self.block_h = get_config(num_heads).block_h
        self.num_sms = current_platform.num_compute_units()
        self.workspace_specs = [
            (shape, torch.float32)
            for shape in get_workspace_shapes(num_heads, self.num_sms)
        ]
        # Reserve the scratch before the workspace is locked, without keeping
        # views that would hold on to storage another layer outgrows.
        current_workspace_manager().get_simultaneous(*self.workspace_specs)

        vllm_config = get_current_vllm_config()
        if vllm_config.kernel_config.enable_jit_warmup:
            dtype = vllm_config.model_config.dtype
            sparse_mla.register_warmup(
                num_heads=num_heads, dtype=dtype, has_rope=self.qk_rope_head_dim > 0
            )
            merge_splits.register_warmup(dtype=dtype)

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not isinstance(q, tuple):
            q = q.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_nope, q_pe = q
        kv_rows, _ = flat_kv_row_view(kv_cache, block_size)
        num_tokens, num_heads, _ = q_nope.shape
        return sparse_mla_attention(
            q_nope,
            q_pe,
            kv_rows,
            topk_indices,
            valid_counts,
            self.scale,
            num_splits=get_num_splits(
                num_tokens, triton.cdiv(num_heads, self.block_h), self.num_sms
            ),
            workspace=current_workspace_manager().get_simultaneous(
                *self.workspace_specs
            ),
        )
