"""The doctor says what vLLM itself chooses on a GPU of each capability, for models, dtypes and KV formats.

vLLM's side is a process with the capability faked: its platform, its compiled modules and its engine configuration are
the real ones. The other side is the doctor on the same host, which sees none of its GPUs.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.ask import NOTHING_FITS
from tests.doctor.conftest import CONFIGS
from tests.doctor.test_backends import CAPABILITIES, DTYPES, KV_CACHE_DTYPES, LAYERS
from tests.gpu.results import gpu_slug, write_results

ROOT = Path(__file__).parents[2]
FAKE_CAPABILITY = Path(__file__).parent / "fake_capability"
MOST_CHILDREN = 8
TIMEOUT = 240  # seconds of a child; half a minute is usual


@dataclass(frozen=True)
class Question:
    model: str
    capability: str
    dtype: str
    kv: str

    def to_doctor(self) -> dict[str, Any]:
        options = {"capability": self.capability, "dtype": self.dtype, "kv-cache-dtype": self.kv, "tokenizer": "none"}
        return {"argv": [str(CONFIGS / self.model), *(f"--{name}={value}" for name, value in options.items())]}

    def to_vllm(self) -> dict[str, Any]:
        options = {"model": str(CONFIGS / self.model), "dtype": self.dtype, "kv_cache_dtype": self.kv}
        return {"layer": LAYERS[self.model], "capability": self.capability, "options": options}


QUESTIONS = [Question(*each) for each in product(LAYERS, CAPABILITIES, DTYPES, KV_CACHE_DTYPES)]


def answers(function: str, questions: list[dict[str, Any]], folder: Path, **environment: str) -> list[str]:
    """Return what a function of tests/doctor/ask.py says, in a child of its own."""
    folder.mkdir()
    (folder / "questions.json").write_text(json.dumps(questions))
    files = [str(folder / "questions.json"), str(folder / "answers.json")]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        **environment,
    }
    with (folder / "log").open("w") as log:
        code = subprocess.run(
            [sys.executable, "-m", "tests.doctor.ask", function, *files],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
        ).returncode
    assert code == 0, f"{function} ended with {code}:\n{(folder / 'log').read_text(errors='replace')[-4000:]}"
    return json.loads((folder / "answers.json").read_text())


def of_capability(capability: str) -> list[Question]:
    return [question for question in QUESTIONS if question.capability == capability]


def ask_vllm(capability: str, folder: Path) -> list[str]:
    path = os.pathsep.join([str(FAKE_CAPABILITY), os.environ.get("PYTHONPATH", "")])
    questions = [question.to_vllm() for question in of_capability(capability)]
    return answers("choice_of_vllm", questions, folder, PYTHONPATH=path, FAKE_CAPABILITY=capability)


def ask_doctor(capability: str, folder: Path) -> list[str]:
    return answers("choice", [question.to_doctor() for question in of_capability(capability)], folder)


@pytest.fixture(scope="module")
def rows(request, tmp_path_factory) -> dict[Question, dict[str, str]]:
    """Both answers to each question, written to --results."""
    folder = tmp_path_factory.mktemp("doctor")
    sides = {"engine": ask_vllm, "doctor": ask_doctor}
    found: dict[Question, dict[str, str]] = {question: asdict(question) for question in QUESTIONS}
    with ThreadPoolExecutor(MOST_CHILDREN) as pool:
        futures = {
            (side, capability): pool.submit(ask, capability, folder / f"{side}-{capability}")
            for (side, ask), capability in product(sides.items(), CAPABILITIES)
        }
        for (side, capability), future in futures.items():
            for question, answer in zip(of_capability(capability), future.result(), strict=True):
                found[question][side] = answer
    if results := request.config.getoption("--results", None):
        write_results(results / f"doctor-{gpu_slug()}.json", list(found.values()))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("model", "capability"), list(product(LAYERS, CAPABILITIES)))
def test_the_doctor_says_what_vllm_chooses(rows, model, capability):
    asked = [question for question in of_capability(capability) if question.model == model]
    differ = [rows[question] for question in asked if rows[question]["engine"] != rows[question]["doctor"]]
    assert not differ


@pytest.mark.gpu
def test_the_answers_are_not_all_alike(rows):
    answers = {row["engine"] for row in rows.values()}
    assert {"TRITON_MLA_SPARSE", "FLASH_ATTN", NOTHING_FITS} <= answers
