# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The contents of GGUF tensors, read from memory-mapped files."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as WeightType

if TYPE_CHECKING:
    from .gguf_files import Tensor

# numpy has no bfloat16: its bits go by int16.
_FLOAT_DTYPES = {
    WeightType.F32: (np.float32, torch.float32),
    WeightType.F16: (np.float16, torch.float16),
    WeightType.BF16: (np.int16, torch.bfloat16),
}


class TensorReader:
    """Views of tensors: nothing is read before somebody looks at it."""

    def __init__(self) -> None:
        self._files: dict[Path, np.memmap] = {}

    def view(self, tensor: Tensor) -> torch.Tensor:
        """Return the tensor as it is in the file, read-only.

        A float type has the tensor's shape; a quantised one is uint8, and its
        last dimension counts the bytes of a row's blocks.
        """
        path = Path(tensor.file)
        if path not in self._files:
            self._files[path] = np.memmap(path, np.uint8, mode="r")
        data = self._files[path][tensor.offset : tensor.offset + tensor.size]
        if tensor.type in _FLOAT_DTYPES:
            numpy_dtype, dtype = _FLOAT_DTYPES[tensor.type]
            return _from_numpy(data.view(numpy_dtype)).view(dtype).view(tensor.shape)
        return _from_numpy(data).view(*tensor.shape[:-1], -1)


def dequantize(data: torch.Tensor, weight_type: WeightType) -> torch.Tensor:
    """Return what a view holds in floating point: float32 if it is quantised."""
    if weight_type in _FLOAT_DTYPES:
        return data
    return _from_numpy(gguf.quants.dequantize(data.numpy(), weight_type))


def _from_numpy(array: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns. Nobody writes to a view.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(array)
