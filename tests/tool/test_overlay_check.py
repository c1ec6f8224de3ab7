"""The overlay check: what of upstream an overlay uses, and what another release has made of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from scripts import overlay_check
from scripts.repository import Author, Repository
from tests.tool.miniature import MTIME, write_files

Files = Mapping[str, str]

BASE = """\
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

T = TypeVar("T")

class Config:
    size: int = 1

    def __init__(self, size: int) -> None:
        self.scale = 1.0

class Layer:
    config: "Config | None"

class Backend(ABC, Generic[T]):
    causal = True
    supports: bool = False

    def __init__(self, heads: int, config: Config) -> None:
        self.heads = heads
        self.config = config

    def forward(self, query, keys, *, layer: Layer) -> int:
        return self._kernel(query, keys)

    def _kernel(self, query, keys) -> int:
        raise NotImplementedError

    @classmethod
    def make(cls, heads: int) -> "Backend": ...

    @property
    def width(self) -> Config: ...

    @staticmethod
    def fits(size): ...

def get_config() -> Config: ...
def run(first, second=0, *, third=0) -> int: ...
"""
ENVS = """\
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    VLLM_ON: bool = True
    VLLM_OFF: bool = False
table = {"VLLM_ON": lambda: True, "VLLM_OFF": lambda: False}
def __getattr__(name):
    return table[name]()
"""
PLATFORM = """\
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from .interface import Platform
    current: Platform
def __getattr__(name): ...
"""
INTERFACE = "class Platform:\n    def units(self) -> int: ...\n    def __getattr__(self, name): ...\n"
UPSTREAM: Files = {
    "vllm/__init__.py": "",
    "vllm/base.py": BASE,
    "vllm/envs.py": ENVS,
    "vllm/platforms/__init__.py": PLATFORM,
    "vllm/platforms/interface.py": INTERFACE,
    "vllm/stars.py": "from vllm.base import *\nfrom torch import *\n",
}
OURS = """\
import torch
import vllm.envs as envs
from vllm.base import Backend, Layer, get_config, run
from vllm.platforms import current

class Ours(Backend[int]):
    causal = False

    def __init__(self, heads, config, **more):
        super().__init__(heads, config)
        self.extra = self.heads + config.size

    def forward(self, query, keys, *, layer: Layer):
        assert layer.config is not None
        self.width.scale, layer.config.size, self.extra
        return super().forward(query, keys, layer=layer)

    def _kernel(self, query, keys):
        configs = [current for current in range(3)]
        return run(query, keys), get_config().scale, configs[0].anything, torch.anything

def use(layer: Layer):
    if envs.VLLM_ON:
        Ours.make(heads=1).forward(1, 2, layer=layer)
    return run(*layer.config, third=current.units()), run(1), Ours.fits(1), Ours(1, None, any=2)
"""


def problems(tmp_path: Path, new: Files, ours: Files, old: Files = UPSTREAM) -> list[str]:
    """What is said of an overlay when upstream's `old` files become `new`; files whose new text is empty are gone."""
    repository = Repository.init(tmp_path / "git")

    def commit(name: str, files: Files) -> str:
        content = [(path, False, text.encode()) for path, text in files.items() if text or path not in new]
        author = Author("A Person", "person@example.org", f"{MTIME} +0000")
        return repository.import_files(f"refs/heads/{name}", content, name, author)

    pinned, upstream = commit("old", old), commit("new", {**old, **new})
    write_files(tmp_path / "overlay", ours)
    files = {path: tmp_path / "overlay" / path for path in ours}
    found = overlay_check.check(repository, files, upstream=upstream, tip=upstream, pinned=pinned)
    assert overlay_check.check(repository, files, upstream=pinned, tip=pinned, pinned=pinned) == []
    return [str(problem).removeprefix("overlay/vllm/ours.py:") for problem in found]


def base(old: str, new: str) -> Files:
    """base.py with one text replaced."""
    assert BASE.count(old) == 1, old
    return {"vllm/base.py": BASE.replace(old, new)}


KERNEL = "18: _kernel overrides vllm.base.Backend._kernel():"

CHANGES: Mapping[str, tuple[Files, list[str]]] = {
    "nothing": ({}, []),
    "something unrelated": ({"vllm/new.py": "x = 1\n", **base("causal = True", "other = 1\n    causal = True")}, []),
    "a new parameter that may be left out": (base("second=0,", "second=0, fourth=0,"), []),
    "a file that the overlay has": ({"vllm/ours.py": OURS}, ["1: upstream has this file now"]),
    "a module that is gone": (
        {"vllm/base.py": "", "vllm/moved.py": BASE},
        [
            "3: no module vllm.base, from which Backend is imported; Backend is in vllm/moved.py",
            "3: no module vllm.base, from which Layer is imported; Layer is in vllm/moved.py",
            "3: no module vllm.base, from which get_config is imported; get_config is in vllm/moved.py",
            "3: no module vllm.base, from which run is imported; run is in vllm/moved.py",
        ],
    ),
    "a function that moved": (
        {**base("def get_config() -> Config: ...\n", ""), "vllm/moved.py": "def get_config(): ...\n"},
        ["3: vllm.base has no get_config; get_config is in vllm/moved.py"],
    ),
    "a module variable made up on demand": (
        {"vllm/envs.py": ENVS.replace("    VLLM_ON: bool = True\n", "")},
        ["23: vllm.envs has no VLLM_ON"],
    ),
    "a method of a class that makes attributes up": (
        {"vllm/platforms/interface.py": INTERFACE.replace("units", "count")},
        ["25: vllm.platforms.interface.Platform has no units"],
    ),
    "a field": (
        base("    size: int = 1\n", ""),
        ["15: vllm.base.Config has no size"],
    ),
    "an attribute that a method sets": (
        base("        self.heads = heads\n", ""),
        ["11: vllm.ours.Ours has no heads"],
    ),
    "an attribute of what a function gives": (
        base("self.scale = 1.0", "pass"),
        ["15: vllm.base.Config has no scale", "20: vllm.base.Config has no scale"],
    ),
    "a parameter that is needed": (
        base("third=0)", "third=0, fourth)"),
        [
            "20: vllm.base.run(): missing a required argument: 'fourth'",
            "25: vllm.base.run(): missing a required argument: 'fourth'",
        ],
    ),
    "a parameter that is gone": (
        base("*, third=0", "*, other=0"),
        ["25: vllm.base.run(): got an unexpected keyword argument 'third'"],
    ),
    "fewer parameters": (
        base("first, second=0, *,", "first, *,"),
        ["20: vllm.base.run(): too many positional arguments"],
    ),
    "parameters in another order": (
        base("def run(first, second=0,", "def run(second, first=0,"),
        [
            "20: vllm.base.run(): argument 1 is second, was first, argument 2 is first, was second",
            "25: vllm.base.run(): argument 1 is second, was first",
        ],
    ),
    "another result": (
        base("third=0) -> int", "third=0) -> tuple[int, int]"),
        [
            "20: vllm.base.run() gives tuple[int, int], gave int",
            "25: vllm.base.run() gives tuple[int, int], gave int",
        ],
    ),
    "the same result in other words": (base('-> "Backend": ...', "-> Backend: ..."), []),
    "a constructor": (
        base("heads: int, config: Config)", "heads: int, config: Config, *, name)"),
        [
            "10: vllm.base.Backend.__init__(): missing a required argument: 'name'",
        ],
    ),
    "a class method's parameter": (
        base("def make(cls, heads", "def make(cls, number"),
        ["24: vllm.base.Backend.make(): missing a required argument: 'number'"],
    ),
    "a hook that is gone": (
        base("    def _kernel(self, query, keys) -> int:\n        raise NotImplementedError\n", ""),
        ["18: _kernel overrides nothing: upstream's base classes have it no more"],
    ),
    "a flag that is gone": (
        base("    causal = True\n", ""),
        ["7: causal overrides nothing: upstream's base classes have it no more"],
    ),
    "a hook that is called with more": (
        base("def _kernel(self, query, keys) ->", "def _kernel(self, query, keys, values) ->"),
        [f"{KERNEL} values is passed as well"],
    ),
    "a hook whose parameters changed places": (
        base("def _kernel(self, query, keys) ->", "def _kernel(self, keys, query) ->"),
        [f"{KERNEL} parameter 1 is keys, here query, parameter 2 is query, here keys"],
    ),
    "a hook that is called with less": (
        base("def _kernel(self, query, keys) ->", "def _kernel(self, query) ->"),
        [f"{KERNEL} keys is not passed"],
    ),
    "a hook that gives something else": (
        base("keys) -> int:\n        raise", "keys) -> None:\n        raise"),
        ["18: vllm.base.Backend._kernel() gives None, gave int"],
    ),
    "a method that has to be there": (
        base("    @staticmethod\n", "    @abstractmethod\n    def name(self): ...\n\n    @staticmethod\n"),
        ["6: vllm.base.Backend requires name, which this class does not define"],
    ),
    "a source that only a newer Python reads": ({"vllm/base.py": BASE + "match = = 1\n"}, []),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_upstream(tmp_path: Path, change: str) -> None:
    new, expected = CHANGES[change]
    assert sorted(problems(tmp_path, new, {"vllm/ours.py": OURS})) == sorted(expected)


ASKING = {
    "a caught import": "try:\n    from vllm.base import run\nexcept ImportError:\n    run = None\n",
    "an attribute asked for": "from vllm import base\nif hasattr(base, 'run'):\n    base.run(1)\n",
    "a type asked for": (
        "from vllm.base import Config\ndef use(config: Config):\n"
        "    if isinstance(config, object):\n        return config.run\n"
    ),
    "a name used twice": "from vllm.base import Config\ndef use():\n    a = Config(1)\n    a = 1\n    return a.run\n",
    "another package": "from elsewhere import run\nimport elsewhere.run\nrun.run\n",
    "a lambda's parameter": "from vllm import base\nf = lambda base: base.run\n",
    "a star": "from vllm.stars import run\n",
}


@pytest.mark.parametrize("ours", ASKING)
def test_code_that_asks_first_is_not_accused(tmp_path: Path, ours: str) -> None:
    new = base("def run(first, second=0, *, third=0) -> int: ...\n", "")
    assert problems(tmp_path, new, {"vllm/ours.py": ASKING[ours]}) == []


def test_imports_of_every_form(tmp_path: Path) -> None:
    ours = {
        "vllm/ours/__init__.py": "from . import a\nfrom ..base import run\nimport vllm.base\n",
        "vllm/ours/a.py": "def f():\n    from vllm import base\n    from ..base import run\n    return base.run\n",
    }
    found = problems(tmp_path, {"vllm/base.py": ""}, ours)
    assert found == [
        "overlay/vllm/ours/__init__.py:2: no module vllm.base, from which run is imported",
        "overlay/vllm/ours/__init__.py:3: no module vllm.base",
        "overlay/vllm/ours/a.py:2: vllm has no base",
        "overlay/vllm/ours/a.py:3: no module vllm.base, from which run is imported",
    ]


def test_what_the_pin_lacks_too(tmp_path: Path) -> None:
    """A module that only the wheel has is no finding; a name that a module plainly lacks is one wherever it is."""
    ours = {"vllm/ours.py": "from vllm.wheel_only import anything\n"}
    assert problems(tmp_path, {}, ours) == []
    with pytest.raises(AssertionError, match=r"vllm\.base has no nothing"):
        problems(tmp_path / "again", {}, {"vllm/ours.py": "from vllm.base import nothing\n"})
