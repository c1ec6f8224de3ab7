"""Surroundings of a process in which nvcc is missing, or an old one."""

import os
from pathlib import Path

# Name an nvcc by themselves, to vLLM's copy of DeepGEMM.
VARIABLES = ("DG_JIT_NVCC_COMPILER", "DJ_JIT_NVCC_COMPILER")
CUDA_HOMES = ("CUDA_HOME", "CUDA_PATH")


def change_nvcc(env: dict[str, str], folder: Path, release: str | None) -> None:
    """Change the variables of a process so that it finds no nvcc, or one that says it is of `release`.

    DeepGEMM's cache of compiled kernels becomes an empty one.

    Args:
        env: the variables, changed in place.
        folder: for what is made: a CUDA toolkit of nothing but nvcc, the cache, folders for PATH.
        release: "12.4"; None for no nvcc.

    """
    home = folder / "cuda"  # never made without a release
    paths = [
        str(_without_nvcc(Path(path), folder / f"path-{index}"))
        for index, path in enumerate(env["PATH"].split(os.pathsep))
        if path
    ]
    if release is not None:
        nvcc = home / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(f"#!/bin/sh\n[ \"$*\" = --version ] && echo 'Cuda compilation tools, release {release}'\n")
        nvcc.chmod(0o755)
        paths.insert(0, str(nvcc.parent))
    for name in VARIABLES:
        env.pop(name, None)
    env |= dict.fromkeys(CUDA_HOMES, str(home))
    env |= {"PATH": os.pathsep.join(paths), "DG_JIT_CACHE_DIR": str(folder / "deep-gemm-cache")}


def _without_nvcc(path: Path, shadow: Path) -> Path:
    """Return a folder with what `path` holds, nvcc excepted: itself where it holds none."""
    if not (path / "nvcc").exists():
        return path
    shadow.mkdir(parents=True)
    for entry in path.iterdir():
        if entry.name != "nvcc":
            (shadow / entry.name).symlink_to(entry)
    return shadow
