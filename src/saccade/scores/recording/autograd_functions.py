"""`torch.autograd.Function` in functions of the score: its value, with its own derivative.

Torch reports no call of a Function. So `Function.apply` is wrapped once in a process: it looks for stand-ins among its
arguments, and does as before where there are none. That is when a recording first meets one; where `apply` is of C, as
since torch 2.14, nothing tells that, and it is when something is first recorded.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

_APPLY: Any = Function.__dict__["apply"]
UNSEEN = _APPLY.__func__.__code__ if isinstance(_APPLY, classmethod) else None
"""The code of torch's own `Function.apply`, if it is of Python."""


class Unseen(BaseException):
    """A recording is inside a Function that it cannot see."""


class _Applying(threading.local):
    depth = 0


_applying = _Applying()
_wrapped: list[Any] = []


def applying() -> int:
    """How many Functions this thread is inside of, of which no argument is a stand-in; 0 while `apply` is torch's."""
    return _applying.depth


def see_functions(kind: type, applied: Callable[..., Any]) -> bool:
    """Makes Functions call `applied(function, args)` for arguments of this class from now on. False if they do."""
    if _wrapped:
        return False
    plain: Any = Function.__dict__["apply"]
    _wrapped.append(plain)

    @functools.wraps(Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(x) is kind for x in args):
            return applied(cls, args)
        _applying.depth += 1
        try:
            return plain.__get__(None, cls)(*args, **kwargs)
        finally:
            _applying.depth -= 1

    Function.apply = classmethod(apply)  # pyright: ignore[reportAttributeAccessIssue]
    return True


class Context:
    """A Function's context while it is recorded."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.needs_input_grad = tuple([isinstance(x, Tensor) for x in args])
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: tuple[Any, ...] = ()
        """Results that have no derivative."""

    def called(self, function: Any, args: Sequence[Any]) -> Any:
        if function.setup_context is Function.setup_context:
            return function.forward(self, *args)
        value = function.forward(*args)
        function.setup_context(self, args, value)
        return value

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    save_for_forward = mark_dirty = lambda self, *tensors: None

    def set_materialize_grads(self, value: bool) -> None:
        pass


_SUMS = frozenset(("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "subtract"))
_PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply"))
_QUOTIENTS = frozenset(("div", "__truediv__", "divide", "true_divide"))
_SELECTS = frozenset(("where", "masked_fill"))
_PASSES = frozenset(("neg", "__neg__", "to", "float", "double", "clone", "detach", "view_as", "contiguous", "alias"))


def linear(tape: Any, gradient: int, first: int, outputs: Sequence[int]) -> bool:
    """Whether the values of steps from `first` on are linear in a gradient."""
    of_it = {gradient}
    for place in range(first + 5, len(tape.steps) + 5):
        function, positional, named = tape.steps[place - 5]
        arguments = (*positional, *(x for _, x in named))
        by = [x[0] == "value" and x[1] in of_it for x in arguments]
        if any(by):
            if not _is_linear(function.__name__, arguments, by):
                return False
            of_it.add(place)
    return all(x in of_it for x in outputs)


def _is_linear(name: str, arguments: Sequence[Any], by: Sequence[bool]) -> bool:
    """Whether a step is linear in those of its arguments that depend on the gradient."""
    if name in _SUMS:
        return all(by[:2])
    if name in _PRODUCTS:
        return sum(by) == 1
    if name in _SELECTS:
        return all(depends or _is_zero(x) for depends, x in _choices(name, arguments, by))
    return (name in _PASSES and by[0]) or (name in _QUOTIENTS and by[0] and not any(by[1:]))


def _choices(name: str, given: Any, by: Sequence[bool]) -> list[tuple[bool, Any]]:
    pairs = list(zip(by, given, strict=False))
    return [pairs[1], pairs[2]] if name == "where" else [pairs[0], pairs[2]]


def _is_zero(x: Any) -> bool:
    return x[0] == "constant" and x[2] == 0


# One operator stands for all of them in graphs: the value is the first argument, the derivative by the second is the
# third.

_library = torch.library.Library("saccade", "FRAGMENT")
_library.define("attached(Tensor value, Tensor x, Tensor slope) -> Tensor")
_library.impl("attached", lambda value, x, slope: value.clone(), "CompositeExplicitAutograd")


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    value, x, slope = inputs
    ctx.shapes = value.shape, x.shape
    ctx.save_for_backward(slope)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (slope,) = ctx.saved_tensors
    by_value, by_x = ctx.shapes
    return gradient.sum_to_size(by_value), (gradient * slope).sum_to_size(by_x), None


torch.library.register_autograd("saccade::attached", _backward, setup_context=_setup, lib=_library)


def attached(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    return torch.ops.saccade.attached(value, x.to(value.dtype), slope.to(value.dtype))
