"""The self-test as a user runs it, whole, on the GPU that is there."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

STAGES = {"sparse MLA", "indexer", "top-k", "engine float16", "engine bfloat16"}


@pytest.fixture(scope="module")
def selftest(request, tmp_path_factory) -> tuple[subprocess.CompletedProcess, dict]:
    """What the command printed and wrote; with --results the file is kept as selftest-<gpu>.json."""
    from tests.gpu.results import gpu_slug

    folder = request.config.getoption("--results", None) or tmp_path_factory.mktemp("selftest")
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"selftest-{gpu_slug()}.json").resolve()
    command = [sys.executable, "-m", "vllm.sm120", "doctor", "--selftest", "--output", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=os.environ, check=False)
    print(done.stdout, done.stderr, sep="\n")
    assert path.exists(), f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done, json.loads(path.read_text())


def test_it_passes(selftest):
    done, content = selftest
    assert content["problems"] == []
    assert content["verdict"] == "passed"
    assert done.returncode == content["exit"] == 0
    assert done.stdout.splitlines()[-1].endswith("attach it to a report")


def test_it_names_what_was_tested(selftest):
    hardware = selftest[1]["hardware"]
    assert hardware["gpu"] == torch.cuda.get_device_name()
    assert hardware["capability"] == "{}.{}".format(*torch.cuda.get_device_capability())
    assert {"driver", "multiprocessors", "memory_gib", "l2_mib", "shared_memory_kib"} <= set(hardware)
    assert selftest[1]["provenance"][0]["patches"]


def test_every_stage_has_run_and_little_was_skipped(selftest):
    checks = selftest[1]["checks"]
    assert {check["stage"] for check in checks if check["status"] == "passed"} == STAGES
    skipped = [check["name"] for check in checks if check["status"] == "skipped"]
    assert all("past 2^31" in name for name in skipped), skipped


def test_no_kernel_is_faster_than_its_floor(selftest):
    """Else the floor, or the time, is wrong. 2% are for the clocks, which change between the two."""
    timings = selftest[1]["timings"]
    assert len(timings) > 30
    shares = {(t["kernel"], t["shape"]): t["floor_us"] / t["us"] for t in timings}
    assert {case: share for case, share in shares.items() if not 0 < share < 1.02} == {}
