"""Processes in which kernels run without a GPU.

Triton decides when it is imported whether it interprets or compiles, and vLLM
turns Triton off when it sees no GPU unless CUDA_VISIBLE_DEVICES is empty. So
each mode gets its own processes; the test process stays as it is.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _pool(workers: int, **variables: str) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        mp_context=get_context("spawn"),
        initializer=_set_environment,
        initargs=({"CUDA_VISIBLE_DEVICES": "", **variables},),
    )


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton interprets kernels on the CPU."""
    with _pool(1, TRITON_INTERPRET="1") as pool:
        yield pool


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    """Processes in which Triton compiles kernels, with an empty cache."""
    cache = tmp_path_factory.mktemp("triton-cache")
    with _pool(os.cpu_count() or 1, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(cache)) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)
