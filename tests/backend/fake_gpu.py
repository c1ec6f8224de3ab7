"""Make `vllm` believe in an NVIDIA GPU that is not there, of any compute capability.

Only for a child process: it changes `vllm.platforms` and `sys.modules` for good.
"""

import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import torch


class _ExtensionStub(types.ModuleType):
    """A compiled module whose functions exist and do nothing."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def stub_extensions(package: Path) -> None:
    """Replace every compiled module of the wheel.

    They need libcuda. Without them, backends refuse with an ImportError that no GPU machine would show.
    """
    for library in package.rglob("*.so"):
        parts = library.relative_to(package.parent).with_suffix("").with_suffix("").parts
        sys.modules[".".join(parts)] = _ExtensionStub(".".join(parts))


def answer_capability_queries() -> None:
    """Say what the wheel's kernels (CUDA 13) say of themselves, see scaled_mm_entry.cu and its neighbours."""
    queries = {
        "cutlass_scaled_mm_supports_fp8": lambda capability: capability >= 89,
        "cutlass_scaled_mm_supports_block_fp8": lambda capability: capability >= 90,
        "cutlass_scaled_mm_supports_fp4": lambda capability: 100 <= capability < 130,
        "cutlass_group_gemm_supported": lambda capability: 90 <= capability < 120,
    }
    for name, answer in queries.items():
        setattr(torch.ops._C, name, answer)


def install(package: Path) -> SimpleNamespace:
    """Fake the GPU; returns the object whose `capability` is the GPU's from now on."""
    sys.path.insert(0, str(package.parent))
    stub_extensions(package)
    answer_capability_queries()

    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    gpu = SimpleNamespace(capability=(12, 0))

    class FakeGpu(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id=0):
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id=0):
            return "NVIDIA fake"

        @classmethod
        def num_compute_units(cls, device_id=0):
            return 188

    vllm.platforms._current_platform = FakeGpu()
    assert Path(vllm.__file__).parent == package, vllm.__file__

    # Some modules allocate on the GPU when they are imported (CUTLASS_MLA 128 MB).
    empty = torch.empty
    torch.empty = lambda *args, device=None, **kwargs: empty(
        *args, device="meta" if str(device).startswith("cuda") else device, **kwargs
    )
    return gpu


def interpret(package: Path) -> None:
    """Fake the GPU and let Triton interpret its kernels on the CPU; before anything imports Triton."""
    # vLLM turns Triton off where it sees no GPU, unless somebody hid all of them.
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_PLUGINS": "",
    }
    install(package)
