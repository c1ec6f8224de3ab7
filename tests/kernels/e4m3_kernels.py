"""Triton kernels around the e4m3 encoder; imported only where they run, in the interpreter or on a GPU."""

import torch
import triton
import triton.language as tl

from tests.kernels.overlay import load_overlay

e4m3 = load_overlay("vllm.v1.attention.ops.e4m3")
encode_e4m3 = e4m3.encode_e4m3


@triton.jit
def encode_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """out[i] = the e4m3 pattern of x[i]."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < size, other=0.0)
    tl.store(out_ptr + offsets, encode_e4m3(x), mask=offsets < size)


def encode(x: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 patterns, uint8, of a float32 vector."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    block = 65536
    encode_kernel[(triton.cdiv(x.numel(), block),)](x, out, x.numel(), BLOCK=block)
    return out


@triton.jit
def count_differences_kernel(counts_ptr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Count the floats that the encoder and the conversion instruction disagree on: numbers, then NaNs."""
    numbers = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    for block in range(NUM_BLOCKS):
        bits = (tl.program_id(0) * NUM_BLOCKS + block).to(tl.uint32) * BLOCK + tl.arange(0, BLOCK).to(tl.uint32)
        x = bits.to(tl.float32, bitcast=True)
        software = encode_e4m3(x)
        hardware = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        numbers += (~is_nan & (software != hardware)).to(tl.int32)
        # Which of the two NaNs it is, is nobody's business.
        nans += (is_nan & ((software & hardware & 0x7F) != 0x7F)).to(tl.int32)
    tl.atomic_add(counts_ptr, tl.sum(numbers, 0))
    tl.atomic_add(counts_ptr + 1, tl.sum(nans, 0))


def count_differences(device: str) -> list[int]:
    """Return how many of all 2^32 floats differ: numbers, and NaNs that are none in either of the two."""
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    block, num_blocks = 1024, 64
    count_differences_kernel[((1 << 32) // (block * num_blocks),)](counts, BLOCK=block, NUM_BLOCKS=num_blocks)
    return counts.tolist()
