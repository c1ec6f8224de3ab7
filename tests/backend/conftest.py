"""What upstream's tree and the installed, patched one select, asked once for all tests that want to know."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import fake_gpu
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def patched_package() -> Path:
    """The vLLM of the environment that runs the tests."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed here: build the wheel and install it"
    return Path(spec.origin).parent


@pytest.fixture(scope="session")
def stock_package(patched_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Upstream's vLLM: the installed one with the series taken out of it again.

    Links, except for the files that the series touches. Those must come out as the very blobs that the patches
    name, so nothing but the series and the overlay can make a difference between the two trees.
    """
    site = tmp_path_factory.mktemp("stock")
    package = site / "vllm"
    shutil.copytree(patched_package, package, copy_function=os.symlink)
    for path in (ROOT / "overlay/vllm").rglob("*.py"):
        (package / path.relative_to(ROOT / "overlay/vllm")).unlink()

    series = (ROOT / "patches/vllm/series").read_text().splitlines()
    patches = [ROOT / "patches/vllm" / line for line in series if line and not line.startswith("#")]
    upstream_blobs: dict[str, str] = {}
    for patch in patches:
        for name, blob in re.findall(r"^diff --git a/(vllm/\S+) .*\nindex (\w+)", patch.read_text(), re.MULTILINE):
            upstream_blobs.setdefault(name, blob)
    for name in upstream_blobs:
        content = (site / name).read_bytes()
        (site / name).unlink()
        (site / name).write_bytes(content)

    def git(*arguments: str) -> str:
        # The ceiling: in a folder inside a repository, `git apply` would do nothing and succeed.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(site.parent)}
        return subprocess.check_output(["git", *arguments], cwd=site, env=environment, text=True)

    for patch in reversed(patches):
        git("apply", "--reverse", "--include=vllm/*", str(patch))
    for name, blob in upstream_blobs.items():
        assert git("hash-object", "--no-filters", name).strip() == blob, f"{name} is not upstream's"
    return package


@pytest.fixture(scope="session")
def cuda_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA toolkit with which DeepGEMM would compile: without one the patched package never chooses it."""
    nvcc = tmp_path_factory.mktemp("cuda") / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    return nvcc.parents[1]


@pytest.fixture(scope="session")
def selections(request, patched_package: Path, stock_package: Path, cuda_home: Path) -> dict[str, SimpleNamespace]:
    """The answers to every `selection` parameter of the collected tests."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    texts = {json.dumps(each.params["selection"]) for each in parameters if each and "selection" in each.params}
    wanted = sorted(texts)
    process = subprocess.run(
        [sys.executable, str(HERE / "select_kernels.py"), str(stock_package), str(patched_package)],
        input=f"[{','.join(wanted)}]",
        text=True,
        capture_output=True,
        env=os.environ | {"CUDA_HOME": str(cuda_home)},
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return {
        selection: SimpleNamespace(stock=stock, patched=patched)
        for selection, stock, patched in zip(wanted, *json.loads(process.stdout), strict=True)
    }


@pytest.fixture
def selected(selection: dict, selections: dict[str, SimpleNamespace]) -> SimpleNamespace:
    """What upstream (`stock`) and this distribution (`patched`) answer to the test's own selection."""
    return selections[json.dumps(selection)]


@pytest.fixture(scope="session")
def interpreter(patched_package: Path) -> Iterator[ProcessPoolExecutor]:
    """A process with the installed package, a fake GPU, and Triton's interpreter for its kernels."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=fake_gpu.interpret, initargs=(patched_package,)
    ) as pool:
        yield pool
