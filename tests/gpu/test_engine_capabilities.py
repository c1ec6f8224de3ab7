"""The real engine as other GPUs and hosts run it: the capability faked, DeepGEMM or nvcc missing.

A run takes one level of each of four factors: the capability, the dtype, the KV cache, eager or CUDA graphs. RUNS has
two runs a capability, not all eight, and still every pair of levels of any two factors, and every combination of the
last three; `test_every_pair_is_run` says so. What a capability stands for here:

* 8.0, 8.6, 8.9: every function of DeepGEMM raises, which would work on the GPU that is really there. On 8.0 and 8.6
  nothing may use an fp8 instruction: e4m3 is encoded and decoded in software.
* 12.0: DeepGEMM or Triton, as the host's nvcc allows.
* 12.1: no nvcc.

Prompts of the first round fit top-k and are prefilled by FlashAttention 2 (but for float16 with fp8_ds_mla, which has
no dense prefill); the driver compiles its PTX then, at its first use.
"""

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu.engine import Outcome, Run
from tests.gpu.nvcc import change_nvcc
from tests.gpu.prompts import both, decode, rounding_errors, shared_selections, tokens
from tests.gpu.tiny_glm import INDEX_TOPK
from tests.gpu.yardstick import LENGTHS as YARDSTICK_LENGTHS
from tests.gpu.yardstick import NATIVE, about, check, errors, native_errors, row

LENGTHS = [[900, 2048], [2500, 3000, 8000]]
#: For the selections of the indexer.
SELECT_LENGTH = 8000
#: Of 2048 positions, mean over the tokens that see more; what another engine with an fp8 indexer reached on an H200.
LEAST_SHARED = 2013

FACTORS = {
    "capability": ["8.0", "8.6", "8.9", "12.0", "12.1"],
    "dtype": ["float16", "bfloat16"],
    "kv": ["auto", "fp8_ds_mla"],
    "mode": ["graphs", "eager"],
}
CHOSEN = [
    ("8.0", "float16", "auto", "graphs"),
    ("8.0", "bfloat16", "fp8_ds_mla", "eager"),
    ("8.6", "float16", "fp8_ds_mla", "graphs"),
    ("8.6", "bfloat16", "auto", "eager"),
    ("8.9", "float16", "auto", "eager"),
    ("8.9", "bfloat16", "fp8_ds_mla", "graphs"),
    ("12.0", "float16", "fp8_ds_mla", "eager"),
    ("12.0", "bfloat16", "auto", "graphs"),
    ("12.1", "float16", "auto", "graphs"),
    ("12.1", "bfloat16", "fp8_ds_mla", "eager"),
]


def make_run(name: str, dtype: str, kv: str, mode: str, backend: str | None = None, **fields) -> Run:
    """Return a run; without CUDA graphs it also keeps what the indexers select."""
    options = {"max_model_len": 8192, "enable_trace_replay": True, "enforce_eager": mode == "eager"}
    select = decode(SELECT_LENGTH) if mode == "eager" else None
    rounds = [both(lengths) for lengths in LENGTHS]
    return Run(name, dtype, backend, rounds, options, kv=kv, select=select, **fields)


def make_capability_run(capability: str, dtype: str, kv: str, mode: str) -> Run:
    fields = {"capability": capability}
    if capability.startswith("8."):
        fields["deep_gemm"] = False
    elif dtype == "bfloat16":
        # The selection prefers FlashInfer's backend where that is installed, and it cannot run on another GPU.
        fields["backend"] = "TRITON_MLA_SPARSE"
    if capability == "12.1":
        fields["nvcc"] = "missing"
    return make_run(f"{capability}, {dtype}, {kv}, {mode}", dtype, kv, mode, **fields)


RUNS = [make_capability_run(*levels) for levels in CHOSEN]

# The reasons for the indexer's path, as the log gives them.
REASONS = {
    **{
        capability: rf"Triton kernels \(DeepGEMM has no kernels for compute capability {re.escape(capability)}\)"
        for capability in ("8.0", "8.6", "8.9")
    },
    "12.0": r"DeepGEMM \(it can compile its kernels here\)|Triton kernels \(DeepGEMM cannot compile its kernels: .*\)",
    "12.1": r"Triton kernels \(DeepGEMM cannot compile its kernels: no nvcc was found .*\)",
}

# Where DeepGEMM serves upstream: it only lacks its compiler.
NO_NVCC = make_run("9.0, without nvcc", "float16", "auto", "eager", nvcc="missing", needs_capability=9)
OLD_NVCC = make_run(
    "9.0, nvcc 12.4", "bfloat16", "auto", "graphs", nvcc="12.4", needs_capability=9, backend="TRITON_MLA_SPARSE"
)
COMPILER_RUNS = [NO_NVCC, OLD_NVCC]
COMPILER_REASONS = {
    NO_NVCC: r"Triton kernels \(DeepGEMM cannot compile its kernels: no nvcc was found .*\)",
    OLD_NVCC: r"Triton kernels \(DeepGEMM cannot compile its kernels: .*/cuda/bin/nvcc is version 12\.4, .*\)",
}
EAGER_RUNS = [run for run in [*RUNS, *COMPILER_RUNS] if run.select]


def with_native(runs: list[Run]):
    return pytest.mark.parametrize(("run", "native"), [(run, NATIVE[run.dtype]) for run in runs], ids=str)


def require_gpu(engines, run: Run) -> None:
    if not engines.can_run(run):
        pytest.skip(f"needs a GPU of capability {run.needs_capability}, which DeepGEMM has kernels for")


def check_accuracy(engines, reference, rows, run: Run, native: Run) -> None:
    """As in test_engine_accuracy.py; an fp8 cache may cost what its rounding costs, as in test_engine_kv_formats.py."""
    found = errors(engines, run, LENGTHS, reference)
    limits = yardstick = native_errors(engines, native, YARDSTICK_LENGTHS, reference)
    if run.kv != "auto":
        limits = {length: limits[length] + rounding_errors(length, run.kv, reference) for length in found}
    peer = native if run.kv == "auto" else None
    new_rows = [row(engines, run, length, found[length], peer, peer and yardstick[length]) for length in found]
    rows += new_rows
    check(found, limits, "\n".join(map(str, new_rows)))


def test_every_pair_is_run():
    def combinations(number: int) -> set[tuple]:
        factors = itertools.combinations(range(len(FACTORS)), number)
        return {(chosen, tuple(levels[i] for i in chosen)) for chosen in factors for levels in CHOSEN}

    levels = list(FACTORS.values())
    for pair in itertools.combinations(range(len(levels)), 2):
        for wanted in itertools.product(*(levels[i] for i in pair)):
            assert (pair, wanted) in combinations(2)
    for wanted in itertools.product(*levels[1:]):
        assert ((1, 2, 3), wanted) in combinations(3)


@pytest.mark.parametrize("release", [None, "12.4"])
def test_nvcc_is_hidden_or_replaced(tmp_path, release):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("nvcc", "other"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    env = {"PATH": os.pathsep.join([str(tools), os.environ["PATH"]]), "DG_JIT_NVCC_COMPILER": str(tools / "nvcc")}
    change_nvcc(env, tmp_path / "run", release)

    found = shutil.which("nvcc", path=env["PATH"])
    assert shutil.which("other", path=env["PATH"])
    assert "DG_JIT_NVCC_COMPILER" not in env
    if release is None:
        assert found is None
        assert not Path(env["CUDA_HOME"]).exists()
    else:
        assert found == f"{env['CUDA_HOME']}/bin/nvcc"
        assert f"release {release}" in subprocess.run([found, "--version"], capture_output=True, text=True).stdout


def test_indexer_is_read_from_the_log():
    line = "INFO Sparse indexer logits: DeepGEMM (it can compile its kernels here); set VLLM_SPARSE_INDEXER_LOGITS\n"
    assert Outcome(0, "other\n" + 2 * line, None).indexer == "DeepGEMM (it can compile its kernels here)"


@pytest.mark.gpu
@with_native(RUNS)
def test_logprobs_are_as_near_as_the_native_backends(engines, reference, rows, run, native):
    worker = engines.result(run)["workers"][0]
    assert worker["capability"] == run.capability
    assert worker["backends"] == ["TRITON_MLA_SPARSE"]
    assert ("FULL" in worker["graphs"]) == (not run.options["enforce_eager"])
    check_accuracy(engines, reference, rows, run, native)


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_log_names_backend_and_indexer(engines, run):
    worker = engines.result(run)["workers"][0]
    outcome = engines.outcome(run)
    assert re.search(r"Using \S*TRITON_MLA_SPARSE (attention )?backend", outcome.log)
    assert re.fullmatch(REASONS[run.capability], outcome.indexer)
    assert worker["triton_indexer"] == outcome.indexer.startswith("Triton")


@pytest.mark.gpu
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_e4m3_is_software_where_the_gpu_has_none(engines, run):
    """Read off the code that ran: the fused kernels, the indexer's and the attention's."""
    result = engines.result(run)
    code, worker = result["code"], result["workers"][0]
    is_software = run.capability in ("8.0", "8.6")
    assert worker["software_e4m3"] == is_software
    assert code.keys() >= {"sparse_mla_kernel", "sparse_mla_mma_kernel", "_fused_norm_rope_kernel"}
    if worker["triton_indexer"]:
        assert any("logits" in name for name in code), f"no kernel of the logits ran: {sorted(code)}"
    if is_software:
        assert "_fused_q_kernel" in code  # from SM100 on its part is done by a CuTe DSL kernel in bfloat16
        assert not [name for name, has_fp8 in code.items() if has_fp8]
    else:
        assert code["_fused_norm_rope_kernel"]


@pytest.mark.gpu
@pytest.mark.parametrize("run", [run for run in RUNS if (run.dtype, run.kv) != ("float16", "fp8_ds_mla")], ids=str)
def test_short_prompts_are_prefilled_by_flash_attention_2(engines, run):
    assert engines.result(run)["workers"][0]["flash_attention"] == 2
    assert "Using FLASH_ATTN MLA prefill backend" in engines.outcome(run).log


@pytest.mark.gpu
@with_native(COMPILER_RUNS)
def test_starts_without_a_compiler_for_deep_gemm(engines, reference, rows, run, native):
    require_gpu(engines, run)
    worker = engines.result(run)["workers"][0]
    assert worker["backends"] == [run.backend or native.backend]
    assert worker["triton_indexer"]
    assert re.fullmatch(COMPILER_REASONS[run], engines.outcome(run).indexer)
    assert any("logits" in name for name in engines.result(run)["code"])
    check_accuracy(engines, reference, rows, run, native)


@pytest.mark.gpu
@pytest.mark.parametrize("run", EAGER_RUNS, ids=str)
def test_indexer_selects_what_transformers_selects(engines, reference, rows, run):
    """The first layer's indexer, whose input has no error yet; the others are reported.

    Both the prompt, whose logits are computed from gathered keys, and the tokens after it, from the paged cache.
    """
    require_gpu(engines, run)
    selected = torch.load(engines.result(run)["selected"])
    expected = reference.selections(tokens(SELECT_LENGTH))
    assert sorted(selected) == list(range(len(expected)))
    num_read = len(tokens(SELECT_LENGTH)) - 1  # the last token is not
    for layer, positions in sorted(selected.items()):
        found = positions[INDEX_TOPK:num_read]  # the tokens that see more than top-k
        assert len(found) == num_read - INDEX_TOPK
        assert found.min() >= 0
        assert (found.sort(dim=1).values.diff(dim=1) > 0).all(), f"a position twice in layer {layer}"
        shared = shared_selections(found, expected[layer][INDEX_TOPK:num_read]).float()
        prompt, decoded = shared.split([SELECT_LENGTH - INDEX_TOPK, num_read - SELECT_LENGTH])
        new_row = {
            **about(engines, run),
            "prompt": SELECT_LENGTH,
            "layer": layer,
            "topk": INDEX_TOPK,
            "topk_shared_mean": round(prompt.mean().item(), 1),
            "topk_shared_min": int(prompt.min()),
            "topk_shared_decode_mean": round(decoded.mean().item(), 1),
            "topk_shared_decode_min": int(decoded.min()),
        }
        print(new_row)
        rows.append(new_row)
        if layer == 0:
            assert prompt.mean() >= LEAST_SHARED, new_row
            # The more tokens, the more are close to the limit; the prompt's last ones see as many as these.
            assert decoded.mean() >= prompt[-len(decoded) :].mean() - 5, new_row
