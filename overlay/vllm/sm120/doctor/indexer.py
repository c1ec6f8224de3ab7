# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whose kernels score the keys for a sparse model, and why theirs."""

from vllm.platforms import current_platform
from vllm.sm120.doctor.facts import Case, Row
from vllm.utils.deep_gemm_nvcc import get_nvcc_problem
from vllm.utils.import_utils import has_deep_gemm
from vllm.v1.attention.ops import mqa_logits_backend


def examine(case: Case) -> list[Row]:
    """Return the path of the indexer's logits and what it rests on."""
    if not case.model["sparse"]:
        return []
    try:
        use_triton, reason = mqa_logits_backend._choose()
    except ValueError as error:  # VLLM_SPARSE_INDEXER_LOGITS asks for what cannot be
        return [Row("logits", "none", str(error))]
    rows = [Row("logits", "Triton" if use_triton else "DeepGEMM", reason)]
    if current_platform.support_deep_gemm() and has_deep_gemm():
        problem = get_nvcc_problem()
        rows.append(
            Row(
                "nvcc",
                problem is None,
                f"{problem or '12.9 or newer is here'}; this machine was asked, and "
                "what counts is the one that serves",
            )
        )
    if not current_platform.supports_fp8():
        why = "no 8-bit floating point below compute capability 8.9"
        rows.append(Row("8-bit values", "decoded in software", why))
    return rows
