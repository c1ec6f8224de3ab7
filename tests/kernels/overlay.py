"""Loading of overlay files: a test runs this repository's text, whichever vLLM is installed."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

OVERLAY = Path(__file__).parents[2] / "overlay"


def load_overlay(name: str) -> ModuleType:
    """Import overlay/<name>.py, and its neighbours, under the names they have in the package.

    What the installed package has of it will do if it was imported before and is the same text.
    """
    package, _, _ = name.rpartition(".")
    folder = str(OVERLAY.joinpath(*package.split(".")))
    path = import_module(package).__path__
    if path[0] != folder:
        path.insert(0, folder)
    module = sys.modules.get(name)
    if module is not None:
        found = Path(str(module.__file__))
        if found.read_bytes() != Path(folder, found.name).read_bytes():
            raise ImportError(f"{name} was imported before from {found}, which differs from {folder}")
    return import_module(name)
