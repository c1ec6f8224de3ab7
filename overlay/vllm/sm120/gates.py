# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What kernels refuse on compute capability 12.x and upstream's gates do not know."""

from typing import TYPE_CHECKING

import torch

from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

# Experts whose grouped GEMM writes bfloat16 only, by class name: importing the
# classes here would be circular. Triton's or Marlin's experts are next in line.
_BFLOAT16_ONLY_EXPERTS = frozenset(
    {
        # DeepGEMM asserts d.scalar_type() == BFloat16.
        "TritonOrDeepGemmExperts",
        "BatchedDeepGemmExperts",
        # csrc: "SM120 NVFP4 MOE only supports bfloat16 output".
        "CutlassExpertsFp4",
    }
)


def unsupported_moe_dtype(
    experts_cls: type, moe_config: "FusedMoEConfig"
) -> str | None:
    """Return what `experts_cls` does not support, or None if the dtype is fine."""
    if (
        moe_config.in_dtype == torch.float16
        and experts_cls.__name__ in _BFLOAT16_ONLY_EXPERTS
        and current_platform.is_device_capability_family(120)
    ):
        return "float16 output on compute capability 12.x"
    return None
