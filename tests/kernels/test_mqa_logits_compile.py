"""The MQA logits kernels compiled for every supported GPU, and what the assembler says of them.

No GPU is needed; the compiling runs in other processes, all at once.
"""

from concurrent.futures import Future

import pytest

from tests.kernels.compilation import SHARED_MEMORY, Binary, compile_kernel
from tests.kernels.overlay import load_overlay

ARCHS = [arch for arch in SHARED_MEMORY if arch != 100]  # SM100 keeps DeepGEMM
HEADS = [16, 32, 64, 128]
TOKENS = [1, 2, 4]  # of a request in a decode, as far as a tile holds them
# Some predicates on the stack, where the assembler finds it cheaper than a register.
MAX_LOCAL_BYTES = 8


def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mqa_logits")


def configs():
    return load_overlay("vllm.v1.attention.ops.triton_mqa_logits_config")


def is_software(arch: int) -> bool:
    """Below SM89 Triton refuses e4m3, in pointers already: what compiles there computes the bytes."""
    return arch < 89


def compile_contiguous(arch: int, num_heads: int, software: bool | None = None) -> Binary:
    software = is_software(arch) if software is None else software
    config = configs().get_contiguous_config(num_heads, divmod(arch, 10), software)
    e4m3 = "*u8" if config.software_e4m3 else "*fp8e4nv"
    counts = ("num_tokens", "num_keys", "max_seqlen_k", "keys_per_program", "weights_pitch", "out_pitch")
    return compile_kernel(
        kernels().mqa_logits_kernel,
        arch,
        pointers={
            "q_ptr": e4m3,
            "k_ptr": e4m3,
            "k_scale_ptr": "*fp32",
            "weights_ptr": "*fp32",
            "cu_seqlen_ks_ptr": "*i32",
            "cu_seqlen_ke_ptr": "*i32",
            "out_ptr": "*fp32",
        },
        scalars=dict.fromkeys((*counts, "k_stride0"), "i32"),
        constants={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": 128,
            "BLOCK_Q": config.block_q,
            "BLOCK_N": config.block_n,
            "SOFTWARE_E4M3": config.software_e4m3,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )


def compile_paged(arch: int, num_heads: int, tokens: int, block_size: int) -> Binary:
    config = configs().get_paged_config(num_heads, divmod(arch, 10), is_software(arch))
    e4m3 = "*u8" if config.software_e4m3 else "*fp8e4nv"
    counts = (
        *("next_n", "max_model_len", "weights_pitch", "context_lens_pitch", "context_lens_step"),
        *("block_tables_pitch", "out_pitch"),
    )
    return compile_kernel(
        kernels().paged_mqa_logits_kernel,
        arch,
        pointers={
            "q_ptr": e4m3,
            "kv_cache_ptr": e4m3,
            "weights_ptr": "*fp32",
            "context_lens_ptr": "*i32",
            "block_tables_ptr": "*i32",
            "schedule_ptr": "*i32",
            "out_ptr": "*fp32",
        },
        scalars=dict.fromkeys((*counts, "kv_cache_stride0"), "i32"),
        constants={
            "NUM_HEADS": num_heads,
            "HEAD_DIM": 128,
            "BLOCK_SIZE": block_size,
            "BLOCK_Q": min(tokens * num_heads, config.block_q),
            "BLOCK_N": config.block_n,
            "PROGRAMS_PER_SLOT": config.programs_per_slot,
            "NUM_STAGES": config.num_stages,
            "SOFTWARE_E4M3": config.software_e4m3,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.maxnreg,
    )


def compile_schedule(arch: int) -> Binary:
    return compile_kernel(
        kernels().paged_mqa_schedule_kernel,
        arch,
        pointers={"context_lens_ptr": "*i32", "schedule_ptr": "*i32"},
        scalars=dict.fromkeys(("num_rows", "next_n", "block_size", "context_lens_pitch"), "i32"),
        constants={"BLOCK_ROWS": 1024},
        num_warps=4,
        num_stages=3,
    )


# SM86 gets the code of SM80 and SM121 that of SM120, but for what the assembler makes of it.
CONTIGUOUS = [(arch, num_heads) for arch in ARCHS for num_heads in HEADS if arch not in (86, 121) or num_heads == 32]
PAGED = [(*case, tokens, 64) for case in CONTIGUOUS for tokens in TOKENS if case[1] * tokens <= 128]
PAGED += [(arch, 32, 1, 32) for arch in ARCHS]


@pytest.fixture(scope="module")
def binaries(compiler) -> dict[tuple, Future[Binary]]:
    return {
        **{case: compiler.submit(compile_contiguous, *case) for case in CONTIGUOUS},
        **{case: compiler.submit(compile_paged, *case) for case in PAGED},
    }


def check(arch: int, binary: Binary) -> None:
    assert binary.shared <= SHARED_MEMORY[arch]
    # Few registers, with a stack, is how the assembler gives up.
    assert binary.local <= MAX_LOCAL_BYTES
    assert 32 <= binary.registers <= 255
    # The instructions that this GPU has for the operands.
    e4m3, float16 = (
        binary.count(rf"\b(wgmma\.mma_async|mma)\.sync[^;]*{pair}") for pair in (r"\.e4m3\.e4m3", r"\.f16\.f16\.f32")
    )
    assert (float16 > 0, e4m3 > 0) == (is_software(arch), not is_software(arch))
    assert (binary.count(r"\bwgmma\.mma_async") > 0) == (arch == 90)
    # Keys arrive by 16-byte asynchronous copies, and never by TMA.
    assert binary.count(r"cp\.async\.cg\.shared\.global [^;]*, 0x10,") > 0
    assert binary.count(r"cp\.async\.bulk") == 0
    # They are decoded once, not byte by byte out of shared memory.
    assert binary.count(r"ld\.shared\.[bu]8") == 0


@pytest.mark.parametrize(("arch", "num_heads"), CONTIGUOUS)
def test_contiguous_kernel(binaries, arch, num_heads):
    check(arch, binaries[arch, num_heads].result())


@pytest.mark.parametrize(("arch", "num_heads", "tokens", "block_size"), PAGED)
def test_paged_kernel(binaries, arch, num_heads, tokens, block_size):
    binary = binaries[arch, num_heads, tokens, block_size].result()
    check(arch, binary)
    # The scales, 4 bytes each, are copied ahead like the keys.
    assert binary.count(r"cp\.async\.ca\.shared\.global [^;]*, 0x4,") > 0


@pytest.mark.parametrize("arch", ARCHS)
def test_schedule_kernel(compiler, arch):
    binary = compiler.submit(compile_schedule, arch).result()
    assert binary.shared <= 1024
    assert binary.local == 0


def compile_native_for_sm80() -> None:
    try:
        compile_contiguous(80, 32, software=False)
    except Exception as error:
        raise RuntimeError(str(error)) from None  # Triton's own errors do not survive the way back


def test_e4m3_itself_is_refused_below_sm89(compiler):
    """What the software form is for; without the refusal nobody would need it."""
    with pytest.raises(RuntimeError, match="fp8e4nv"):
        compiler.submit(compile_native_for_sm80).result()
