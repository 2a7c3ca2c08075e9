"""A trace: what a function of the score computes, known from running it on stand-ins for its arguments.

The five arguments are stand-ins, and so are the results of operations on them: each operation is a step of a tape.
Numbers, strings and captured tensors are themselves, and torch computes at once what depends on tensors alone. A tensor
or a number that meets a stand-in becomes an input of the tape.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from saccade.scores.tracing.autograd_functions import NOT_GIVEN, Unseen, applying, followed, seen_functions, steps_of
from saccade.scores.tracing.tape import ARITHMETIC, BEHIND, TILE, Refused, Tape, is_itself, target_dtype
from saccade.util.imports import DispatchMode

_BRANCHES = (
    "the function branches in Python on values that only the kernel knows; "
    "write torch.where(condition, a, b), and keep to tensors (no int(), float(), bool(), math.*)"
)
_VALUES = frozenset((
    "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "__contains__", "item", "tolist",
    "numpy", "data_ptr", "equal", "allclose", "is_nonzero", "__dlpack__", "nonzero", "untyped_storage", "storage",
))  # fmt: skip
_RANDOM = frozenset((
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_",
    "normal", "normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_", "multinomial",
    "poisson", "binomial", "dropout", "dropout_", "native_dropout", "rrelu", "rrelu_", "gumbel_softmax",
    "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d",
))  # fmt: skip
_METADATA = frozenset((
    "shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_meta", "dim", "size",
    "numel", "nelement", "__len__", "is_floating_point", "ndimension", "is_complex",
))  # fmt: skip
"""Attributes of a tensor that do not depend on its values."""
_CONVERSIONS = frozenset(("to", "float", "double", "half", "bfloat16", "long", "int", "bool", "type_as", "cpu", "cuda"))
"""Operations that return a tensor itself where it has the form already, and else write nothing."""
_BY_STRIDES = frozenset(("contiguous", "ravel", "resolve_conj", "resolve_neg", "coalesce"))
"""Operations that return a tensor itself, or another, by more than its form."""
_DEVICES = {"is_cuda": "cuda", "is_cpu": "cpu", "is_meta": "meta", "is_mps": "mps", "is_xpu": "xpu"}


class StandIn(Tensor):
    """A tensor without numbers. It stands for a value that a kernel computes."""

    tape: Tape
    value: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refused(f"a value of a score function is used after its call ended, or {BEHIND}")


_EMPTY = torch.empty((), device="meta")
_make: Any = Tensor._make_subclass


def _stand_in(tape: Tape, index: int) -> Any:
    stand_in = _make(StandIn, _EMPTY)
    stand_in.tape, stand_in.value = tape, index
    return stand_in


class Computed(NamedTuple):
    """A tensor, and the call that computes it."""

    result: Tensor
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Trace(NamedTuple):
    """The result of one run of a function."""

    tape: Tape
    outputs: tuple[Any, ...]
    """What the function returned, as arguments of the tape."""
    called: set[Any] | None
    """Torch's functions that were called; None if some read what tensors hold, write to them, or make new ones."""
    made: dict[int, Computed]
    """By its id, each tensor that was computed of captured tensors alone."""

    @property
    def key(self) -> Any:
        """Equal for traces of one program."""
        tape = self.tape
        return tuple(tape.steps), self.outputs, tuple(tape.forms), tape.dtype, torch.get_default_dtype()


def trace_function(
    fn: Callable[..., Any], dtype: torch.dtype, device: torch.device, outputs: int = 1, reads_numbers: bool = True
) -> Trace:
    """Runs a function of (score, b, h, q_idx, kv_idx) once. Raises Refused, and says what to write instead, if a kernel
    cannot do what the function does."""
    try:
        if not _met:
            return _traced(fn, Tape(StandIn, dtype, device, reads_numbers), outputs, sees=False)
    except Unseen:
        _met.append(True)

    def applied(function: Any, args: Any) -> Any:
        return followed(StandIn, _stand_in, _dtype, function.__name__, steps_of(function), args)

    with seen_functions(StandIn, applied):
        return _traced(fn, Tape(StandIn, dtype, device, reads_numbers), outputs, sees=True)


_met: list[bool] = []
"""Whether a trace has met a torch.autograd.Function."""


def _traced(fn: Callable[..., Any], tape: Tape, outputs: int, sees: bool) -> Trace:
    mode = _TraceMode(tape, sees)
    try:
        with mode:
            results = fn(*[_stand_in(tape, i) for i in range(5)])
        if mode.refused is not None:  # and the function caught it
            raise mode.refused
        results = results if outputs > 1 and type(results) is tuple else (results,)
        if len(results) != outputs or not all(isinstance(x, Tensor) for x in results):
            got = type(results[0]).__name__ if isinstance(results[0], (tuple, list)) else repr(results[0])
            raise Refused(
                "a score function returns the modified score, a tensor, and a mask function one of bools; got " + got
            )
        arguments = tuple([tape.argument(x, True) for x in results])
        return Trace(tape, arguments, mode.called, mode.made)
    except Refused as refused:
        refused.line = refused.line or user_line(refused)
        raise
    except Exception as failed:
        raise Refused(error_text(failed), user_line(failed)) from failed
    finally:
        tape.run = None


_RECORD = _traced.__code__
_BY_ANOTHER_NAME = (
    "a torch.autograd.Function is called by a name that its apply was given, which cannot be recorded: write "
    "Clip.apply(score), not clip = Clip.apply"
)


class _TraceMode(TorchFunctionMode):
    """Sees every call of torch while a function runs."""

    def __init__(self, tape: Tape, sees: bool) -> None:
        super().__init__()
        self.tape, self.sees, self.depth = tape, sees, applying()
        self.graded = self.set = torch.is_grad_enabled()
        """The grad mode that the caller set, and that the function set last."""
        self.called: set[Any] | None = set()
        self.made: dict[int, Computed] = {}
        self.refused: Refused | Unseen | None = None
        self.writes = WritesRefused()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._seen(func, types, args, kwargs)
        except (Refused, Unseen) as refused:
            self.refused = self.refused or refused
            raise

    def _seen(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if name in _RANDOM and kwargs.get("training", True):
            raise Refused(refusal(name) or "")
        if StandIn in types:
            if name == "broadcast_tensors":  # every value is one number for each score already
                return tuple(args[0]) if isinstance(args[0], (tuple, list)) else args
            return self._step(name, func, args, kwargs)
        if name == "_set_grad_enabled":
            return self._set_grad_mode(func, args, kwargs)
        if name in ("as_tensor", "asarray") and type(args[0]) is StandIn:
            return args[0]
        if any(type(x) is StandIn for x in args):  # torch.tensor(score)
            return self._step("detach", Tensor.detach, args[:1], {})
        if name in _METADATA:
            result = func(*args, **kwargs)
        else:
            with self.writes:
                result = func(*args, **kwargs)
        self._captured(name, func, args, kwargs, result)
        return result

    def _set_grad_mode(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._check_grad_mode()
        result = func(*args, **kwargs)
        if applying() == self.depth:
            self.set = torch.is_grad_enabled()
        return result

    def _check_grad_mode(self) -> None:
        """Raises Unseen or Refused if the grad mode is a torch.autograd.Function's, not one that the function set."""
        if torch.is_grad_enabled() == self.set or applying() > self.depth or torch.is_inference_mode_enabled():
            return
        raise Refused(_BY_ANOTHER_NAME) if self.sees else Unseen

    def _captured(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Notes a call of captured tensors alone. The shapes of what is made of them may depend on what they hold."""
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if self.called is None or (name in _METADATA and not any(id(x) in self.made for x in given)):
            return
        same = any(result is x for x in given)
        explicit = name in _BY_STRIDES or "memory_format" in kwargs or (same and name not in _CONVERSIONS)
        if type(result) is not Tensor or not given or explicit:
            self.called = None
            return
        self.called.add(func)
        if not same:
            self.made[id(result)] = Computed(result, func, args, kwargs)

    def _step(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x: Any = args[0] if args else None
        if applying() > self.depth:
            raise Refused(NOT_GIVEN)
        self._check_grad_mode()
        if self.called is not None:
            self.called.add(func)
        if name in _QUERIES and type(x) is StandIn:
            return _query(name, func, x, args[1:])
        if name in ("__repr__", "__format__", "__str__"):
            named = TILE[x.value] if x.value < 5 else f"step {x.value - 5}"
            return f"a value of the score function, {named}"
        if name == "to" or name == "type_as":
            dtype = target_dtype(StandIn, args, kwargs, _dtype)
            if dtype is None:
                return x
            func, args, kwargs = Tensor.to, (x, dtype), {}
        if func.__name__ == "__get__":
            if name != "data":
                raise Refused(f"{name} is not available: the shape of a score function's values is unknown")
            name, func = "detach", Tensor.detach
        if reason := refusal(name):
            raise Refused(reason)
        if kwargs.get("out") is not None:
            raise Refused(f"{name} writes to out=…; use what it returns")
        if not self.graded or torch.is_grad_enabled():
            return _stand_in(self.tape, self.tape.call(func, args, kwargs, _user_frame()))
        return self._constant_step(name, func, args, kwargs)

    def _constant_step(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Without gradients."""
        if is_itself(name, args, kwargs, _dtype):
            return args[0]
        result = _stand_in(self.tape, self.tape.call(func, args, kwargs, _user_frame()))
        return _stand_in(self.tape, self.tape.call(Tensor.detach, (result,), {}))


def refusal(name: str) -> str | None:
    """Why a value of a score function has no such method, or None."""
    if name in _VALUES:
        return _BRANCHES
    if name in _RANDOM:
        return f"{name} draws random numbers: dropout_p of attention drops probabilities at random"
    if name == "__setitem__":
        return "x[…] = … writes in place; write a new value, such as x = torch.where(condition, value, x)"
    if name in WRITES:
        return f"x {WRITES[name]}= … writes in place; write a new value, such as x = x {WRITES[name]} …"
    if name.endswith("_") and not name.endswith("__"):
        return f"{name} writes in place; write a new value, such as x = x.{name.strip('_')}(…)"
    if name in ("shape", "size", "dim", "ndim", "numel", "__len__"):
        return _SHAPE
    return None


_SHAPE = (
    "the shape of the score and the indices is not known: a function is given one value of each, whatever tile a "
    "kernel works on; capture lengths as numbers"
)
_SIGNS = "+", "-", "*", "/", "/", "//", "%", "**", "&", "|", "^", "<<", ">>"
WRITES = {f"__i{name}__": sign for name, sign in zip((*ARITHMETIC, "lshift", "rshift"), _SIGNS, strict=True)}


# Attributes of stand-ins


def _dtype(x: StandIn) -> torch.dtype:
    return x.tape.dtype if x.value == 0 else torch.int64 if x.value < 5 else _form(x)[0]


def _form(x: StandIn) -> tuple[torch.dtype, tuple[int, ...]]:
    from saccade.scores.tracing.lowering import form_of

    return form_of(x.tape, x.value)


def _query(name: str, query: Callable[..., Any], x: StandIn, args: Any) -> Any:
    """What one of `_QUERIES` returns of a stand-in."""
    if name == "device":
        return x.tape.device
    if name in _DEVICES:
        return x.tape.device.type == _DEVICES[name]
    if name == "__hash__":
        return id(x)
    shape = _form(x)[1] if x.value > 4 and name not in _OF_TYPES else ()
    if not shape and name not in _OF_TYPES:
        raise Refused(_SHAPE)
    if name in ("unbind", "__iter__"):
        dim = args[0] % len(shape) if args else 0
        indices = [(*[slice(None)] * dim, i) for i in range(shape[dim])]
        row = [_stand_in(x.tape, x.tape.call(Tensor.__getitem__, (x, index), {})) for index in indices]
        return iter(row) if name == "__iter__" else row
    return query(torch.empty(shape, dtype=_dtype(x), device="meta"), *args)


_OF_TYPES = frozenset(("dtype", "is_floating_point", "is_complex", "is_signed", "layout"))
_QUERIES = frozenset((
    "device", "__hash__", "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "unbind",
    "__iter__", *_OF_TYPES, *_DEVICES,
))  # fmt: skip
"""What a stand-in answers without a step."""


# Where the user's code is


_TORCH = torch.__path__[0]
_HERE = str(Path(__file__).parents[1])


def _user_frame() -> tuple[str, int] | None:
    """The line of the user's code that is running."""
    frame = sys._getframe(4)
    while frame is not None and frame.f_code is not _RECORD:
        if not _inside(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def _inside(file: str) -> bool:
    return file.startswith((_TORCH, _HERE, "<frozen"))


def error_text(failed: BaseException) -> str:
    """What an error of torch or of the function means to the user."""
    text = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
    if "broadcast" in text or "must match the size" in text:
        return f"{text}; index captured tensors to combine them with the score, as in table[h, kv_idx]"
    if missing := re.match(r'"(\w+?)(?:_cpu|_cuda)?" not implemented for \'(\w+)\'', text):
        return f"torch has no {missing[1]} of {missing[2]} values: convert them first, as in x.to(torch.int64)"
    if isinstance(failed, TypeError) and "positional argument" in text:
        return (
            "a score function is called with (score, b, h, q_idx, kv_idx), and a ScoreMod's tensors, a mask function "
            f"with (b, h, q_idx, kv_idx); {text}"
        )
    return f"{type(failed).__name__}: {text}"


def user_line(failed: BaseException) -> str | None:
    """The last line of the traceback that belongs to neither torch nor this package."""
    line, at = None, failed.__traceback__
    while at is not None:
        file, number = at.tb_frame.f_code.co_filename, at.tb_lineno
        if not _inside(file) and linecache.getline(file, number):
            line = line_of((file, number))
        at = at.tb_next
    return line


def line_of(frame: tuple[str, int] | None) -> str | None:
    return frame and f"{frame[0]}:{frame[1]}: {linecache.getline(*frame).strip()}"


# Writes of a function to memory that was there before it ran: refused before they happen.


_NEW = (torch.ops.aten.lift_fresh.default,)
"""Operations that return their argument, which torch has just made."""


class WritesRefused(DispatchMode):
    """Calls of torch that may write to tensors made in here, and to no others.

    A tensor is made in here where an operation returns it and, by its schema, it is no view of an argument. All
    writes of torch's operations are in their schemas, whatever the user calls them by."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        """Storages, which stay alive, so that no other has their address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            named = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(func, named.get(argument.name))
        result = func(*args, **kwargs)
        if func in _NEW or not any(x.alias_info for x in func._schema.returns):
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.layout == torch.strided:
                    storage = x.untyped_storage()
                    self.made[storage._cdata] = storage
        return result

    def _check(self, func: Any, written: Any) -> None:
        for x in tree_leaves(written):
            if isinstance(x, Tensor) and (x.layout != torch.strided or x.untyped_storage()._cdata not in self.made):
                raise Refused(written_text(func.overloadpacket.__name__, f"{x.dtype} {tuple(x.shape)}"))


def written_text(name: str, how: str) -> str:
    return (
        f"{name} writes to a captured tensor, {how}, and a function of the score changes nothing: write before the "
        "call of attention, or compute a new tensor, such as table = table + 1"
    )
