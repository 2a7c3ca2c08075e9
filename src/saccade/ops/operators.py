"""The registered operators: schema, fakes and flop formulas around the backends.

`saccade::forward` is opaque to torch.compile. A Call passes through its schema in the form of `call/flatten.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from saccade.backends import Outputs
from saccade.call import SCHEMA, Call, flatten, needs_gradient, operator, outline, unflatten
from saccade.call.descale import EIGHT_BITS
from saccade.layouts import empty_like_rows
from saccade.ops import autograd, execution, replay, vmap
from saccade.ops.autograd import refuse_gradients
from saccade.ops.execution import execute
from saccade.ops.replay import CallKey
from saccade.util import arguments
from saccade.util.imports import after_import

library = torch.library.Library("saccade", "DEF")
OVERLOADS = {"": (), ".numbers": (torch.Tag.cudagraph_unsafe,)}
for _overload, _tags in OVERLOADS.items():
    for _name, _schema in {
        "forward": f"({SCHEMA}, bool lse) -> (Tensor out, Tensor lse, Tensor max_scores)",
        "forward_out": f"(Tensor(a!) out, {SCHEMA}, bool lse) -> (Tensor lse, Tensor max_scores)",
        "backward": f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {SCHEMA}, bool[] wanted)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor[])",
    }.items():
        library.define(_name + _overload + _schema, tags=_tags)


def implement(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Registers a kernel of an operator. In the place of an empty list AOTInductor passes None."""
    schema = torch._C._get_schema(f"saccade::{name.partition('.')[0]}", name.partition(".")[2])
    lists = [i for i, argument in enumerate(schema.arguments) if isinstance(argument.type, torch.ListType)]

    def with_lists(*given: Any) -> Any:
        for i in lists:
            if given[i] is None:
                given = *given[:i], [], *given[i + 1 :]
        return kernel(*given)

    library.impl(name, with_lists, key)


def run(call: Call, backend: str, lse: bool, found: CallKey | None = None) -> Outputs:
    """The results in the layout's order, directly or by the operator. Those that nobody asked for are None or empty.
    found: the call by its arguments, if it has a key."""
    results = run_directly(call, backend, lse, found)
    return run_by_operator(call, backend, lse) if results is None else results


def gradients(
    call: Call, backend: str, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call by its results, in the layout's order; for those who have an autograd of their own."""
    flat = flatten(call, backend)
    return operator("backward", flat)(dout, dlse, out, lse, *flat, [])[:3]


def run_directly(call: Call, backend: str, lse: bool, found: CallKey | None = None) -> Outputs | None:
    """The same past the dispatcher, where nothing could tell: plain tensors whose memory is their values, and no mode
    or transform that would watch. None elsewhere.

    The operator costs a small call as much as its launch does.
    """
    tensors = call.differentiable()
    if backend == "reference" and not arguments.has_dtensor(*tensors):
        if call.given[3] is not None:
            refuse_gradients(*tensors)
        return execute(call, backend, lse)
    if not _unseen(*tensors):
        return None
    if not needs_gradient(*tensors):
        return execute(call, backend, lse, found)
    if call.given[3] is not None:
        return None
    return autograd.eager(call, backend, partial(execute, call, backend, True, found), found)


def replayed(found: CallKey) -> Outputs | None:
    """The results of the replay of an earlier call with this key; None if there is no replay."""
    if found.needs_gradient:
        return autograd.replayed(found)
    return cast("Outputs | None", found.again())


def run_by_operator(call: Call, backend: str, lse: bool) -> Outputs:
    """The same through the dispatcher."""
    out, flat = call.given[3], flatten(call, backend)
    if out is None:
        return operator("forward", flat)(*flat, bool(lse))
    return out, *operator("forward_out", flat)(out, *flat, bool(lse))


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether an operator of these may go past the dispatcher, and needs no gradient."""
    return _unseen(*tensors) and not needs_gradient(*tensors)


def _unseen(*tensors: Tensor | None) -> bool:
    """Whether nothing could tell that a call goes past the dispatcher."""
    if arguments.watched():
        return False
    given = [x for x in tensors if x is not None]
    plain = arguments.PLAIN.issuperset(map(type, given)) and not any(map(Tensor.is_neg, given))
    return plain and not any(map(_is_meta, given))


_is_meta = attrgetter("is_meta")


# Kernels at the Autograd key.


def _forward_autograd(*arguments: Any) -> Any:
    *flat, lse = arguments
    tensors = *flat[:4], *flat[4]
    autograd.refuse_tangents(*tensors)
    if needs_gradient(*tensors):
        return autograd.forward(flat, *tensors, *flat[5])
    found = replay.of_operator("forward", flat, lse)
    return _below("forward", flat, arguments) if found is None else execution.forward_of(found, flat, lse)


def _forward_out_autograd(out: Tensor, *arguments: Any) -> Any:
    tensors = out, *arguments[:4], *arguments[4]
    autograd.refuse_tangents(*tensors)
    refuse_gradients(*tensors)
    return _below("forward_out", arguments, (out, *arguments))


def _backward_autograd(*arguments: Any) -> Any:
    given, flat, wanted = arguments[:4], arguments[4:-1], arguments[-1]
    tensors = *arguments[:8], *arguments[8]
    autograd.refuse_tangents(*tensors)
    if needs_gradient(*tensors):
        return autograd.backward(arguments, *tensors)
    found = replay.of_backward(given, flat, wanted)
    return _below("backward", flat, arguments) if found is None else execution.backward_of(found, given, flat, wanted)


def _below(name: str, flat: Sequence[Any], arguments: Sequence[Any]) -> Any:
    """The operator of tensors that need no gradient."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(name, flat)(*arguments)


# Fakes: shapes, dtypes and strides of the results.


def fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *flat, lse = arguments
    call = outline(*flat)
    layout, q, rows, dtype = call.layout, call.given[0], call.q, call.lse_dtype()

    def of_rows(asked: bool) -> Tensor:
        return layout.ordered_lse(q.new_empty(rows.shape[:-1], dtype=dtype)) if asked else q.new_empty(0, dtype=dtype)

    out = torch.bfloat16 if q.dtype in EIGHT_BITS else q.dtype
    return layout.ordered(empty_like_rows(rows, call.v.shape[-1], out)), of_rows(lse), of_rows(call.max_scores)


def _fake_forward_out(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return fake_forward(*arguments)[1:]


def _fake_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    *flat, wanted = arguments
    call = outline(*flat)
    dq, dk, dv = (
        dout.new_empty(0) if x.dtype in EIGHT_BITS else call.layout.ordered(empty_like_rows(x, x.shape[-1]))
        for x in (call.q, call.k, call.v)
    )
    dsink = dout.new_empty(0) if call.sink is None else torch.empty_like(call.sink)
    dcaptures = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if asked else dout.new_empty(0)
        for x, asked in zip(flat[4], wanted, strict=True)
    ]
    return dq, dk, dv, dsink, dcaptures


_OPERATORS: tuple[tuple[Any, ...], ...] = (
    ("forward", execution.forward, _forward_autograd, fake_forward, vmap.forward),
    ("forward_out", execution.forward_out, _forward_out_autograd, _fake_forward_out, vmap.forward_out),
    ("backward", execution.backward, _backward_autograd, _fake_backward, vmap.backward),
)
for _overload in OVERLOADS:
    for _name, _kernel, _derivative, _fake, _batched in _OPERATORS:
        implement(_name + _overload, _kernel, "CompositeExplicitAutograd")
        implement(_name + _overload, _derivative, "Autograd")
        torch.library.register_fake(f"saccade::{_name}{_overload}", _fake, lib=library)
        torch.library.register_vmap(f"saccade::{_name}{_overload}", _batched, lib=library)
if torch._C._parse_dispatch_key("Batched"):  # the older vmap's, as long as torch has it
    for _overload in OVERLOADS:
        library.impl("backward" + _overload, vmap.of_older_vmap(vmap.backward), "Batched")


# Flop formulas of the operators, for `torch.utils.flop_counter`: masked pairs are counted too, as torch does.


def register_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for formula in (forward, forward_out, backward):
        operator = getattr(torch.ops.saccade, formula.__name__)
        register_flop_formula(operator, get_raw=True)(formula)  # pyright: ignore[reportArgumentType]


def forward(*args: Any, **_: Any) -> int:
    scores, values = _products(*args[:-1])
    return 2 * (scores + values)


def forward_out(out: Any, *args: Any, **_: Any) -> int:
    return forward(*args)


def backward(dout: Any, dlse: Any, out: Any, lse: Any, *args: Any, **_: Any) -> int:
    scores, values = _products(*args[:-1])
    return 2 * (3 * scores + 2 * values)


def _products(*flat: Any) -> tuple[int, int]:
    """Multiply-adds of q k^T and of p v."""
    call, _ = unflatten(*flat)
    q, k, v, _ = call.given
    pairs = call.layout.pairs(q, k)
    return pairs * q.shape[-1], pairs * v.shape[-1]


after_import("torch.utils.flop_counter", register_flops)  # which imports triton
