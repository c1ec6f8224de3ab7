# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether DeepGEMM can compile its kernels on this host."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from vllm.utils.import_utils import _has_module

# What DeepGEMM's compiler backend demands ("NVCC version must be at least 12.9").
_OLDEST_NVCC = (12, 9)
_DEFAULT_CUDA_HOME = "/usr/local/cuda"


@functools.cache
def get_nvcc_problem() -> str | None:
    """Return why DeepGEMM cannot compile its kernels here, or None if it can.

    DeepGEMM comes without binaries: its first kernel looks for nvcc and asserts
    its version, whatever the kernel cache holds (the version is part of the
    cache's keys). This asks the same questions in the same order, with one
    `nvcc --version` at most.

    A `deep_gemm` package that is installed beside vLLM, which takes it instead
    of its own copy, may have other rules (NVRTC, older compilers): it is trusted.
    """
    if _has_module("deep_gemm"):
        return None
    nvcc = _find_nvcc()
    if nvcc is None:
        return (
            "no nvcc was found by CUDA_HOME, CUDA_PATH, PATH or in "
            f"{_DEFAULT_CUDA_HOME}"
        )
    if not shutil.which(nvcc):
        return f"{nvcc} is not an executable file"
    try:
        process = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=60
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{nvcc} --version failed: {error}"
    release = re.search(r"release (\d+)\.(\d+)", process.stdout)
    if process.returncode != 0 or release is None:
        return f"{nvcc} --version did not tell its version"
    version = (int(release[1]), int(release[2]))
    if version < _OLDEST_NVCC:
        return (
            f"{nvcc} is version {version[0]}.{version[1]}, "
            f"{_OLDEST_NVCC[0]}.{_OLDEST_NVCC[1]} or newer is needed"
        )
    return None


def _find_nvcc() -> Path | None:
    """Return the absolute path that DeepGEMM would run, or None without a toolkit."""
    cuda_home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    # DeepGEMM searches PATH with the `which` command, which slim images lack.
    if not cuda_home and shutil.which("which") and (on_path := shutil.which("nvcc")):
        cuda_home = str(Path(on_path).parent.parent)
    cuda_home = cuda_home or _DEFAULT_CUDA_HOME
    # It wants the toolkit's folder even where its own variables name an nvcc.
    if not os.access(cuda_home, os.F_OK):
        return None
    own_variable = os.environ.get(
        "DG_JIT_NVCC_COMPILER", os.environ.get("DJ_JIT_NVCC_COMPILER")
    )
    return Path(own_variable or f"{cuda_home}/bin/nvcc").absolute()
