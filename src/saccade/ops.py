"""The registered operators: schema, fakes and flop formulas around the backends.

`saccade::forward` is opaque to torch.compile. A Call passes through its schema in the form of `call/flatten.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from saccade import aliasing, arguments, autograd, batching, dispatch, flops, repeats, shared_pages
from saccade.after_import import after_import
from saccade.autograd import refuse_gradients
from saccade.backends import Outputs, Saved
from saccade.call import SCHEMA, Call, flatten, needs_gradient, operator, outline, unflatten
from saccade.descale import EIGHT_BITS
from saccade.layouts import empty_like_rows
from saccade.masks import MaskMod
from saccade.scores import Traced

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


def run(call: Call, backend: str, lse: bool) -> Outputs:
    """The results in the layout's order, directly or by the operator. Those that nobody asked for are None or empty."""
    results = run_directly(call, backend, lse)
    return run_by_operator(call, backend, lse) if results is None else results


def gradients(
    call: Call, backend: str, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of a call by its results, in the layout's order; for those who have an autograd of their own."""
    flat = flatten(call, backend)
    return operator("backward", flat)(dout, dlse, out, lse, *flat, [])[:3]


def run_directly(call: Call, backend: str, lse: bool) -> Outputs | None:
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
        return execute(call, backend, lse)
    if call.given[3] is not None:
        return None
    return autograd.eager(call, backend, partial(execute, call, backend, True))


def run_by_operator(call: Call, backend: str, lse: bool) -> Outputs:
    """The same by the dispatcher."""
    out, flat = call.given[3], flatten(call, backend)
    if out is None:
        return operator("forward", flat)(*flat, bool(lse))
    return out, *operator("forward_out", flat)(out, *flat, bool(lse))


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether an operator of these may go past the dispatcher, and needs no gradient."""
    return _unseen(*tensors) and not needs_gradient(*tensors)


def _unseen(*tensors: Tensor | None) -> bool:
    """Whether nothing could tell that a call goes past the dispatcher."""
    if repeats.watched():
        return False
    given = [x for x in tensors if x is not None]
    plain = repeats.PLAIN.issuperset(map(type, given)) and not any(map(Tensor.is_neg, given))
    return plain and not any(map(_is_meta, given))


_is_meta = attrgetter("is_meta")


def execute(call: Call, backend: str, lse: bool) -> Outputs:
    """Plan and run: what the operator does. Results are in the layout's order."""
    key = repeats.key_of(call, backend, lse)
    if key and (repeat := repeats.find(key)) is not None:
        return cast(Outputs, tuple(repeat([x.data_ptr() for x in repeats.operands_of(call)])))
    layout = call.layout
    if (layout.tensors or layout.ints) and (layout.validate or call.q.is_cpu):
        layout.check_lengths(call.q.shape[2], call.k.shape[2])
        if layout.positioned:
            layout.check_positions(_takes_positions(call), call.q.shape[2], layout.capacity(call.k.shape[2]))
    if call.out is not None:
        aliasing.refuse_shared("out", layout.ordered(call.out), _inputs(call))
    with torch._C._DisableAutocast():  # q, k and v are cast; a backend's own products keep the dtypes that it chose
        try:
            if layout.shared_pages and (parts := shared_pages.parts(call, backend)):
                out, row_lse, max_scores = shared_pages.forward(call, parts, lse)
            else:
                operands = repeats.operands_of(call) if key else []
                plan, call = dispatch.planned(call, backend)
                if call.arrivals is not None and not getattr(plan.module, "WAITS_FOR_KEYS", False):
                    call.arrivals.come()
                if key:
                    work = partial(_planned, plan, call, lse)
                    return cast(Outputs, tuple(repeats.run(key, plan.module, operands, work)))
                out, row_lse, max_scores = plan.module.run_forward(call, lse)
        except IndexError as error:
            raise _out_of_range(call, error) from error
    if call.out is not None and out is not call.out:
        call.out.copy_(_with_tail(call, out))
    return _ordered(call, out, row_lse if lse else None, max_scores)


def _planned(plan: dispatch.Plan, call: Call, lse: bool) -> Outputs:
    return _ordered(call, *plan.module.run_forward(call, lse))


def _ordered(call: Call, out: Tensor, lse: Tensor | None, max_scores: Tensor | None) -> Outputs:
    """Results in the layout's order."""
    layout = call.layout
    lse = None if lse is None else layout.ordered_lse(lse)
    return layout.ordered(out), lse, None if max_scores is None else layout.ordered_lse(max_scores)


def _takes_positions(call: Call) -> bool:
    """Whether a function of positions is part of the call."""
    leaves = () if call.mask is None else call.mask.leaves()
    return isinstance(call.score, Traced) or any(isinstance(leaf, MaskMod) for leaf in leaves)


def _with_tail(call: Call, out: Tensor) -> Tensor:
    """The result, and of rows that the caller's out keeps those."""
    if not call.keeps_tail or call.out is None:
        return out
    rows = torch.arange(out.shape[2], device=out.device)
    return torch.where((rows < call.layout.cu_seqlens_q[-1])[:, None], out, call.out)


def _out_of_range(call: Call, error: IndexError) -> Exception:
    """The error for an index that a score or mask function computes; on a GPU such an index is clamped."""
    score, mask = call.score, call.mask
    functions = [] if score is None else [(score.kind, score.tensors)]
    functions += [] if mask is None else [(mask.kind, mask.tensors)]
    if not any(tensors for _, tensors in functions):
        return error
    read = " and ".join(f"{kind} with {', '.join(str(tuple(x.shape)) for x in tensors)}" for kind, tensors in functions)
    operand = f"q {tuple(call.layout.ordered(call.q).shape)}"
    return ValueError(f"a captured tensor is read out of range, {error}: {read}; {operand}")


def _inputs(call: Call) -> Iterator[tuple[str, Tensor]]:
    """All tensors that a call reads, as the user has them."""
    layout, mask, score = call.layout, call.mask, call.score
    yield "q", layout.ordered(call.q)
    yield from (("k", layout.ordered_keys(call.k)), ("v", layout.ordered_keys(call.v)))
    yield from (() if call.descale is None else (("a tensor of descale", x) for x in call.descale.tensors))
    yield from (() if call.sink is None else [("sink", call.sink)])
    yield from (("a tensor of the layout", x) for x in layout.tensors)
    yield from (() if mask is None else (("a tensor of the mask", x) for x in mask.tensors))
    yield from (() if score is None else (("a tensor of the score_mod", x) for x in score.tensors))


# Kernels: the arguments are those of the schema.


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *flat, lse = arguments
    call, backend = unflatten(*flat)
    out, row_lse, max_scores = execute(call, backend, lse)
    return out, _or_empty(call, row_lse if lse else None), _or_empty(call, max_scores)


def _forward_out(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *flat, lse = arguments
    call, backend = unflatten(*flat, out=out)
    _, row_lse, max_scores = execute(call, backend, lse)
    return _or_empty(call, row_lse if lse else None), _or_empty(call, max_scores)


def _or_empty(call: Call, x: Tensor | None) -> Tensor:
    """An operator's results are tensors: those that nobody asked for are empty."""
    return call.q.new_empty(0, dtype=call.lse_dtype()) if x is None else x


def _backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    *flat, wanted = arguments
    given, backend = unflatten(*flat)
    call = given.replace(max_scores=False)  # which have no gradient
    if call.descale is not None:
        call = call.dequantized(dout.dtype)
    layout = call.layout
    dlse, lse = None if dlse is None else layout.canonical_lse(dlse), layout.canonical_lse(lse)
    saved = Saved(layout.canonical(dout), dlse, layout.canonical(out), lse, tuple(wanted))
    key = repeats.gradient_key_of(call, saved, backend)
    if (repeat := repeats.find(key)) is not None:
        found = repeat([x.data_ptr() for x in repeats.gradient_operands_of(call, saved)])
    else:
        operands = repeats.gradient_operands_of(call, saved) if key else []
        plan, call = dispatch.planned(call, backend, gradient=True)
        with torch._C._DisableAutocast():
            found = repeats.run(key, plan.module, operands, partial(_planned_backward, plan, call, saved))
    dq, dk, dv, dsink, *dcaptures = found
    none = partial(dout.new_empty, 0)
    dsink, *dcaptures = (none() if x is None else x for x in (dsink, *dcaptures))
    of_operands = zip((dq, dk, dv), given.given[:3], strict=True)
    dq, dk, dv = (none() if x.dtype in EIGHT_BITS else cast(Tensor, dx) for dx, x in of_operands)
    return dq, dk, dv, dsink, dcaptures


def _planned_backward(plan: dispatch.Plan, call: Call, saved: Saved) -> list[Tensor | None]:
    """dq, dk and dv in the layout's order, dsink, and the gradients of captured tensors."""
    *gradients, dsink, dcaptures = plan.module.run_backward(call, saved)
    return [*map(call.layout.ordered, gradients), dsink, *dcaptures]


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
    ("forward", _forward, autograd.forward, fake_forward, batching.forward),
    ("forward_out", _forward_out, autograd.forward_out, _fake_forward_out, batching.forward_out),
    ("backward", _backward, autograd.backward, _fake_backward, batching.backward),
)
for _overload in OVERLOADS:
    for _name, _kernel, _derivative, _fake, _batched in _OPERATORS:
        implement(_name + _overload, _kernel, "CompositeExplicitAutograd")
        implement(_name + _overload, _derivative, "Autograd")
        torch.library.register_fake(f"saccade::{_name}{_overload}", _fake, lib=library)
        torch.library.register_vmap(f"saccade::{_name}{_overload}", _batched, lib=library)
after_import("torch.utils.flop_counter", flops.register)  # which imports triton
if torch._C._parse_dispatch_key("Batched"):  # the older vmap's, as long as torch has it
    for _overload in OVERLOADS:
        library.impl("backward" + _overload, batching.of_older_vmap(batching.backward), "Batched")
