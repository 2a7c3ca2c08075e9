"""From a Problem to graphs: what cuDNN computes, and what is left to do around it.

Sinks are one of these: with `lse` the logarithm with the sink and `lse'` the one without, `out = exp(lse' - lse) out'`.
cuDNN's backward takes its probabilities from the LSE that it is given, so that there nothing else changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.backends import Gradients, Saved, Unsupported
from saccade.backends.cudnn.cache import cache
from saccade.backends.cudnn.frontend import frontend
from saccade.backends.cudnn.graphs import Built, Form, Place, built
from saccade.backends.cudnn.handles import handle
from saccade.backends.cudnn.masked import masked
from saccade.backends.cudnn.modification import Modification, modification
from saccade.backends.cudnn.tiles import beside_tiles, inside
from saccade.backends.device.gradients import sink_gradient
from saccade.layouts import empty_like_rows
from saccade.masks import Window
from saccade.problem import Problem, aligned


class Use(NamedTuple):
    """Of a call in which not every row or key is in use, or sees any."""

    rows: Tensor
    """int32 (b, 1, 1, 1): how many; `keys` alike"""
    keys: Tensor
    unused_rows: Tensor
    """bool (b or 1, 1, s_q, 1); `unused_keys` (b or 1, 1, s_k, 1)"""
    unused_keys: Tensor
    blind: Tensor
    """bool (b or 1, 1, s_q): rows that see no key, those not in use among them."""


def forward(problem: Problem, lse: bool) -> tuple[Tensor, Tensor | None]:
    """out (b, h_q, s_q, d_v) and, if asked for, lse (b, h_q, s_q)."""
    q, k, v = problem.q, problem.k, problem.v
    out = empty_like_rows(q, v.shape[3])
    if not out.numel() or not k.numel():
        return out.zero_(), _nothing(problem) if lse else None
    use = _use(problem)
    if problem.layout.records and use is not None:
        q, k, v = _cleared(q, use.unused_rows), _cleared(k, use.unused_keys), _cleared(v, use.unused_keys)
    given = {"q": _once(q), "k": _once(k), "v": _once(v), "out": out}
    row_lse = None
    if lse or problem.sink is not None:
        row_lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        given["stats"] = row_lse[..., None]
    _run(problem, given, use, gradient=False)
    if use is not None:
        out.masked_fill_(use.blind[..., None], 0)
        if row_lse is not None:
            row_lse.masked_fill_(use.blind, -torch.inf)
    if problem.sink is not None and row_lse is not None:
        row_lse = _with_sink(problem.sink, out, row_lse)
        if use is not None:
            row_lse.masked_fill_(use.unused_rows[..., 0], -torch.inf)
    return out, row_lse if lse else None


def backward(problem: Problem, saved: Saved) -> Gradients:
    """dq, dk, dv, dsink and those of the score's tensors."""
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (q, k, v))
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_(), sink_gradient(problem, saved), _captured(problem, saved)
    dout, out, stats, dlse, use = saved.dout, saved.out, saved.lse.contiguous(), saved.dlse, _use(problem)
    if use is not None:
        dout, out = _cleared(dout, use.blind[..., None]), _cleared(out, use.blind[..., None])
        stats = stats.masked_fill(use.blind, torch.inf)  # of these no probability is left
        dlse = None if dlse is None else dlse.masked_fill(use.blind, 0)
    if problem.layout.records and use is not None:
        q, k, v = _cleared(q, use.unused_rows), _cleared(k, use.unused_keys), _cleared(v, use.unused_keys)
    dsink = None
    if problem.sink is not None:
        delta = (dout.float() * out.float()).sum(-1)
        dsink = sink_gradient(problem, saved, delta if saved.dlse is None else delta - saved.dlse)
    wide_dv = dv
    if dlse is not None:
        v, out, dout = extended(v, out, dout, dlse)
        wide_dv = empty_like_rows(v, v.shape[3])
    given = {"q": _once(q), "k": _once(k), "v": _once(v), "out": _plain(out), "dout": _plain(dout)}
    given |= {"stats": stats[..., None], "dq": dq, "dk": dk, "dv": wide_dv}
    _run(problem, given, use, gradient=True)
    if dlse is not None:
        dv.copy_(wide_dv[..., : dv.shape[3]])
    if use is not None:
        dq.masked_fill_(use.blind[..., None], 0)
        dk.masked_fill_(use.unused_keys, 0)
        dv.masked_fill_(use.unused_keys, 0)
    return dq, dk, dv, dsink, _captured(problem, saved)


def _captured(problem: Problem, saved: Saved) -> Sequence[Tensor | None]:
    """By the kernel that all backends share: cuDNN has no such gradients."""
    if not any(saved.wanted):
        return [None] * len(saved.wanted)
    from saccade.backends.device import captured_gradients

    return captured_gradients.gradients(problem, saved)


MORE = 8
"""Columns: head dims are multiples of it."""


def extended(v: Tensor, out: Tensor, dout: Tensor, dlse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """v, out and dout with columns by which cuDNN's `rowsum(dout out)` becomes `rowsum(dout out) - dlse`, and nothing
    else changes: it takes no dlse itself. In the input's precision dlse is a sum of three."""
    parts, rest = [], dlse.float()
    for _ in range(3):
        parts.append(rest.to(dout.dtype))
        rest = rest - parts[-1].float()
    zeros = dout.new_zeros(*dlse.shape, MORE - len(parts))
    minus = torch.full_like(dlse, -1, dtype=out.dtype)[..., None].expand(*dlse.shape, MORE)
    more = torch.cat([torch.stack(parts, -1), zeros], -1)
    nothing = v.new_zeros(*v.shape[:3], MORE)
    return torch.cat([v, nothing], -1), torch.cat([out, minus], -1), torch.cat([dout, more], -1)


def _run(problem: Problem, given: dict[str, Tensor], use: Use | None, gradient: bool) -> None:
    mod, held = None, []
    band = (problem.mask.left, problem.mask.right) if isinstance(problem.mask, Window) else None
    if problem.score is not None:
        mod = _modification(problem, gradient)
        held = mod.tensors(problem.score)
    elif use is not None:
        given |= {"rows": use.rows, "keys": use.keys}
    # All that a Form holds and the Problem's key does not.
    key = (
        *(gradient, *given, problem.scale, band, *((x.shape, x.stride()) for x in held)),
        *((given["out"].stride(), given["dout"].stride()) if gradient else ()),
    )
    form = problem.launches.get(key)
    if form is None:
        form = problem.launches[key] = Form(
            given["q"].device.index,
            tuple((name, Place.of(x)) for name, x in given.items()),
            problem.scale,
            band if mod is None else None,
            # On whole squares both are the same, and more engines know the other.
            "rows" in given or given["q"].shape[2] != given["k"].shape[2],
            problem.deterministic and gradient,
            mod,
            tuple(map(Place.of, held)),
        )
    device = given["q"].device
    with _on_device(device):
        mine = handle(device)
        _graph(problem, form, mine).run(given, held, mine)


def _modification(problem: Problem, gradient: bool) -> Modification:
    """Of the score and, if there is one, of the mask and of the tensors' ends."""
    assert problem.score is not None
    mod, window = modification(problem.score, gradient), problem.mask
    rows, keys = problem.q.shape[2], problem.k.shape[2]
    ends = gradient and beside_tiles(problem, mod)
    if not isinstance(window, Window) and not ends:
        return mod
    key = "masked", gradient, window, ends
    found = problem.launches.get(key)
    if found is None:
        found = masked(mod, window, keys - rows) if isinstance(window, Window) else mod
        found = problem.launches[key] = inside(found, rows, keys) if ends else found
    return found


def _graph(problem: Problem, form: Form, mine: object) -> Built:
    """
    Raises:
        Unsupported: cuDNN does not build it, in its own words.
    """
    cudnn = frontend()
    try:
        return cache.built(form, lambda: built(form, mine))
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as refused:
        told = f"cuDNN {cudnn.backend_version()} does not build its graph: {refused}"
        raise Unsupported(f"no backend runs {problem.spec()}\n  cudnn: {told}") from refused


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Handles are made for the current device."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def _use(problem: Problem) -> Use | None:
    """None where all is in use, and every row sees its diagonal at least."""
    s_q, s_k, b = problem.q.shape[2], problem.k.shape[2], problem.q.shape[0]
    if not problem.layout.records and (problem.mask is None or s_q <= s_k):
        return None
    extent = problem.extent
    unused_rows = extent.q_idx() >= extent.rows
    unused_keys = torch.arange(s_k, device=problem.k.device)[None] >= extent.keys
    blind = unused_rows | (extent.keys == 0)
    if problem.mask is not None:
        blind = blind | (problem.mask.hull(extent).clipped(extent).length() == 0)
    rows, keys = (x.expand(b, 1).to(torch.int32).contiguous().view(b, 1, 1, 1) for x in (extent.rows, extent.keys))
    return Use(rows, keys, unused_rows[:, None, :, None], unused_keys[:, None, :, None], blind[:, None])


def _cleared(x: Tensor, unused: Tensor) -> Tensor:
    """x with zeros where nothing is in use: NaN times a probability of zero is NaN."""
    return torch.where(unused, 0, x)


def _plain(x: Tensor) -> Tensor:
    """Aligned, and no element twice."""
    return _once(x) if aligned(x) else x.contiguous()


def _once(x: Tensor) -> Tensor:
    """No element twice."""
    return x.contiguous() if 0 in x.stride() else x


def _nothing(problem: Problem) -> Tensor:
    """The LSE of rows that see no key."""
    lse = torch.full(problem.q.shape[:3], -torch.inf, device=problem.q.device)
    if problem.sink is None:
        return lse
    seen = problem.extent.q_idx() < problem.extent.rows
    return torch.where(seen[:, None], problem.sink.float()[:, None], lse)


def _with_sink(sink: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The LSE with one more column; out, in place, is what is left of it."""
    whole = torch.logaddexp(lse, sink.float()[:, None])
    share = torch.where(lse == -torch.inf, 0, torch.exp(lse - whole))
    out.mul_(share[..., None])
    return whole
