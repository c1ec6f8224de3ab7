"""Running a kernel with as many programs on an SM as another GPU, with less shared memory, would run.

A configuration for the 100 KB of SM120's SM is alone there where the 228 KB of SM90's hold two, and the copies of one
program hide behind the products of the other. Timed like that, another GPU's configuration would win.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: Shared memory of an SM in bytes (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
SM_SHARED = {(8, 0): 167_936, (8, 6): 102_400, (8, 9): 102_400, (12, 0): 102_400, (12, 1): 102_400}
#: What a program takes of it beyond what it asks for, in bytes.
RESERVED = 1024
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # a CUfunction_attribute


def programs_per_sm(shared: int, sm_shared: int) -> int:
    """Return how many programs that ask for `shared` bytes fit the shared memory of an SM."""
    return sm_shared // (shared + RESERVED)


def padded_shared(shared: int, sm_shared: int, own_sm_shared: int) -> int:
    """Return the bytes to ask for so that an SM of `own_sm_shared` holds as many programs as one of `sm_shared`."""
    programs = max(programs_per_sm(shared, sm_shared), 1)
    return max(shared, own_sm_shared // programs - RESERVED)


@contextmanager
def programs_as_on(capability: tuple[int, int], kernel: Any) -> Iterator[None]:
    """Have what was compiled of a Triton kernel, and launched once, run meanwhile as many programs on an SM.

    Nothing changes for capabilities without less shared memory than this GPU has.
    """
    properties = torch.cuda.get_device_properties(0)
    own = properties.shared_memory_per_multiprocessor
    sm_shared = min(SM_SHARED.get(capability, own), own)
    cache = kernel.device_caches[torch.cuda.current_device()][0] if sm_shared < own else {}
    compiled = [one for one in cache.values() if one.function]  # what could not be launched has none
    metadata = [one.packed_metadata for one in compiled]
    try:
        for one, (num_warps, num_ctas, shared) in zip(compiled, metadata, strict=True):
            padded = min(padded_shared(shared, sm_shared, own), properties.shared_memory_per_block_optin)
            _allow_shared(one.function, padded)
            one.packed_metadata = num_warps, num_ctas, padded
        yield
    finally:
        for one, own_metadata in zip(compiled, metadata, strict=True):
            one.packed_metadata = own_metadata


def _allow_shared(function: int, size: int) -> None:
    """Let a CUfunction be launched with `size` bytes of shared memory, which is refused above 48 KB otherwise."""
    driver = ctypes.CDLL("libcuda.so.1")
    result = driver.cuFuncSetAttribute(ctypes.c_void_p(function), _MAX_DYNAMIC_SHARED_SIZE_BYTES, ctypes.c_int(size))
    if result:
        raise RuntimeError(f"cuFuncSetAttribute refuses {size} bytes of shared memory: CUresult {result}")
