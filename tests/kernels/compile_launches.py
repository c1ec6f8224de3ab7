"""Have launches of Triton kernels compiled for a GPU that is not there, instead of run."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


class _Driver:
    """What Triton asks of a GPU before it compiles for it."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # what is compiled is kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_launches(arch: int) -> Iterator[list[tuple[JITFunction, Any]]]:
    """Compile, with the signature that the call has, whatever is launched; yields the list of (function, compiled)."""
    compiled = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append((self, kernel))
        return kernel

    driver.set_active(_Driver(arch))
    JITFunction.run = compile_only
    try:
        yield compiled
    finally:
        JITFunction.run = run


def jit_functions(module_name: str) -> dict[str, JITFunction]:
    """Return the Triton functions that a module defines, in its classes too."""
    module = importlib.import_module(module_name)
    classes = [value for value in vars(module).values() if isinstance(value, type)]
    values = [value for owner in (module, *classes) for value in vars(owner).values()]
    values = [value.__func__ if isinstance(value, staticmethod) else value for value in values]
    return {
        value.fn.__qualname__: value
        for value in values
        if isinstance(value, JITFunction) and value.fn.__module__ == module_name
    }
