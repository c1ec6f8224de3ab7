"""`vllm doctor` as users run it, on a machine without libcuda, and the line that the selector's error gains."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import CONFIGS

ROOT = Path(__file__).parents[2]
VLLM = [str(Path(sys.executable).with_name("vllm"))]
MODULE = [sys.executable, "-m", "vllm.sm120"]
ENVIRONMENT = os.environ | {"VLLM_LOGGING_LEVEL": "INFO", "CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *arguments], text=True, capture_output=True, env=ENVIRONMENT)


def test_the_command_answers_without_a_gpu():
    process = run(VLLM, "doctor", str(CONFIGS / "glm5/config.json"), "--dtype", "float16", "--capability", "12.0")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert any(line.startswith("  TRITON_MLA_SPARSE ") and "fits, chosen" in line for line in lines)
    assert lines[-1] == f"vllm serve {CONFIGS / 'glm5'} --dtype float16"
    assert "\033[" not in process.stdout
    assert not [line for line in lines if "not found out" in line]


def test_the_module_prints_json_and_nothing_else():
    process = run(MODULE, "doctor", str(CONFIGS / "glm5"), "--capability", "7.5", "--json")
    assert process.returncode == 3, process.stderr
    content = json.loads(process.stdout)
    assert (content["schema"], content["capability"], content["chosen"], content["exit"]) == (1, "7.5", None, 3)


@pytest.mark.parametrize("command", [VLLM, MODULE], ids=["vllm", "module"])
def test_bad_input_is_a_message(command):
    process = run(command, "doctor", "/no/such/model", "--capability", "12.0")
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr.startswith("error: MODEL /no/such/model is no file or folder")
    assert "Traceback" not in process.stderr


def test_make_hands_its_arguments_over_once(tmp_path):
    arguments = """'/a model' --gpu "RTX PRO 6000" --speculative-config '{"n": 1}'"""
    make = run(["make", "-s", "-C", str(ROOT), "doctor", "VENV=" + str(tmp_path)], "ARGS=" + arguments)
    assert make.returncode
    assert "cure: make wheel install" in make.stderr
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vllm").touch()
    (tmp_path / "bin/python").write_text("""#!/bin/sh\nprintf '%s\\n' "$@"\n""")
    (tmp_path / "bin/python").chmod(0o755)
    make = run(["make", "-s", "-C", str(ROOT), "doctor", "VENV=" + str(tmp_path)], "ARGS=" + arguments)
    words = make.stdout.splitlines()
    assert words == ["-m", "vllm.sm120", "doctor", *shlex.split(arguments)]


HELP = """
import sys
from vllm.platforms import cpu
import vllm.platforms
vllm.platforms._current_platform = cpu.CpuPlatform()  # `vllm --help` needs one
from vllm.entrypoints.cli.main import main
sys.argv = ["vllm", "--help"]
main()
"""


def test_help_lists_it():
    process = run([sys.executable, "-c", HELP])
    assert process.returncode == 0, process.stderr[-2000:]
    assert "doctor" in process.stdout.partition("positional arguments:")[2]


LAYER = {"head_size": 576, "use_mla": True, "use_sparse": True, "num_heads": 64}


def test_the_selectors_error_names_the_command_for_its_configuration(doctor):
    options = ("--capability", "7.5", "--dtype", "float16", "--kv-cache-dtype", "fp8", "-tp", "2", "--block-size", "64")
    error = doctor.select(LAYER, "glm5", *options)
    first, hint = error.splitlines()
    assert first.startswith("No valid attention backend found for cuda with AttentionSelectorConfig(")
    start, command = hint.split(": ")
    assert start == "What would fit"
    words = shlex.split(command)
    assert words[:2] == ["vllm", "doctor"]
    # The command asks the question that failed.
    again = doctor(*words[2:])
    asked = doctor("glm5", *options)
    assert again["backends"] == asked["backends"]
    assert again["model"]["facts"]["heads_per_rank"]["value"] == 32
