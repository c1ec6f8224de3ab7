"""Signatures as the sources have them: whether a call fits one, and what two of them differ in."""

from __future__ import annotations

import ast
import inspect
import re
from inspect import Parameter

from scripts.symbols import Function, last_name

_KINDS = ("classmethod", "property", "cached_property", "staticmethod", "contextmanager")


def fit(function: Function, call: ast.Call) -> str:
    """Why a call does not fit a function, in Python's words; empty where it does, or where unpacking leaves it open."""
    try:
        _bind(function, call)
    except TypeError as error:
        return str(error)
    return ""


def moved(function: Function, before: Function, call: ast.Call) -> str:
    """Which arguments of a call that fits both reach another parameter than before, in words."""
    now, then = (_places(one, call) for one in (function, before))
    changed = [
        f"argument {place + 1} is {now[place]}, was {then[place]}"
        for place in sorted(now.keys() & then.keys())
        if now[place] != then[place]
    ]
    return ", ".join(changed)


def overriding(base: Function, ours: Function) -> str:
    """Why whoever calls `base` by its signature cannot call the override, in words; empty where he can."""
    theirs, own = (_signature(one).parameters for one in (base, ours))
    kinds = {one.kind for one in own.values()}
    places = [one for one in own.values() if one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    problems = []
    for place, one in enumerate(theirs.values()):
        if one.kind is Parameter.POSITIONAL_OR_KEYWORD and place < len(places):
            if places[place].name != one.name:
                problems.append(f"parameter {place + 1} is {one.name}, here {places[place].name}")
        elif one.kind is Parameter.POSITIONAL_OR_KEYWORD:
            if one.name not in own and not kinds & {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD}:
                problems.append(f"{one.name} is passed as well")
        elif one.kind is Parameter.KEYWORD_ONLY and one.name not in own and Parameter.VAR_KEYWORD not in kinds:
            problems.append(f"{one.name} is passed as well")
    if Parameter.VAR_KEYWORD not in {one.kind for one in theirs.values()}:
        asked = [one for one in own.values() if one.default is Parameter.empty and one.name not in theirs]
        variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        beyond = [one.name for one in asked if one.kind not in variable and one not in places[: len(theirs)]]
        problems += [f"{name} is not passed" for name in beyond]
    return ", ".join(problems)


def result(function: Function) -> str:
    """What a function gives back, in words: its kind and its annotation, written in one way."""
    kinds = {last_name(one) for one in function.node.decorator_list}
    words = ["async"] if isinstance(function.node, ast.AsyncFunctionDef) else []
    words += [kind for kind in _KINDS if kind in kinds]
    text = ast.unparse(function.node.returns).replace("'", "").replace('"', "") if function.node.returns else "anything"
    text = re.sub(r"\b(?:typing\.|t\.)?(List|Dict|Tuple|Set|Type)\[", lambda match: f"{match[1].lower()}[", text)
    return " ".join([*words, re.sub(r"\bOptional\[((?:[^\[\]]|\[[^\[\]]*\])*)\]", r"\1 | None", text)])


def _signature(function: Function) -> inspect.Signature:
    """The parameters that are left for the caller to give."""
    node = function.node.args
    positional = [*node.posonlyargs, *node.args]
    kinds = len(node.posonlyargs) * [Parameter.POSITIONAL_ONLY] + len(node.args) * [Parameter.POSITIONAL_OR_KEYWORD]
    first_default = len(positional) - len(node.defaults)
    parameters = [
        Parameter(one.arg, kind, default=None if place >= first_default else Parameter.empty)
        for place, (one, kind) in enumerate(zip(positional, kinds, strict=True))
    ][function.given :]
    if node.vararg:
        parameters.append(Parameter(node.vararg.arg, Parameter.VAR_POSITIONAL))
    parameters += [
        Parameter(one.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for one, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)
    ]
    if node.kwarg:
        parameters.append(Parameter(node.kwarg.arg, Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _bind(function: Function, call: ast.Call) -> inspect.BoundArguments:
    """Bind a call's arguments, each by its own place; raises TypeError where they do not fit."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    # What comes after an unpacked argument may be at any place.
    places = [place for place, one in enumerate(call.args) if not isinstance(one, ast.Starred)]
    places = [place for place in places if not any(isinstance(one, ast.Starred) for one in call.args[:place])]
    keywords = {word.arg: word.arg for word in call.keywords if word.arg}
    open_ended = starred or any(word.arg is None for word in call.keywords)
    signature = _signature(function)
    return (signature.bind_partial if open_ended else signature.bind)(*places, **keywords)


def _places(function: Function, call: ast.Call) -> dict[int, str]:
    """The parameter that each positional argument of a call reaches."""
    return {place: name for name, place in _bind(function, call).arguments.items() if isinstance(place, int)}
