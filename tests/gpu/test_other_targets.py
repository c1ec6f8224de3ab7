"""The kernels as Triton generates them for SM80, SM86 and SM89, executed on the GPU at hand.

It shows that the code is right that those cards will run, with Ampere's matrix instructions and asynchronous copies
and without fp8 instructions on SM80 and SM86. It cannot show their speed, nor that their shared memory suffices; the
latter is asserted in tests/kernels.
"""

import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.child_pytest import run_pytest
from tests.gpu.other_target import generate_for

HERE = Path(__file__).parent
TARGETS = ["8.0", "8.6", "8.9"]
MATRIX_KERNELS = {"sparse_mla_kernel", "sparse_mla_mma_kernel", "mqa_logits_kernel", "paged_mqa_logits_kernel"}
FUSED_KERNELS = {"_fused_norm_rope_kernel", "_fused_q_kernel"}
OTHER_KERNELS = {"merge_splits_kernel", "paged_mqa_schedule_kernel"}


def run_forms(tmp_path: Path, capability: str) -> list[dict[str, Any]]:
    """Run kernel_forms.py with vLLM and Triton believing in `capability`; returns what Triton generated."""
    generated = tmp_path / "generated.jsonl"
    target = ["-p", "tests.gpu.other_target", "--generate-for", capability.replace(".", "")]
    run = run_pytest(
        [*target, "--generated", str(generated), "tests/gpu/kernel_forms.py"],
        cwd=HERE.parents[1],
        report=tmp_path / "report.xml",
        environment={"FAKE_CAPABILITY": capability, "TRITON_CACHE_DIR": str(tmp_path / "triton-cache")},
        path=[HERE / "fake_capability"],
        workers=8,  # the time goes into compiling
    )
    assert run.returncode == 0, run.output[-10_000:]
    assert {case.outcome for case in run.cases} == {"passed"}
    return [json.loads(line) for line in generated.read_text().splitlines()]


@pytest.mark.gpu
@pytest.mark.parametrize("capability", TARGETS)
def test_code_for_other_targets_is_right(tmp_path, capability):
    if torch.cuda.get_device_capability() <= tuple(map(int, capability.split("."))):
        pytest.skip(f"needs a GPU newer than SM{capability.replace('.', '')}")
    kernels = run_forms(tmp_path, capability)
    assert {kernel["name"] for kernel in kernels} >= MATRIX_KERNELS | FUSED_KERNELS | OTHER_KERNELS
    assert all(kernel["target"] for kernel in kernels)
    assert all(kernel["matrix_products"] for kernel in kernels if kernel["name"] in MATRIX_KERNELS)
    for name in MATRIX_KERNELS:
        assert any(kernel["asynchronous_copies"] for kernel in kernels if kernel["name"] == name), name
    # The instruction where there is one, and software where there is none.
    fused = [kernel for kernel in kernels if kernel["name"] in FUSED_KERNELS]
    assert all(bool(kernel["e4m3_conversions"]) is (capability == "8.9") for kernel in fused)


def _generate(arch: int, folder: Path) -> str:
    """Compile a matrix product with SM90 as the GPU that is there and `arch` as the target; returns its PTX."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    from tests.gpu.probe_kernels import matmul_kernel
    from tests.kernels.compilation import compile_kernel

    generate_for(arch, folder / "generated.jsonl")
    pointers = {"a_ptr": "*fp16", "b_ptr": "*fp16", "out_ptr": "*fp32"}
    return compile_kernel(
        matmul_kernel, 90, pointers, {"num_tiles": "i32"}, {"TILE": 64}, num_warps=4, num_stages=3
    ).ptx


@pytest.mark.parametrize("arch", [80, 86, 89])
def test_assembler_takes_the_code_of_other_targets(tmp_path, arch):
    """What the GPU test builds on, shown without a GPU."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        ptx = pool.submit(_generate, arch, tmp_path).result()
    assert f".target sm_{arch}\n" in ptx
    assert "wgmma" not in ptx
    kernel = json.loads((tmp_path / "generated.jsonl").read_text())
    assert kernel["target"]
    assert kernel["matrix_products"] > 0
    assert kernel["asynchronous_copies"] > 0
