"""When two callbacks record the same graph: a key for what a callback is made of, or none.

A key of a callback's own, `score_mod_graph_cache_key`, stands for everything that it holds. Functions have one without:
their code, and by value what they capture, the defaults, and the globals that they name. Bound methods and objects that
are called may hold anything, and have none.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

Callback = Callable[..., Any]
OWN_KEY = "score_mod_graph_cache_key"


class Same:
    """Stands in a key for an object that is itself and nothing else; it keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes that code, and functions made in it, may read."""
    nested = (names_of(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*nested)


class _Contents:
    """What a function is made of: deep, and looked up in every call, so that it is hashed once."""

    def __init__(self, parts: Any) -> None:
        self.parts, self.hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Contents) and self.parts == other.parts)


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
    kept = _kept.get(callback)
    if kept is not None and kept[1].holds():
        return kept[0]
    seen = _Seen()
    try:
        key = _Contents(_contents(callback, _NONE, seen))
    except _Unkeyed:
        return None
    if seen.lasting:
        if len(_kept) >= _MOST:
            _kept.clear()
        _kept[callback] = key, seen
    return key


_MISSING = object()


class _Seen:
    """What a walk has come across: objects by their number, and all that it read, so that a key may be kept for as long
    as each of these reads would give the same object."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.names: list[tuple[Mapping[str, Any], str, Any]] = []
        """A name in a scope, and what it stood for."""
        self.cells: list[tuple[types.CellType, Any]] = []
        self.functions: list[tuple[types.FunctionType, types.CodeType, Any]] = []
        """Code and defaults of a function that has no attributes, nor defaults by keyword."""
        self.lasting = True
        """Whether all that it read can change in these places alone."""

    def read(self, scope: Mapping[str, Any], names: frozenset[str]) -> list[tuple[str, Any]]:
        """What names stand for, of those that are there; that the others are not is a read too."""
        self.names += ((scope, name, scope.get(name, _MISSING)) for name in names)
        return [(name, scope[name]) for name in sorted(names & scope.keys())]

    def holds(self) -> bool:
        for scope, name, value in self.names:
            if scope.get(name, _MISSING) is not value:
                return False
        for fn, code, defaults in self.functions:
            if fn.__code__ is not code or fn.__defaults__ is not defaults or fn.__kwdefaults__ or fn.__dict__:
                return False
        try:
            return all(cell.cell_contents is value for cell, value in self.cells)
        except ValueError:  # nothing is assigned any more
            return False


_kept: dict[Callback, tuple[Any, _Seen]] = {}
"""Keys of functions, which are hashed by what they are."""
_MOST = 256


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
        return "dict", frozenset((frozen(k), frozen(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(frozen, value))
    if isinstance(value, (set, frozenset)):
        return "set", frozenset(map(frozen, value))
    hash(value)
    return type(value), value


_PLAIN = (bool, int, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, enum.Enum)
_NONE: frozenset[str] = frozenset()


def _contents(value: Any, names: frozenset[str], seen: _Seen) -> Any:
    """What a value is, to code that names these attributes.

    Raises:
        _Unkeyed: neither a constant, nor made of constants, nor code.
    """
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, _PLAIN) or hasattr(type(value), "__members__"):  # cuDNN's own enumerations
        return type(value), value
    if isinstance(value, (types.BuiltinFunctionType, enum.EnumMeta)):
        return Same(value)
    if id(value) in seen.numbers:
        return "again", seen.numbers[id(value)]
    seen.numbers[id(value)] = len(seen.numbers)
    match value:
        case types.FunctionType():
            return _of_function(value, names, seen)
        case types.ModuleType() | type():
            seen.lasting &= not isinstance(value, type)  # whose bases may change too
            return Same(value), _attributes(value, names, seen)
        case _:
            seen.lasting &= isinstance(value, tuple)
            return type(value), tuple(_contents(x, names, seen) for x in _parts(value))


def _parts(value: Any) -> Iterable[Any]:
    """What a container holds, and what a partial or a method is made of.

    Raises:
        _Unkeyed: any other object.
    """
    match value:
        case staticmethod() | classmethod():
            return (value.__func__,)
        case types.MethodType():
            return value.__func__, value.__self__
        case functools.partial():
            return value.func, value.args, value.keywords
        case dict():
            return (x for item in value.items() for x in item)
        case list() | tuple():
            return value
        case set() | frozenset():
            return sorted(value, key=repr)
    raise _Unkeyed


def _of_function(fn: types.FunctionType, outer: frozenset[str], seen: _Seen) -> Any:
    names = names_of(fn.__code__)
    try:
        cells = [(cell, cell.cell_contents) for cell in fn.__closure__ or ()]
    except ValueError as unassigned:
        raise _Unkeyed from unassigned
    seen.cells += cells
    seen.functions.append((fn, fn.__code__, fn.__defaults__))
    seen.lasting &= not fn.__kwdefaults__ and not fn.__dict__
    held = [_contents(x, names, seen) for x in (fn.__defaults__, fn.__kwdefaults__, tuple(x for _, x in cells))]
    held += ((name, _contents(x, names, seen)) for name, x in seen.read(fn.__globals__, names))
    return fn.__code__, tuple(held), _attributes(fn, outer | names, seen) if fn.__dict__ else ()


def _attributes(owner: Any, names: frozenset[str], seen: _Seen) -> tuple[Any, ...]:
    """What code reads of a module, a class or a function, by itself and by the methods that it calls."""
    scopes = [vars(x) for x in owner.__mro__[:-1]] if isinstance(owner, type) else [vars(owner)]
    while isinstance(owner, type):
        methods = [getattr(scope[name], "__func__", scope[name]) for scope in scopes for name in names & scope.keys()]
        more = names.union(*(names_of(x.__code__) for x in methods if isinstance(x, types.FunctionType)))
        if more == names:
            break
        names = more
    found = (item for scope in scopes for item in seen.read(scope, names))
    return tuple((name, _contents(x, names, seen)) for name, x in found)
