"""Nothing is compiled while requests are served: whatever a configuration can reach is compiled at the start.

vLLM's own JIT monitor watches, from the end of the warm-up on: Triton, CuTe DSL
and TileLang. A kernel that Triton finds in its cache on disk counts as compiled;
what DeepGEMM compiles for the indexer is not watched. So the indexer's logits
are those of Triton's kernels in two of the runs, once with e4m3 in software.
"""

import random

import pytest

from tests.gpu.engine import TRITON_INDEXER, Run
from tests.gpu.prompts import generate

pytestmark = pytest.mark.gpu

MAX_NUM_SEQS = 16


def sweep() -> list[list[dict]]:
    """Return batches of 1 to 16 requests with prompts of 1 to 3000 tokens, read in chunks beside the decodes."""
    rng = random.Random(0)
    lengths = [1, 2, 63, 64, 65, 2047, 2048, 2049, 3000]
    return [
        [
            generate(length, rng.randint(1, 12)) | {"after_steps": rng.randint(0, 6)}
            for length in [rng.choice(lengths), *(rng.randint(1, 3000) for _ in range(size - 1))]
        ]
        for size in range(1, MAX_NUM_SEQS + 1)
    ]


def sweep_run(name: str, dtype: str, options: dict | None = None, **fields) -> Run:
    """Return a run whose graphs cover half of the batch sizes, so that the others run without."""
    options = {"max_model_len": 4096, "max_num_batched_tokens": 1024, "max_num_seqs": MAX_NUM_SEQS, **(options or {})}
    return Run(name, dtype, "TRITON_MLA_SPARSE", sweep(), options, logprobs=False, recompile=True, **fields)


RUNS = [
    sweep_run("sweep, float16", "float16"),
    sweep_run("sweep, bfloat16, fp8_ds_mla, 8.0", "bfloat16", kv="fp8_ds_mla", capability="8.0", deep_gemm=False),
    sweep_run(
        "sweep, MTP 2",
        "float16",
        {
            "speculative_config": {
                "method": "mtp",
                "num_speculative_tokens": 2,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.8, 0.5],
            },
            "compilation_config": {"cudagraph_capture_sizes": [3, 6, 12, 24]},
        },
        environment=TRITON_INDEXER,
    ),
]

# Upstream's kernels that are compiled late, with the reason.
UPSTREAM = {
    "fused_moe_kernel": "its tiles depend on the number of tokens (get_default_config), of which the warm-up runs few; "
    "only unquantized experts and those that Triton serves use it",
}


def compiled_by(result: dict) -> set[str]:
    """Return the names of the kernels that a run compiled while it served requests."""
    return {kernel for served in result["rounds"] for _, kernel in served["compiled"]}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_none_of_our_kernels_is_compiled(engines, run):
    result = engines.result(run)
    assert result["workers"][0]["backends"] == ["TRITON_MLA_SPARSE"]
    late = compiled_by(result) & set(result["kernels"])
    assert not late, f"compiled while requests were served: {sorted(late)}"


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_nothing_is_compiled(engines, run):
    late = compiled_by(engines.result(run)) - UPSTREAM.keys()
    assert not late, f"compiled while requests were served: {sorted(late)}"


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_compilation_is_seen(engines, run):
    """The same requests do compile once the kernels are forgotten, and the monitor says so."""
    result = engines.result(run)
    assert {kernel for _, kernel in result["recompiled"]} & set(result["kernels"])
