"""A tiny GLM-5.3-Flash (glm5next): no RoPE, rows of 2176 indices, an indexer that scores pools of 16 tokens.

It has the sparse attention and the wrappers of the indexer's logits in common with GLM-5. What of it runs where:

* bfloat16 only: several of its parameters are.
* The kernels that pool and quantise the indexer's keys and queries store e4m3, below SM89 as bytes encoded in software.
* KDA, its linear attention: FlashKDA is for SM90, SM100 and SM120 and needs `vllm._flashkda_C`, which a host may lack;
  the runs ask for the Triton kernels, which vLLM takes by itself elsewhere.
* The hyper-connections, which need TileLang, are no part of the model here; see tiny_glm5next.py.
"""

import re

import pytest

from tests.gpu.engine import Run
from tests.gpu.prompts import both, rounding_errors
from tests.gpu.tiny_glm5next import TOPK_WIDTH
from tests.gpu.yardstick import check, errors, row

pytestmark = pytest.mark.gpu

LENGTHS = [[900, 2048], [2500, 3000]]


def make_run(name: str, mode: str, kv: str = "auto", backend: str | None = "TRITON_MLA_SPARSE", **fields) -> Run:
    options = {
        "max_model_len": 4096,
        "enable_trace_replay": True,
        "enforce_eager": mode == "eager",
        "additional_config": {"kda_prefill_backend": "triton"},
    }
    rounds = [both(lengths) for lengths in LENGTHS]
    return Run(
        f"glm5next, {name}, {mode}", "bfloat16", backend, rounds, options, kv=kv, model="tiny-glm5next", **fields
    )


# With DeepGEMM, where the host has nvcc.
NATIVE = make_run("native", "graphs", backend="FLASH_ATTN_MLA_SPARSE", needs_capability=9)
RUNS = [
    make_run("8.6", "eager", backend=None, capability="8.6", deep_gemm=False),
    make_run("8.9", "graphs", backend=None, capability="8.9", deep_gemm=False),
    make_run("12.0", "graphs", capability="12.0"),
    make_run("12.1, fp8_ds_mla", "eager", "fp8_ds_mla", capability="12.1", nvcc="missing"),
]
NO_KERNELS = r"Triton kernels \(DeepGEMM has no kernels .*"
INDEXERS = {"8.6": NO_KERNELS, "8.9": NO_KERNELS, "12.0": ".*", "12.1": r"Triton kernels \(.* nvcc .*"}


@pytest.mark.parametrize(("run", "native"), [(run, NATIVE) for run in RUNS], ids=str)
def test_logprobs_are_as_near_as_the_native_backends(engines, glm5next, rows, run, native):
    if not engines.can_run(native):
        pytest.skip(f"needs a GPU of capability {native.needs_capability} for {native.backend}")
    worker = engines.result(run)["workers"][0]
    assert worker["capability"] == run.capability
    assert worker["backends"] == ["TRITON_MLA_SPARSE"]
    assert worker["topk_widths"] == [TOPK_WIDTH]
    assert re.fullmatch(INDEXERS[run.capability], engines.outcome(run).indexer)

    _, reference = glm5next
    found = errors(engines, run, LENGTHS, reference)
    yardstick = errors(engines, native, LENGTHS, reference)
    limits = yardstick
    if run.kv != "auto":
        limits = {length: limits[length] + rounding_errors(length, run.kv, reference) for length in found}
    new_rows = [row(engines, run, length, found[length], native, yardstick[length]) for length in found]
    rows += new_rows
    check(found, limits, "\n".join(map(str, new_rows)))
