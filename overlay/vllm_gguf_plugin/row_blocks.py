# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of a quantised weight are made of blocks, which cannot be cut."""

import gguf
import torch
from gguf import GGMLQuantizationType as WeightType


def check_row_shard(
    layer_name: str, weight: torch.Tensor, weight_type: int, tp_size: int
) -> None:
    """Raise a ValueError where `tp_size` parts of a row are not of whole blocks.

    Args:
        layer_name: The layer, for the error
        weight: The undivided weight, [rows, bytes] uint8 if it is quantised
        weight_type: Its GGML type
        tp_size: How many GPUs the values of a row are divided among

    """
    block_size, type_size = gguf.GGML_QUANT_SIZES[weight_type]
    if block_size == 1 or weight.dtype != torch.uint8:
        return
    blocks = weight.shape[-1] // type_size
    if blocks % tp_size:
        raise ValueError(
            f"{layer_name}: rows of {blocks * block_size} values in "
            f"{WeightType(weight_type).name} blocks of {block_size} cannot be divided "
            f"among {tp_size} GPUs. Use a --tensor-parallel-size that divides {blocks}."
        )
