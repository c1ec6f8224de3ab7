"""Loading of overlay files: a test runs this repository's text, whichever vLLM is installed."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

OVERLAY = Path(__file__).parents[2] / "overlay"


def load_overlay(name: str) -> ModuleType:
    """Import overlay/<name>.py under the module name it has in the package."""
    path = OVERLAY.joinpath(*name.split(".")).with_suffix(".py")
    module = sys.modules.get(name)
    if module is not None and module.__file__ == str(path):
        return module
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
