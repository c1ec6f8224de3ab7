"""The real engine on a tiny GLM-5 with CUDA graphs, against transformers in float32.

Past top-k the indexer's choice counts. Its keys are quantised to fp8, which is
most of the error there; the native backend has the same one.
"""

import pytest

from tests.gpu.engine import Run
from tests.gpu.yardstick import LENGTHS, NATIVE, accuracy_run, check, errors, native_errors, row

pytestmark = pytest.mark.gpu

RUNS = [
    accuracy_run("float16", "float16", "TRITON_MLA_SPARSE"),
    accuracy_run("bfloat16", "bfloat16", "TRITON_MLA_SPARSE"),
]


@pytest.mark.parametrize(("run", "native"), [(run, NATIVE[run.dtype]) for run in RUNS], ids=str)
def test_logprobs_are_as_near_as_the_native_backends(engines, reference, rows, run, native):
    worker = engines.result(run)["workers"][0]
    assert worker["backends"] == ["TRITON_MLA_SPARSE"]
    assert "FULL" in worker["graphs"]

    found = errors(engines, run, LENGTHS, reference)
    yardstick = native_errors(engines, native, LENGTHS, reference)
    new_rows = [row(engines, run, length, found[length], native, yardstick[length]) for length in found]
    rows += new_rows

    check(found, yardstick, "\n".join(map(str, new_rows)))


STOCK = Run(
    "stock on 12.0",
    "float16",
    None,
    [],
    {"max_model_len": 4096, "enforce_eager": True},
    capability="12.0",
    stock=True,
)


@pytest.mark.parametrize("run", [STOCK], ids=str)
def test_stock_vllm_has_no_backend_on_12_0(engines, run):
    """What this distribution is for: the error of the unpatched release."""
    if not engines.can_run(run):
        pytest.skip("needs the unpatched vLLM: --stock-site")
    outcome = engines.outcome(run)
    assert outcome.returncode != 0
    assert "No valid attention backend found for cuda" in outcome.log
    assert "TRITON_MLA: [sparse not supported]" in outcome.log
    assert "FLASHINFER_MLA_SPARSE_SM120: [dtype not supported" in outcome.log
    assert "TRITON_MLA_SPARSE" not in outcome.log
