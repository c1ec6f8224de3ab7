# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sparse MLA backend that runs on every NVIDIA GPU since Ampere."""

from typing import Any, ClassVar

import torch

from vllm.config import (
    VllmConfig,
    get_current_vllm_config,
    get_current_vllm_config_or_none,
)
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
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
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.attention.ops.triton_mla_sparse import (
    KV_LORA_RANK,
    register_warmup,
    sparse_mla_attention,
)
from vllm.v1.attention.ops.triton_mla_sparse_config import (
    KVFormat,
    get_workspace_specs,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.workspace import current_workspace_manager

# `fp8` is e4m3 with one scale per tensor, as everywhere else in vLLM: 576 bytes
# a token. fp8_ds_mla takes 656 and has to be asked for by its name.
_KV_FORMATS: dict[CacheDType, KVFormat] = {
    "auto": KVFormat.MODEL,
    "float16": KVFormat.MODEL,
    "bfloat16": KVFormat.MODEL,
    "fp8": KVFormat.FP8,
    "fp8_e4m3": KVFormat.FP8,
    "fp8_ds_mla": KVFormat.FP8_DS_MLA,
}
# What the indexer can merge across DCP ranks (_merge_dcp_topk_global).
_DCP_TOPK = (512, 1024, 2048)


class TritonMLASparseBackend(AttentionBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = list(_KV_FORMATS)

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
        return unsupported_kv_cache(kv_cache_dtype, dtype) or _unsupported_dcp_topk()


def unsupported_kv_cache(kv_cache_dtype: str | None, dtype: torch.dtype) -> str | None:
    """Return why the backend cannot read this KV cache, or None if it can."""
    if kv_cache_dtype is None:
        return None
    if kv_cache_dtype not in _KV_FORMATS:
        return (
            "TRITON_MLA_SPARSE requires a KV cache in the model's dtype, fp8_e4m3 "
            f"or fp8_ds_mla, got kv_cache_dtype={kv_cache_dtype}"
        )
    # The cache writers copy 16-bit values bit for bit, so a bfloat16 cache
    # under a float16 model would hold float16 bits.
    if (
        kv_cache_dtype in ("float16", "bfloat16")
        and STR_DTYPE_TO_TORCH_DTYPE[kv_cache_dtype] != dtype
    ):
        model_dtype = str(dtype).removeprefix("torch.")
        return (
            "TRITON_MLA_SPARSE requires a 16-bit KV cache in the model's dtype, got "
            f"kv_cache_dtype={kv_cache_dtype} and dtype={model_dtype}"
        )
    return None


def _unsupported_dcp_topk() -> str | None:
    """Return why the model's top-k rules out decode context parallelism, or None."""
    vllm_config = get_current_vllm_config_or_none()
    if (
        vllm_config is None
        or vllm_config.model_config is None
        or vllm_config.parallel_config.decode_context_parallel_size == 1
    ):
        return None
    index_topk = getattr(vllm_config.model_config.hf_text_config, "index_topk", None)
    if index_topk in _DCP_TOPK:
        return None
    return (
        "TRITON_MLA_SPARSE requires index_topk 512, 1024 or 2048 with DCP, which the "
        f"indexer can merge across ranks, got {index_topk}"
    )


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
        # speculative ones) are worth keeping from dense MHA prefill. That holds
        # under DCP as well: a token's own top-k list makes it causal.
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        self.supports_draft_decode_metadata_update = (
            self.dcp_world_size == 1
            and vllm_config.attention_config.hisparse_config is None
        )

    def update_draft_decode_metadata(self, metadata: SparseMLACommonMetadata) -> None:
        # The other tensors that a decode reads belong to the runner, which
        # rewrites them in place.
        if num_tokens := metadata.num_decode_tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc,
                metadata.req_id_per_token,
                num_mapped_tokens=num_tokens,
                num_tokens=num_tokens,
            )


class TritonMLASparseImpl(SparseMLACommonImpl[SparseMLACommonMetadata]):
    group_conversion_decode_only: ClassVar[bool] = True
    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    # Where the KV rows of a request lie matters to the conversion of its top-k
    # lists only, which is per token.
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

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
        vllm_config = get_current_vllm_config()
        dtype = vllm_config.model_config.dtype
        if reason := unsupported_kv_cache(kv_cache_dtype, dtype):
            raise NotImplementedError(reason)
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
        self.kv_format = _KV_FORMATS[kv_cache_dtype]
        has_rope = self.qk_rope_head_dim > 0
        if self.kv_format is KVFormat.FP8_DS_MLA:
            # The gather of dense MHA prefill makes 576 bfloat16 values of a row.
            self.supports_dense_mha_prefill = has_rope and dtype == torch.bfloat16
        self._mostly_prefill = False

        capability = current_platform.get_device_capability()
        assert capability is not None
        kernel_args: dict[str, Any] = {
            # Under DCP every rank attends with the heads of the whole group.
            "num_heads": num_heads * self.dcp_world_size,
            "num_topk": self.topk_indices_buffer.shape[1],
            "dtype": dtype,
            "kv_format": self.kv_format,
            "capability": (capability.major, capability.minor),
        }
        self.workspace_specs = get_workspace_specs(
            max_num_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            num_sms=current_platform.num_compute_units(),
            **kernel_args,
        )
        # Reserve the scratch before the workspace is locked, without keeping
        # views that would hold on to storage another layer outgrows.
        current_workspace_manager().get_simultaneous(*self.workspace_specs)
        if vllm_config.kernel_config.enable_jit_warmup:
            register_warmup(has_rope=has_rope, **kernel_args)

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        if self.kv_format is KVFormat.FP8_DS_MLA:
            # The RoPE part of these rows is bfloat16 for the reader and for the
            # fused writer. This writer copies 16 bits, whatever they mean.
            k_pe = k_pe.to(torch.bfloat16).view(k_pe.dtype)
        super().do_kv_cache_update(
            kv_c_normed,
            k_pe,
            kv_cache,
            slot_mapping,
            kv_cache_dtype,
            k_scale,
            skip_scale,
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # Neighbours in a prefill share most of their rows, decodes of different
        # requests none. A batch that holds a prefill may still be mostly decodes.
        num_tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        self._mostly_prefill = num_tokens > 2 * attn_metadata.num_decode_tokens
        return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)

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
        return sparse_mla_attention(
            q_nope,
            q_pe,
            kv_rows,
            topk_indices,
            valid_counts,
            self.scale,
            kv_scale=layer._k_scale if self.kv_format is KVFormat.FP8 else None,
            is_prefill=self._mostly_prefill,
            workspace=current_workspace_manager().get_simultaneous(
                *self.workspace_specs
            ),
        )
