# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let vLLM believe in a GPU that is not there, for the rest of this process.

Only what asks for a GPU is replaced; every rule that then decides is vLLM's own.
"""

import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import vllm
from vllm.sm120.doctor import spare
from vllm.sm120.doctor.facts import GIB, Gpu

# The wheel's CUDA, for a torch that was built without.
_CUDA_VERSION = "13.0"

_gpu: Gpu | None = None  # the one that vLLM believes in


class _ExtensionStub(types.ModuleType):
    """A compiled module whose functions exist and do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


# What the wheel's kernels answer about a capability (major * 10 + minor):
# csrc/quantization/w8a8/cutlass/scaled_mm_entry.cu and
# csrc/quantization/fp4/nvfp4_scaled_mm_entry.cu. The compiled code itself cannot be
# asked without libcuda.
_KERNEL_ANSWERS = {
    "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
    "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
    "cutlass_scaled_mm_supports_fp4": lambda capability: 100 <= capability < 130,
    "cutlass_group_gemm_supported": lambda capability: 90 <= capability < 120,
}


def pretend(gpu: Gpu) -> None:
    """Make `gpu` vLLM's current platform; before anything imports vLLM's platforms.

    Called again, it changes the GPU. vLLM's own caches still know the one before.
    """
    global _gpu
    is_first = _gpu is None
    _gpu = gpu
    if is_first:
        _install()


def _install() -> None:
    # No GPU of this machine may answer, and CUDA stays uninitialised. vLLM keeps
    # Triton if the GPUs are hidden, and drops it if there are none.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Else importing the humming kernels compiles their launcher in the background.
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    logging.disable(logging.ERROR)  # what matters comes as an exception
    _stub_extensions(Path(vllm.__file__).parent)

    import torch

    torch.version.cuda = torch.version.cuda or _CUDA_VERSION
    for name, answer in _KERNEL_ANSWERS.items():
        setattr(torch.ops._C, name, answer)
    # Some modules allocate on the GPU when imported (cutlass_mla: 128 MB).
    empty = torch.empty
    torch.empty = lambda *args, device=None, **kwargs: empty(
        *args, device="meta" if str(device).startswith("cuda") else device, **kwargs
    )

    from vllm import platforms

    platforms._current_platform = _platform()
    spare.install()


def _stub_extensions(package: Path) -> None:
    """Replace every compiled module of the wheel.

    They need libcuda. Without them, backends refuse with an ImportError that no
    machine with a GPU would show.
    """
    for library in package.rglob("*.so"):
        parts = library.relative_to(package.parent).parts
        name = ".".join([*parts[:-1], parts[-1].partition(".")[0]])
        sys.modules[name] = _ExtensionStub(name)


def _platform() -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PretendedGpu(CudaPlatformBase):
        """Answers the questions about the device; all else is inherited."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*_gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return _gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _gpu.memory or 80 * GIB

        @classmethod
        def device_count(cls) -> int:
            return sys.maxsize  # whoever asks has as many as he asks for

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return False

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def is_integrated_gpu(cls, device_id: int = 0) -> bool:
            return False

    return PretendedGpu()
