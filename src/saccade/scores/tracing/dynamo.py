"""Tracing inside torch.compile: Dynamo itself follows the user's function, on tensors of a class of ours.

Its guards decide how long a trace holds, and captured values become inputs of the graph. A tape is made of
Python lists; what a Program needs of it is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from saccade.scores.tracing.autograd_functions import check_outside_of_functions, follow_functions, followed
from saccade.scores.tracing.tape import BEHIND, Refused, Tape, any_size, is_itself, refuse, target_dtype
from saccade.scores.tracing.trace import WRITES, refusal, written_text
from saccade.util.caches import compile_constant, exports, word_of


class Symbol(Tensor):
    """Stands for a value that a kernel computes."""

    tape: Tape
    value: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


def symbol(tape: Tape, index: int) -> Any:
    # Without values: what torch computes of them behind our back is noticed (`trace_function`).
    with torch._C.DisableTorchFunctionSubclass():
        stand_in = torch.empty((), device="meta").as_subclass(Symbol)
    stand_in.tape, stand_in.value = tape, index
    return stand_in


class Follower(TorchFunctionMode):
    """Shows Dynamo the calls whose symbols are inside tuples, as in `table[h, kv_idx]`, and refuses writes to what the
    function captures."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        """Tensors whose memory the function has made, by the calls that never return views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _symbol(args) is not None:
            return call(func, args, kwargs)
        name = word_of(func)
        written = args[0] if args and (writes(name) or kwargs.get("inplace")) else kwargs.get("out")
        for x in written if isinstance(written, (list, tuple)) else [written]:
            if isinstance(x, Tensor) and not any([x is y for y in self.made]):  # noqa: C419 (Dynamo follows lists)
                refuse_write(name, str(x.dtype), tuple([int(n) for n in x.shape]))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (name == "clone" or not any([isinstance(x, Tensor) for x in args])):  # noqa: C419 (Dynamo follows lists)
            self.made.append(result)
        return result


@compile_constant
def refuse_write(name: str, dtype: str, shape: Any) -> None:
    raise Refused(written_text(name, f"{dtype} {shape}"))


@compile_constant
def writes(name: str) -> bool:
    """Whether one of torch's functions writes to its first argument."""
    writing = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return writing or name == "__setitem__" or name in WRITES


def _symbol(args: Any) -> Any:
    for x in args:
        if isinstance(x, Symbol):
            return x
        if type(x) is tuple or type(x) is list:
            inner = _symbol(x)
            if inner is not None:
                return inner
    return None


def call(function: Any, args: Any, kwargs: Any) -> Any:
    """Records a call of one of torch's functions on symbols."""
    name = word_of(function)
    tape = _symbol(args).tape
    if name == "__get__":
        name = attribute_of(function)
    if name == "dtype":
        return _dtype(args[0])
    if name == "device":
        return tape.device
    if name == "is_floating_point":
        return _dtype(args[0]).is_floating_point
    if name == "broadcast_tensors":  # every value is one number for each score already
        return tuple(args[0]) if isinstance(args[0], (tuple, list)) else args
    if name == "to" or name == "type_as":
        dtype = target_dtype(Symbol, args, kwargs, _dtype)
        if dtype is None:
            return args[0]
        function, args, kwargs = Tensor.to, (args[0], dtype), {}
    check_operation(name)
    if kwargs.get("out") is not None:
        refuse(f"{name} writes to out=…; use what it returns")
    check_outside_of_functions()
    cut = tape.graded and not torch.is_grad_enabled()
    if cut and is_itself(name, args, kwargs, _dtype):
        return args[0]
    result = symbol(tape, tape.call(function, args, kwargs))
    _refuse_captured(tape)
    if cut:
        result = symbol(tape, tape.call(Tensor.detach, (result,), {}))
    return result


def _refuse_captured(tape: Tape) -> None:
    if tape.tensors and exports():
        refuse(_STRICT)


def applied(name: str, forward: Any, backward: Any, setup_context: Any, *args: Any) -> Any:
    """Records a call of a torch.autograd.Function of symbols."""
    return followed(Symbol, symbol, _dtype, name, (forward, backward, setup_context), args)


def _dtype(x: Symbol) -> torch.dtype:
    if x.value < 5:
        return torch.int64 if x.value else x.tape.dtype
    return _dtype_of(tuple(x.tape.steps), tuple(x.tape.forms), x.tape.dtype, x.value)


@compile_constant
def attribute_of(getter: Any) -> str:
    return getter.__self__.__name__


@compile_constant
def check_operation(name: str) -> None:
    """Raises Refused for what no function of the score does."""
    if reason := refusal(name):
        raise Refused(reason)


_STRICT = (
    "torch.export with strict=True does not see where a function reads a tensor that it captures: "
    "torch.export.export(…, strict=False) does"
)


@compile_constant
def _effects(allowed: bool) -> bool:
    """Whether Dynamo lets what runs again, as a checkpoint does, enter and leave a mode; and from now on does."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tracer: Any = InstructionTranslator.current_tx().output.current_tracer
    except AttributeError:  # a break of the graph left this to Python
        return allowed
    before, tracer.allow_side_effects_in_hop = tracer.allow_side_effects_in_hop, allowed
    return before


def trace_function(fn: Callable[..., Any], dtype: torch.dtype, device: torch.device, outputs: int) -> tuple[Tape, Any]:
    """The tape of a function of (score, b, h, q_idx, kv_idx), and its outputs."""
    follow_functions(Symbol, applied)
    tape = Tape(Symbol, dtype, device, reads_numbers=False)
    tape.graded = torch.is_grad_enabled()
    values = [symbol(tape, i) for i in range(5)]
    before = _effects(True)  # the mode is left again, and the function has none of its own
    with Follower():
        _effects(before)
        results = fn(*values)
        _effects(True)
    _effects(before)
    results = results if outputs > 1 else (results,)
    arguments = tuple([tape.argument(x, True) for x in results])
    _refuse_captured(tape)
    for x in tape.tensors:
        if x.device.type == "meta" and device.type != "meta":
            refuse(BEHIND)
    return tape, arguments


def stand_in_tape(steps: Any, forms: Any, dtype: torch.dtype) -> Tape:
    """A tape of the same program, whose tensors and numbers have no values."""
    tape = Tape(Symbol, dtype, torch.device("cpu"))
    tape.steps, tape.lines, tape.forms = list(steps), [None] * len(steps), list(forms)
    tape.tensors = [
        torch.zeros((), dtype=kind, device="cpu").expand([1 if one else any_size(i) for i, one in enumerate(ones)])
        for kind, ones in forms
    ]
    kinds: dict[int, str] = {}
    for _, positional, named in steps:
        _kinds((*positional, *(x for _, x in named)), kinds)
    tape.numbers = [1 if kinds[i] == "int" else 1.0 for i in range(len(kinds))]  # which divide
    tape.sources = [None] * len(kinds)
    return tape


def _kinds(arguments: Any, kinds: dict[int, str]) -> None:
    for x in arguments:
        if x[0] == "number":
            kinds[x[1]] = x[2]
        elif x[0] in ("tuple", "list", "slice"):
            _kinds(x[1:], kinds)


@compile_constant
def _dtype_of(steps: Any, forms: Any, dtype: torch.dtype, index: int) -> torch.dtype:
    from saccade.scores.tracing.lowering import form_of

    return form_of(stand_in_tape(steps, forms, dtype), index)[0]
