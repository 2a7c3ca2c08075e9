"""The registered operators: schema, fakes, autograd and flop formulas around the backends.

`saccade::forward` is opaque to torch.compile. A Problem passes through its schema flat: the tensors of the layout, the
mask and dropout as `records`, one text that says what they are (`problem.Header`), and the runtime numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from saccade import batching, dispatch, flops, memory
from saccade.backends import Outputs, Saved
from saccade.layouts import PLAIN, Packed, Paged, empty_like_rows, form
from saccade.problem import Header, Problem

library = torch.library.Library("saccade", "DEF")
_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor[] captures, Tensor[] records, str header, SymInt[] ints, "
    "float[] floats"
)
library.define(f"forward({_ARGUMENTS}, bool lse) -> (Tensor out, Tensor lse, Tensor max_scores)")
library.define(f"forward_out(Tensor(a!) out, {_ARGUMENTS}, bool lse) -> (Tensor lse, Tensor max_scores)")
library.define(
    f"backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_ARGUMENTS}, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor[])"
)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    captures: Sequence[Tensor],
    records: list[Tensor],
    header: str,
    ints: list[int],
    floats: list[float],
    lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out in q's layout, lse (b, h_q, s_q), which is empty, (0,), when neither the caller nor a backward needs it, and
    max_scores (b, h_q, s_q), empty when the header does not ask for them."""
    return torch.ops.saccade.forward(q, k, v, sink, captures, records, header, ints, floats, lse)


def forward_out(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`forward`, written to `out`; returns the others alone."""
    return torch.ops.saccade.forward_out(out, *arguments)


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def runs_directly(*tensors: Tensor | None) -> bool:
    """Whether a call may go past the dispatcher: plain tensors, no derivative, no mode or transform that would watch.

    The operator costs a small call as much as its launch does.
    """
    if torch.compiler.is_compiling() or needs_gradient(*tensors) or _forward_mode():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return all(type(x) in _PLAIN for x in tensors)


def execute(problem: Problem, backend: str, lse: bool) -> Outputs:
    """Plan and run: what the operator does. Results are in the layout's order."""
    layout = problem.layout
    readable = problem.q.device.type == "cpu"
    if (isinstance(layout, Packed) and (layout.validate or readable)) or (isinstance(layout, Paged) and readable):
        layout.check(problem.q.shape[2], problem.k.shape[2])
    if problem.out is not None:
        memory.refuse_shared("out", layout.ordered(problem.out), _inputs(problem))
    with torch._C._DisableAutocast():  # q, k and v are cast; a backend's own products keep the dtypes that it chose
        plan, problem = dispatch.planned(problem, backend)
        try:
            out, found, top = plan.module.run_forward(problem, lse)
        except IndexError as wrong:
            raise _outside(problem, wrong) from wrong
    if problem.out is not None and out is not problem.out:
        problem.out.copy_(out)
    found = None if found is None else layout.ordered_lse(found)
    return layout.ordered(out), found, None if top is None else layout.ordered_lse(top)


def _outside(problem: Problem, wrong: IndexError) -> Exception:
    """What to raise for an index that a score or mask function computes; on a GPU such are kept inside."""
    score, mask = problem.score, problem.mask
    functions = [] if score is None else [(score.kind, score.tensors)]
    functions += [] if mask is None else [(mask.kind, mask.records)]
    if not any(tensors for _, tensors in functions):
        return wrong
    told = " and ".join(f"{kind} with {', '.join(str(tuple(x.shape)) for x in tensors)}" for kind, tensors in functions)
    call = f"q {tuple(problem.layout.ordered(problem.q).shape)}"
    return ValueError(f"a captured tensor is read where it has no element, {wrong}: {told}; {call}")


def _inputs(problem: Problem) -> Iterator[tuple[str, Tensor]]:
    """All that a call reads, as the user has it."""
    layout, mask, score = problem.layout, problem.mask, problem.score
    keys = PLAIN["bshd"] if isinstance(layout, Paged) else layout
    yield from (("q", layout.ordered(problem.q)), ("k", keys.ordered(problem.k)), ("v", keys.ordered(problem.v)))
    yield from (() if problem.sink is None else [("sink", problem.sink)])
    yield from (("a tensor of the layout", x) for x in layout.records)
    yield from (() if mask is None else (("a tensor of the mask", x) for x in mask.records))
    yield from (() if score is None else (("a tensor of the score_mod", x) for x in score.tensors))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    captures: Any,
    records: Any,
    header: str,
    ints: Any,
    floats: Any,
    lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = Header.parse(header)
    problem = parsed.problem(q, k, v, sink, captures, records, ints, floats)
    out, found, top = execute(problem, parsed.backend, lse)
    return out, _given(problem, found if lse else None), _given(problem, top)


def _given(problem: Problem, x: Tensor | None) -> Tensor:
    """What nobody asked for is empty: an operator's results are tensors."""
    return problem.q.new_empty(0, dtype=problem.lse_dtype()) if x is None else x


def _forward_out(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    q, k, v, sink, captures, records, header, ints, floats, lse = arguments
    parsed = Header.parse(header)
    out = form(parsed.layout).canonical(out)
    problem = parsed.problem(q, k, v, sink, captures, records, ints, floats, out=out)
    _, found, top = execute(problem, parsed.backend, lse)
    return _given(problem, found if lse else None), _given(problem, top)


def _backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    captures: Any,
    records: Any,
    header: str,
    ints: Any,
    floats: Any,
    wanted: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    parsed = Header.parse(header)
    # The largest scores have no gradient.
    problem = parsed.problem(q, k, v, sink, captures, records, ints, floats, max_scores=False)
    plan, problem = dispatch.planned(problem, parsed.backend, gradient=True)
    layout = problem.layout
    dlse, lse = None if dlse is None else layout.canonical_lse(dlse), layout.canonical_lse(lse)
    saved = Saved(layout.canonical(dout), dlse, layout.canonical(out), lse, tuple(wanted))
    with torch._C._DisableAutocast():
        dq, dk, dv, dsink, dcaptures = plan.module.run_backward(problem, saved)
    none = q.new_empty(0)
    dsink, *dcaptures = (none.clone() if x is None else x for x in (dsink, *dcaptures))
    return layout.ordered(dq), layout.ordered(dk), layout.ordered(dv), dsink, dcaptures


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    captures: Any,
    records: Any,
    header: str,
    ints: Any,
    floats: Any,
    lse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    parsed = Header.parse(header)
    layout = form(parsed.layout)
    rows = layout.canonical(q)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32

    def of_rows(asked: bool) -> Tensor:
        return layout.ordered_lse(q.new_empty(rows.shape[:-1], dtype=dtype)) if asked else q.new_empty(0, dtype=dtype)

    return layout.ordered(empty_like_rows(rows, v.shape[-1])), of_rows(lse), of_rows(parsed.max_scores)


def _fake_forward_out(out: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(*arguments)[1:]


def _fake_backward(
    dout: Tensor,
    dlse: Any,
    out: Any,
    lse: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    captures: Any,
    records: Any,
    header: str,
    ints: Any,
    floats: Any,
    wanted: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    layout = form(Header.parse(header).layout)

    def gradient(x: Tensor) -> Tensor:
        return layout.ordered(empty_like_rows(layout.canonical(x), x.shape[-1]))

    dsink = q.new_empty(0) if sink is None else torch.empty_like(sink)
    dcaptures = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if given else q.new_empty(0)
        for x, given in zip(captures, wanted, strict=True)
    ]
    return gradient(q), gradient(k), gradient(v), dsink, dcaptures


# At the operators' Autograd key torch.func has already peeled one level off, so these are single-level functions:
# the plain ones would start the peeling again.
class _Attention(torch.autograd.function._SingleLevelFunction):
    @staticmethod
    def forward(q, k, v, sink, records, header, ints, floats, *captures):
        # Captured tensors come one by one: those in a list would get no gradient.
        return _below(torch.ops.saccade.forward, q, k, v, sink, captures, records, header, ints, floats, True)

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, sink, records, ctx.header, ctx.ints, ctx.floats, *captures = inputs
        ctx.captures, ctx.programs = len(captures), Header.parse(ctx.header).programs()
        out, lse, max_scores = output
        ctx.save_for_backward(q, k, v, sink, out, lse, *captures, *records)
        ctx.mark_non_differentiable(max_scores)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dout, dlse, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, sink, out, lse, *rest = ctx.saved_tensors
        captures, records = rest[: ctx.captures], rest[ctx.captures :]
        if dout is None and dlse is None:
            return (None,) * (8 + ctx.captures)
        dout = torch.zeros_like(out) if dout is None else dout
        needs = ctx.needs_input_grad
        *gradients, dcaptures = torch.ops.saccade.backward(
            dout, dlse, out, lse, q, k, v, sink, captures, records, ctx.header, ctx.ints, ctx.floats, needs[8:]
        )
        gradients = [given if wanted else None for given, wanted in zip(gradients, needs[:4], strict=True)]
        dcaptures = [given if wanted else None for given, wanted in zip(dcaptures, needs[8:], strict=True)]
        return (*gradients, None, None, None, None, *dcaptures)


class _Gradient(torch.autograd.function._SingleLevelFunction):
    """The backward operator's own autograd: differentiating it is an error, not silence."""

    @staticmethod
    def forward(dout, dlse, out, lse, q, k, v, sink, records, header, ints, floats, wanted, *captures):
        tensors = dout, dlse, out, lse, q, k, v, sink, captures, records
        *found, dcaptures = _below(torch.ops.saccade.backward, *tensors, header, ints, floats, wanted)
        return (*found, *dcaptures)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *gradients):
        raise dispatch.Unsupported(_FIRST)


_FIRST = (
    "the fused backends of saccade.attention have first derivatives in reverse mode alone; second ones, and forward "
    'mode (torch.func.jvp, jacfwd, linearize, hessian), backend="reference" can, in memory for the whole score matrix'
)


def _below(operator: Any, *arguments: Any) -> Any:
    """The operator below autograd. An autograd.Function turns derivatives off while it runs, and with them those that
    transforms around this one of torch.func take."""
    with torch._C._AutoDispatchBelowAutograd():
        if not torch._C._are_functorch_transforms_active():
            return operator(*arguments)
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return operator(*arguments)


def _forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def refuse_tangents(*tensors: Tensor | None) -> None:
    """
    Raises:
        Unsupported: a derivative in forward mode is asked for, which only the reference has.
    """
    if _forward_mode() and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise dispatch.Unsupported(_FIRST)


def needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def refuse_gradients(*tensors: Tensor | None) -> None:
    """
    Raises:
        ValueError: one of them requires a gradient, and `out` was given.
    """
    if needs_gradient(*tensors):
        raise ValueError("out=… is for calls without gradients: leave it away, or call inside of torch.no_grad()")


def _forward_out_autograd(out, q, k, v, sink, captures, *arguments):
    refuse_tangents(out, q, k, v, sink, *captures)
    refuse_gradients(out, q, k, v, sink, *captures)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.saccade.forward_out(out, q, k, v, sink, captures, *arguments)


def _forward_autograd(q, k, v, sink, captures, records, header, ints, floats, lse):
    refuse_tangents(q, k, v, sink, *captures)
    if needs_gradient(q, k, v, sink, *captures):
        if isinstance(form(Header.parse(header).layout), Paged):
            raise dispatch.Unsupported(
                "a paged cache has no gradients: call attention inside of torch.no_grad(), or with Dense or Packed "
                "keys and values"
            )
        with enable_single_level_autograd_function():
            return _Attention.apply(q, k, v, sink, records, header, ints, floats, *captures)  # pyright: ignore[reportAttributeAccessIssue]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.saccade.forward(q, k, v, sink, captures, records, header, ints, floats, lse)


def _backward_autograd(dout, dlse, out, lse, q, k, v, sink, captures, records, header, ints, floats, wanted):
    tensors = dout, dlse, out, lse, q, k, v, sink
    refuse_tangents(*tensors, *captures)
    if needs_gradient(*tensors, *captures):
        with enable_single_level_autograd_function():
            found = _Gradient.apply(*tensors, records, header, ints, floats, wanted, *captures)  # pyright: ignore[reportAttributeAccessIssue]
        return (*found[:4], list(found[4:]))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.saccade.backward(*tensors, captures, records, header, ints, floats, wanted)


library.impl("forward", _forward, "CompositeExplicitAutograd")
library.impl("forward_out", _forward_out, "CompositeExplicitAutograd")
library.impl("backward", _backward, "CompositeExplicitAutograd")
library.impl("forward", _forward_autograd, "Autograd")
library.impl("forward_out", _forward_out_autograd, "Autograd")
library.impl("backward", _backward_autograd, "Autograd")
torch.library.register_fake("saccade::forward", _fake_forward, lib=library)
torch.library.register_fake("saccade::forward_out", _fake_forward_out, lib=library)
torch.library.register_fake("saccade::backward", _fake_backward, lib=library)
for _rule in (batching.forward, batching.forward_out, batching.backward):
    torch.library.register_vmap(f"saccade::{_rule.__name__}", _rule, lib=library)
if torch._C._parse_dispatch_key("Batched"):  # the older vmap's, as long as torch has it
    library.impl("backward", batching.batched_backward, "Batched")
register_flop_formula(torch.ops.saccade.forward, get_raw=True)(flops.forward)
register_flop_formula(torch.ops.saccade.forward_out, get_raw=True)(flops.forward_out)
register_flop_formula(torch.ops.saccade.backward, get_raw=True)(flops.backward)
