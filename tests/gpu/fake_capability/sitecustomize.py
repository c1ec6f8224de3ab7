"""Make vLLM believe in another GPU: this folder on PYTHONPATH, FAKE_CAPABILITY=12.0.

Python imports this module at the start of every process, the workers' included.
Only vLLM's platform is patched; PyTorch and the kernels see the real GPU.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType

_MODULE = "vllm.platforms.cuda"


class _Loader(importlib.abc.Loader):
    """The module's own loader, followed by the patch."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        major, minor = map(int, os.environ["FAKE_CAPABILITY"].split("."))
        capability = module.DeviceCapability(major, minor)
        for platform in (module.NvmlCudaPlatform, module.NonNvmlCudaPlatform):
            platform.get_device_capability = classmethod(lambda cls, device_id=0: capability)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        spec.loader = _Loader(spec.loader)
        return spec


if "FAKE_CAPABILITY" in os.environ:
    sys.meta_path.insert(0, _Finder())
