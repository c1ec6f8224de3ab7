# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Spare the doctor what vLLM imports to serve requests, and no answer rests on.

Nothing here changes what vLLM decides. What is not there any more in another release
of vLLM, torch, Triton or transformers is not spared, and costs time only.
"""

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import inspect
import itertools
import linecache
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# What these import of the modules below is called when a request or an image is
# processed; the types are for annotations.
_CONFIGURATION = ("vllm.engine.arg_utils", "vllm.v1.executor")
_DEFERRED = (
    # Parsers, grammars, the types of OpenAI's API, FastAPI: a second together.
    "vllm.v1.structured_output",
    "vllm.entrypoints.mcp.tool_server",
    # torchvision, torchaudio, aiohttp: another.
    "transformers.models.auto.image_processing_auto",
    "vllm.transformers_utils.processor",
    "vllm.assets.base",
    "vllm.multimodal.media.connector",
    # The tokenizers that transformers makes of GGUF files.
    "transformers.modeling_gguf_pytorch_utils",
)
# What compiles models, and what generates text with those of transformers: nothing of
# it runs here. Three seconds.
_ABSENT = (
    "torch._dynamo",
    "torch._inductor.standalone_compile",
    "torch._inductor.utils",
    "vllm.compilation.passes",
    "transformers.generation.utils",
)


def install() -> None:
    """Import vLLM's configuration for less; the platform must be known."""
    # Spans of requests. vLLM does without where it is not installed.
    sys.modules.setdefault("opentelemetry", None)
    importlib.metadata.packages_distributions = _packages_distributions
    _find_sources_directly()
    for name in _ABSENT:
        sys.meta_path.insert(0, _Finder([name]))
    _compile_nothing()
    finder = _Finder(_DEFERRED)
    sys.meta_path.insert(0, finder)
    for name in _CONFIGURATION:
        with suppress(ImportError):
            importlib.import_module(name)
    # Who imports them later gets the real ones: a model's class may be built on them.
    finder.end()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for modules, and for all within them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._found: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> ModuleSpec | None:
        for each in self._names:
            exists = name == each and PathFinder.find_spec(name, path)
            if exists or name.startswith(f"{each}."):
                self._found.append(name)
                return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name, self.end)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    def end(self) -> None:
        """Find none any more. Who has the names of a stand-in keeps them."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        while self._found:
            name = self._found.pop()
            package, _, child = name.rpartition(".")
            del sys.modules[name]
            if package in sys.modules:
                vars(sys.modules[package]).pop(child, None)


class _StandIn(types.ModuleType):
    """Has classes of every name; a call imports the real module, and is its."""

    def __init__(self, name: str, end: Callable[[], None]) -> None:
        super().__init__(name)
        self.__end = end

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(cls: type, *args: Any, **kwargs: Any) -> Any:
            self.__end()
            return getattr(importlib.import_module(self.__name__), name)(
                *args, **kwargs
            )

        # A class and no function: annotations say `Name | None` and `Name[int]`.
        item = classmethod(lambda cls, item: cls)
        return type(name, (), {"__new__": call, "__class_getitem__": item})


def _packages_distributions() -> Mapping[str, list[str]]:
    """Return what importlib.metadata's function of this name returns.

    transformers asks it for versions when it is imported. The original makes a path
    of each of the 40,000 files that are installed, which takes a second.
    """
    packages: dict[str, list[str]] = defaultdict(list)
    for distribution in importlib.metadata.distributions():
        name = re.search("^Name: (.*)", distribution.read_text("METADATA") or "", re.M)
        names = (distribution.read_text("top_level.txt") or "").split()
        if not names:
            files = distribution.read_text("RECORD") or ""
            top = set(re.findall(r"^([^,/\n]+)[,/]", files, re.M))
            names = {inspect.getmodulename(each) or each for each in top}
        for each in filter(str.isidentifier, names if name else ()):
            packages[each].append(name[1])
    return dict(packages)


def _find_sources_directly() -> None:
    """Let Triton and torch not search all modules for each kernel and operator.

    inspect does, to find out which module a function or a frame belongs to.
    """
    import torch

    def source_lines(function: Any) -> tuple[list[str], int]:
        start = function.__code__.co_firstlineno
        lines = linecache.getlines(function.__code__.co_filename)[start - 1 :]
        if not lines:
            return inspect.getsourcelines(function)
        if lines[0][0].isspace():
            return inspect.getblock(lines), start
        # All to the next statement outside. inspect tokenises the text to know where
        # that is, and here nobody reads it.
        body = next(i for i, line in enumerate(lines) if line.startswith("def ")) + 1
        inside = itertools.takewhile(re.compile(r"[\s)]").match, lines[body:])
        return [*lines[:body], *inside], start

    def module_of(frame: types.FrameType) -> types.ModuleType | None:
        return sys.modules.get(frame.f_globals["__name__"])

    with suppress(ImportError):
        jit = importlib.import_module("triton.runtime.jit")
        jit.inspect = _Changed(inspect, getsourcelines=source_lines)
    torch.library.inspect = _Changed(inspect, getmodule=module_of)
    # A place for error messages.
    torch._library.utils.get_source = lambda stacklevel: ""


def _compile_nothing() -> None:
    """Let torch leave functions as they are; to mark them imports its compilers."""
    import torch

    def as_it_is(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        return (lambda each: each) if function is None else function

    torch.compile = as_it_is
    with suppress(ImportError):
        dynamo = importlib.import_module("torch._dynamo")
        for name in ("allow_in_graph", "assume_constant_result", "disable"):
            setattr(dynamo, name, as_it_is)
    # The Triton kernels within an operator, which Inductor would see into.
    with suppress(ImportError):
        operators = importlib.import_module("torch._library.triton")
        operators.get_inner_triton_kernels = lambda function: []


class _Changed(types.ModuleType):
    """A module with other functions, for one of those that import it."""

    def __init__(self, module: types.ModuleType, **changes: Any) -> None:
        super().__init__(module.__name__)
        vars(self).update(vars(module) | changes)
