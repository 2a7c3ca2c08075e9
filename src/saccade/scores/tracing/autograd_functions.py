"""`torch.autograd.Function` in functions of the score: its value, with its own derivative.

Torch reports no call of a Function. But it runs `forward` without gradients and tells nobody, so a step in a grad mode
that nobody set is a step inside of one. Once a trace has met one, `Function.apply` is replaced while traces
run: it looks for stand-ins among its arguments, and does as before where there are none.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from saccade.scores.tracing.tape import Refused, refuse
from saccade.util.caches import compile_constant


class Unseen(BaseException):
    """A trace is inside a Function that it did not see called."""


class _Applying(threading.local):
    depth = 0


_applying = _Applying()
NOT_GIVEN = (
    "a torch.autograd.Function computes with values of the score function that are not among its arguments: pass them "
    "to apply"
)


def applying() -> int:
    """How many Functions this thread is inside of, of which no argument is a stand-in; of those seen called."""
    return _applying.depth


@contextlib.contextmanager
def inside_function() -> Iterator[None]:
    """This thread runs a Function of which no argument is a stand-in."""
    _applying.depth += 1
    try:
        yield
    finally:
        _applying.depth -= 1


class _Seen:
    """How many traces see Functions now, and torch's own `Function.apply` meanwhile."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.traces = 0
        self.plain: Any = None


_seen = _Seen()


@contextlib.contextmanager
def seen_functions(kind: type, applied: Callable[..., Any]) -> Iterator[None]:
    """Functions call `applied(function, args)` for arguments of this class in here."""
    with _seen.lock:
        if _seen.traces == 0:
            _seen.plain = Function.__dict__["apply"]
            Function.apply = _replacement(_seen.plain, kind, applied)
        _seen.traces += 1
    try:
        yield
    finally:
        with _seen.lock:
            _seen.traces -= 1
            if _seen.traces == 0:
                Function.apply = _seen.plain


def _replacement(plain: Any, kind: type, applied: Callable[..., Any]) -> Any:
    @functools.wraps(Function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(type(x) is kind for x in args):
            return applied(cls, args)
        with inside_function():
            return plain.__get__(None, cls)(*args, **kwargs)

    return classmethod(apply)


class Context:
    """A Function's context while it is recorded."""

    def __init__(self, args: Sequence[Any], needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.constant: tuple[Any, ...] = ()
        """Results that have no derivative."""

    def called(self, forward: Any, setup_context: Any, args: Sequence[Any]) -> Any:
        if setup_context is None:
            return forward(self, *args)
        value = forward(*args)
        setup_context(self, args, value)
        return value

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.constant = tensors

    save_for_forward = mark_dirty = lambda self, *tensors: None

    def set_materialize_grads(self, value: bool) -> None:
        pass


def steps_of(function: Any) -> tuple[Any, Any, Any]:
    """A Function's forward, backward and setup_context, or None in place of the last."""
    setup = function.setup_context
    return function.forward, function.backward, None if setup is Function.setup_context else setup


def followed(
    kind: type, made: Callable[..., Any], dtype_of: Callable[..., Any], name: str, steps: Any, args: Any
) -> Any:
    """The value of a torch.autograd.Function of stand-ins, with its own derivative by each: `made(tape, index)`.

    Dynamo follows this too. Raises Refused if the derivative is not linear in the gradient, and for several results.
    """
    forward, backward, setup_context = steps
    graded = torch.is_grad_enabled()
    with torch.no_grad():
        context = Context(args, tuple([_may_need(x, kind, dtype_of) for x in args]))
        value = context.called(forward, setup_context, args)
    if type(value) is not kind:
        refuse(f"{name} must return one value of the score, got {type(value).__name__}")
    tape, constant = value.tape, any([value is x for x in context.constant])  # noqa: C419 (Dynamo follows lists)
    # Its derivatives are those of `backward` alone, also where it is an argument.
    value = made(tape, tape.call(Tensor.detach, (value,), {}))
    if constant or not graded:
        return value
    gradient: Any = torch.ones_like(value)
    before = len(tape.steps)
    with torch.no_grad():
        slopes = backward(context, gradient)
    slopes = slopes if isinstance(slopes, tuple) else (slopes,)
    check_linear(name, tuple(tape.steps), gradient.value, before, tuple([x.value for x in slopes if type(x) is kind]))
    for x, needs, slope in zip(args, context.needs_input_grad, slopes, strict=False):
        if needs and slope is not None:
            slope = slope if type(slope) is kind else torch.ones_like(value) * slope
            value = made(tape, tape.call(attached, (value, x, slope), {}))
    return value


def _may_need(x: Any, kind: type, dtype_of: Callable[..., Any]) -> bool:
    """Whether an argument may need a gradient: of floats of the score nothing says that they do not."""
    if type(x) is kind:
        return dtype_of(x).is_floating_point
    return isinstance(x, Tensor) and x.requires_grad


@compile_constant
def check_linear(name: str, steps: Any, gradient: int, first: int, slopes: Any) -> None:
    if not linear(steps, gradient, first, slopes):
        raise Refused(f"the backward of {name} is not linear in its gradient, as a derivative is")


_SUMS = frozenset(("add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "subtract"))
_PRODUCTS = frozenset(("mul", "__mul__", "__rmul__", "multiply"))
_QUOTIENTS = frozenset(("div", "__truediv__", "divide", "true_divide"))
_SELECTS = frozenset(("where", "masked_fill"))
_PASSES = frozenset((
    "neg", "__neg__", "to", "float", "double", "clone", "detach", "view_as", "contiguous", "alias", "attached",
))  # fmt: skip


def linear(steps: Sequence[Any], gradient: int, first: int, outputs: Sequence[int]) -> bool:
    """Whether the values of steps from `first` on are linear in a gradient."""
    of_it, zeros = {gradient}, set[int]()
    for index in range(first + 5, len(steps) + 5):
        function, positional, named = steps[index - 5]
        arguments = (*positional, *(x for _, x in named))
        by = [x[0] == "value" and x[1] in of_it for x in arguments]
        zero = [_is_zero(x) or (x[0] == "value" and x[1] in zeros) for x in arguments]
        if function.__name__ == "zeros_like" or (function.__name__ in _PASSES and zero[0]):
            zeros.add(index)
        elif any(by):
            if not _is_linear(function.__name__, by, zero) or _truncates(function.__name__, positional, dict(named)):
                return False
            of_it.add(index)
    return all(x in of_it or x in zeros for x in outputs)


def _is_linear(name: str, by: Sequence[bool], zero: Sequence[bool]) -> bool:
    """Whether a step is linear in those of its arguments that depend on the gradient; others may be zero."""
    if name in _SUMS:
        return all(depends or none for depends, none in zip(by[:2], zero, strict=False))
    if name in _PRODUCTS:
        return sum(by) == 1
    if name in _SELECTS:
        chosen = slice(1, 3) if name == "where" else slice(0, 3, 2)
        return all(depends or none for depends, none in zip(by[chosen], zero[chosen], strict=True))
    return (name in _PASSES and by[0]) or (name in _QUOTIENTS and by[0] and not any(by[1:]))


def _truncates(name: str, positional: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether a division rounds, or a conversion is to integers, or to the dtype of something."""
    if name in _QUOTIENTS:
        return named.get("rounding_mode", ("constant", "", None))[2] is not None
    to = [*positional[1:], *named.values()] if name == "to" else []
    return any(x[0] != "constant" or (isinstance(x[2], torch.dtype) and not x[2].is_floating_point) for x in to)


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


# `torch.autograd.Function` in functions of the score that Dynamo follows: what autograd_functions.py does, in a graph.
#
# Dynamo makes a graph of its own of a Function's forward, in which our symbols lose their derivative. So it is told to
# follow `applied` in its place where an argument is a symbol.


_followed: list[Callable[..., Any]] = []
_STEPS = ("forward", "backward", "setup_context")


@compile_constant
def follow_functions(kind: type, applied: Callable[..., Any]) -> None:
    """Dynamo, which runs this while it compiles, follows `applied(name, forward, backward, setup_context, *args)` for
    Functions of arguments of this class from now on."""
    if _followed:
        return
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    variables: Any = AutogradFunctionVariable
    plain = variables.call_apply

    @functools.wraps(plain)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not any(_is_of(kind, x) for x in args):
            with inside_function():
                return plain(self, tx, args, kwargs)
        given = [VariableTracker.build(tx, self.fn_cls.__name__)]
        for name, step in zip(_STEPS, steps_of(self.fn_cls), strict=True):
            source = AttrSource(self.source, name) if self.source and step else None
            given.append(VariableTracker.build(tx, step, source=source))
        return VariableTracker.build(tx, applied).call_function(tx, [*given, *args], {})

    variables.call_apply = call_apply
    _followed.append(plain)


def _is_of(kind: type, x: Any) -> bool:
    try:
        return issubclass(x.python_type(), kind)
    except (NotImplementedError, TypeError):  # Dynamo's variables of no class
        return False


@compile_constant
def check_outside_of_functions() -> None:
    """Raises Refused if a Function computes with symbols that are not among its arguments."""
    if applying():
        raise Refused(NOT_GIVEN)
