"""Decode context parallelism and pipeline parallelism on two GPUs."""

import pytest
import torch

from tests.gpu.engine import TRITON_INDEXER, Run
from tests.gpu.prompts import NUM_FORCED, both, generate, prefill, prefill_errors, rounding_errors, summarize, tokens
from tests.gpu.yardstick import LENGTHS as YARDSTICK_LENGTHS
from tests.gpu.yardstick import NATIVE, check, errors, native_errors

pytestmark = [pytest.mark.gpu, pytest.mark.two_gpus]

# Two prompts that fit top-k, then two that do not.
LENGTHS = [[17, 2048], [2500, 3000]]

DCP = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "enable_trace_replay": True}
PP = {"pipeline_parallel_size": 2}


def parallel_run(name: str, dtype: str, parallel: dict, rounds=None, **fields) -> Run:
    options = {"max_model_len": 4096, "disable_custom_all_reduce": True, **parallel}
    rounds = rounds or [both(lengths) for lengths in LENGTHS]
    return Run(name, dtype, "TRITON_MLA_SPARSE", rounds, options, **fields)


RUNS = [
    parallel_run("DCP 2", "float16", DCP),
    parallel_run("DCP 2, fp8_ds_mla", "bfloat16", DCP, kv="fp8_ds_mla", environment=TRITON_INDEXER),
]
# Trace replay forces what is answered, not what the first rank of a pipeline is fed. So these tokens are greedy.
GREEDY = [[ask for length in lengths for ask in (prefill(length), generate(length, NUM_FORCED))] for lengths in LENGTHS]
PP_RUNS = [
    parallel_run("PP 2", "float16", PP, GREEDY),
    # What pp-stream.patch is for.
    parallel_run("PP 2, no PyNCCL", "float16", PP, GREEDY, environment={"VLLM_DISABLE_PYNCCL": "1"}),
]


@pytest.mark.parametrize(("run", "native"), [(run, NATIVE[run.dtype]) for run in RUNS], ids=str)
def test_as_accurate_as_one_gpu(engines, reference, run, native):
    """The yardstick is one GPU's; an fp8 cache may cost what its rounding costs, as in test_engine_kv_formats.py."""
    workers = engines.result(run)["workers"]
    assert [worker["backends"] for worker in workers] == [["TRITON_MLA_SPARSE"]] * 2
    assert all(worker["triton_indexer"] for worker in workers) or run.environment != TRITON_INDEXER
    found = errors(engines, run, LENGTHS, reference)
    print(f"{run}: {found}")
    limits = native_errors(engines, native, YARDSTICK_LENGTHS, reference)
    if run.kv != "auto":
        limits = {length: limits[length] + rounding_errors(length, run.kv, reference) for length in found}
    check(found, limits)


@pytest.mark.parametrize(("run", "native"), [(run, NATIVE["float16"]) for run in PP_RUNS], ids=str)
def test_pipeline_is_as_accurate_as_one_gpu(engines, reference, run, native):
    result = engines.result(run)
    assert [worker["backends"] for worker in result["workers"]] == [["TRITON_MLA_SPARSE"]] * 2
    found = {}
    for served, lengths in zip(result["rounds"], LENGTHS, strict=True):
        for index, length in enumerate(lengths):
            prompt, greedy = served["answers"][2 * index : 2 * index + 2]
            expected = reference.chosen(tokens(length)[:length] + greedy["generated"])[-NUM_FORCED:]
            decoded = (torch.tensor(greedy["logprobs"]) - expected).abs()
            found[length] = summarize(prefill_errors(prompt, length, reference), decoded)
    print(f"{run}: {found}")
    check(found, native_errors(engines, native, YARDSTICK_LENGTHS, reference))
