"""`attention(…, context=plan)`: one rank's part of a call over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import ops, scores
from saccade.call import Call, autocast, check_call
from saccade.call.descale import EIGHT_BITS
from saccade.call.dropout import Dropout
from saccade.distributed.arriving import ArrivingRows
from saccade.distributed.arriving import attention as arriving_attention
from saccade.distributed.context_plan import ContextPlan, padded
from saccade.distributed.exchanges import heads_error, moved
from saccade.distributed.groups import constant
from saccade.distributed.sharding import reach_of, sees_all_before
from saccade.distributed.transport import counted
from saccade.layouts import Dense, Layout, with_rows
from saccade.layouts.validate import counts_from_first, sink_error
from saccade.masks import KeyInterval, Mask, Selected, Window, as_mask
from saccade.ops import dispatch
from saccade.ops.autograd import forward_mode
from saccade.util import arguments
from saccade.util.arguments import Unsupported

KEYS, PIECES = "the exchange of keys and values", "the exchange of keys and values for pieces"
CAUSAL, BESIDE = "the exchange of keys and values for causal pieces", "the exchange of keys and values beside own ones"
QUERIES, RESULT = "the exchange of query heads", "the exchange of results"


Options = dict[str, Any]
"""The arguments of `attention` besides operands and layout."""
Results = tuple[Tensor, Tensor | None, Tensor | None]
"""out, and, if requested, the LSE and the largest scores"""


def attention(plan: ContextPlan, q: Tensor, k: Tensor, v: Tensor, layout: Any, options: Options) -> Results:
    """This rank's rows of the result. All errors are raised before the first exchange."""
    if torch.compiler.is_compiling() or not isinstance(q, Tensor) or q.device.type != "cpu":
        return _attention(plan, q, k, v, layout, options)
    with counted(plan.rows_transport(), plan.heads_transport()):
        return _attention(plan, q, k, v, layout, options)


def _attention(plan: ContextPlan, q: Tensor, k: Tensor, v: Tensor, layout: Any, options: Options) -> Results:
    arguments.operands(q, k, v)
    if arguments.has_dtensor(q, k, v, options["sink"]):
        raise TypeError("context= takes a rank's rows and the sink as plain tensors, got DTensors: pass x.to_local()")
    arguments.flags(return_lse=options["return_lse"], return_max_scores=options["return_max_scores"])
    given = _layout(plan, layout, q)
    options = options | {"mask": as_mask(options["mask"])}
    _check(plan, given, (q, k, v), options)
    q, k, v = autocast(q, k, v)
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        got = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"q, k and v must share one dtype and one device, got {got}")
    if plan.ranks.heads > 1:
        return _by_heads(plan, given, (q, k, v), options)
    by_positions = options["mask"] is None or all(isinstance(leaf, Window) for leaf in options["mask"].leaves())
    pieces = plan.by_pieces and by_positions and not options["dropout_p"] and options["score_mod"] is None
    layout = plan.pieces_layout(q.device) if pieces else plan.layout(q.device, given.order)
    exchange = plan.pieces_exchange() if pieces else plan.keys_exchange() if plan.ranks.parts > 1 else None
    k, v = (_user_order(_to_rows(given, x)[: plan.used_rows], given) if plan.padding else x for x in (k, v))
    stage = PIECES if pieces else KEYS
    if pieces and plan.arriving is not None and sees_all_before(options["mask"]):
        exchange, stage = plan.arriving, CAUSAL
        if not _derives_otherwise(options):
            return _while_keys_come(exchange, q, k, v, options)
    if exchange is None:
        return _run(plan, _checked(q, k, v, layout, options), options)
    own = _to_rows(given, k), _to_rows(given, v)
    awaited_k, awaited_v = (_user_order(exchange.awaited(x), given) for x in own)
    call = _checked(q, awaited_k, awaited_v, layout, options)
    call = call.replace(given=(q, k, v, None))  # what stood for the result is freed before that comes
    k, v = (with_rows(_user_order(x, given)) for x in exchange(stage, *own))
    return _run(plan, call.replace(given=(call.given[0], k, v, None)), options)


def _derives_otherwise(options: Options) -> bool:
    """Whether a call may need other derivatives than one backward."""
    return options["backend"] == "reference" or forward_mode() or torch._C._are_functorch_transforms_active()


def _while_keys_come(exchange: ArrivingRows, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results:
    """Runs a causal call that starts with the rank's own keys while the others arrive."""
    layouts = exchange.layouts(q.device)
    call = _bound(q, k, v, layouts.own, options)
    awaited = q, exchange.awaited(k), exchange.awaited(v), None
    _plan(call.replace(given=awaited, layout=layouts.whole), options["backend"])
    out, lse, max_scores = arriving_attention(exchange, BESIDE, call, options["backend"])
    return out, lse if options["return_lse"] else None, max_scores if options["return_max_scores"] else None


def _by_heads(plan: ContextPlan, given: Layout, operands: tuple[Tensor, Tensor, Tensor], options: Options) -> Results:
    """Runs the call over all rows of this rank's part and its share of the heads."""
    rows = [_to_rows(given, x)[: plan.used_rows] for x in operands]
    h_q, h_k = rows[0].shape[1], rows[1].shape[1]
    queries, keys = plan.heads_exchange(h_q, h_q), plan.heads_exchange(h_k, h_q)
    first, n = queries.heads[plan.heads_transport().rank]
    layout, needed = plan.layout(operands[0].device, "sbhd"), plan.keys_exchange() if plan.ranks.parts > 1 else None
    # (keys, h_k, b, d) and (keys, h_k, b, d_v) that this rank's rows see
    awaited = [keys.awaited(x) for x in rows[1:]]
    awaited = [queries.awaited(rows[0]), *(awaited if needed is None else map(needed.awaited, awaited))]
    if options["score_mod"] is not None:  # which may read by the numbers of heads of others
        all_heads = (x.new_empty(x.shape[-1]).expand(len(y), *x.shape[1:]) for x, y in zip(rows, awaited, strict=True))
        q, k, v = (_user_order(x, layout) for x in all_heads)
        _bound(q, k, v, layout, options | {"dropout_p": 0.0})
    sink = options["sink"] if options["sink"] is None else options["sink"][first : first + n]
    own = options | {"score_mod": _of_heads(options["score_mod"], awaited[0], first), "sink": sink}
    q, k, v = (_user_order(x, layout) for x in awaited)
    call = _checked(q, k, v, layout, own)
    if call.mask is not None and "h" in call.mask.indices:
        raise Unsupported(_by_head_refusal(f"the mask {call.mask!r} depends on the head"))
    call = call.replace(given=(*rows, None))  # what stood for results is freed before these come
    del awaited, q, k, v
    (both,) = keys(KEYS, torch.cat(rows[1:], dim=-1))
    (q,) = queries(QUERIES, rows[0])
    k, v = both.split([x.shape[-1] for x in operands[1:]], dim=-1)
    k, v = (k, v) if needed is None else needed(KEYS, k, v)
    q, k, v = (with_rows(_user_order(x, layout)) for x in (q, k, v))
    out, lse, max_scores = _run(plan, call.replace(given=(q, k, v, None)), own)
    (out,) = queries.adjoint(RESULT, _to_rows(layout, out))
    out = _user_order(padded(out, plan.padding), given)

    def rows_of_all_heads(x: Tensor | None, asked: bool) -> Tensor | None:
        if x is None or not asked:
            return None
        (x,) = queries.adjoint(RESULT, layout.canonical_lse(x).permute(2, 1, 0).contiguous())
        x = padded(x, plan.padding, -torch.inf)
        return given.ordered_lse(x.permute(2, 1, 0))

    lse = rows_of_all_heads(lse, options["return_lse"])
    return out, lse, rows_of_all_heads(max_scores, options["return_max_scores"])


def _bound(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options) -> Call:
    return check_call(q, k, v, layout=layout, **options)


def _checked(q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: Options) -> Call:
    """The call with operands of the shapes that the exchange will return; errors are raised before the exchange."""
    call = _bound(q, k, v, layout, options)
    if call.dropout is not None and torch._C._functorch.is_batchedtensor(call.dropout.state):  # pyright: ignore[reportAttributeAccessIssue]
        raise Unsupported(
            "context: dropout of torch.vmap(…, randomness='different') is not supported over several ranks: use 'same'"
        )
    _plan(call, options["backend"])
    return call


def _plan(call: Call, backend: str) -> None:
    """Finds a backend, or raises why none runs the call; compiled code when it runs. Meta tensors have none."""
    if not torch.compiler.is_compiling() and not call.given[0].is_meta:
        dispatch.plan_of(call, backend)


def _run(plan: ContextPlan, call: Call, options: Options) -> Results:
    if call.dropout is not None:
        heads = call.given[0].shape[-2 if plan.batch is None else 2]
        call = call.replace(given=call.given, dropout=_common(plan, call.dropout, heads))
    return ops.run(call, options["backend"], options["return_lse"])


def _common(plan: ContextPlan, dropout: Dropout, heads: int) -> Dropout:
    """Rank 0's dropout state, with the offset of this rank's heads."""
    state, ranks = dropout.state, plan.ranks
    stage = f"the seed of dropout_p={dropout.p}"
    if ranks.parts > 1:
        (state,) = moved(constant(id(plan), "_rows_seed"), stage, state)
    if ranks.heads > 1:
        (state,) = moved(constant(id(plan), "_heads_seed"), stage, state)
        # Dropout takes `head ^ offset`, and the first of a power of two of heads is a multiple of it.
        state = torch.stack([state[0], state[1] ^ ranks.rank % ranks.heads * heads])
    return Dropout(state, dropout.p)


# Views: (rows, heads, batch rows, d) is what exchanges take.


def _to_rows(layout: Layout, x: Tensor) -> Tensor:
    return layout.canonical(x).permute(2, 1, 0, 3)


def _user_order(x: Tensor, layout: Layout) -> Tensor:
    return layout.ordered(x.permute(2, 1, 0, 3))


def _of_heads(score_mod: Any, q: Tensor, first: int) -> Any:
    """The score function for heads that are numbered from `first` on."""
    if score_mod is None or isinstance(score_mod, scores.Score):
        return score_mod
    bound = scores.bind(score_mod, q)
    if bound is None or "h" not in bound.indices:
        return score_mod
    if bound.own:
        raise Unsupported(_by_head_refusal(f"{score_mod!r} depends on the head, and has a derivative of its own"))
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b, h + first, q_idx, kv_idx)


def _by_head_refusal(what: str) -> str:
    return f"context: {what}: not supported if ranks divide the heads; plan(…, method='gather') supports it"


# Checks, of what every rank can see before the first exchange


def _layout(plan: ContextPlan, layout: Any, q: Tensor) -> Layout:
    """The layout of the user's operands: the given order for a batch, else packed rows."""
    if not isinstance(layout, Dense) or not layout.plain or (plan.batch is None and layout.order != "bhsd"):
        wanted = "omit layout" if plan.batch is None else "pass its order alone, such as Dense('bshd')"
        raise ValueError(f"the plan says where rows and keys are: {wanted}, got {layout!r} with {plan!r}")
    return layout if plan.batch is not None else plan.layout(q.device)


def _check(plan: ContextPlan, layout: Layout, operands: tuple[Tensor, ...], options: Options) -> None:
    for name, value in (("out", options["out"]), ("descale", options["descale"])):
        if value is not None:
            raise Unsupported(f"context: {name}= is not supported over several ranks: omit it")
    if any(x.is_nested or x.dtype in EIGHT_BITS for x in operands):
        raise Unsupported(
            "context: nested and 8-bit operands are not supported over several ranks: pass plain tensors of 16 bits or "
            f"more, got {', '.join(str(x.dtype) for x in operands)}"
        )
    shapes = [tuple(x.shape) for x in operands]
    if error := layout.shape_error(*(x.shape for x in operands)):
        raise ValueError(f"{error}: q, k and v {shapes} with {plan!r}")
    for x in operands:
        b, _, rows, _ = layout.canonical(x).shape
        if rows != plan.rows or (plan.batch is not None and b != plan.batch):
            wanted = f"{plan.rows} rows" if plan.batch is None else f"{plan.batch} batch rows of {plan.rows}"
            raise ValueError(
                f"rank {plan.rank} has {wanted} of {plan!r}, which plan.shard(x, dim) takes; got q, k and v {shapes}"
            )
    if error := heads_error(plan.ranks.heads, *(layout.canonical(x).shape[1] for x in operands[:2])):
        raise ValueError(f"{error}: plan(…, method='gather') takes any heads")
    _check_mask(plan, options["mask"])
    heads = layout.canonical(operands[0]).shape[1] // plan.ranks.heads
    if options["dropout_p"] and plan.ranks.heads > 1 and heads & (heads - 1):
        raise Unsupported(_by_head_refusal(f"dropout with {heads} heads for each rank, not a power of two"))
    if options["sink"] is not None and (
        error := sink_error(options["sink"], layout.canonical(operands[0]).shape[1], operands[0].device)
    ):
        raise arguments.refusal(options["sink"], f"{error}: q, k and v {shapes}")


def _check_mask(plan: ContextPlan, mask: Mask | None) -> None:
    seen = reach_of(mask)
    if not plan.sharding.reach.holds(seen):
        raise ValueError(
            f"the plan exchanges the keys that {plan.sharding.reach} shows, but the mask {mask!r} may see {seen}: "
            "pass plan(…, mask=…) the widest mask of all calls, or None for all keys"
        )
    leaves = [] if mask is None else [mask, *mask.leaves()]
    if (leaf := next(filter(counts_from_first, leaves), None)) is not None:
        raise Unsupported(
            f"context: {leaf!r} counts the rows and keys of one process: write it as mask_mod(fn), which takes the "
            "positions in each document; documents need no mask, because a plan of their lengths separates them"
        )
    if (leaf := next((leaf for leaf in leaves if isinstance(leaf, Selected)), None)) is not None:
        raise Unsupported(
            f"context: {leaf!r} lists keys that other ranks may have: not supported over several ranks; attend to each "
            "rank's keys and merge the Partials"
        )
    bounds = [x for leaf in leaves if isinstance(leaf, KeyInterval) for x in leaf.tensors]
    if plan.ranks.heads > 1 and any(x.dim() == 1 or x.shape[1] != 1 for x in bounds):
        raise Unsupported(_by_head_refusal(f"{mask!r} has bounds for each row"))
