"""DeepGEMM counts as supported only where it can compile: the check gives the answers of DeepGEMM's own binary."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vllm import envs
from vllm.utils import deep_gemm, deep_gemm_nvcc

ASK_DEEP_GEMM = Path(__file__).with_name("ask_deep_gemm.py")
SYSTEM = "/usr/bin:/bin"


def write_nvcc(path: Path, text="Cuda compilation tools, release {}, V{}.88", version="13.0", exit_code=0) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{text.format(version, version)}'\nexit {exit_code}\n")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def toolkits(tmp_path_factory) -> Path:
    """Folders that a host's variables can name: CUDA toolkits of several kinds, and none."""
    root = tmp_path_factory.mktemp("toolkits")
    for version in ("11.8", "12.8", "12.9", "12.10", "13.0"):
        write_nvcc(root / version / "bin/nvcc", version=version)
    write_nvcc(root / "failing/bin/nvcc", exit_code=1)
    write_nvcc(root / "silent/bin/nvcc", text="no version")
    write_nvcc(root / "data/bin/nvcc")
    (root / "data/bin/nvcc").chmod(0o644)
    (root / "folder/bin/nvcc").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "slim").mkdir()
    (root / "slim/sh").symlink_to(shutil.which("sh"))
    return root


# Environment variables, and what the problem must tell: None where DeepGEMM compiles. `{}` are the toolkits above.
HOSTS = {
    "nvcc 13.0 on PATH": ({"PATH": "{}/13.0/bin:" + SYSTEM}, None),
    "nvcc 12.9 on PATH": ({"PATH": "{}/12.9/bin:" + SYSTEM}, None),
    "nvcc 12.10 on PATH": ({"PATH": "{}/12.10/bin:" + SYSTEM}, None),
    "nvcc 12.8 on PATH": ({"PATH": "{}/12.8/bin:" + SYSTEM}, "{}/12.8/bin/nvcc is version 12.8, 12.9 or newer"),
    "nvcc 11.8 on PATH": ({"PATH": "{}/11.8/bin:" + SYSTEM}, "{}/11.8/bin/nvcc is version 11.8, 12.9 or newer"),
    "an nvcc that fails": ({"PATH": "{}/failing/bin:" + SYSTEM}, "did not tell its version"),
    "an nvcc without a version": ({"PATH": "{}/silent/bin:" + SYSTEM}, "did not tell its version"),
    "CUDA_HOME": ({"PATH": SYSTEM, "CUDA_HOME": "{}/13.0"}, None),
    "CUDA_HOME before PATH": ({"PATH": "{}/13.0/bin:" + SYSTEM, "CUDA_HOME": "{}/12.8"}, "12.8/bin/nvcc is version"),
    "CUDA_HOME before CUDA_PATH": (
        {"PATH": SYSTEM, "CUDA_HOME": "{}/12.8", "CUDA_PATH": "{}/13.0"},
        "12.8/bin/nvcc is version",
    ),
    "CUDA_PATH before PATH": ({"PATH": "{}/13.0/bin:" + SYSTEM, "CUDA_PATH": "{}/12.8"}, "12.8/bin/nvcc is version"),
    "an empty CUDA_HOME": ({"PATH": "{}/13.0/bin:" + SYSTEM, "CUDA_HOME": "", "CUDA_PATH": ""}, None),
    "CUDA_HOME without nvcc": (
        {"PATH": "{}/13.0/bin:" + SYSTEM, "CUDA_HOME": "{}/empty"},
        "{}/empty/bin/nvcc is not an executable file",
    ),
    "CUDA_HOME with data": ({"PATH": SYSTEM, "CUDA_HOME": "{}/data"}, "not an executable file"),
    "CUDA_HOME with a folder": ({"PATH": SYSTEM, "CUDA_HOME": "{}/folder"}, "not an executable file"),
    "CUDA_HOME nowhere": ({"PATH": "{}/13.0/bin:" + SYSTEM, "CUDA_HOME": "{}/nowhere"}, "no nvcc was found"),
    "DeepGEMM's variable": ({"CUDA_HOME": "{}/12.8", "DG_JIT_NVCC_COMPILER": "{}/13.0/bin/nvcc"}, None),
    "DeepJIT's variable": ({"CUDA_HOME": "{}/12.8", "DJ_JIT_NVCC_COMPILER": "{}/13.0/bin/nvcc"}, None),
    "DeepGEMM's variable before DeepJIT's": (
        {"CUDA_HOME": "{}/12.8", "DG_JIT_NVCC_COMPILER": "", "DJ_JIT_NVCC_COMPILER": "{}/13.0/bin/nvcc"},
        "12.8/bin/nvcc is version",
    ),
    "DeepGEMM's variable without a toolkit": (
        {"CUDA_HOME": "{}/nowhere", "DG_JIT_NVCC_COMPILER": "{}/13.0/bin/nvcc"},
        "no nvcc was found",
    ),
    "DeepGEMM's variable is no search": (
        {"PATH": "{}/13.0/bin:" + SYSTEM, "DG_JIT_NVCC_COMPILER": "nvcc"},
        "/nvcc is not an executable file",
    ),
}


def on_host(environment: dict[str, str], toolkits: Path) -> dict[str, str]:
    return {"PATH": SYSTEM} | {name: value.format(toolkits) for name, value in environment.items()}


@pytest.fixture
def host(monkeypatch, toolkits):
    """Takes a host's environment; there is no default toolkit and no separate deep_gemm package."""
    monkeypatch.setattr(deep_gemm_nvcc, "_DEFAULT_CUDA_HOME", str(toolkits / "nowhere"))
    monkeypatch.setattr(deep_gemm_nvcc, "_has_module", lambda name: False)

    def set_environment(environment: dict[str, str]) -> None:
        for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "DJ_JIT_NVCC_COMPILER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in on_host(environment, toolkits).items():
            monkeypatch.setenv(name, value)
        deep_gemm_nvcc.get_nvcc_problem.cache_clear()

    yield set_environment
    deep_gemm_nvcc.get_nvcc_problem.cache_clear()


@pytest.fixture(scope="module")
def deep_gemm_answers(patched_package, toolkits) -> dict[str, tuple[str | None, bool]]:
    """What the wheel's DeepGEMM says on each host."""
    process = subprocess.run(
        [sys.executable, str(ASK_DEEP_GEMM), str(patched_package / "third_party/deep_gemm/_C_extension.abi3.so")],
        input=json.dumps([on_host(environment, toolkits) for environment, _ in HOSTS.values()]),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return dict(zip(HOSTS, map(tuple, json.loads(process.stdout)), strict=True))


@pytest.mark.parametrize("name", HOSTS)
def test_the_check_says_what_deep_gemm_would_do(name, host, toolkits, deep_gemm_answers):
    environment, expected = HOSTS[name]
    host(environment)
    problem = deep_gemm_nvcc.get_nvcc_problem()
    path, compiles = deep_gemm_answers[name]
    assert compiles == (problem is None)
    if path is not None:
        assert str(deep_gemm_nvcc._find_nvcc()) == path
    if expected is None:
        assert problem is None
    else:
        assert expected.format(toolkits) in problem


def test_without_any_toolkit_the_problem_names_the_places(host, toolkits):
    host({"PATH": f"{toolkits}/empty"})
    assert deep_gemm_nvcc.get_nvcc_problem() == (
        f"no nvcc was found by CUDA_HOME, CUDA_PATH, PATH or in {toolkits}/nowhere"
    )


def test_the_default_toolkit_is_the_last_resort(host, toolkits, monkeypatch):
    monkeypatch.setattr(deep_gemm_nvcc, "_DEFAULT_CUDA_HOME", str(toolkits / "13.0"))
    host({"PATH": f"{toolkits}/empty"})
    assert deep_gemm_nvcc.get_nvcc_problem() is None


def test_path_counts_only_where_deep_gemm_can_search_it(host, toolkits):
    host({"PATH": f"{toolkits}/13.0/bin:{toolkits}/slim"})
    assert "no nvcc was found" in deep_gemm_nvcc.get_nvcc_problem()


def test_nvcc_is_run_once(host, tmp_path):
    runs = tmp_path / "runs"
    write_nvcc(tmp_path / "bin/nvcc", text=f"release 13.0' >> {runs}; cat '{runs}")
    host({"CUDA_HOME": str(tmp_path)})
    assert [deep_gemm_nvcc.get_nvcc_problem() for _ in range(3)] == [None] * 3
    assert len(runs.read_text().splitlines()) == 1


def test_an_nvcc_that_cannot_start_is_a_problem(host, tmp_path):
    write_nvcc(tmp_path / "bin/nvcc")
    (tmp_path / "bin/nvcc").write_bytes(b"\x7fELF")
    host({"CUDA_HOME": str(tmp_path)})
    assert "--version failed" in deep_gemm_nvcc.get_nvcc_problem()


def test_a_package_beside_vllm_is_trusted(host, monkeypatch, toolkits):
    monkeypatch.setattr(deep_gemm_nvcc, "_has_module", lambda name: name == "deep_gemm")
    host({"PATH": f"{toolkits}/empty"})
    assert deep_gemm_nvcc.get_nvcc_problem() is None


@pytest.fixture
def supported(monkeypatch, host, toolkits):
    """Asks whether DeepGEMM is supported, on a GPU that has its kernels, and on which line the log says why not."""
    log = []
    monkeypatch.setattr(deep_gemm.current_platform, "support_deep_gemm", lambda: True, raising=False)
    monkeypatch.setattr(deep_gemm, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(deep_gemm.logger, "info_once", lambda text, *values: log.append(text % values))

    def ask(toolkit: str) -> tuple[bool, list[str]]:
        host({"CUDA_HOME": f"{toolkits}/{toolkit}"})
        deep_gemm.is_deep_gemm_supported.cache_clear()
        log.clear()
        return deep_gemm.is_deep_gemm_supported(), list(log)

    yield ask
    deep_gemm.is_deep_gemm_supported.cache_clear()


def test_linear_and_moe_kernels_are_supported_where_they_can_be_compiled(supported, toolkits, monkeypatch):
    assert supported("13.0") == (True, [])
    answer, (line,) = supported("12.8")
    assert not answer
    assert line.startswith(f"DeepGEMM disabled, it cannot compile: {toolkits}/12.8/bin/nvcc is version 12.8")
    # Whoever turned DeepGEMM off is told nothing of compilers.
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert supported("12.8") == (False, [])


def test_without_deep_gemm_activations_get_plain_scales(supported, monkeypatch):
    monkeypatch.setattr(deep_gemm, "_fp8_gemm_nt_impl", object())
    monkeypatch.setattr(deep_gemm.DeepGemmQuantScaleFMT, "_oracle_cache", None, raising=False)
    supported("12.8")
    deep_gemm.is_deep_gemm_e8m0_used.cache_clear()
    assert not deep_gemm.is_deep_gemm_e8m0_used()
    assert deep_gemm.DeepGemmQuantScaleFMT.from_oracle() == deep_gemm.DeepGemmQuantScaleFMT.FLOAT32
    deep_gemm.is_deep_gemm_e8m0_used.cache_clear()


def test_the_compile_cache_knows_the_answer(supported):
    factors = {}
    for toolkit in ("13.0", "12.8"):
        supported(toolkit)
        factors[toolkit] = envs.compile_factors()
    assert factors["13.0"] != factors["12.8"]
