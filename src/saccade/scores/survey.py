"""What a Python function reads besides its arguments: the tensors and numbers it captures, and a key for all the rest.

A survey follows closures, defaults, partials, bound methods, callable objects, attributes and globals, as far as the
code names them. Tensors and numbers become leaves, in an order that equal keys share; what is left is the key.
"""

from __future__ import annotations

import builtins
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

Step = tuple[str, Any]
"""How a value is reached from the one that holds it: `("closure", 0)`, `("attr", "table")`, ..."""


class Leaf(NamedTuple):
    """A captured tensor or number, and the way to it."""

    path: tuple[Step, ...]
    value: Any


class Constant:
    """Of this class is what no survey looks into: it compares by what it is."""


class Survey(NamedTuple):
    key: tuple[Any, ...]
    leaves: tuple[Leaf, ...]


def survey(fn: Callable[..., Any], zero_dim: bool = True) -> Survey:
    """The key and the leaves of a function. With `zero_dim`, tensors on the CPU that have no dimensions and need no
    gradient are numbers.

    Numbers are leaves by type: their values are not in the key. Of tensors the key holds the dtype, the rank and which
    dimensions have one element.
    """
    names = _known_names.get(_code(fn), frozenset())
    while True:
        walk = _Walk(names, zero_dim)
        walk.visit(fn, ())
        if walk.names <= names:
            return Survey(tuple(walk.key), tuple(walk.leaves))
        # Attributes are followed where some code names them, and code is found on the way: once more, with all names.
        names = names | walk.names
        if code := _code(fn):
            if len(_known_names) > _KNOWN:
                _known_names.clear()
            _known_names[code] = names


def survey_of(value: Any, path: tuple[Step, ...], zero_dim: bool = True) -> Survey:
    """The same of a value that holds no code, which is found at a path."""
    walk = _Walk(frozenset(), zero_dim)
    walk.visit(value, path)
    return Survey(tuple(walk.key), tuple(walk.leaves))


_known_names: dict[Any, frozenset[str]] = {None: frozenset()}
_KNOWN = 4096


def replaced(fn: Callable[..., Any], found: Survey, values: dict[tuple[Step, ...], Any]) -> Callable[..., Any]:
    """A copy of the function that reads other values in the place of some leaves."""
    return _replaced(fn, (), values, found)


def follow(value: Any, path: tuple[Step, ...]) -> Any:
    """The value at a path. torch.compile can follow it too."""
    for kind, name in path:
        if kind == "closure":
            value = value.__closure__[name].cell_contents
        elif kind == "default":
            value = value.__defaults__[name]
        elif kind == "kwdefault":
            value = value.__kwdefaults__[name]
        elif kind == "global":
            value = value.__globals__[name]
        elif kind == "attr":
            value = getattr(value, name)
        else:
            value = value[name]
    return value


def is_number(x: Tensor) -> bool:
    """Whether a tensor is a kernel parameter, as a Python number is, and no captured tensor."""
    return x.dim() == 0 and x.device.type == "cpu" and not x.requires_grad


class _Walk:
    def __init__(self, names: frozenset[str], zero_dim: bool) -> None:
        self.names, self.zero_dim = names, zero_dim
        self.key: list[Any] = []
        self.leaves: list[Leaf] = []
        self.seen: dict[int, int] = {}

    def visit(self, value: Any, path: tuple[Step, ...]) -> None:
        if isinstance(value, Tensor):
            if self.zero_dim and is_number(value):
                self.visit(value.item(), path)  # a kernel parameter, as a Python number is
                return
            self.key.append((Tensor, value.dtype, tuple(n == 1 for n in value.shape)))
            self.leaves.append(Leaf(path, value))
        elif type(value) in (int, float):
            self.key.append(type(value))
            self.leaves.append(Leaf(path, value))
        elif value is None or isinstance(value, (bool, str, bytes, torch.dtype, torch.device)):
            self.key.append((type(value), value))
        elif _opaque(value):
            self.key.append(_by_identity(value))
        elif id(value) in self.seen:  # a function that calls itself, an object that knows its owner
            self.key.append(("again", self.seen[id(value)]))
        else:
            self.seen[id(value)] = len(self.seen)
            self.names |= _names(value)
            self.key.append(_kind(value))
            for step, child in _children(value, self.names):
                self.key.append(step)
                self.visit(child, (*path, step))


def _code(fn: Any) -> Any:
    fn = getattr(fn, "func", fn)
    return getattr(getattr(fn, "__func__", fn), "__code__", None)


LIBRARIES = ("torch", "math", "operator", "builtins", "numpy")

_JOINS = "torch.nn.attention.flex_attention"
"""Of torch, but its and_masks and or_masks hold functions of the user's."""


def _opaque(value: Any) -> bool:
    """Whether a value is a constant, whatever is inside it."""
    if isinstance(value, (types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, type, Constant)):
        return True
    if isinstance(value, (list, tuple, dict, torch.nn.Module, types.MethodType)):
        return False
    return of_library(value)


def of_library(value: Any) -> bool:
    """Whether a function or an object is not a user's own."""
    module = value.__module__ if isinstance(value, types.FunctionType) else type(value).__module__
    if module == _JOINS:
        return False
    return (module or "").partition(".")[0] in LIBRARIES


class Same:
    """Stands in a key for an object that is itself and nothing else; it keeps the object alive."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def _by_identity(value: Any) -> Any:
    if isinstance(value, (types.ModuleType, type, types.BuiltinFunctionType)):
        return value
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return type(value), value


def _kind(value: Any) -> Any:
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, dict):
        return dict, tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value), len(value)
    return type(value)


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> frozenset[str]:
    """The names of globals and attributes that code, and functions made in it, may read."""
    nested = (names_of(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*nested)


def _names(value: Any) -> frozenset[str]:
    return names_of(value.__code__) if isinstance(value, types.FunctionType) else frozenset()


def _children(value: Any, names: frozenset[str]) -> Iterator[tuple[Step, Any]]:
    """The values that a value holds and the code may read, in an order that is always the same."""
    match value:
        case types.FunctionType():
            for i, cell in enumerate(value.__closure__ or ()):
                try:
                    yield ("closure", i), cell.cell_contents
                except ValueError:  # not assigned yet
                    continue
            yield from ((("default", i), x) for i, x in enumerate(value.__defaults__ or ()))
            yield from ((("kwdefault", name), x) for name, x in (value.__kwdefaults__ or {}).items())
            found = value.__globals__
            for name in sorted(names_of(value.__code__)):
                if name in found and not isinstance(found[name], types.ModuleType) and not hasattr(builtins, name):
                    yield ("global", name), found[name]
        case types.MethodType():
            yield ("attr", "__func__"), value.__func__
            yield ("attr", "__self__"), value.__self__
        case functools.partial():
            yield ("attr", "func"), value.func
            yield ("attr", "args"), value.args
            yield ("attr", "keywords"), value.keywords
        case dict():
            yield from ((("item", name), x) for name, x in value.items())
        case list() | tuple():
            yield from ((("item", i), x) for i, x in enumerate(value))
        case _:
            yield from _attributes(value, names)


def _attributes(value: Any, names: frozenset[str]) -> Iterator[tuple[Step, Any]]:
    own: dict[str, Any] = dict(getattr(value, "__dict__", {}))
    for held in ("_parameters", "_buffers", "_modules"):
        own |= own.get(held, {}) if isinstance(value, torch.nn.Module) else {}
    call = "forward" if isinstance(value, torch.nn.Module) else "__call__"
    for name in (call, *sorted(names - {call})):
        if name in own:
            yield ("attr", name), own[name]
            continue
        for cls in type(value).__mro__:
            if name not in cls.__dict__ or cls.__module__.partition(".")[0] in ("builtins", "torch"):
                continue
            held = cls.__dict__[name]
            if isinstance(held, property):
                yield ("method", name), held.fget
            elif isinstance(held, types.MemberDescriptorType):  # a slot
                if hasattr(value, name):
                    yield ("attr", name), getattr(value, name)
            elif isinstance(held, (classmethod, staticmethod)):
                yield ("method", name), held.__func__
            else:
                yield ("method" if isinstance(held, types.FunctionType) else "attr", name), held
            break


def _replaced(value: Any, path: tuple[Step, ...], values: dict[tuple[Step, ...], Any], found: Survey) -> Any:
    if path in values:
        return values[path]
    below = {leaf_path[len(path)] for leaf_path in values if leaf_path[: len(path)] == path and leaf_path != path}
    made = {}
    for step in below:
        if step[0] == "method":  # it belongs to the class: its globals stay constants
            continue
        made[step] = _replaced(follow(value, (step,)), (*path, step), values, found)
    return _with(value, made) if made else value


def _with(value: Any, made: dict[Step, Any]) -> Any:  # noqa: C901 (one case for each kind of value)
    """A copy of a value with others in the place of what it holds."""
    attributes = {name: x for (kind, name), x in made.items() if kind == "attr"}
    items = {name: x for (kind, name), x in made.items() if kind == "item"}
    match value:
        case types.FunctionType():
            cells = list(value.__closure__ or ())
            defaults, keywords = list(value.__defaults__ or ()), dict(value.__kwdefaults__ or {})
            held = dict(value.__globals__)
            for (kind, name), x in made.items():
                if kind == "closure":
                    cells[name] = types.CellType(x)
                elif kind == "default":
                    defaults[name] = x
                elif kind == "kwdefault":
                    keywords[name] = x
                else:
                    held[name] = x
            fn = types.FunctionType(value.__code__, held, value.__name__, tuple(defaults), tuple(cells))
            fn.__kwdefaults__ = keywords
            return fn
        case types.MethodType():
            return types.MethodType(
                attributes.get("__func__", value.__func__), attributes.get("__self__", value.__self__)
            )
        case functools.partial():
            args = attributes.get("args", value.args), attributes.get("keywords", value.keywords)
            return functools.partial(attributes.get("func", value.func), *args[0], **args[1])
        case dict():
            return value | items
        case list():
            return [items.get(i, x) for i, x in enumerate(value)]
        case tuple():
            new = [items.get(i, x) for i, x in enumerate(value)]
            return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
    clone = copy.copy(value)
    for name, x in attributes.items():
        for held in ("_parameters", "_buffers", "_modules"):
            if isinstance(clone, torch.nn.Module) and name in clone.__dict__[held]:
                clone.__dict__[held] = {n: y for n, y in clone.__dict__[held].items() if n != name}
        if hasattr(clone, "__dict__"):
            clone.__dict__[name] = x
        else:
            object.__setattr__(clone, name, x)
    return clone
