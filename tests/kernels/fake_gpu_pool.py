"""Processes that believe in a GPU that is not there, and interpret or compile Triton's kernels for it."""

import importlib.util
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

gpu: SimpleNamespace  # the fake GPU of a process of a pool


def set_capability(capability: tuple[int, int]) -> None:
    """Make this process believe in another GPU; what modules found out when they were imported stays as it was."""
    gpu.capability = capability


def _start(capability: tuple[int, int], interpret: bool, cache: Path) -> None:
    # vLLM turns Triton off where it sees no GPU, unless somebody hid all of them.
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": str(int(interpret)),
        "TRITON_CACHE_DIR": str(cache),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
    }
    from tests.backend import fake_gpu

    global gpu
    gpu = fake_gpu.install(Path(str(importlib.util.find_spec("vllm").origin)).parent)
    set_capability(capability)

    from vllm.platforms import current_platform

    # Upstream asks PyTorch, which sees no GPU; the interpreter has no such instructions.
    current_platform.is_arch_support_pdl = lambda: not interpret and gpu.capability >= (9, 0)


def fake_gpu_pool(capability: tuple[int, int], cache: Path, *, interpret: bool = False) -> ProcessPoolExecutor:
    """Return a pool of one process with the installed vLLM, of which it finds this GPU's compute capability."""
    return ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=_start, initargs=(capability, interpret, cache)
    )
