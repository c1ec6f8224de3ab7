"""What an engine's errors are measured by: the native backend's, on the same model and prompts.

They are measured in the same session where the GPU has the native backend, and
read from the H200's results elsewhere.
"""

import json
import re
from pathlib import Path

import pytest

from tests.gpu.engine import Engines, Run
from tests.gpu.prompts import Errors, both, errors_of_both
from tests.gpu.tiny_glm import Reference

RECORDED = Path(__file__).parents[2] / "benchmarks" / "results" / "engine-h200.json"

# How far a mean error may be above the native one's.
MARGIN = 0.002
# The same for the tokens decoded after all prompts, 64 each: three standard errors
# of the mean over 384 of them.
DECODE_MARGIN = 0.01

# Prompt lengths, round by round. The first round fits top-k, so its prompts are
# prefilled by dense attention.
LENGTHS = [[17, 900, 2047, 2048], [2049, 2500, 3000, 8000, 30000]]


def accuracy_run(name: str, dtype: str, backend: str | None, **fields) -> Run:
    options = {"max_model_len": 32768, "enable_trace_replay": True}
    return Run(name, dtype, backend, [both(lengths) for lengths in LENGTHS], options, **fields)


NATIVE = {
    dtype: accuracy_run(f"{dtype}, native", dtype, "FLASH_ATTN_MLA_SPARSE", needs_capability=9)
    for dtype in ("float16", "bfloat16")
}


def errors(engines: Engines, run: Run, lengths: list[list[int]], reference: Reference) -> dict[int, Errors]:
    """Return the errors of a run that answers `both(lengths)` round by round."""
    found: dict[int, Errors] = {}
    for served, of_round in zip(engines.result(run)["rounds"], lengths, strict=True):
        found |= errors_of_both(served["answers"], of_round, reference)
    return found


def native_errors(engines: Engines, native: Run, lengths: list[list[int]], reference: Reference) -> dict[int, Errors]:
    """Return the native backend's errors, measured here or else recorded."""
    if engines.can_run(native):
        return errors(engines, native, lengths, reference)
    if not RECORDED.exists():
        pytest.skip(f"needs a GPU of capability {native.needs_capability} for {native.backend}, or its {RECORDED.name}")
    rows = [
        row
        for row in json.loads(RECORDED.read_text())["rows"]
        if (row["model"], row["dtype"], row.get("native_backend")) == (native.model, native.dtype, native.backend)
    ]
    return {row["prompt"]: Errors(row["native_mean"], row["native_past_topk"], row["native_decode"]) for row in rows}


def check(found: dict[int, Errors], limits: dict[int, Errors], report: object = None) -> None:
    """Assert that no error is above its limit by more than the margins."""
    report = report or found
    for length, error in found.items():
        assert error.mean <= limits[length].mean + MARGIN, f"prompt of {length} tokens: {report}"
        if error.past_topk is not None:
            assert error.past_topk <= limits[length].past_topk + MARGIN, f"past top-k at {length} tokens: {report}"
    decode, limit = (sum(each[length].decode for length in found) / len(found) for each in (found, limits))
    assert decode <= limit + DECODE_MARGIN, f"decoded tokens: {report}"


def about(engines: Engines, run: Run) -> dict:
    """Return what the results file says of a run in each of its rows."""
    worker = engines.result(run)["workers"][0]
    return {
        "run": run.name,
        "model": run.model,
        "dtype": run.dtype,
        "kv": run.kv,
        "backend": worker["backends"][0],
        "indexer": re.sub(r"/\S*/", "", engines.outcome(run).indexer),  # without the folders of this machine
        "capability": worker["capability"],
        "graphs": worker["graphs"],
    }


def row(engines: Engines, run: Run, length: int, found: Errors, native: Run | None, yardstick: Errors | None) -> dict:
    """Return a measurement of one prompt as the results file holds it."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 5)

    return {
        **about(engines, run),
        "prompt": length,
        "logprob_mean": rounded(found.mean),
        "logprob_past_topk": rounded(found.past_topk),
        "logprob_decode": rounded(found.decode),
        "native_backend": native and native.backend,
        "native_mean": rounded(yardstick and yardstick.mean),
        "native_past_topk": rounded(yardstick and yardstick.past_topk),
        "native_decode": rounded(yardstick and yardstick.decode),
    }
