"""The fused DSA kernels on a real GPU: e4m3 in software gives what the instructions give, bit by bit.

What the kernels write is compared with a reference in kernel_forms.py, which test_other_targets.py runs.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
LAUNCHES = {
    "glm-5": [
        *("norm-rope-fp16", "norm-rope-bf16", "norm-rope-fp8", "norm-rope-fp8-unscaled", "norm-rope-ds-mla-fp16"),
        *("norm-rope-ds-mla-bf16", "norm-rope-shared", "norm-rope-uncached"),
        *("query-fp16", "query-bf16", "query-shared", "query-fp8", "pack-queries"),
    ],
    "glm-5.3-flash": ["pool-keys"],
}


@pytest.fixture(autouse=True)
def needs_instructions():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with e4m3 instructions: SM89 or newer")


def run(*command: str, capability: str | None = None) -> str:
    """Run Python in a process of its own, where vLLM believes in `capability`; returns what it prints."""
    environment = dict(os.environ)
    if capability is not None:
        environment["FAKE_CAPABILITY"] = capability
        path = [str(ROOT / "tests/gpu/fake_capability"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    process = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.returncode == 0, process.stdout[-10_000:]
    return process.stdout


def run_kernels(outputs: Path, launches: list[str], capability: str | None = None) -> dict[str, Any]:
    run("-m", "tests.gpu.run_dsa_kernels", str(outputs), *launches, capability=capability)
    return torch.load(outputs)


def test_encoder_and_instruction_agree_on_every_float():
    program = (
        "from tests.kernels.e4m3_kernels import count_differences; print('differences', count_differences('cuda'))"
    )
    assert "differences [0, 0]" in run("-c", program)


@pytest.mark.parametrize("launches", LAUNCHES.values(), ids=LAUNCHES)
def test_software_and_hardware_write_the_same_bytes(tmp_path, launches):
    if launches == LAUNCHES["glm-5.3-flash"] and not hasattr(transformers, "Glm5NextTextConfig"):
        pytest.skip("needs a transformers that knows GLM-5.3-Flash")
    hardware = run_kernels(tmp_path / "hardware.pt", launches)
    software = run_kernels(tmp_path / "software.pt", launches, capability="8.0")
    assert (hardware["software"], software["software"]) == (False, True)
    hardware, software = hardware["outputs"], software["outputs"]
    assert hardware.keys() == software.keys()
    assert [name for name, data in hardware.items() if not torch.equal(data, software[name])] == []
    assert all(data.any() for name, data in hardware.items() if "cache" in name and "shared" not in name)
