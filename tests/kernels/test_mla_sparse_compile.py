"""The sparse MLA kernels compiled for every supported GPU, and what the assembler says of them.

No GPU is needed; the compiling runs in other processes, all at once.
"""

from concurrent.futures import Future
from itertools import product

import pytest

from tests.kernels.compilation import SHARED_MEMORY, Binary, compile_kernel
from tests.kernels.overlay import load_overlay

HEADS = [8, 128]  # one head count per configuration of the table
# name -> model dtype, output dtype, RoPE width
VARIANTS = {
    "fp16-split": ("fp16", "fp32", 64),
    "bf16-direct": ("bf16", "bf16", 64),
    "fp16-nope": ("fp16", "fp16", 0),
}
CASES = [
    *product(SHARED_MEMORY, HEADS, ["fp16-split", "bf16-direct"]),
    *product([80, 120], HEADS, ["fp16-nope"]),
]


def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse")


def compile_attention(arch: int, num_heads: int, variant: str) -> Binary:
    dtype, out_dtype, rope_dim = VARIANTS[variant]
    config = kernels().get_config(num_heads)
    return compile_kernel(
        kernels().sparse_mla_kernel,
        arch,
        pointers={
            "q_nope_ptr": f"*{dtype}",
            "q_pe_ptr": f"*{dtype}",
            "kv_ptr": f"*{dtype}",
            "topk_ptr": "*i32",
            "valid_count_ptr": "*i32",
            "out_ptr": f"*{out_dtype}",
            "lse_ptr": "*fp32",
        },
        scalars={
            "sm_scale": "fp32",
            "num_heads": "i32",
            "num_topk": "i32",
            "q_nope_stride0": "i32",
            "q_nope_stride1": "i32",
            "q_pe_stride0": "i32",
            "q_pe_stride1": "i32",
        },
        constants={
            "KV_STRIDE": 512 + rope_dim,
            "HAS_ROPE": rope_dim > 0,
            "BLOCK_H": config.block_h,
            "BLOCK_N": config.block_n,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def compile_merge(arch: int, num_splits: int) -> Binary:
    return compile_kernel(
        kernels().merge_splits_kernel,
        arch,
        pointers={
            "partial_out_ptr": "*fp32",
            "partial_lse_ptr": "*fp32",
            "out_ptr": "*fp16",
            "lse_ptr": "*fp32",
        },
        scalars={},
        constants={"NUM_SPLITS": num_splits},
        num_warps=4,
        num_stages=3,
    )


def configurations() -> list[int]:
    return sorted(kernels().CONFIGS)


@pytest.fixture(scope="module")
def binaries(compiler) -> dict[tuple, Future[Binary]]:
    return {case: compiler.submit(compile_attention, *case) for case in CASES}


@pytest.mark.parametrize(("arch", "num_heads", "variant"), CASES)
def test_attention_kernel(binaries, arch, num_heads, variant):
    binary = binaries[arch, num_heads, variant].result()
    assert binary.shared <= SHARED_MEMORY[arch]
    # Fewer registers than a tile needs, with a stack, is how the assembler gives up.
    assert binary.local == 0
    assert 64 <= binary.registers <= 255
    assert binary.count(r"\bmma\.sync|\bwgmma\.mma_async") > 0
    # KV rows arrive by 16-byte asynchronous copies, and never by TMA.
    assert binary.count(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,") > 0
    assert binary.count(r"cp\.async\.bulk") == 0


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_merge_kernel(compiler, arch):
    binary = compiler.submit(compile_merge, arch, 32).result()
    assert binary.shared <= 48 * 1024
    assert binary.local == 0


def test_every_configuration_is_compiled(compiler):
    assert compiler.submit(configurations).result() == HEADS
