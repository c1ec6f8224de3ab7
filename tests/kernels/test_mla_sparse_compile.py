"""The sparse MLA kernels compiled for every supported GPU, and what the assembler says of them.

No GPU is needed; the compiling runs in other processes, all at once.
"""

import json
import re
from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks.occupancy import RESERVED, SM_SHARED
from tests.kernels.compilation import SHARED_MEMORY, Binary, compile_kernel
from tests.kernels.overlay import OVERLAY, load_overlay

TABLE = json.loads((OVERLAY / "vllm/v1/attention/ops/triton_mla_sparse_configs.json").read_text())
TILE = ("block_h", "block_n", "num_warps", "num_stages", "group", "gluon", "maxnreg", "alone")
# format of the table -> name -> KV format, model dtype, RoPE width
VARIANTS = {
    "16-bit": {
        "fp16": ("16-bit", "fp16", 64),
        "bf16": ("16-bit", "bf16", 64),
        "fp16-nope": ("16-bit", "fp16", 0),
    },
    "fp8": {
        "fp16-ds": ("fp8_ds_mla", "fp16", 64),
        "bf16-ds": ("fp8_ds_mla", "bf16", 64),
        "bf16-e4m3": ("fp8_e4m3", "bf16", 64),
    },
}
ASYNC_COPY = r"cp\.async\.cg\.shared\.global [^;]*, 0x10,"
# The rows of "default" are chosen to spill nothing where they are meant to run. SM90's own are the fastest measured,
# and some of them spill a little.
MAX_SPILLED_BYTES = {arch: 192 if arch == 90 else 0 for arch in SHARED_MEMORY}


def tiles(section: str, kv_format: str) -> list[tuple]:
    """Return the different kernels of a section of the table, and those for pairs of tokens that are left alone."""
    usual = {"group": 1, "gluon": "", "maxnreg": None, "alone": False}
    rows = [usual | row for kind in ("decode", "prefill") for row in TABLE[section][kv_format][kind]]
    least = {"": 8, "mma": 8, "wgmma": 16}
    rows += [
        row | {"group": 1, "block_h": max(row["block_h"] // row["group"], least[row["gluon"]]), "alone": True}
        for row in rows
        if row["group"] > 1
    ]
    return sorted({tuple(row[name] for name in TILE) for row in rows}, key=str)


def cases() -> list[tuple[int, str, str, tuple]]:
    """Return (compute capability, format, variant, tile): each kernel on each GPU that the table gives it to.

    SM80 and SM120 get every variant, the others one after the other.
    """
    result = []
    for arch in SHARED_MEMORY:
        section = f"{arch // 10}.{arch % 10}"
        for kv_format, variants in VARIANTS.items():
            for index, tile in enumerate(tiles(section if section in TABLE else "default", kv_format)):
                names = list(variants)
                if arch not in (80, 120):
                    names = [names[index % len(names)]]
                result += [(arch, kv_format, name, tile) for name in names]
    return result


CASES = cases()


@pytest.mark.parametrize("kv_format", VARIANTS)
def test_every_gpu_has_the_kernel_for_its_matrix_instructions(kv_format):
    def gluon(section):
        return {tile[TILE.index("gluon")] for tile in tiles(section, kv_format)} - {""}

    own = {"wgmma"} if kv_format == "16-bit" else {"wgmma", "mma"}
    assert {section: gluon(section) for section in TABLE} == {"default": {"mma"}, "9.0": own}


def kernels():
    return load_overlay("vllm.v1.attention.ops.triton_mla_sparse")


def compile_attention(arch: int, table_format: str, variant: str, tile: tuple) -> Binary:
    kv_format, dtype, rope_dim = VARIANTS[table_format][variant]
    config: dict[str, Any] = dict(zip(TILE, tile, strict=True))
    if config["gluon"] == "wgmma":
        kernel = load_overlay("vllm.v1.attention.ops.gluon_mla_sparse_sm90").sparse_mla_wgmma_kernel
        tiles, options = {"NUM_BUFFERS": config["num_stages"]}, {}
    elif config["gluon"] == "mma":
        kernel = load_overlay("vllm.v1.attention.ops.gluon_mla_sparse").sparse_mla_mma_kernel
        tiles = {"BLOCK_N": config["block_n"], "NUM_BUFFERS": config["num_stages"], "HAS_E4M3": arch >= 89}
        options = {}
    else:
        kernel = kernels().sparse_mla_kernel
        tiles, options = {"BLOCK_N": config["block_n"]}, {"num_stages": config["num_stages"]}
    return compile_kernel(
        kernel,
        arch,
        pointers={
            "q_nope_ptr": f"*{dtype}",
            "q_pe_ptr": f"*{dtype}",
            "kv_ptr": f"*{dtype}" if kv_format == "16-bit" else "*u8",
            "lists_ptr": "*i32",
            "counts_ptr": "*i32",
            "kv_scale_ptr": "*fp32",
            "out_ptr": f"*{dtype}",
            "lse_ptr": "*fp32",
        },
        scalars={
            "sm_scale": "fp32",
            "num_tokens": "i32",
            "num_heads": "i32",
            "list_width": "i32",
            "q_nope_stride0": "i32",
            "q_nope_stride1": "i32",
            "q_pe_stride0": "i32",
            "q_pe_stride1": "i32",
        },
        constants={
            "KV_STRIDE": 656 if kv_format == "fp8_ds_mla" else 512 + rope_dim,
            "KV_FORMAT": kv_format,
            "HAS_ROPE": rope_dim > 0,
            "GROUP": config["group"],
            "BLOCK_H": config["block_h"],
            "MAY_SKIP": config["group"] > 1 or config["alone"],
            "LAUNCH_PDL": arch >= 90,
            **tiles,
        },
        num_warps=config["num_warps"],
        maxnreg=config["maxnreg"],
        **options,
    )


def compile_merge(arch: int) -> Binary:
    return compile_kernel(
        kernels().merge_splits_kernel,
        arch,
        pointers={
            "partial_out_ptr": "*fp16",
            "partial_lse_ptr": "*fp32",
            "out_ptr": "*fp16",
            "lse_ptr": "*fp32",
        },
        scalars={"num_splits": "i32"},
        constants={"BLOCK_S": 32, "LAUNCH_PDL": arch >= 90},
        num_warps=4,
        num_stages=3,
    )


def compile_union(arch: int) -> Binary:
    return compile_kernel(
        load_overlay("vllm.v1.attention.ops.gluon_union_rows").union_rows_kernel,
        arch,
        pointers={
            "topk_ptr": "*i32",
            "valid_count_ptr": "*i32",
            "union_ptr": "*i32",
            "count_ptr": "*i32",
            "alone_count_ptr": "*i32",
        },
        scalars={"num_tokens": "i32", "num_topk": "i32"},
        constants={"BLOCK_K": 2048},
        num_warps=8,
    )


@pytest.fixture(scope="module")
def binaries(compiler) -> dict[tuple, Future[Binary]]:
    return {case: compiler.submit(compile_attention, *case) for case in CASES}


@pytest.mark.parametrize(("arch", "table_format", "variant", "tile"), CASES, ids=lambda value: str(value))
def test_attention_kernel(binaries, arch, table_format, variant, tile):
    binary = binaries[arch, table_format, variant, tile].result()
    assert binary.shared <= SHARED_MEMORY[arch]
    # Fewer registers than a tile needs, with a stack, is how the assembler gives up.
    assert binary.local <= MAX_SPILLED_BYTES[arch]
    assert 64 <= binary.registers <= 255
    assert binary.count(r"\bmma\.sync|\bwgmma\.mma_async|tcgen05\.mma") > 0
    # KV rows arrive by 16-byte asynchronous copies, but for fp8 rows under SM90's instructions, and never by TMA.
    gluon = tile[TILE.index("gluon")]
    assert (binary.count(ASYNC_COPY) > 0) == (table_format == "16-bit" or gluon != "wgmma")
    assert binary.count(r"cp\.async\.bulk") == 0
    # fp8 rows are not decoded byte by byte out of shared memory.
    assert binary.count(r"ld\.shared\.[bu]8") == 0
    # Launched beside the end of the kernel before it: nothing is read before that has ended.
    waits = binary.ptx.find("griddepcontrol.wait")
    assert (waits >= 0) == (binary.count(r"griddepcontrol\.launch_dependents") > 0) == (arch >= 90)
    assert waits < re.search(r"\bld\.global", binary.ptx).start()
    if gluon:
        # Outputs are stored by 16 bytes; the others are log-sum-exps.
        assert binary.count(r"\bst\.global\.v4\.b32") >= binary.count(r"\bst\.global\.b32") > 0
        assert binary.count(r"\bst\.global\.[bu]16") == 0
    if gluon == "mma":
        # The SM of the smallest GPUs holds two programs.
        assert 2 * (binary.shared + RESERVED) <= SM_SHARED[12, 0]
        assert (binary.count(r"\bcvt\.rn\.f16x2\.e4m3x2") > 0) == (table_format == "fp8" and arch >= 89)
    if gluon == "wgmma":
        # Both operands come from shared memory: no fragments are loaded.
        assert binary.count(r"\bwgmma\.mma_async") > 0
        assert binary.count(r"\bmma\.sync") == 0
        assert binary.count(r"\bldmatrix") <= 4


@pytest.mark.parametrize("arch", SHARED_MEMORY)
@pytest.mark.parametrize("compile_other", [compile_merge, compile_union])
def test_other_kernels(compiler, compile_other, arch):
    binary = compiler.submit(compile_other, arch).result()
    assert binary.shared <= 48 * 1024
    assert binary.local == 0
