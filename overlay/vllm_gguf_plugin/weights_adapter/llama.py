# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights of Llama models.

llama.cpp rotates neighbouring values of a head, vLLM values half a head apart. So
its converter (conversion/llama.py) reorders the rows of the query and key
projections, and here they get their places back. Rows are whole, whatever their
type.
"""

from __future__ import annotations

import torch

from .default import GGUFWeightsAdapter


def restore_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return [rows, ...] with each head's rows 0, n, 1, n + 1 ... as 0, 1 ... n."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


class LlamaGGUFAdapter(GGUFWeightsAdapter):
    """Adapter for files of llama.cpp's architecture "llama"."""

    @classmethod
    def matches(cls, config) -> bool:
        return config.model_type == "llama"

    def transform_weight(self, hf_name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 0:  # a type
            return weight
        if ".q_proj." in hf_name:
            return restore_rows(weight, self.config.num_attention_heads)
        if ".k_proj." in hf_name:
            return restore_rows(weight, self.config.num_key_value_heads)
        return weight
