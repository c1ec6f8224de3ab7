"""Compiling kernels ahead, in all processor cores at once: what is then timed comes out of Triton's cache."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")
#: Each process holds a CUDA context, half a gigabyte of the GPU's memory.
MAX_PROCESSES = 16


def in_processes(function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
    """Call `function`, of a module's top level, on every task in processes of their own; yield what is done first."""
    tasks = list(tasks)
    workers = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, max(len(tasks), 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(function, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
