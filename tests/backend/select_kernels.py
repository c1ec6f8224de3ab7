"""Ask several trees of vLLM what they select: JSON cases on stdin, one list of results a tree on stdout.

    python select_kernels.py PATH/TO/vllm... < cases.json > results.json

A process of its own, because fake_gpu.py changes vLLM for good, and one more for each tree: they are forked
once what all trees import is there, since torch and FlashInfer take longer than vLLM itself.
"""

import functools
import gc
import importlib
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

SHARED_IMPORTS = ("torch._inductor.standalone_compile", "transformers", "flashinfer.decode")


def clear_caches() -> None:
    """Forget what vLLM remembers of the previous GPU."""
    for candidate in gc.get_objects():
        # Not isinstance(): it would load what lazy modules stand for.
        if type(candidate) is functools._lru_cache_wrapper and str(candidate.__module__).startswith("vllm."):
            candidate.cache_clear()


def select_all(package: str, cases: list[dict]) -> list[str]:
    import fake_gpu

    gpu = fake_gpu.install(Path(package))
    from kernel_selectors import SELECTORS

    def select(case: dict) -> str:
        if gpu.capability != tuple(case["capability"]):
            gpu.capability = tuple(case["capability"])
            clear_caches()
        try:
            return SELECTORS[case["selector"]](**case["arguments"])
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"

    # One GPU after the other: what vLLM remembers of one is expensive to find out.
    order = sorted(range(len(cases)), key=lambda index: cases[index]["capability"])
    results = {index: select(cases[index]) for index in order}
    return [results[index] for index in range(len(cases))]


if __name__ == "__main__":
    # Everything that the libraries print goes to stderr.
    results_file, sys.stdout = sys.stdout, sys.stderr
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_PLUGINS": ""}
    for name in SHARED_IMPORTS:
        importlib.import_module(name)
    cases = json.load(sys.stdin)
    trees = sys.argv[1:]
    with ProcessPoolExecutor(len(trees), mp_context=multiprocessing.get_context("fork")) as pool:
        json.dump(list(pool.map(select_all, trees, [cases] * len(trees))), results_file)
