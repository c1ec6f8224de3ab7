# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A residual stream that does not overflow float16.

Each layer adds its branches (attention, MLP) to the residual, which in a model
trained in bfloat16 may outgrow float16's 65504. So it is kept as a fraction of
its value, the scale: the embedding and every branch are multiplied by it. An RMS
norm gives the same output for that, with its epsilon times the scale squared.

Only the sum is protected. A branch that is itself beyond 65504 is lost.
"""

import copy
from typing import Any

import torch

from vllm.model_executor.models.deepseek_v2 import DeepseekV2MoE

# A power of two, so multiplying is exact. Sums of up to a million fit then. Values
# below 0.001 lose bits, which is less than what the sum of all is rounded by.
FLOAT16_SCALE = 1 / 16


def get_residual_scale(dtype: torch.dtype) -> float:
    """Return the scale of the residual in a model that computes in `dtype`."""
    return FLOAT16_SCALE if dtype == torch.float16 else 1.0


def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return `x` times `scale`, never in place: the embedding has other readers."""
    return x if scale == 1.0 else x * scale


def with_routed_scale(config: Any, scale: float) -> Any:
    """Return `config` for an MoE block whose routed experts' output is scaled."""
    if scale == 1.0:
        return config
    factor = getattr(config, "routed_scaling_factor", 1.0)
    config = copy.copy(config)
    config.routed_scaling_factor = factor * scale
    return config


def scale_branches(layer: torch.nn.Module, scale: float) -> None:
    """Scale what `layer` adds to the residual, before it is reduced over ranks.

    Of an MoE block that is the shared experts: for the routed ones the router does
    it, see `with_routed_scale`.
    """
    if scale == 1.0:
        return
    mlp = layer.mlp
    if isinstance(mlp, DeepseekV2MoE):
        mlp = mlp.shared_experts
    for branch in (layer.self_attn, mlp):
        if branch is not None:
            branch.register_forward_hook(lambda module, args, output: output * scale)
