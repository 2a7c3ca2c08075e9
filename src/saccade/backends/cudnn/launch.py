"""Runs a Call on cuDNN: builds the graph's operands, runs the graph, and computes what cuDNN leaves out.

Sinks are left to do: with `lse` the logarithm with the sink and `lse'` the one without, `out = exp(lse' - lse) out'`.
cuDNN's backward takes its probabilities from the LSE that it is given, so that nothing else changes there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.backends import Gradients, Launches, Saved
from saccade.backends.cudnn.graphs import (
    TILE,
    BuiltGraph,
    GraphKey,
    ScoreGraph,
    TensorDesc,
    built_graph,
    frontend,
    handle_of,
    on_device,
    score_graph,
    within,
)
from saccade.call import Call, aligned
from saccade.layouts import empty_like_rows
from saccade.masks import Window
from saccade.util.arguments import Unsupported


class UsedRows(NamedTuple):
    """Rows and keys in use of a call that has padding or rows that see no key."""

    rows: Tensor
    """int32 (b, 1, 1, 1): how many; `keys` alike"""
    keys: Tensor
    unused_rows: Tensor
    """bool (b or 1, 1, s_q, 1); `unused_keys` (b or 1, 1, s_k, 1)"""
    unused_keys: Tensor
    empty_rows: Tensor
    """bool (b or 1, 1, s_q): rows that see no key, those not in use among them."""


def forward(call: Call, launches: Launches, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Returns out (b, h_q, s_q, d_v) and lse (b, h_q, s_q), or None if the call does not return it."""
    q, v = call.q, call.v
    out = empty_like_rows(q, v.shape[3])
    if not out.numel() or not call.k.numel():
        return out.zero_(), _empty_lse(call) if lse else None
    used = _used_rows(call)
    tensors = {**_operands(call, used), "out": out}
    row_lse = None
    if lse or call.sink is not None:
        row_lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        tensors["stats"] = row_lse[..., None]
    _run(call, launches, tensors, used, gradient=False)
    if used is not None:
        out.masked_fill_(used.empty_rows[..., None], 0)
        if row_lse is not None:
            row_lse.masked_fill_(used.empty_rows, -torch.inf)
    if call.sink is not None and row_lse is not None:
        row_lse = _add_sink(call.sink, out, row_lse)
        if used is not None:
            row_lse.masked_fill_(used.unused_rows[..., 0], -torch.inf)
    return out, row_lse if lse else None


def backward(call: Call, launches: Launches, saved: Saved) -> Gradients:
    """Returns dq, dk, dv, dsink and the gradients of the score's tensors."""
    q, k, v = call.q, call.k, call.v
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_(), _of_sink(call, saved), _captured(call, launches, saved)
    dout, out, stats, dlse, used = saved.dout, saved.out, saved.lse.contiguous(), saved.dlse, _used_rows(call)
    if used is not None:
        dout, out = _clear(dout, used.empty_rows[..., None]), _clear(out, used.empty_rows[..., None])
        stats = stats.masked_fill(used.empty_rows, torch.inf)  # of these no probability is left
        dlse = None if dlse is None else dlse.masked_fill(used.empty_rows, 0)
    dsink = None
    if call.sink is not None:
        delta = (dout.float() * out.float()).sum(-1)
        dsink = _of_sink(call, saved, delta if saved.dlse is None else delta - saved.dlse)
    operands, wide_dv = _operands(call, used), dv
    if dlse is not None:
        operands["v"], out, dout = append_dlse(operands["v"], out, dout, dlse)
        wide_dv = empty_like_rows(operands["v"], operands["v"].shape[3])
    tensors = {**operands, "out": _aligned(out), "dout": _aligned(dout), "stats": stats[..., None]}
    tensors |= {"dq": dq, "dk": dk, "dv": wide_dv}
    _run(call, launches, tensors, used, gradient=True)
    if dlse is not None:
        dv.copy_(wide_dv[..., : dv.shape[3]])
    if used is not None:
        dq.masked_fill_(used.empty_rows[..., None], 0)
        dk.masked_fill_(used.unused_keys, 0)
        dv.masked_fill_(used.unused_keys, 0)
    return dq, dk, dv, dsink, _captured(call, launches, saved)


def _of_sink(call: Call, saved: Saved, delta: Tensor | None = None) -> Tensor | None:
    """`-sum p_sink delta` with p_sink = exp(sink - lse) and delta = rowsum(dout out) - dlse; rows that are not in use
    have lse = -inf, and those of a sink of +inf, which has no gradient, +inf."""
    if call.sink is None:
        return None
    if delta is None:  # no keys or no rows: only the LSE has a gradient
        delta = torch.zeros_like(saved.lse) if saved.dlse is None else -saved.dlse
    share = torch.exp(call.sink.float()[:, None] - saved.lse)
    return -torch.where(saved.lse.isinf(), 0, share * delta).sum((0, 2)).to(call.sink.dtype)


def _captured(call: Call, launches: Launches, saved: Saved) -> Sequence[Tensor | None]:
    """Returns the gradients of captured tensors, from the kernel that all GPU backends share: cuDNN has none."""
    if not any(saved.wanted):
        return [None] * len(saved.wanted)
    from saccade.backends.device import captured_gradients

    return captured_gradients.gradients(call, launches, saved)


DLSE_COLUMNS = 8
"""Head dims are multiples of it."""


def append_dlse(v: Tensor, out: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v, out and dout with columns by which cuDNN's `rowsum(dout out)` becomes `rowsum(dout out) - dlse`, and nothing
    else changes: cuDNN takes no dlse itself. In the input's precision dlse is a sum of three."""
    parts, rest = [], dlse.float()
    for _ in range(3):
        parts.append(rest.to(dout.dtype))
        rest = rest - parts[-1].float()
    zeros = dout.new_zeros(*dlse.shape, DLSE_COLUMNS - len(parts))
    minus = torch.full_like(dlse, -1, dtype=out.dtype)[..., None].expand(*dlse.shape, DLSE_COLUMNS)
    more = torch.cat([torch.stack(parts, -1), zeros], -1)
    nothing = v.new_zeros(*v.shape[:3], DLSE_COLUMNS)
    return torch.cat([v, nothing], -1), torch.cat([out, minus], -1), torch.cat([dout, more], -1)


def _run(call: Call, launches: Launches, tensors: dict[str, Tensor], used: UsedRows | None, gradient: bool) -> None:
    score, score_inputs = None, []
    window = (call.mask.left, call.mask.right) if isinstance(call.mask, Window) else None
    if call.score is not None:
        score = _score_graph(call, launches, gradient)
        score_inputs = score.tensors(call.score)
    elif used is not None:
        tensors |= {"rows": used.rows, "keys": used.keys}
    # All that a GraphKey holds and the Call's key does not.
    launch = (
        *(gradient, *tensors, call.scale, window, *((x.shape, x.stride()) for x in score_inputs)),
        *((tensors["out"].stride(), tensors["dout"].stride()) if gradient else ()),
    )
    device = tensors["q"].device
    key = launches.get(launch)
    if key is None:
        key = launches[launch] = GraphKey(
            device.index,
            tuple((name, TensorDesc.of(x)) for name, x in tensors.items()),
            call.scale,
            window,
            # Both alignments are the same on whole squares, where more engines know the other.
            "rows" in tensors or tensors["q"].shape[2] != tensors["k"].shape[2],
            call.deterministic and gradient,
            score,
            tuple(map(TensorDesc.of, score_inputs)),
        )
    with on_device(device):
        handle = handle_of(device)
        _graph(call, key, handle).run(tensors, score_inputs, handle)


def _score_graph(call: Call, launches: Launches, gradient: bool) -> ScoreGraph:
    """The callback's, which masks the ends of a backward's last tiles."""
    assert call.score is not None
    graph = score_graph(call.score, gradient)
    rows, keys = call.q.shape[2], call.k.shape[2]
    if not gradient or rows % TILE == keys % TILE == 0:
        return graph
    key = "score graph", call.score.identity
    if key not in launches:
        launches[key] = within(graph, rows, keys)
    return launches[key]


def _graph(call: Call, key: GraphKey, handle: object) -> BuiltGraph:
    """Raises Unsupported, in cuDNN's own words, if cuDNN does not build it."""
    cudnn = frontend()
    try:
        return built_graph(key, handle)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as refused:
        reason = f"cuDNN {cudnn.backend_version()} cannot build the graph: {refused}"
        raise Unsupported(f"no backend runs {call.spec}\n  cudnn: {reason}") from refused


def _used_rows(call: Call) -> UsedRows | None:
    """Returns the UsedRows, or None if all rows are in use and every row sees its diagonal."""
    s_q, s_k, b = call.q.shape[2], call.k.shape[2], call.q.shape[0]
    if not call.layout.tensors and (call.mask is None or s_q <= s_k):
        return None
    extent = call.extent
    unused_rows = extent.q_idx() >= extent.rows
    unused_keys = torch.arange(s_k, device=call.k.device)[None] >= extent.keys
    empty_rows = unused_rows | (extent.keys == 0)
    if call.mask is not None:
        empty_rows = empty_rows | (call.mask.hull(extent).clipped(extent).length() == 0)
    rows, keys = (x.expand(b, 1).to(torch.int32).contiguous().view(b, 1, 1, 1) for x in (extent.rows, extent.keys))
    return UsedRows(rows, keys, unused_rows[:, None, :, None], unused_keys[:, None, :, None], empty_rows[:, None])


def _operands(call: Call, used: UsedRows | None) -> dict[str, Tensor]:
    """Returns q, k and v with zeros in unused rows, and copies of expanded tensors."""
    q, k, v = call.q, call.k, call.v
    if call.layout.tensors and used is not None:
        q, k, v = _clear(q, used.unused_rows), _clear(k, used.unused_keys), _clear(v, used.unused_keys)
    return {"q": _unexpanded(q), "k": _unexpanded(k), "v": _unexpanded(v)}


def _clear(x: Tensor, unused: Tensor) -> Tensor:
    """Returns x with zeros in unused rows, because NaN times a probability of zero is NaN."""
    return torch.where(unused, 0, x)


def _aligned(x: Tensor) -> Tensor:
    return _unexpanded(x) if aligned(x) else x.contiguous()


def _unexpanded(x: Tensor) -> Tensor:
    """Returns x, or a copy if it is expanded."""
    return x.contiguous() if 0 in x.stride() else x


def _empty_lse(call: Call) -> Tensor:
    """Returns the LSE of a call in which no row sees a key."""
    lse = torch.full(call.q.shape[:3], -torch.inf, device=call.q.device)
    if call.sink is None:
        return lse
    seen = call.extent.q_idx() < call.extent.rows
    return torch.where(seen[:, None], call.sink.float()[:, None], lse)


def _add_sink(sink: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Returns the LSE with the sink, and scales out in place by the share that the keys keep."""
    whole = torch.logaddexp(lse, sink.float()[:, None])
    share = torch.where(lse == -torch.inf, 0, torch.exp(lse - whole))
    out.mul_(share[..., None])
    return whole
