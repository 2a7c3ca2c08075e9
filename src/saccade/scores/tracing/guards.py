"""Guards: what must hold so that a new trace of a function would be the same as the last.

They hold while every name in the code resolves to what it did, where each is plain: a number, a string, None, a tensor,
one of torch's functions that the trace called, an arithmetic builtin, or a function of the same kind. Any other
function has no guards and is traced in every call.

A tensor may be another one of the same form, as a model computes one in each step: a function that asks tensors that it
captures for more has no guards, as tracing sees all that public attributes do. Where code reads others, it has to be
the same object. What torch computes of captured tensors alone is computed again, and is to have the same form.

Guards run no code of what they look at: an object is known by `type`, never by `isinstance`, which asks it; `==` and
`hash` are those of Python and torch; and attributes are read where `_class`, `_usual` and `_codeless` say that reading
them calls nothing.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from saccade.scores.codegen.program import Program
from saccade.scores.tracing.tape import Tape
from saccade.scores.tracing.trace import Computed, Trace
from saccade.util.caches import BoundedCache


class Unguarded(Exception):
    """Something that may change without notice."""


_QUIET = frozenset((
    "RESUME", "NOP", "CACHE", "PUSH_NULL", "PRECALL", "CALL", "KW_NAMES", "CALL_KW", "LOAD_CONST", "LOAD_SMALL_INT",
    "LOAD_CONST_IMMORTAL", "COPY_FREE_VARS", "MAKE_CELL", "BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "COMPARE_OP",
    "UNARY_NEGATIVE", "UNARY_INVERT", "UNARY_NOT", "RETURN_VALUE", "RETURN_CONST", "BUILD_TUPLE", "BUILD_SLICE",
    "POP_TOP", "COPY", "SWAP", "JUMP_FORWARD", "JUMP_BACKWARD", "POP_JUMP_IF_TRUE", "POP_JUMP_IF_FALSE",
    "POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_FORWARD_IF_FALSE",
    "POP_JUMP_FORWARD_IF_NONE", "POP_JUMP_FORWARD_IF_NOT_NONE", "EXTENDED_ARG", "UNPACK_SEQUENCE", "FOR_ITER",
    "GET_ITER", "END_FOR", "POP_ITER", "TO_BOOL", "IS_OP", "STORE_FAST", "LOAD_FAST", "LOAD_FAST_CHECK",
    "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "STORE_FAST_LOAD_FAST",
    "STORE_FAST_STORE_FAST", "NOT_TAKEN",
))  # fmt: skip
"""Operations that name nothing and write to locals alone."""


@functools.lru_cache(maxsize=1024)
def chains(code: types.CodeType) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
    """What code reads: ("global", name, attributes that follow), ("free", name, …), ("self", "read" or "written", …) of
    its first argument, and ("value", "", …) of what it computes. Raises Unguarded if the code does something else."""
    return tuple(dict.fromkeys(_read(code)))


def _read(code: types.CodeType) -> Iterator[tuple[str, str, tuple[str, ...]]]:  # noqa: C901 (a table of operations)
    root: tuple[str, str] | None = None
    path: list[str] = []
    first = code.co_varnames[0] if code.co_argcount else ""
    for step in dis.get_instructions(code):
        name, operand = step.opname, step.argval
        if name in ("CACHE", "EXTENDED_ARG", "NOP"):
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            root = root or ("value", "")
            path.append(str(operand))
            continue
        if root is not None:
            yield root[0], root[1], tuple(path)
        root, path = None, []
        locals_ = operand if isinstance(operand, tuple) else (operand,)
        if name == "LOAD_GLOBAL":
            root = "global", str(operand)
        elif name == "LOAD_DEREF" and operand in code.co_freevars:
            root = "free", str(operand)
        elif name not in _QUIET:
            raise Unguarded
        elif "STORE_FAST" in name and first in locals_:
            yield "self", "written", ()
        elif name.startswith("LOAD_FAST") and first in locals_:
            if locals_[-1] == first:  # attributes are of the last
                root = "self", "read"
            if first in locals_[:-1]:
                yield "self", "read", ()
    if root is not None:
        yield root[0], root[1], tuple(path)


Find = str
"""Where something is that a function reads, which guards do not keep alive: a text of Python around `root`, the
function."""


_BUILTINS = (
    abs, all, any, bool, divmod, enumerate, float, int, len, max, min, pow, range, reversed, round, slice, sum, tuple,
    zip,
)  # fmt: skip
_PURE = {id(x) for x in (
    *_BUILTINS, *(x for held in (math, operator) for x in vars(held).values() if type(x) is types.BuiltinFunctionType)
)}  # fmt: skip
"""Functions whose results depend on their arguments alone, and that call no other code on plain arguments."""
_NUMBERS = (int, float, complex)
_SAME = (bool, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device)
_OF_C = (types.GetSetDescriptorType, types.MethodDescriptorType, types.WrapperDescriptorType)
_DEEPEST = 40
"""Functions that call one another; Python nests no more than 200 parentheses."""
_MISSING = object()


class Guards:
    """Hold as long as the trace of a function does. `called` are torch's functions that the trace called, `attributes`
    what the function's arguments have besides those of tensors. Raises Unguarded if it reads something that may change
    unseen.

    Checks and finds are texts of Python around `root`, the function: all checks are one expression, which costs a small
    call a third of what a function for each of them does.
    """

    def __init__(self, fn: Any, called: set[Any], attributes: frozenset[str] = frozenset()) -> None:
        self.called, self.attributes, self.met = called, attributes, set()
        self.kinds = {type(x) for x in called}
        self.made: Mapping[int, Computed] = {}
        self.checks: list[str] = []
        self.objects: dict[str, Any] = dict(_OBJECTS)
        """What texts name."""
        self.tensors: list[tuple[weakref.ref[Tensor], Find]] = []
        """The tensors that the function reads, and where."""
        self.read: set[str] = set()
        """The attributes of tensors that the code reads."""
        self.of_a_form = True
        """Whether these are public ones, and none is written."""
        self._function("root", fn)
        self._check_tensors()
        self.all_checks = " and ".join(self.checks)
        self.holds: Callable[[Any], bool] = self._compiled(self.all_checks)
        """(function) -> whether the guards hold for it."""

    def _check_tensors(self) -> None:
        """They are the same ones, or as many different ones in the same places, as code may compare them by `is`; and
        nobody gave one of them an attribute of its own that the code reads."""
        own = self._named(self.read) if self.read else ""
        for reference, find in self.tensors:
            if not self.read.isdisjoint(getattr(reference(), "__dict__", ())):
                raise Unguarded
            if own:
                self._check(f"{own}.isdisjoint({find}.__dict__)")
        first_found: dict[int, Find] = {}
        for reference, find in self.tensors:
            known = first_found.setdefault(id(reference()), find)
            if not self.of_a_form:
                self._check(f"(y := {find}) is {self._named(reference)}() and y is not None")
            elif known is not find:
                self._check(f"{find} is {known}")
        if self.of_a_form and len(first_found) > 1:
            self._check(f"len({{{', '.join(f'id({find})' for find in first_found.values())}}}) == {len(first_found)}")

    def inputs(
        self, tensors: Sequence[Tensor], numbers: Sequence[tuple[Any, Tensor | None]], made: Mapping[int, Computed]
    ) -> Callable[[Any], tuple[list[Tensor], list[Any]] | None]:
        """(function) -> what it has now in the places of these tensors and numbers, which may be tensors' items; None
        where the guards do not hold, or a tensor that was `made` of others has another form, or cannot be made. Asked
        for once. Raises Unguarded if a tensor is not among what the function reads, nor made of that, or if a number is
        made."""
        if any(id(source) in made for _, source in numbers):  # a tensor of one item may have more, made of others
            raise Unguarded
        self.made = made
        found = [self._find(x) for x in tensors]
        read = [self._named(x) if source is None else f"{self._find(source)}.item()" for x, source in numbers]
        inputs = self._compiled(f"([{', '.join(found)}], [{', '.join(read)}]) if {self.all_checks} else None")
        forms = [(i, _form(x)) for i, x in enumerate(tensors) if id(x) in made]
        self.made = {}  # which holds tensors
        self.tensors.clear()  # torch.utils.swap_tensors takes none with weak references

        def checked(root: Any) -> tuple[list[Tensor], list[Any]] | None:
            try:
                now = inputs(root)
                return now if now is not None and all(_form(now[0][i]) == form for i, form in forms) else None
            except Exception:  # the function itself raises it, or takes another way
                return None

        return checked if forms else inputs

    def _compiled(self, text: Find) -> Callable[[Any], Any]:
        return eval(_code_of(f"lambda root: {text}"), self.objects)

    def _find(self, x: Tensor) -> Find:
        for reference, find in self.tensors:
            if reference() is x:
                return find
        if id(x) not in self.made:
            raise Unguarded
        _, func, args, kwargs = self.made[id(x)]
        given = [*map(self._argument, args), *(f"{name}={self._argument(y)}" for name, y in kwargs.items())]
        return f"{self._named(func)}({', '.join(given)})"

    def _argument(self, x: Any) -> str:
        """A tensor as the function finds it now; all else is what checks say that it still is."""
        kind = _class(x)
        if issubclass(kind, Tensor):
            return self._find(x)
        if kind is tuple or kind is list:
            return f"{self._named(kind)}([{', '.join(map(self._argument, x))}])"
        if kind is slice:
            return f"{self._named(slice)}({', '.join(map(self._argument, (x.start, x.stop, x.step)))})"
        if kind in _SAME or kind in _NUMBERS or issubclass(kind, type):
            return self._named(x)
        raise Unguarded

    def _named(self, x: Any) -> str:
        """A name for an object in texts."""
        name = f"x{len(self.objects)}"
        self.objects[name] = x
        return name

    def _check(self, text: str) -> None:
        self.checks.append(f"({text})")

    def _function(self, find: Find, fn: Any) -> None:
        """A function, a method of an object, a partial of either, or one of the records in `PARTS`."""
        kind = _class(fn)
        if kind is types.FunctionType:
            self._code(find, fn, None)
        elif kind is types.MethodType and type(fn.__func__) is types.FunctionType:
            self._check(f"type({find}) is {self._named(kind)}")
            self._code(f"{find}.__func__", fn.__func__, (f"{find}.__self__", fn.__self__))
        elif kind is functools.partial:
            self._parts(find, fn, ("func",), ("args", "keywords"))
        elif kind in PARTS:
            self._parts(find, fn, *PARTS[kind])
        else:
            raise Unguarded

    def _parts(self, find: Find, fn: Any, names: Sequence[str], containers: Sequence[str]) -> None:
        self._check(f"type({find}) is {self._named(type(fn))}")
        for name in names:
            self._plain(f"{find}.{name}", getattr(fn, name))
        for name in containers:
            parts = getattr(fn, name)
            keys = list(parts) if isinstance(parts, dict) else list(range(len(parts)))
            self._check(f"len({find}.{name}) == {len(keys)}")
            for key in keys:
                if type(key) not in (int, str):
                    raise Unguarded
                if isinstance(parts, dict):
                    self._check(f"{key!r} in {find}.{name}")
                self._plain(f"{find}.{name}[{key!r}]", parts[key])

    def _plain(self, find: Find, x: Any) -> None:
        """Checks that what `find` finds is still x."""
        kind = _class(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            if is_functorch_wrapped_tensor(x):  # of a transform, which does not say all that it is
                raise Unguarded
            form = x.shape, x.dtype, x.device, x.requires_grad
            self.tensors.append((weakref.ref(x), find))
            shape, dtype, device, needs = map(self._named, form)
            same = f"y.shape == {shape} and y.dtype is {dtype} and y.device == {device} and y.requires_grad is {needs}"
            self._check(f"type(y := {find}) is {self._named(kind)} and {same} and not wrapped(y)")
        elif kind in _SAME or kind in _NUMBERS:
            name = self._named(x)
            more = "" if kind in _SAME or x != 0 else " and False"  # 0.0 and -0.0 are equal, and not the same
            self._check(f"(y := {find}) is {name} or type(y) is {self._named(kind)} and y == {name}{more}")
        elif id(x) in _PURE or (kind in self.kinds and kind.__hash__ is not None and x in self.called):
            self._check(f"{find} is {self._named(x)}")
        else:
            self._function(find, x)

    def _code(self, find: Find, fn: types.FunctionType, owner: tuple[Find, Any] | None) -> None:
        code, defaults = fn.__code__, len(fn.__defaults__ or ())
        self._check(
            f"type(y := {find}) is FunctionType and y.__code__ is {self._named(code)}"
            f" and {f'len(y.__defaults__ or ()) == {defaults}' if defaults else 'not y.__defaults__'}"
            " and not y.__kwdefaults__"
        )
        nameless = owner is not None and not code.co_argcount  # the object is one of *args
        if fn.__kwdefaults__ or id(fn) in self.met or nameless or len(self.met) > _DEEPEST:
            raise Unguarded
        self.met.add(id(fn))
        for i, x in enumerate(fn.__defaults__ or ()):
            self._plain(f"{find}.__defaults__[{i}]", x)
        for root, name, path in chains(code):
            if root == "global":
                self._global(find, fn, name, path)
            elif root == "free":
                i = code.co_freevars.index(name)
                cells = fn.__closure__ or ()
                self._follow(f"contents({find}.__closure__[{i}])", contents(cells[i]), path)
            elif root == "self" and owner is not None:
                if not path or name == "written":
                    raise Unguarded
                self._follow(*owner, path)
            else:
                for attribute in path:  # of a value: those of tensors might be given others
                    self._of_tensors(attribute)
        self.met.discard(id(fn))

    def _of_tensors(self, name: str) -> None:
        self.read.add(name)
        self.of_a_form &= not name.startswith("_") and not name.endswith("_")
        if name in self.attributes:
            return
        attribute = getattr(Tensor, name, _MISSING)
        if type(attribute) not in _OF_C and not any(attribute is x for x in self.called):  # it may read anything
            raise Unguarded
        self._check(f"getattr(Tensor, {name!r}, MISSING) is {self._named(attribute)}")

    def _global(self, find: Find, fn: types.FunctionType, name: str, path: tuple[str, ...]) -> None:
        if name in fn.__globals__:
            self._follow(f"{find}.__globals__.get({name!r}, MISSING)", fn.__globals__[name], path)
        else:
            known = fn.__builtins__
            self._check(f"{name!r} not in {find}.__globals__")
            self._follow(f"{find}.__builtins__.get({name!r}, MISSING)", known.get(name, _MISSING), path)

    def _follow(self, find: Find, x: Any, path: tuple[str, ...]) -> None:
        """Checks an object and the attributes of it that code reads."""
        kind = _class(x)
        if not path:
            self._plain(find, x)
        elif kind is types.ModuleType:
            module = self._named(x)
            self._check(f"{find} is {module} and type({module}) is ModuleType")
            if path[0] not in vars(x):
                raise Unguarded
            self._follow(f"vars({module}).get({path[0]!r}, MISSING)", vars(x)[path[0]], path[1:])
        elif kind in (*_NUMBERS, *_SAME):
            self._plain(find, x)
        elif kind is enum.EnumMeta and len(path) == 1 and path[0] in x.__members__ and _codeless(x):
            self._check(f"{find} is {self._named(x)}")
        elif kind in (Tensor, torch.nn.Parameter):
            self._plain(find, x)
            for attribute in path:
                self._of_tensors(attribute)
        else:
            self._attribute(find, x, path)

    def _attribute(self, find: Find, x: Any, path: tuple[str, ...]) -> None:
        """Checks an attribute of an object whose class looks attributes up as Python or torch's modules do."""
        name, kind = path[0], _class(x)
        has_dict = type(_first(kind, "__dict__")) is types.GetSetDescriptorType
        if issubclass(kind, type) or not _usual(kind) or not has_dict or type(x.__dict__) is not dict:
            raise Unguarded
        space, value, of = vars(x), _first(kind, name), self._named(kind)
        first = f"first({of}, {name!r})"
        self._check(f"type(y := {find}) is {of} and usual({of}) and {first} is {self._named(value)} and y is not None")
        if value is not _MISSING:  # a method, or a number that all objects share
            if name in space or (type(value) is types.FunctionType and len(path) > 1):
                raise Unguarded
            self._check(f"{name!r} not in vars({find})")
            if type(value) is types.FunctionType:
                self._code(self._named(value), value, (find, x))
            elif _class(value) in (*_NUMBERS, *_SAME):
                self._plain(first, value)
            else:
                raise Unguarded
        elif name in space:
            self._follow(f"vars({find}).get({name!r}, MISSING)", space[name], path[1:])
        else:
            parts = [(n, space.get(n)) for n in _HELD if issubclass(kind, torch.nn.Module)]
            container = next((n for n, held in parts if type(held) in _DICTS and name in held), None)
            if container is None:
                raise Unguarded
            held = f"vars({find})[{container!r}]"
            self._check(f"{name!r} not in vars({find}) and type({held}) is {self._named(type(space[container]))}")
            self._follow(f"{held}.get({name!r}, MISSING)", space[container][name], path[1:])


def _form(x: Tensor) -> Any:
    return type(x), x.shape, x.dtype, x.device, x.requires_grad


@functools.lru_cache(maxsize=1024)
def _code_of(text: str) -> types.CodeType:
    try:
        return compile(text, "<guards>", "eval")
    except (SyntaxError, RecursionError, MemoryError) as deep:
        raise Unguarded from deep


_HELD = ("_parameters", "_buffers", "_modules")
_DICTS = (dict, collections.OrderedDict)
PARTS: dict[type, tuple[Sequence[str], Sequence[str]]] = {}
"""Classes of callables: which attributes are functions, and which are tuples or dictionaries of them."""


def contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned
        return _MISSING


def _class(x: Any) -> Any:
    """Raises Unguarded for a class that may run code where it is compared, hashed or asked for an attribute."""
    kind = type(x)
    meta = type(kind)
    if meta is not type and any(_first(meta, name) is not _first(type, name) for name in _ASKED):
        raise Unguarded
    return kind


_ASKED = ("__eq__", "__hash__", "__getattribute__", "__getattr__")


def _codeless(kind: Any) -> bool:
    """Whether an enumeration has members that are numbers, strings or names, and no code of its own."""
    for cls in kind.__mro__:
        if type(cls) is type and cls in (object, str, bytes, *_NUMBERS):
            continue
        if type(cls) is not enum.EnumMeta:
            return False
        if vars(enum).get(cls.__name__) is cls:
            continue
        for x in vars(cls).values():
            x = x.__func__ if type(x) is staticmethod else x
            own = type(x) is types.FunctionType and x.__globals__ is not vars(enum)
            of_enum = any(type(x) is y for y in (types.FunctionType, enum.property, *_OF_C))
            if own or (_first(type(x), "__get__") is not _MISSING and not of_enum):
                return False
    return True


def _usual(kind: type) -> bool:
    other = getattr(kind, "__getattr__", None)
    return kind.__getattribute__ is object.__getattribute__ and other in (None, torch.nn.Module.__getattr__)


def _first(kind: type, name: str) -> Any:
    for cls in kind.__mro__:
        if name in cls.__dict__:
            return cls.__dict__[name]
    return _MISSING


_OBJECTS = {
    "FunctionType": types.FunctionType, "ModuleType": types.ModuleType, "Tensor": Tensor, "MISSING": _MISSING,
    "contents": contents, "usual": _usual, "first": _first, "wrapped": is_functorch_wrapped_tensor,
}  # fmt: skip
"""What the texts of all guards name."""


# Traces with their guards: a function runs again when its guards no longer hold. Guards are asked about any
# function. So a trace is found by the function's identity, and one that each call defines anew,
# as a closure in a model's `forward`, by its code and what it captures. Either is a guess, which the guards decide.


class GuardedTrace(NamedTuple):
    """A Program, and what its function reads the tensors and numbers from that it takes."""

    guards: Guards
    program: Program
    inputs: Callable[[Any], tuple[list[Tensor], list[Any]] | None]
    """(function) -> its tensors and numbers now; None where the guards do not hold, or they have other forms"""
    rows: bool
    whole: bool
    """What its Score has is what the function captures, as it is; the guards hold for the forms of all that."""
    counts: bool
    """Whether tensors' items are among its numbers. The guards compare all others."""
    trusted: bool
    """The guards are older than the trace. Otherwise another thread may have changed something between the two."""


_cache: BoundedCache[Any, GuardedTrace] = BoundedCache(512)
_trusted: BoundedCache[Any, GuardedTrace] = BoundedCache(512)
"""Those of score functions that may be used, without the name among their settings."""


def find_trace(fn: Any, settings: Any) -> GuardedTrace | None:
    """The trace of a function whose guards hold. `settings` are what a trace depends on besides the function.
    It may be used where it is `trusted`."""
    guarded = _cache.get(_key(_same(fn), settings))
    if guarded is not None and guarded.guards.holds(fn):
        return guarded
    guarded = _cache.get(_key(_twin(fn), settings))
    return guarded if guarded is not None and guarded.guards.holds(fn) else None


def find_trusted(fn: Any, dtype: torch.dtype, device: torch.device) -> tuple[GuardedTrace, Any] | None:
    """The trace of a score function whose guards hold, by any name, where it may be used; and its tensors and
    numbers. In the hot path of small calls."""
    settings = dtype, device, torch.is_grad_enabled(), torch.get_default_dtype()
    found = _trusted.get((_same(fn), *settings))
    if found is not None and (now := found.inputs(fn)) is not None:
        return found, now
    found = _trusted.get((_twin(fn), *settings))
    return (found, now) if found is not None and (now := found.inputs(fn)) is not None else None


def put_trace(fn: Any, settings: Any, trace: Trace, program: Program, older: GuardedTrace | None) -> None:
    """Caches a trace that has guards. It is trusted if `older`, which was found before the trace, still holds."""
    if trace.called is None:
        return
    tape = trace.tape
    try:
        guards = Guards(fn, trace.called)
        inputs = guards.inputs(tape.tensors, [*zip(tape.numbers, tape.sources, strict=True)], trace.made)
        trusted = older is not None and older.guards.holds(fn)  # before the trace, and after the new guards
        whole, counts = _whole(program, tape, settings[1]), any(x is not None for x in tape.sources)
        guarded = GuardedTrace(guards, program, inputs, tape.rows, whole, counts, trusted)
        owners = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else (fn,)
        twin, codes = _twin(fn), _codes(fn)
        found_by = [(_same(fn), owners), (twin, codes)] if codes else [(_same(fn), owners)]
        for name, of in found_by:
            _cache.put(_key(name, settings), guarded, of)
            if trusted and len(settings) == 3:  # of a score function
                _trusted.put((name, *settings[:2], torch.is_grad_enabled(), torch.get_default_dtype()), guarded, of)
    except (Unguarded, TypeError):  # TypeError: an owner without weak references
        _cache.discard(_key(_same(fn), settings))


def _whole(program: Program, tape: Tape, device: torch.device) -> bool:
    captured = [*tape.tensors, *tape.numbers]
    order = [*program.before[0], *program.numbers[0]]
    computes = program.before[1] is not None or program.numbers[1] is not None
    return not computes and order == [*range(len(captured))] and all(x.device == device for x in tape.tensors)


def _key(fn: Any, settings: Any) -> Any:
    return fn, settings, torch.is_grad_enabled(), torch.get_default_dtype()


def _same(fn: Any) -> Any:
    """The function itself."""
    return (id(fn.__func__), id(fn.__self__)) if type(fn) is types.MethodType else id(fn)


def _codes(fn: Any) -> list[types.CodeType]:
    """The code of a function, or of those that a record holds."""
    if type(fn) is types.FunctionType:
        return [fn.__code__]
    return [code for x in _parts(fn) for code in _codes(x)]


def _parts(fn: Any) -> Sequence[Any]:
    """What tells one record, or partial, from others: its function and what is in its tuples."""
    kind = type(fn)
    if kind is functools.partial:
        return fn.func, *fn.args
    names, containers = PARTS.get(kind, ((), ())) if type(kind) is type else ((), ())
    return *[getattr(fn, name) for name in names[:1]], *[x for name in containers for x in getattr(fn, name)]


def _twin(fn: Any) -> Any:
    """What functions share that may be one function, defined again: code, and what it captures."""
    if type(fn) is types.FunctionType:  # which may capture itself
        return id(fn.__code__), *[_captured(contents(cell)) for cell in fn.__closure__ or ()]
    parts = _parts(fn)
    return (type(fn), *map(_twin, parts)) if parts else _captured(fn)


def _captured(x: Any) -> Any:
    """A tensor by its form, as another may take its place; else the object, or what is equal to it."""
    kind = type(x)
    if kind is Tensor or kind is torch.nn.Parameter:
        return x.shape, x.dtype, x.device
    return (kind, x) if kind is float or kind is int or kind is bool or kind is str else _same(x)
