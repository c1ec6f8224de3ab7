# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whose kernels compute the sparse indexer's logits: DeepGEMM's or Triton's."""

import functools
from typing import TYPE_CHECKING

import torch

import vllm.envs as envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.deep_gemm_nvcc import get_nvcc_problem
from vllm.utils.import_utils import has_deep_gemm

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

# How many query rows a request may have in Triton's paged kernel.
MAX_NEXT_N = 4


@functools.cache
def use_triton_mqa_logits() -> bool:
    """Return whether Triton's kernels serve instead of DeepGEMM's.

    Decided, and logged with its reason, by the first call in a process.

    Raises:
        ValueError: VLLM_SPARSE_INDEXER_LOGITS asks for what cannot be.

    """
    if not current_platform.is_cuda():
        return False
    use_triton, reason = _choose()
    logger.info_once(
        "Sparse indexer logits: %s (%s); set VLLM_SPARSE_INDEXER_LOGITS to force a "
        "path.",
        "Triton kernels" if use_triton else "DeepGEMM",
        reason,
    )
    return use_triton


def register_mqa_logits_warmup(
    vllm_config: "VllmConfig", head_dim: int, *, min_heads: int = 1
) -> None:
    """Have the kernels that this model's indexer can reach compiled at start-up.

    `min_heads` is what the model pads the indexer's heads to.
    """
    if vllm_config.model_config is None or not use_triton_mqa_logits():
        return
    from vllm.v1.attention.ops.triton_mqa_logits import register_warmup

    # A step's decodes come with up to this many rows a request, or flattened to one.
    max_next_n = 1 + vllm_config.num_speculative_tokens
    if max_next_n > MAX_NEXT_N:
        max_next_n = 1
    register_warmup(
        num_heads=max(vllm_config.model_config.hf_text_config.index_n_heads, min_heads),
        head_dim=head_dim,
        next_n=range(1, max_next_n + 1),
    )


def get_fp8_query(q: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Return the values of a query whose scale is folded into the weights.

    Raises:
        ValueError: the query brings scales of its own (MXFP4 or MXFP8).

    """
    values, scale = q
    if scale is not None or values.dtype != torch.float8_e4m3fn:
        raise ValueError(
            "the Triton kernels of the sparse indexer take fp8_e4m3 queries whose "
            f"scale is folded into the weights, got {values.dtype} "
            f"{'with' if scale is not None else 'without'} MX scales"
        )
    return values


def _choose() -> tuple[bool, str]:
    """Return whether Triton's kernels serve, and why."""
    choice = envs.VLLM_SPARSE_INDEXER_LOGITS
    needs_mx_scales = current_platform.is_device_capability_family(100)
    if choice == "triton" and needs_mx_scales:
        raise ValueError(
            "VLLM_SPARSE_INDEXER_LOGITS=triton is not possible on compute capability "
            f"{_get_capability()}: the indexer's cache has MX scales there, which only "
            "DeepGEMM reads"
        )
    if choice == "triton":
        return True, "forced by VLLM_SPARSE_INDEXER_LOGITS=triton"
    problem = _get_deep_gemm_problem()
    if choice == "auto" and not needs_mx_scales:
        return problem is not None, problem or "it can compile its kernels here"
    if choice == "deep_gemm":
        reason = "forced by VLLM_SPARSE_INDEXER_LOGITS=deep_gemm"
    else:
        reason = "only it reads the MX scales of the indexer's cache"
    return False, f"{reason}, but {problem}" if problem else reason


def _get_deep_gemm_problem() -> str | None:
    """Return what keeps DeepGEMM from serving on this host, or None."""
    if not current_platform.support_deep_gemm():
        return f"DeepGEMM has no kernels for compute capability {_get_capability()}"
    if not has_deep_gemm():
        return "DeepGEMM is not installed"
    if problem := get_nvcc_problem():
        return f"DeepGEMM cannot compile its kernels: {problem}"
    return None


def _get_capability() -> str:
    capability = current_platform.get_device_capability()
    return capability.as_version_str() if capability else "unknown"
