"""The kernels under compute-sanitizer's memcheck: no access outside the tensors they were given.

PyTorch's caching allocator is turned off, so that every tensor is an allocation of its own; within its pool an access
past the end of a tensor would hit another one, and nobody would notice.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.child_pytest import run_pytest
from tests.gpu.results import gpu_slug, write_results

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FORMS = "tests/gpu/kernel_forms.py"
FOUND = 87  # the exit status of a run with errors, unlike any of Python or pytest
ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
OPTIONS = [
    *("--tool", "memcheck", "--error-exitcode", str(FOUND), "--target-processes", "application-only"),
    # An access a little past a tensor must not land in the next one.
    *("--padding", "4096"),
    # Failed calls of the CUDA API are the caller's business, and some of PyTorch's only ask what there is.
    *("--report-api-errors", "no"),
]


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """The path of compute-sanitizer: on PATH, of a CUDA toolkit, or of NVIDIA's package for Python."""
    folders = [*Path("/usr/local").glob("cuda*/bin"), *(Path(p) / "nvidia" / "cu13" / "bin" for p in sys.path)]
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *map(str, folders)]))
    if path is None:
        pytest.skip("needs compute-sanitizer: a CUDA toolkit, or `pip install nvidia-cuda-sanitizer-api`")
    return path


def read(sanitizer: str, length: int, log: Path) -> subprocess.CompletedProcess:
    """Let a Triton kernel read 1024 values of a tensor that has `length`."""
    program = (
        "import torch; from tests.gpu.probe_kernels import read_kernel; "
        f"x = torch.ones({length}, device='cuda'); out = torch.zeros(1, device='cuda'); "
        "read_kernel[(1,)](x, out, SIZE=1024); torch.cuda.synchronize()"
    )
    command = [sanitizer, *OPTIONS, "--log-file", str(log), sys.executable, "-c", program]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_memcheck_sees_a_read_past_the_end(sanitizer, tmp_path):
    """Of a Triton kernel, in a process like that of the next test: which therefore can fail."""
    log = tmp_path / "memcheck.log"
    process = read(sanitizer, 1024, log)
    assert process.returncode == 0, process.stdout + log.read_text()
    process = read(sanitizer, 1000, log)
    assert process.returncode == FOUND, process.stdout + log.read_text()
    assert re.search(r"Invalid __global__ read of size \d+ bytes\n.* at read_kernel", log.read_text()), log.read_text()


def test_kernels_stay_inside_their_tensors(request, sanitizer, tmp_path):
    # Compiles everything, so that under memcheck only the launches take their time.
    run = run_pytest([FORMS], cwd=ROOT, report=tmp_path / "before.xml", workers=8)
    assert run.returncode == 0, run.output[-10_000:]

    log = tmp_path / "memcheck.log"
    prefix = [sanitizer, *OPTIONS, "--log-file", str(log)]
    start = time.monotonic()
    run = run_pytest([FORMS], cwd=ROOT, report=tmp_path / "report.xml", environment=ENVIRONMENT, prefix=prefix)
    seconds = time.monotonic() - start
    summary = re.search(r"ERROR SUMMARY: (\d+) error", log.read_text())
    assert summary is not None, log.read_text()[-5000:] + run.output[-5000:]
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout.strip().splitlines()[-1]
    row = {
        "tool": f"NVIDIA Compute Sanitizer, {version}",
        "command": f"compute-sanitizer {' '.join(OPTIONS)} python -m pytest {FORMS}",
        "environment": ENVIRONMENT,
        **dict.fromkeys(("passed", "failed", "skipped"), 0),
        **Counter(case.outcome for case in run.cases),
        "errors": int(summary[1]),
        "seconds": round(seconds),
    }
    print(row)
    if results := request.config.getoption("--results", None):
        write_results(results / f"memcheck-{gpu_slug()}.json", [row])
    assert run.returncode == 0, log.read_text()[-10_000:] + run.output[-5000:]
    assert row["errors"] == row["failed"] == row["skipped"] == 0
    assert row["passed"] > 0
