"""A DeepGEMM whose every function raises: this package's parent folder on PYTHONPATH.

vLLM takes an installed `deep_gemm` instead of the copy in its wheel. So whatever calls DeepGEMM where the GPU is made
to look like one that it has no kernels for ends the run, although it would work on the GPU that is really there.
"""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"deep_gemm.{name} was called, and has no kernels for this GPU")

    return refuse
