"""What the Python modules of a git tree define, found without a work tree and without importing anything.

Only what the sources say plainly is answered: imports, definitions, annotations and `self.x = ...`. Whatever depends on
more than that is UNKNOWN, and UNKNOWN has every attribute.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scripts.repository import Repository

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Bindings = Mapping[str, Sequence[ast.AST]]


@dataclass(frozen=True)
class Unknown:
    """A value of which nothing can be said."""


@dataclass(frozen=True)
class Missing:
    """`holder` has no such attribute. Not certain where it makes attributes up as they are asked for."""

    holder: str
    certain: bool = True


@dataclass(frozen=True)
class Module:
    """A module of the tree."""

    name: str
    path: str
    node: ast.Module


@dataclass(frozen=True)
class Class:
    """A class or, with `inherited`, only what it inherits, as super() sees it."""

    module: Module
    node: ast.ClassDef
    inherited: bool = False

    @property
    def name(self) -> str:
        return f"{self.module.name}.{self.node.name}"


@dataclass(frozen=True)
class Instance:
    """An object of a class."""

    of: Class


@dataclass(frozen=True)
class Function:
    """A function; `given` is how many of its first parameters the access fills in: self or cls."""

    module: Module
    node: FunctionNode
    owner: Class | None = None
    given: int = 0

    @property
    def name(self) -> str:
        return f"{self.owner.name if self.owner else self.module.name}.{self.node.name}"

    @property
    def plain(self) -> bool:
        """Whether no decorator may have changed the signature."""
        return all(last_name(one) in _TRANSPARENT for one in self.node.decorator_list)


Value = Unknown | Module | Class | Instance | Function
UNKNOWN = Unknown()

_TRANSPARENT = {
    *("abstractmethod", "cache", "cached_property", "classmethod", "contextmanager", "final", "inference_mode"),
    *("lru_cache", "no_grad", "override", "property", "staticmethod"),
}
# Bases from elsewhere that bring no attribute that code asks for by its name.
_BARE_BASES = {"object", "ABC", "Generic", "Protocol", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
_ENUM_ATTRIBUTES = {"name", "value"}


class Symbols:
    """The modules of one tree; `ours` are files on disk that are laid over it."""

    def __init__(self, repository: Repository, tree: str, ours: Mapping[str, Path]) -> None:
        self._repository, self._tree, self._ours = repository, tree, ours
        self._packages = sorted({path.split("/")[0] for path in ours})
        listings = [repository.files(tree, f"{package}/") for package in self._packages]
        self._blobs = {path: entry.blob for listing in listings for path, entry in listing.items()}
        self._modules: dict[str, Module | None] = {}
        self._known: dict[object, Value | Missing] = {}

    # -- modules -------------------------------------------------------------------------------------

    def inside(self, name: str) -> bool:
        """Whether a module of this name would be one of the tree's."""
        return name.split(".")[0] in self._packages

    def module(self, name: str) -> Module | None:
        """The module called `name`, or None where the tree has none. One that cannot be parsed is empty."""
        if name not in self._modules:
            base = name.replace(".", "/")
            paths = (f"{base}.py", f"{base}/__init__.py")
            path = next((path for path in paths if path in self._ours or path in self._blobs), None)
            self._modules[name] = Module(name, path, self._parse(path)) if path else None
        return self._modules[name]

    def _parse(self, path: str) -> ast.Module:
        if path in self._ours:
            return _parse(self._ours[path].read_bytes())
        return _parse_blob(self._repository, self._blobs[path])

    def _is_folder(self, name: str) -> bool:
        prefix = f"{name.replace('.', '/')}/"
        return any(path.startswith(prefix) for path in (*self._ours, *self._blobs))

    def imported(self, module: Module, node: ast.ImportFrom) -> str:
        """The module that a `from ... import` names, made absolute."""
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        parts = parts[: len(parts) - node.level + module.path.endswith("__init__.py")]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def definitions(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The files that define each of `names` at their top level."""
        found: dict[str, list[str]] = {name: [] for name in names}
        if found:
            defining = rf"^(async def |def |class )?({'|'.join(found)})\b *[:=(]"
            arguments = ("grep", "-E", "--null", defining, self._tree, "--", *self._packages)
            for line in self._repository.attempt(*arguments).stdout.decode(errors="replace").splitlines():
                place, _, text = line.partition("\0")
                match = re.match(defining, text)
                path = place.split(":", 1)[1]
                if match and path.endswith(".py") and path not in found[match[2]]:
                    found[match[2]].append(path)
        return found

    # -- attributes ----------------------------------------------------------------------------------

    def attribute(self, value: Value, name: str) -> Value | Missing:
        """The attribute `name` of a value."""
        if isinstance(value, Module):
            return self.once((value.name, name), lambda: self._module_attribute(value, name))
        if isinstance(value, Class | Instance):
            cls = value.of if isinstance(value, Instance) else value
            found = self.member(cls, name)
            if isinstance(found, Missing):  # an object may be of a subclass of what it is said to be
                return Missing(found.holder, certain=found.certain and value is cls and not cls.inherited)
            if isinstance(found, Unknown):
                return UNKNOWN
            return self.once((type(value), cls, name), lambda: self._member_value(value, *found))
        return UNKNOWN

    def once(self, key: object, find: Callable[[], Value | Missing]) -> Value | Missing:
        """What `find` gives, remembered; UNKNOWN where it needs its own answer."""
        if key not in self._known:
            self._known[key] = UNKNOWN
            self._known[key] = find()
        return self._known[key]

    def _module_attribute(self, module: Module, name: str) -> Value | Missing:
        bindings = bound_names(module.node)
        if name in bindings:
            return Scope(self, module, module.node).value(name, bindings[name])
        for node in bindings.get("*", ()):
            assert isinstance(node, ast.ImportFrom)
            other = self.module(source) if self.inside(source := self.imported(module, node)) else None
            found = self.attribute(other, name) if other else UNKNOWN
            if not isinstance(found, Missing):
                return found
        if submodule := self.module(f"{module.name}.{name}"):
            return submodule
        if name.startswith("__") or self._is_folder(f"{module.name}.{name}"):
            return UNKNOWN
        return Missing(module.name, certain="__getattr__" not in bindings)

    def bases(self, cls: Class) -> list[Class | Unknown]:
        """The class and all that it inherits from, in the order in which attributes are looked up."""
        found: list[Class | Unknown] = [] if cls.inherited else [Class(cls.module, cls.node)]
        scope = Scope(self, cls.module, cls.module.node)
        for base in cls.node.bases:
            value = scope.infer(base)
            if isinstance(value, Class) and value.node is not cls.node:
                found += self.bases(value)
            elif last_name(base) not in _BARE_BASES:
                found.append(UNKNOWN)
        if any(word.arg == "metaclass" and last_name(word.value) != "ABCMeta" for word in cls.node.keywords):
            found.append(UNKNOWN)
        return [one for place, one in enumerate(found) if one not in found[place + 1 :]]

    def member(self, cls: Class, name: str) -> tuple[Class, Sequence[ast.AST]] | Unknown | Missing:
        """The class that gives `cls` its attribute `name`, and what binds it there."""
        known = []
        for one in self.bases(cls):
            if isinstance(one, Unknown):
                return UNKNOWN
            if nodes := bound_names(one.node).get(name) or own_attributes(one.node).get(name):
                return one, nodes
            known.append(one)
        is_enum = any(last_name(base).endswith(("Enum", "Flag")) for one in known for base in one.node.bases)
        if name.startswith("__") or (is_enum and name in _ENUM_ATTRIBUTES):
            return UNKNOWN
        return Missing(cls.name, certain=not any("__getattr__" in bound_names(one.node) for one in known))

    def _member_value(self, value: Class | Instance, owner: Class, nodes: Sequence[ast.AST]) -> Value | Missing:
        node = nodes[0]
        scope = Scope(self, owner.module, owner.module.node)
        if isinstance(node, FunctionNode):
            decorators = {last_name(one) for one in node.decorator_list}
            if decorators & {"property", "cached_property"}:
                return scope.annotated(node.returns)
            if len(nodes) > 1:
                return UNKNOWN
            bound = isinstance(value, Instance) or value.inherited or "classmethod" in decorators
            return Function(owner.module, node, owner, int(bound and "staticmethod" not in decorators))
        for one in nodes:
            if isinstance(one, ast.AnnAssign):
                return scope.annotated(one.annotation)
        if len(nodes) == 1 and isinstance(node, ast.Assign):
            for method in owner.node.body:  # whose parameters, with their annotations, may be what is assigned
                if isinstance(method, FunctionNode) and method.lineno < node.lineno <= (method.end_lineno or 0):
                    scope = Scope(self, owner.module, method, scope, owner)
            return scope.infer(node.value)
        return UNKNOWN


class Scope:
    """Where names are looked up: a module, a class body or a function, inside `parent`.

    `owner` is the class whose method the function is.
    """

    def __init__(
        self,
        symbols: Symbols,
        module: Module,
        node: ast.Module | ast.ClassDef | FunctionNode | ast.Lambda,
        parent: Scope | None = None,
        owner: Class | None = None,
    ) -> None:
        self.symbols, self.module, self.node, self.parent, self.owner = symbols, module, node, parent, owner

    def lookup(self, name: str) -> Value:
        """What a name stands for here."""
        if isinstance(self.node, ast.Module):
            found = self.symbols.attribute(self.module, name) if name in bound_names(self.node) else UNKNOWN
            return UNKNOWN if isinstance(found, Missing) else found
        assert self.parent is not None
        if isinstance(self.node, ast.ClassDef):
            return UNKNOWN if name in bound_names(self.node) else self.parent.lookup(name)
        facts = _facts(self.node)
        if name in facts.parameters:
            return UNKNOWN if name in facts.stored or name in facts.narrowed else self._parameter(name)
        if nodes := bound_names(self.node).get(name):
            if facts.stored[name] > 1 or name in facts.narrowed:
                return UNKNOWN
            found = self.symbols.once((id(self.node), name), lambda: self.value(name, nodes))
            return UNKNOWN if isinstance(found, Missing) else found
        return UNKNOWN if name in facts.stored else self.parent.lookup(name)

    def _parameter(self, name: str) -> Value:
        parameters = _facts(self.node).parameters
        if self.owner and isinstance(self.node, FunctionNode) and name == next(iter(parameters)):
            decorators = {last_name(one) for one in self.node.decorator_list}
            if "staticmethod" not in decorators:
                is_class = "classmethod" in decorators or self.node.name in ("__new__", "__init_subclass__")
                return self.owner if is_class else Instance(self.owner)
        assert self.parent is not None
        return self.parent.annotated(parameters[name])

    def value(self, name: str, nodes: Sequence[ast.AST]) -> Value | Missing:
        """The value of a name that `nodes` bind in this scope."""
        node = nodes[0]
        if len(nodes) > 1:
            return UNKNOWN
        if isinstance(node, FunctionNode):
            return Function(self.module, node)
        if isinstance(node, ast.ClassDef):
            return Class(self.module, node)
        if isinstance(node, ast.Import):
            alias = next(one for one in node.names if (one.asname or one.name.split(".")[0]) == name)
            target = alias.name if alias.asname else name
            return (self.symbols.module(target) if self.symbols.inside(target) else None) or UNKNOWN
        if isinstance(node, ast.ImportFrom):
            alias = next(one for one in node.names if (one.asname or one.name) == name)
            source = self.symbols.imported(self.module, node)
            module = self.symbols.module(source) if self.symbols.inside(source) else None
            found = self.symbols.attribute(module, alias.name) if module else UNKNOWN
            return UNKNOWN if isinstance(found, Missing) else found
        if isinstance(node, ast.AnnAssign):
            return self.annotated(node.annotation)
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            return self.infer(node.value)
        return UNKNOWN

    def infer(self, node: ast.AST) -> Value:
        """The value of an expression."""
        if isinstance(node, ast.Name):
            return self.lookup(node.id)
        if isinstance(node, ast.Attribute):
            if not isinstance(self.node, ast.Module | ast.ClassDef) and ast.unparse(node) in _facts(self.node).narrowed:
                return UNKNOWN
            found = self.symbols.attribute(self.infer(node.value), node.attr)
            return UNKNOWN if isinstance(found, Missing) else found
        if isinstance(node, ast.Subscript):
            value = self.infer(node.value)
            return value if isinstance(value, Class) else UNKNOWN
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id == "super" and not node.args:
                return self._super()
            called = self.infer(node.func)
            if isinstance(called, Class):
                return Instance(called)
            if isinstance(called, Function) and called.plain and isinstance(called.node, ast.FunctionDef):
                return Scope(self.symbols, called.module, called.module.node).annotated(called.node.returns)
        return UNKNOWN

    def _super(self) -> Value:
        scope: Scope | None = self
        while scope and not scope.owner:
            scope = scope.parent
        return Class(scope.owner.module, scope.owner.node, inherited=True) if scope and scope.owner else UNKNOWN

    def annotated(self, node: ast.AST | None) -> Value:
        """What an annotation says of a value."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                return self.annotated(ast.parse(node.value, mode="eval").body)
            except SyntaxError:
                return UNKNOWN
        if isinstance(node, ast.BinOp):
            sides = [
                side for side in (node.left, node.right) if not (isinstance(side, ast.Constant) and not side.value)
            ]
            return self.annotated(sides[0]) if len(sides) == 1 else UNKNOWN
        if isinstance(node, ast.Subscript):
            head = last_name(node.value)
            if head in ("ClassVar", "Final", "Optional", "Annotated"):
                first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
                return self.annotated(first)
            if head in ("type", "Type"):
                return self.infer(node.slice)
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript):
            value = self.infer(node)
            return Instance(value) if isinstance(value, Class) else UNKNOWN
        return UNKNOWN


# -- what the nodes of one file say ------------------------------------------------------------------


@cache
def _parse_blob(repository: Repository, blob: str) -> ast.Module:
    return _parse(repository.run("cat-file", "blob", blob))


@cache
def _parse(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.parse("from elsewhere import *")  # a newer Python's: whatever is asked for may be there


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name, called or subscripted or not: `a.b(c)` gives b."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def bound_names(node: ast.AST) -> Bindings:
    """The names that a module, a class body or a function binds, with what binds each.

    What is bound for type checkers only says more than what is bound at run time, and stands in its place.
    """
    found: dict[str, list[ast.AST]] = {}
    for_types: dict[str, list[ast.AST]] = {}

    def bind(into: dict[str, list[ast.AST]], names: Iterable[str], by: ast.AST) -> None:
        for name in names:
            into.setdefault(name, []).append(by)

    def visit(body: Iterable[ast.AST], into: dict[str, list[ast.AST]]) -> None:
        for child in body:
            if isinstance(child, FunctionNode | ast.ClassDef):
                bind(into, [child.name], child)
            elif isinstance(child, ast.Import):
                bind(into, [alias.asname or alias.name.split(".")[0] for alias in child.names], child)
            elif isinstance(child, ast.ImportFrom):
                bind(into, [alias.asname or alias.name for alias in child.names], child)
            elif isinstance(child, ast.If) and last_name(child.test) == "TYPE_CHECKING":
                visit(child.body, for_types)
                visit(child.orelse, into)
            elif isinstance(child, ast.stmt):
                bind(into, _targets(child), child)
                for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                    visit(getattr(child, field, ()), into)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                visit(child.body, into)

    body = getattr(node, "body", [])
    visit(body if isinstance(body, list) else [], found)
    return found | for_types


def _targets(node: ast.stmt) -> Iterator[str]:
    """The names that a statement itself assigns to."""
    parts: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        parts += node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor):
        parts.append(node.target)
    elif isinstance(node, ast.With | ast.AsyncWith):
        parts += [item.optional_vars for item in node.items if item.optional_vars]
    for part in parts:
        for one in ast.walk(part):
            if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                yield one.id


@cache
def own_attributes(node: ast.ClassDef) -> Bindings:
    """What the methods of a class assign to attributes of their first parameter."""
    found: dict[str, list[ast.AST]] = {}
    for method in node.body:
        if not isinstance(method, FunctionNode) or not method.args.args:
            continue
        for one in ast.walk(method):
            places = [*getattr(one, "targets", ()), getattr(one, "target", None), getattr(one, "optional_vars", None)]
            for target in [part for place in places if place for part in ast.walk(place)]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.ctx, ast.Store)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == method.args.args[0].arg
                ):
                    whole = isinstance(one, ast.AnnAssign) or (isinstance(one, ast.Assign) and target in one.targets)
                    found.setdefault(target.attr, []).append(one if whole else target)
    return found


@dataclass(frozen=True)
class _Facts:
    """A function's parameters with their annotations, how often it stores to each name, and whose type it asks for."""

    parameters: Mapping[str, ast.expr | None]
    stored: Counter[str]
    narrowed: frozenset[str]


@cache
def _facts(node: ast.AST) -> _Facts:
    assert isinstance(node, FunctionNode | ast.Lambda)
    arguments = node.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variable = [one for one in (arguments.vararg, arguments.kwarg) if one]
    stored: Counter[str] = Counter()
    narrowed = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            stored[one.id] += 1
        elif isinstance(one, ast.Lambda) and one is not node:
            stored.update(argument.arg for argument in one.args.args)
        elif isinstance(one, ast.Call) and last_name(one.func) in ("isinstance", "issubclass") and one.args:
            narrowed.add(ast.unparse(one.args[0]))
    annotations = {one.arg: one.annotation for one in parameters} | {one.arg: None for one in variable}
    return _Facts(annotations, stored, frozenset(narrowed))
