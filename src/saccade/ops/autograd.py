"""The derivatives of the registered operators, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import get_single_level_autograd_function_allowed, set_single_level_autograd_function_allowed
from torch.autograd import forward_ad

from saccade.backends import Outputs
from saccade.call import (
    Call,
    Static,
    eight_bit_gradients,
    flatten,
    joined,
    needs_gradient,
    operator,
    programs,
    read_header,
    savable,
    split,
)
from saccade.call.descale import EIGHT_BITS
from saccade.layouts import Layout, view_layout
from saccade.ops import execution, replay
from saccade.ops.replay import CallKey
from saccade.util.arguments import Unsupported


class SingleLevel(torch.autograd.function._SingleLevelFunction):
    """At the operators' Autograd key torch.func has already peeled one level off: plain functions would start the
    peeling again."""

    _compiled_autograd_key = torch.autograd.Function._compiled_autograd_key  # which torch gives to plain ones alone


Needed = tuple[Static, list[Any], Hashable]
"""The part of a backward besides tensors: the static part of a call's `split`, its programs, and its part of a key."""


def needed_of(static: Static, tensors: Sequence[Tensor | None]) -> Needed:
    tail = None if tensors[0] is None or replay.on_host(tensors[0]) else replay.tail_of(static)
    return static, programs(static), tail


# Tensors come one by one: those in a list would get no gradient.
class _Attention(SingleLevel):
    @staticmethod
    def forward(flat: Sequence[Any], *tensors: Tensor):
        return below(operator("forward", flat), *flat, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        flat, *tensors = inputs
        _, static = split(flat)
        _save(ctx, needed_of(static, tensors), tensors, output)

    @staticmethod
    def backward(ctx, dout, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, *_gradients(ctx, dout, dlse)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Sequence[Tensor | None]:
    """Of the tensors of a call."""
    out, lse, *tensors = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * len(tensors)
    captures, *_ = ctx.static
    dout = torch.zeros_like(out) if dout is None else dout
    needs = ctx.needs_input_grad[-len(tensors) :][: 4 + captures]
    given, wanted = (dout, dlse, out, lse), needs[4:]
    found = None if torch.is_grad_enabled() else replay.of_saved(given, tensors, ctx.tail, wanted)
    gradients = None if found is None else found.again()  # nothing could tell that it goes past the dispatcher
    if gradients is None:
        flat = joined(tensors, ctx.static)
        if found is None:
            *gradients, dcaptures = operator("backward", flat)(*given, *flat, wanted)
            gradients += dcaptures
        else:
            gradients = execution.computed_gradients(found, given, flat, wanted)
    gradients = [x if asked else None for x, asked in zip(gradients, needs, strict=True)]
    return *gradients, *[None] * (len(tensors) - len(needs))


def _save(ctx: Any, needed: Needed, tensors: Sequence[Tensor | None], results: Outputs) -> None:
    """The tensors of a call and of its results that the backward needs."""
    out, lse, max_scores = results
    ctx.static, ctx.programs, ctx.tail = needed
    ctx.save_for_backward(out, lse, *tensors[:3], *savable(tensors[3:]))
    if max_scores is not None:
        ctx.mark_non_differentiable(max_scores)
    ctx.set_materialize_grads(False)


class _Eager(torch.autograd.Function):
    """The same without the dispatcher, for calls that no mode or transform watches."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[], Outputs], needed: Needed, *tensors: Tensor) -> Any:
        out, lse, max_scores = run()
        _save(ctx, needed, tensors, (out, lse, max_scores))
        return out, lse, max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None, None, *_gradients(ctx, dout, dlse)


_apply_eager = cast("Any", super(torch.autograd.Function, _Eager)).apply
"""That of C++: torch's own looks for transforms first, of which there are none here. No module holds the `super`:
vLLM on a CPU asks all that modules hold for their attributes, which it cannot give."""


def eager(call: Call, backend: str, run: Callable[[], Outputs], found: CallKey | None) -> Outputs:
    """The results of `run`, with gradients. found: the call by its arguments, if it has a key."""
    dequantized = call.descale is not None and call.descale.backward
    _refuse_without_gradients(call.layout, call.given[:3], dequantized)
    tensors, static = split(flatten(call, backend))
    needed = needed_of(static, tensors)
    results = _apply_eager(run, needed, *tensors)
    if found is not None:
        found.learn(tensors, needed)
    return results


def replayed(found: CallKey) -> Outputs | None:
    """The results of the replay of an earlier call with this key, with gradients; None if there is no replay."""
    replay = found.replay
    if replay is None or replay.static is None or not replay.ready():
        return None
    if found.dropout_p:
        found = found.drawn()
    (needed, sunk), operands = replay.static, found.operands
    tensors = operands if sunk else (*operands[:3], None, *operands[3:])
    return _apply_eager(partial(replay, found.addresses), needed, *tensors)


def _refuse_without_gradients(layout: Layout, operands: Sequence[Any], dequantized: bool) -> None:
    """Raises Unsupported if calls of this kind have no gradients."""
    if error := layout.gradient_error:
        raise Unsupported(error)
    if operands[1].dtype in EIGHT_BITS and not dequantized:
        raise Unsupported(eight_bit_gradients(*operands))


def forward(flat: Sequence[Any], *tensors: Tensor | None) -> Any:
    """The operator of tensors that need gradients."""
    layout, *_, flags = read_header(flat[6])
    _refuse_without_gradients(view_layout(layout), flat[:3], "dequantized" in flags)
    return apply(_Attention, flat, *tensors)


class _Gradient(SingleLevel):
    """The backward operator's own autograd: differentiating it is an error, not silence."""

    @staticmethod
    def forward(arguments: tuple[Any, ...], *tensors: Tensor):
        *gradients, dcaptures = below(operator("backward", arguments[4:]), *arguments)
        return (*gradients, *dcaptures)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise Unsupported(FIRST_ALONE)


def backward(arguments: Sequence[Any], *tensors: Tensor | None) -> Any:
    """The operator's backward of tensors that need gradients."""
    gradients = apply(_Gradient, arguments, *tensors)
    return (*gradients[:4], list(gradients[4:]))


FIRST_ALONE = (
    "the fused backends of saccade.attention have first derivatives in reverse mode alone; for second derivatives and "
    'forward mode (torch.func.jvp, jacfwd, linearize, hessian) pass backend="reference", which holds the whole score '
    "matrix"
)


def apply(function: Any, *arguments: Any) -> Any:
    """`function.apply` of a single-level function. torch's own context manager for it costs 2 us of a call."""
    allowed = get_single_level_autograd_function_allowed()
    set_single_level_autograd_function_allowed(True)
    try:
        return function.apply(*arguments)
    finally:
        set_single_level_autograd_function_allowed(allowed)


def below(operator: Any, *arguments: Any) -> Any:
    """The operator below autograd. An autograd.Function turns derivatives off while it runs, and with them those that
    transforms around this one of torch.func take."""
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return operator(*arguments)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return operator(*arguments)


def forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises Unsupported if a tensor has a tangent; only the reference has derivatives in forward mode."""
    if forward_mode() and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise Unsupported(FIRST_ALONE)


def refuse_gradients(*tensors: Tensor | None) -> None:
    """Raises ValueError if one of them requires a gradient, and `out` was passed."""
    if needs_gradient(*tensors):
        raise ValueError("out=… is for calls without gradients: omit it, or call inside torch.no_grad()")
