"""Small Triton kernels that show what the tools around the real ones see."""

import triton
import triton.language as tl


@triton.jit
def matmul_kernel(a_ptr, b_ptr, out_ptr, num_tiles, TILE: tl.constexpr):
    """out [TILE, TILE] = sum of a[i] @ b[i], for num_tiles square tiles each."""
    offs = tl.arange(0, TILE)
    tile = offs[:, None] * TILE + offs[None, :]
    acc = tl.zeros([TILE, TILE], tl.float32)
    for i in range(num_tiles):
        a = tl.load(a_ptr + i * TILE * TILE + tile)
        b = tl.load(b_ptr + i * TILE * TILE + tile)
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + tile, acc)


@triton.jit
def read_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    """out = sum of x[:SIZE]."""
    x = tl.load(x_ptr + tl.arange(0, SIZE))
    tl.store(out_ptr, tl.sum(x, 0))
