# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""fp8 e4m3 values in Triton kernels on GPUs that have no instructions for them.

Below SM89 Triton refuses the type, in pointers as well as in conversions. Kernels
then see e4m3 tensors as bytes (`fp8_storage`) and compute the bytes themselves
(`cast_fp8`). With the instructions, both leave everything as it is.
"""

import torch

from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.triton_utils import tl, triton


def lacks_e4m3(platform: Platform) -> bool:
    """Return whether this is an NVIDIA GPU known to lack e4m3 instructions."""
    if not platform.is_cuda():
        return False
    capability = platform.get_device_capability()
    return capability is not None and capability.to_int() < 89


SOFTWARE_E4M3 = tl.constexpr(lacks_e4m3(current_platform))


def fp8_storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which kernels see tensors of `dtype`."""
    is_software = SOFTWARE_E4M3 and dtype == torch.float8_e4m3fn
    return torch.uint8 if is_software else dtype


def fp8_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as kernels see it: e4m3 as uint8 where done in software."""
    dtype = fp8_storage_dtype(tensor.dtype)
    return tensor if dtype == tensor.dtype else tensor.view(dtype)


@triton.jit
def cast_fp8(x, dtype: tl.constexpr):
    """Return x (fp32) as the fp8 type `dtype`, or as uint8 where done in software.

    There `dtype` can only be e4m3.
    """
    if SOFTWARE_E4M3:
        return encode_e4m3(x)
    else:
        return x.to(dtype)


@triton.jit
def encode_e4m3(x):
    """Return the e4m3 patterns (uint8) of x (fp32), as the instructions give them.

    Rounded to the nearest, ties to even; beyond 448, infinity too, +-448; NaN 0x7F.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # From 2^-6 on: round 23 fraction bits to 3 (a carry moves on into the exponent,
    # as it should), then move the exponent's bias from 127 to 7.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - 0x3C000000) >> 20
    # Below, e4m3 counts in steps of 2^-9. Floats from 2^14 on do as well, so the
    # addition rounds, and leaves the count in the last bits.
    sum_bits = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(
        tl.uint32, bitcast=True
    )
    code = tl.where(magnitude < 0x3C800000, sum_bits - 0x46800000, normal)
    code = tl.minimum(code, 0x7E) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > 0x7F800000, 0x7F, code).to(tl.uint8)
