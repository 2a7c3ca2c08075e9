"""When two callbacks record the same graph: a key for what a callback is made of, or none.

A key of a callback's own, `score_mod_graph_cache_key`, stands for everything that it holds. Functions have one without:
their code, and by value what they capture, the defaults, and the globals that they name. Bound methods and objects that
are called may hold anything, and have none.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.scores.survey import Same, names_of, of_library

Callback = Callable[..., Any]
OWN_KEY = "score_mod_graph_cache_key"


class _Unkeyed(Exception):
    """Something that may change without notice."""


def callback_key(callback: Callback | None) -> Any:
    """Equal for callbacks that record the same; None for one that has no key, and is recorded each time.

    Raises:
        TypeError: a `score_mod_graph_cache_key` that holds tensors, or what cannot be hashed.
    """
    if callback is None:
        return ("nothing",)
    method = isinstance(callback, types.MethodType)
    owner = callback.__self__ if method else callback
    if hasattr(owner, OWN_KEY):
        own = getattr(owner, OWN_KEY)
        code = getattr(getattr(callback, "__func__", callback), "__code__", None)
        names = getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)
        return "own", type(owner), code, *names, frozen(own() if callable(own) else own)
    if method or not isinstance(callback, (types.FunctionType, types.BuiltinFunctionType, functools.partial)):
        return None
    try:
        return "contents", _contents(callback, False, {})
    except _Unkeyed:
        return None


def frozen(value: Any) -> Any:
    """A hashable form of a key: dictionaries, lists, tuples and sets by what is in them.

    Raises:
        TypeError: a tensor, or a value that cannot be hashed.
    """
    if isinstance(value, Tensor):
        raise TypeError(
            f"{OWN_KEY} must not hold tensors, got {value.dtype} {tuple(value.shape)}: what changes from call to call "
            "goes into the dictionaries of tensors"
        )
    if isinstance(value, dict):
        return "dict", tuple(sorted(((frozen(k), frozen(v)) for k, v in value.items()), key=repr))
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(frozen, value))
    hash(value)
    return type(value), value


_PLAIN = (bool, int, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, enum.Enum)


def _contents(value: Any, shared: bool, seen: dict[int, int]) -> Any:
    """What a value is. What is shared, by way of a global, may be known by identity; what is captured may not.

    Raises:
        _Unkeyed: captured, and neither a constant nor made of constants.
    """
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, _PLAIN) or hasattr(type(value), "__members__"):  # cuDNN's own enumerations
        return type(value), value
    if isinstance(value, (type, types.BuiltinFunctionType)) or (callable(value) and of_library(value)):
        return Same(value)
    if isinstance(value, types.ModuleType):
        return Same(value)
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    match value:
        case types.FunctionType():
            return _of_function(value, shared, seen)
        case functools.partial():
            parts = value.func, value.args, value.keywords
            return "partial", tuple(_contents(x, shared, seen) for x in parts)
        case dict():
            return "dict", tuple((_contents(k, shared, seen), _contents(v, shared, seen)) for k, v in value.items())
        case list() | tuple():
            return type(value), tuple(_contents(x, shared, seen) for x in value)
        case set() | frozenset():
            return "set", frozenset(_contents(x, shared, seen) for x in value)
    if not shared:
        raise _Unkeyed
    return Same(value)


def _of_function(fn: types.FunctionType, shared: bool, seen: dict[int, int]) -> Any:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(_contents(cell.cell_contents, shared, seen))
        except ValueError:  # not assigned yet
            cells.append(None)
    held = [_contents(x, shared, seen) for x in (fn.__defaults__, fn.__kwdefaults__)]
    names = names_of(fn.__code__)
    for name in sorted(names):
        if name in fn.__globals__:
            found = fn.__globals__[name]
            held.append((name, _contents(found, True, seen)))
            held += _attributes(found, names, seen)
    return fn.__code__, tuple(cells), tuple(held)


def _attributes(owner: Any, names: frozenset[str], seen: dict[int, int]) -> list[Any]:
    """What code may read of a global module or object: constants and functions among its attributes of such names."""
    if isinstance(owner, types.FunctionType):
        return []
    own = getattr(owner, "__dict__", {})
    kinds = (*_PLAIN, float, types.FunctionType)
    return [
        (name, _contents(own[name], True, seen)) for name in sorted(names & own.keys()) if isinstance(own[name], kinds)
    ]
