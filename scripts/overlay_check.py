"""Whether the overlay still fits: what it uses of upstream, compared with what another release has.

A series that applies cleanly says nothing about the overlay, whose files no patch touches. This reads both, without a
work tree and without importing anything, and finds: overlay files that upstream has now; modules, names and attributes
that are gone; calls that no longer fit the signature, or give an argument to another parameter; overrides of what is no
longer there or is called otherwise; abstract methods that are new.

What depends on more than the sources say plainly is not judged. Nor is code that asks first: an import in a `try` that
catches its failure, an attribute that the file passes to hasattr or getattr, an object whose type it asks for.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from scripts import overlay
from scripts.repository import Repository
from scripts.signature import fit, moved, overriding, result
from scripts.symbols import (
    Class,
    Function,
    FunctionNode,
    Instance,
    Missing,
    Module,
    Scope,
    Symbols,
    Unknown,
    bound_names,
    last_name,
)

_Located = ast.stmt | ast.expr | ast.alias

_CAUGHT = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}
_MOST_HINTS = 3


@dataclass(frozen=True, order=True)
class Problem:
    """Something in an overlay file that does not fit; `file` is its path in this repository."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True)
class _Place:
    """A place in an overlay file."""

    path: str
    line: int
    column: int


@dataclass(frozen=True)
class _Missing:
    """Something that is not there; `name` is what to look for elsewhere."""

    message: str
    name: str
    certain: bool


@dataclass
class _Uses:
    """What the overlay uses of one tree, by place.

    Attributes:
        missing: what is not there.
        called: the function that a call reaches, and the call.
        overridden: what a name in a class takes the place of: a function of upstream's, or True for anything else;
            and the function that takes it.
        required: the abstract methods that a class does not define, with their owners.
    """

    missing: dict[_Place, _Missing] = field(default_factory=dict)
    called: dict[_Place, tuple[Function, ast.Call]] = field(default_factory=dict)
    overridden: dict[_Place, tuple[Function | bool, Function | None, str]] = field(default_factory=dict)
    required: dict[tuple[_Place, str], str] = field(default_factory=dict)


def check(repository: Repository, ours: Mapping[str, Path], *, upstream: str, tip: str, pinned: str) -> list[Problem]:
    """What keeps the overlay from working with another upstream release, in the order of the files.

    Args:
        repository: holds the three trees or commits.
        ours: the overlay's files by their path in the tree.
        upstream: the other release.
        tip: the series laid over it, as far as it applies.
        pinned: the series laid over the release that the overlay was written for. It answers what `tip` alone
            leaves open: what is gone from a module that makes its attributes up, and what has changed.
    """
    shadows = overlay.shadows(ours, repository.files(upstream))
    kept = {path: file for path, file in ours.items() if path not in shadows}
    problems = [Problem(f"overlay/{path}", 1, "upstream has this file now") for path in shadows]
    files = tuple(kept.items())
    new, old = (_uses(repository, tree, files) for tree in (tip, pinned))

    gone = {place: one for place, one in new.missing.items() if one.certain or place not in old.missing}
    defined = Symbols(repository, tip, kept).definitions({one.name for one in gone.values() if one.name.isidentifier()})
    for place, one in gone.items():
        found = defined.get(one.name, [])
        hint = f"; {one.name} is in {', '.join(found)}" if 0 < len(found) <= _MOST_HINTS else ""
        problems.append(_problem(place, one.message + hint))
    for place, (function, call) in new.called.items():
        if message := _call_problem(function, call, old.called.get(place)):
            problems.append(_problem(place, message))
    for place, override in new.overridden.items():
        if message := _override_problem(*override, old.overridden.get(place)):
            problems.append(_problem(place, message))
    for (place, name), owner in new.required.items():
        if (place, name) not in old.required:
            problems.append(_problem(place, f"{owner} requires {name}, which this class does not define"))
    return sorted(set(problems))


def _problem(place: _Place, message: str) -> Problem:
    return Problem(f"overlay/{place.path}", place.line, message)


def _call_problem(function: Function, call: ast.Call, before: tuple[Function, ast.Call] | None) -> str:
    problem = fit(function, call)
    fitted = before is not None and not fit(before[0], call)
    if problem:
        return f"{function.name}(): {problem}" if fitted or function.plain else ""
    if before is None or not fitted:
        return ""
    if changed := moved(function, before[0], call):
        return f"{function.name}(): {changed}"
    return _result_problem(function, before[0])


def _override_problem(
    base: Function | bool, ours: Function | None, name: str, before: tuple[Function | bool, Function | None, str] | None
) -> str:
    if not before or not before[0]:
        return ""
    if not base:
        return f"{name} overrides nothing: upstream's base classes have it no more"
    if not isinstance(base, Function) or not isinstance(before[0], Function) or not ours:
        return ""
    problem = overriding(base, ours)
    if problem and problem != overriding(before[0], ours):
        return f"{name} overrides {base.name}(): {problem}"
    return _result_problem(base, before[0])


def _result_problem(function: Function, before: Function) -> str:
    now, then = result(function), result(before)
    return f"{function.name}() gives {now}, gave {then}" if now != then else ""


@lru_cache(maxsize=4)
def _uses(repository: Repository, tree: str, files: tuple[tuple[str, Path], ...]) -> _Uses:
    """What the overlay uses of a tree. The one that all others are compared with is read once."""
    uses = _Uses()
    ours = dict(files)
    symbols = Symbols(repository, tree, ours)
    for path in ours:
        if path.endswith(".py"):
            module = symbols.module(path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
            assert module is not None
            _Reader(symbols, module, uses).read(module.node, Scope(symbols, module, module.node))
    return uses


class _Reader:
    """Reads one overlay file and notes what it uses."""

    def __init__(self, symbols: Symbols, module: Module, uses: _Uses) -> None:
        self._symbols, self._module, self._uses = symbols, module, uses
        calls = [node for node in ast.walk(module.node) if isinstance(node, ast.Call) and len(node.args) > 1]
        asked = [node.args[1] for node in calls if last_name(node.func) in ("hasattr", "getattr")]
        self._asked = {node.value for node in asked if isinstance(node, ast.Constant)}

    def read(self, node: ast.AST, scope: Scope, caught: bool = False) -> None:
        """Note what `node` and all below it use; `caught` says that a failure is provided for."""
        if isinstance(node, ast.Try) and any(_catches(one) for one in node.handlers):
            for inner in node.body:
                self.read(inner, scope, True)
            for rest in (*node.handlers, *node.orelse, *node.finalbody):
                self.read(rest, scope, caught)
            return
        if isinstance(node, FunctionNode | ast.Lambda):
            self._function(node, scope, caught)
            return
        if isinstance(node, ast.ClassDef):
            self._class(node, scope)
            inside = Scope(self._symbols, self._module, node, scope)
            for outer in (*node.bases, *node.keywords, *node.decorator_list):
                self.read(outer, scope, caught)
            for inner in node.body:
                self.read(inner, inside, caught)
            return
        if not caught and isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node)
        elif not caught and isinstance(node, ast.Attribute) and node.attr not in self._asked:
            found = self._symbols.attribute(scope.infer(node.value), node.attr)
            if isinstance(found, Missing):
                self._miss(node, f"{found.holder} has no {node.attr}", node.attr, found.certain)
        elif isinstance(node, ast.Call):
            self._call(node, scope)
        for child in ast.iter_child_nodes(node):
            self.read(child, scope, caught)

    def _place(self, node: _Located) -> _Place:
        return _Place(self._module.path, node.lineno, node.end_col_offset or 0)

    def _miss(self, node: _Located, message: str, name: str, certain: bool) -> None:
        self._uses.missing[self._place(node)] = _Missing(message, name, certain)

    def _function(self, node: FunctionNode | ast.Lambda, scope: Scope, caught: bool) -> None:
        owner = None
        parent = scope
        if isinstance(scope.node, ast.ClassDef):  # whose names a method does not see
            assert scope.parent is not None
            owner, parent = Class(self._module, scope.node), scope.parent
        inside = Scope(self._symbols, self._module, node, parent, owner)
        body = node.body if isinstance(node.body, list) else [node.body]
        for child in ast.iter_child_nodes(node):
            self.read(child, inside if child in body else scope, caught)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if self._symbols.inside(alias.name) and not self._symbols.module(alias.name):
                    self._miss(node, f"no module {alias.name}", alias.name.rpartition(".")[2], False)
            return
        source = self._symbols.imported(self._module, node)
        if not self._symbols.inside(source):
            return
        module = self._symbols.module(source)
        for alias in node.names:
            if not module:
                self._miss(alias, f"no module {source}, from which {alias.name} is imported", alias.name, False)
            elif alias.name != "*":
                found = self._symbols.attribute(module, alias.name)
                if isinstance(found, Missing):
                    self._miss(alias, f"{source} has no {alias.name}", alias.name, found.certain)

    def _call(self, node: ast.Call, scope: Scope) -> None:
        called = scope.infer(node.func)
        if isinstance(called, Class):
            found = self._symbols.member(called, "__init__")
            value = self._symbols.attribute(Instance(called), "__init__") if isinstance(found, tuple) else None
            called = value if isinstance(value, Function) else Unknown()
        if isinstance(called, Function):
            self._uses.called[self._place(node)] = (called, node)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        """Note what a class overrides of upstream's, and what it was to define."""
        own = Class(self._module, node)
        bases = self._symbols.bases(own)
        if any(isinstance(one, Unknown) for one in bases):
            return
        inherited = Class(self._module, node, inherited=True)
        for name, nodes in bound_names(node).items():
            if name.startswith("__") and name != "__init__":
                continue
            found = self._symbols.member(inherited, name)
            base: Function | bool = isinstance(found, tuple)
            if isinstance(found, tuple) and isinstance(found[1][0], FunctionNode):
                base = Function(found[0].module, found[1][0], found[0], _self_or_cls(found[1][0]))
            ours = nodes[0]
            function = Function(self._module, ours, own, _self_or_cls(ours)) if isinstance(ours, FunctionNode) else None
            assert isinstance(ours, ast.stmt)
            self._uses.overridden[self._place(ours)] = (base, function, name)
        defined: set[str] = set()
        for one in bases:
            assert isinstance(one, Class)
            for name, nodes in bound_names(one.node).items():
                decorators = [last_name(item) for item in getattr(nodes[0], "decorator_list", [])]
                if "abstractmethod" in decorators and name not in defined:
                    self._uses.required[self._place(node), name] = one.name
            defined |= bound_names(one.node).keys()


def _self_or_cls(node: FunctionNode) -> int:
    return int("staticmethod" not in {last_name(one) for one in node.decorator_list})


def _catches(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is None or last_name(one) in _CAUGHT for one in caught)
