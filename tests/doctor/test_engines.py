"""The doctor says what real engines chose: those whose measurements are stored, many of them with a faked capability.

What an engine was given is in the tests that ran it; the results name the run.
"""

import importlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from vllm.sm120.selftest.model import NUM_LAYERS, make_config

from tests.gguf import tiny
from tests.gpu import tiny_gguf, tiny_glm5next
from tests.gpu.engine import Run
from tests.gpu.nvcc import change_nvcc

from . import ask

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
FILES = [path for path in (RESULTS / "engine-h200.json", RESULTS / "gguf-h200.json") if path.exists()]
TESTS = [
    "test_engine_accuracy",
    "test_engine_capabilities",
    "test_engine_kv_formats",
    "test_glm5next",
    "test_gguf_engine",
]


def find_runs(value: Any) -> Iterator[Run]:
    if isinstance(value, Run):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from find_runs(each)
    elif isinstance(value, dict):
        yield from find_runs(list(value.values()))


RUNS = {run.name: run for name in TESTS for run in find_runs(vars(importlib.import_module(f"tests.gpu.{name}")))}
#: The first row of each engine, by its run's name; `cuda` is the toolkit of the host.
ENGINES = {
    row["run"]: {**row, "cuda": content["versions"]["cuda"]}
    for content in map(json.loads, map(Path.read_text, FILES))
    for row in reversed(content["rows"])
}


def make_models(folder: Path) -> dict[str, Path]:
    """Write what the doctor reads of the models, by the names that runs give them."""
    from transformers import Glm5NextTextConfig

    make_config(NUM_LAYERS, num_mtp_layers=1).save_pretrained(folder / "tiny-glm")
    Glm5NextTextConfig(**tiny_glm5next._CONFIG).save_pretrained(folder / "tiny-glm5next")
    models = {name: folder / name for name in ("tiny-glm", "tiny-glm5next")}
    for name, fields in tiny_gguf.MODELS.items():
        files = tiny.write(folder / name, rms_norm_eps=tiny_gguf.EPSILON, **fields).files
        models[f"{name}, GGUF"] = files[-1]
    return models


def options_of(run: Run, capability: str) -> list[str]:
    """Return what `vllm serve` would have been given, and the capability."""
    options = {
        "capability": capability,
        "dtype": run.dtype,
        "kv-cache-dtype": run.kv,
        "max-model-len": run.options["max_model_len"],
        "tokenizer": "none",
        "attention-backend": run.backend,
        "tensor-parallel-size": run.options.get("tensor_parallel_size"),
        "speculative-config": json.dumps(run.options.get("speculative_config")),
    }
    return [f"--{name}={value}" for name, value in options.items() if value not in (None, "null")]


def environment_of(run: Run, cuda: str, folder: Path) -> dict[str, str]:
    """Return the surroundings of the run's engine: its variables, and the nvcc that it found."""
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache"), **run.environment}
    folder.mkdir()
    release = {"as it is": cuda, "missing": None}.get(run.nvcc, run.nvcc)
    change_nvcc(environment, folder, release)
    return environment


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What the doctor says of each engine, by its run's name."""
    folder = tmp_path_factory.mktemp("engines")
    models = make_models(folder)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        futures = {
            name: pool.submit(
                ask.ask_elsewhere,
                str(models[RUNS[name].model]),
                *options_of(RUNS[name], row["capability"]),
                environment=environment_of(RUNS[name], row["cuda"], folder / f"run-{index}"),
            )
            for index, (name, row) in enumerate(ENGINES.items())
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.mark.parametrize("name", ENGINES)
def test_the_doctor_chooses_what_the_engine_did(answers, name):
    row, answer = ENGINES[name], answers[name]
    assert (row["dtype"], row.get("kv", RUNS[name].kv)) == (RUNS[name].dtype, RUNS[name].kv)
    assert answer.get("chosen") == row["backend"], answer
    if "indexer" in row:
        (logits,) = [each for each in answer["indexer"] if each["name"] == "logits"]
        path = {"Triton": "Triton kernels"}.get(logits["value"], logits["value"])
        assert without_folders(f"{path} ({logits['why']})") == without_folders(row["indexer"])


def without_folders(reason: str) -> str:
    return re.sub(r"/\S+/cuda/bin/nvcc", "nvcc", reason)


def test_engines_cover_what_a_choice_rests_on():
    rows = ENGINES.values()
    assert {row["capability"] for row in rows} >= {"8.0", "8.6", "8.9", "9.0", "12.0", "12.1"}
    assert {row["dtype"] for row in rows} == {"float16", "bfloat16"}
    assert {RUNS[row["run"]].kv for row in rows} == {"auto", "fp8", "fp8_ds_mla"}
    assert {RUNS[row["run"]].nvcc for row in rows} == {"as it is", "missing", "12.4"}
    assert None in {RUNS[row["run"]].backend for row in rows}, "vLLM itself chose in none of them"
