# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""fp8 e4m3 values in Triton kernels on GPUs that have no instructions for them.

Below SM89 Triton refuses the type, in pointers as well as in conversions. Kernels
then see e4m3 tensors as bytes (`fp8_storage`) and compute the bytes themselves
(`cast_fp8`). With the instructions, both leave everything as it is.

`decode_e4m3` needs them on no GPU.
"""

import torch

from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.triton_utils import HAS_TRITON, tl, triton


def lacks_e4m3(platform: Platform) -> bool:
    """Return whether this is an NVIDIA GPU known to lack e4m3 instructions."""
    if not platform.is_cuda():
        return False
    capability = platform.get_device_capability()
    return capability is not None and capability.to_int() < 89


SOFTWARE_E4M3 = tl.constexpr(lacks_e4m3(current_platform))
# The interpreter has no inline assembly.
_INTERPRETED = tl.constexpr(HAS_TRITON and triton.knobs.runtime.interpret)

# The assembly below turns four e4m3 bytes ($2) into two pairs of 16-bit values
# ($0, $1) and multiplies them by the factors of their row ($3, $5), each twice
# in a register. Sign, exponent and fraction move to their places in the wider
# type, which leaves the difference of the exponent biases to the factor: 2^8 for
# float16 and 2^120 for bfloat16. That is exact, subnormal numbers included. SM80
# has no conversion instruction, and on SM90 it is no faster.
_FP16_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 1;
shr.u32 d, b, 1;
and.b32 c, c, 0x3f803f80;
and.b32 d, d, 0x3f803f80;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
mul.rn.f16x2 $0, a, $3;
mul.rn.f16x2 $1, b, $5;
}""")
# bfloat16 multiplies on SM80 only as a fused multiply-add, here of -0.
_BF16_ASM = tl.constexpr("""{
.reg .b32 a, b, c, d, z;
mov.b32 z, 0x80008000;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 a, a, 0x80008000, c, 0xEA;
lop3.b32 b, b, 0x80008000, d, 0xEA;
fma.rn.bf16x2 $0, a, $3, z;
fma.rn.bf16x2 $1, b, $5, z;
}""")


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


@triton.jit
def decode_e4m3(
    raw,  # uint8 [N, M], e4m3 patterns
    factor,  # fp32 [N, 1] or [1, 1], powers of two up to 2^7
    DTYPE: tl.constexpr,  # fp16 or bf16
):
    """Return raw * factor in DTYPE."""
    if _INTERPRETED:
        bits = raw.to(tl.uint16)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32)
        return (value * (factor * 256.0)).to(DTYPE)
    # With is_pure=True the decoding would sink into the layouts of the dots:
    # done twice, and no asynchronous copies of the bytes.
    if DTYPE == tl.float16:
        return tl.inline_asm_elementwise(
            _FP16_ASM,
            "=r,=r,r,r,r,r,r",
            [raw, _twice((factor * 256.0).to(tl.float16))],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )
    else:
        return tl.inline_asm_elementwise(
            _BF16_ASM,
            "=r,=r,r,r,r,r,r",
            [raw, _twice((factor * 1.329227995784916e36).to(tl.bfloat16))],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def _twice(value):
    """Return 16-bit values in both halves of uint32."""
    return value.to(tl.uint16, bitcast=True).to(tl.uint32) * 0x10001
