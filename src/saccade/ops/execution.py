"""Runs a Call, or the arguments of an operator, on a backend: by replay, or by a plan.

The kernels of the registered operators take the arguments of their schemas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from saccade.backends import Outputs, Saved
from saccade.call import Call, unflatten
from saccade.call.call import Arrivals
from saccade.call.descale import EIGHT_BITS
from saccade.masks import MaskMod, Selected
from saccade.ops import dispatch, replay, shared_pages
from saccade.ops.replay import CallKey
from saccade.scores import Traced
from saccade.util import memory_layout

BackwardResults = tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]
"""dq, dk, dv, dsink, and the gradients of captured tensors"""


def execute(
    call: Call, backend: str, lse: bool, found: CallKey | None = None, arrivals: Arrivals | None = None
) -> Outputs:
    """Plan and run: what the operator does. Results are in the layout's order. found: the call by what it was made of,
    if that has a key, to be recorded. arrivals: what tells which keys have come, where some come while the call runs.
    """
    if found is None and arrivals is None and not replay.on_host(call.q):
        found = replay.of_call(call, backend, lse)
        if found is not None and (results := found.again()) is not None:
            return cast(Outputs, tuple(results))
    layout = call.layout
    if (layout.tensors or layout.ints) and (layout.validate or call.q.is_cpu):
        layout.check_lengths(call.q.shape[2], call.k.shape[2])
        if layout.positioned:
            layout.check_positions(_takes_positions(call), call.q.shape[2], layout.capacity(call.k.shape[2]))
    if call.mask is not None and call.mask.block_sparse and (call.q.is_cpu or backend == "reference"):
        _check_lists(call)
    if call.out is not None:
        memory_layout.refuse_shared("out", layout.ordered(call.out), _inputs(call))
    with torch._C._DisableAutocast():  # q, k and v are cast; a backend's own products keep the dtypes that it chose
        try:
            if layout.shared_pages and (parts := shared_pages.parts(call, backend)):
                return _finished(call, shared_pages.forward(call, parts, lse), lse)
            plan, call = dispatch.planned(call, backend)
            if arrivals is not None:
                if getattr(plan.module, "WAITS_FOR_KEYS", False):
                    return _planned(plan, call, lse, arrivals=arrivals)
                arrivals.come()
            work = partial(_planned, plan, call, lse)
            if found is None:
                return work()
            drawn = [call.dropout.state] if found.dropout_p and call.dropout is not None else []
            return cast(Outputs, tuple(found.recorded(plan.module, drawn, work)))
        except IndexError as error:
            raise _out_of_range(call, error) from error


def _planned(plan: dispatch.Plan, call: Call, lse: bool, **arrivals: Any) -> Outputs:
    return _finished(call, plan.module.run_forward(call, plan.launches, lse, **arrivals), lse)


def _finished(call: Call, results: Outputs, lse: bool) -> Outputs:
    """Results in the layout's order, and in the caller's out."""
    out, row_lse, max_scores = results
    if call.out is not None and out is not call.out:
        call.out.copy_(_with_tail(call, out))
        out = call.out
    layout = call.layout
    row_lse = layout.ordered_lse(row_lse) if lse and row_lse is not None else None
    return layout.ordered(out), row_lse, None if max_scores is None else layout.ordered_lse(max_scores)


def _takes_positions(call: Call) -> bool:
    """Whether a function of positions is part of the call."""
    leaves = () if call.mask is None else call.mask.leaves()
    return isinstance(call.score, Traced) or any(isinstance(leaf, MaskMod) for leaf in leaves)


def _check_lists(call: Call) -> None:
    """Reads the lists of a mask. Raises ValueError for lists that name a key twice, and on a CPU for lengths beyond
    their entries."""
    layout = call.layout
    for leaf in call.mask.leaves() if call.mask is not None else ():
        if isinstance(leaf, Selected):
            keys = layout.keys_in_use(call.k.shape[2]).to(call.q.device)
            starts = layout.cu_seqlens_q
            rows = layout.seqused_q if starts is None else starts.diff()
            leaf.check(keys, rows, starts, lengths=call.q.is_cpu)


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


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    *flat, lse = arguments
    return forward_of(replay.of_operator("forward", flat, lse), flat, lse)


def forward_of(
    found: CallKey | None, flat: Sequence[Any], lse: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of the operator, empty tensors for those that nobody asked for. found: the call, if it has a key."""
    if found is not None and (results := found.again()) is not None:
        nothing = found.replay.nothing
    else:
        call, backend = unflatten(*flat, out=out)
        results = execute(call, backend, lse, found)
        nothing = partial(flat[0].new_empty, 0, dtype=call.lse_dtype())
    result, row_lse, max_scores = results
    row_lse, max_scores = (nothing() if x is None else x for x in (row_lse, max_scores))
    return cast(Tensor, result), row_lse, max_scores


def forward_out(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *flat, lse = arguments
    return forward_of(replay.of_operator("forward", flat, lse, out=out), flat, lse, out)[1:]


def backward(dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any) -> BackwardResults:
    given, (*flat, wanted) = (dout, dlse, out, lse), arguments
    return backward_of(replay.of_backward(given, flat, wanted), given, flat, wanted)


def backward_of(
    found: CallKey | None, given: Sequence[Any], flat: Sequence[Any], wanted: Sequence[bool]
) -> BackwardResults:
    """The same for a backward. Its first arguments are dout, dlse, out and lse."""
    if found is None or (results := found.again()) is None:
        results = computed_gradients(found, given, flat, wanted)
    dout, (dq, dk, dv, *others) = given[0], results
    dsink, *dcaptures = (dout.new_empty(0) if x is None else x for x in others)
    if flat[1].dtype in EIGHT_BITS:
        dq, dk, dv = (
            dout.new_empty(0) if x.dtype in EIGHT_BITS else dx for dx, x in zip((dq, dk, dv), flat, strict=False)
        )
    return cast(BackwardResults, (dq, dk, dv, dsink, dcaptures))


def computed_gradients(
    found: CallKey | None, given: Sequence[Any], flat: Sequence[Any], wanted: Sequence[bool]
) -> Sequence[Tensor | None]:
    """The gradients of a call: dq, dk, dv, dsink, and those of captured tensors. found: the backward, if it has a key,
    to be recorded. given: dout, dlse, out and lse."""
    dout, dlse, out, lse = given
    call, backend = unflatten(*flat)
    call = call.replace(max_scores=False)  # which have no gradient
    if call.descale is not None:
        call = call.dequantized(dout.dtype)
    layout = call.layout
    dlse, lse = None if dlse is None else layout.canonical_lse(dlse), layout.canonical_lse(lse)
    saved = Saved(layout.canonical(dout), dlse, layout.canonical(out), lse, tuple(wanted))
    plan, call = dispatch.planned(call, backend, gradient=True)
    work = partial(_planned_backward, plan, call, saved)
    with torch._C._DisableAutocast():
        return work() if found is None else found.recorded(plan.module, (), work)


def _planned_backward(plan: dispatch.Plan, call: Call, saved: Saved) -> list[Tensor | None]:
    """dq, dk and dv in the layout's order, dsink, and the gradients of captured tensors."""
    *gradients, dsink, dcaptures = plan.module.run_backward(call, plan.launches, saved)
    return [*map(call.layout.ordered, gradients), dsink, *dcaptures]
