"""How far a provider's result is from the exact one, in units of the tolerance that `testing.accuracy` defines.

The oracle's answers are computed once for a Cell, for some heads of some batch rows, one query head at a time, and some
of its rows where the mask allows it, so that ten float64 score matrices of these are all the memory it takes; every
provider is measured on those heads, and has to be finite on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.bench.grids import Cell
from saccade.bench.providers.base import Prepared, Results
from saccade.layouts import Dense, Layout, Packed, form
from saccade.problem import Problem
from saccade.testing import packed
from saccade.testing.call_slice import At, CallSlice, Precision
from saccade.testing.cases import Inputs
from saccade.testing.error_tally import ErrorTally
from saccade.testing.shifted import shift_mask, shift_score

_GROUPS = 4
"""Key heads, with all of their query heads, that are looked at."""
_SCORES = {"cuda": 1 << 31, "cpu": 1 << 25}
"""Elements of score matrices that the oracle works through for one Cell, and at least one group."""

_PAIRS = 1 << 28
"""Of a score matrix that the oracle holds at once, about ten times in float64."""

_Ways = tuple[Tensor, Tensor, Tensor]
"""exact, eager and terms"""

NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv"), "forward+backward": ("dq", "dk", "dv")}
"""What the call of each mode returns."""


@dataclass(frozen=True)
class _Truth:
    """The oracle on one group of heads of one sequence: result name -> (exact, eager, terms), each (1, heads, s, d)."""

    rows_at: At
    """of what q's rows have"""
    keys_at: At
    ways: dict[str, _Ways]


class Verifier:
    """The exact answer to a Cell."""

    def __init__(self, cell: Cell, inputs: Inputs) -> None:
        self.names = NAMES[cell.mode]
        self.eps = torch.finfo(inputs.q.dtype).eps
        layout: Layout = inputs.keywords.get("layout", Dense())
        places = list(packed.places(layout, layout.canonical(inputs.q), layout.canonical(inputs.k)))
        if isinstance(layout, Packed):  # the longest first: where the oracle has room for one, it is that
            places.sort(key=lambda place: place.rows.start - place.rows.stop)
        where = sampled(cell, inputs.q.device.type)
        self.truths = [_truth(cell, inputs, places[row], key_head, self.names) for row, key_head in where]

    def error_ratio(self, results: Results, order: str) -> float:
        """The worst error over its tolerance: at most 1 passes. Infinite where something is not finite.

        Raises:
            ValueError: results of other shapes than the Cell's.
        """
        worst = 0.0
        layout = form(order)
        for name, result in zip(self.names, results, strict=False):
            x = layout.canonical(result.detach())
            tally = ErrorTally(self.eps)
            for truth in self.truths:
                ways = truth.ways[name]
                part = x[truth.keys_at if name in ("dk", "dv") else truth.rows_at]
                if part.shape != ways[0].shape:
                    raise ValueError(f"{name} has shape {tuple(x.shape)} in order bhsd")
                tally.add(part, *ways)
            worst = max(worst, tally.ratio(), 0.0 if bool(x.isfinite().all()) else math.inf)
        return worst

    def check(self, prepared: Prepared) -> float:
        """The error ratio of one call.

        Raises:
            ValueError: fewer results than the mode has.
        """
        if prepared.before:
            prepared.before()
        results = prepared.call()
        if prepared.after:
            results = prepared.after(results)
        if len(results) < len(self.names):
            raise ValueError(f"returned {len(results)} results, not {', '.join(self.names)}")
        return self.error_ratio(results, prepared.order)


def sampled(cell: Cell, device: str) -> Iterator[tuple[int, int]]:
    """(batch row, key head): the first, the last, and some between; packed, as many as the longest sequence allows."""
    case = cell.case
    every = case.b * case.h_k
    group = case.h_q // max(1, case.h_k)
    cost = max(1, group * case.s_q * case.s_k)
    count = min(every, _GROUPS, max(1, _SCORES.get(device, _SCORES["cpu"]) // cost))
    places = dict.fromkeys(round(i * (every - 1) / max(1, count - 1)) for i in range(count))
    for place in reversed(places):  # the last head first: where offsets overflow
        yield divmod(place, case.h_k)


def _truth(cell: Cell, inputs: Inputs, place: packed.SequencePlace, key_head: int, names: tuple[str, ...]) -> _Truth:
    group = cell.case.h_q // cell.case.h_k
    batch, rows = place.batch_q, place.rows
    heads = slice(key_head * group, (key_head + 1) * group)
    rows_at, keys_at = (batch, heads, rows), (place.batch_k, slice(key_head, key_head + 1), place.keys)
    found = [
        _head(cell, inputs, place.number, (batch, slice(head, head + 1), rows), keys_at, names)
        for head in range(heads.start, heads.stop)
    ]
    return _Truth(rows_at, keys_at, _together(found, dim=1))


def _head(cell: Cell, inputs: Inputs, b: int, rows_at: At, keys_at: At, names: tuple[str, ...]) -> dict[str, _Ways]:
    """The oracle on one query head of one sequence."""
    found = []
    for rows, keys in _slices(cell, rows_at[2], keys_at[2]):
        part = _part(cell, inputs, b, (*rows_at[:2], rows), (*keys_at[:2], keys))
        exact = part.exact()
        eager, terms = part.eager(), part.terms(exact)
        ways = {name: (exact[name].detach(), eager[name].detach(), terms[name].detach()) for name in names}
        beyond = (0, 0, 0, keys_at[2].stop - keys.stop)
        for name in {"dk", "dv"} & ways.keys():
            ways[name] = tuple(torch.nn.functional.pad(x, beyond) for x in ways[name])  # pyright: ignore[reportArgumentType]
        found.append(ways)
    return found[0] if len(found) == 1 else _together(found, dim=2)


def _slices(cell: Cell, rows: slice, keys: slice) -> Iterator[tuple[slice, slice]]:
    """Rows, some at a time where their score matrices are too large for a GPU's memory, and the keys that they may see:
    calls of their own, with the same diagonal."""
    case, s_q, s_k = cell.case, rows.stop - rows.start, keys.stop - keys.start
    aligned = case.mask == "none" or (case.mask == "causal" and s_q == s_k)
    if s_q * s_k <= _PAIRS or not aligned or case.score != "none" or case.used != "all":
        yield rows, keys
        return
    step = max(1, _PAIRS // s_k)
    for start in range(0, s_q, step):
        stop = min(start + step, s_q)
        seen = s_k if case.mask == "none" else stop
        yield slice(rows.start + start, rows.start + stop), slice(keys.start, keys.start + seen)


def _together(parts: list[dict[str, _Ways]], dim: int) -> dict[str, _Ways]:
    """Parts of a call, side by side in a dimension; what keys get of all of them is summed."""
    return {name: _joined(name, [ways[name] for ways in parts], dim) for name in parts[0]}


def _joined(name: str, parts: list[_Ways], dim: int) -> _Ways:
    exact, eager, terms = zip(*parts, strict=True)
    if name not in ("dk", "dv"):
        return torch.cat(exact, dim), torch.cat(eager, dim), torch.cat(terms, dim)
    if len(parts) == 1:
        return parts[0]
    total = torch.stack(exact).sum(0)
    # The terms hold the exact result itself once: not each part's share of it, but the sum.
    squares = sum(term**2 - own**2 for term, own in zip(terms, exact, strict=True)) + total**2
    return total, torch.stack(eager).sum(0), squares.sqrt()


def _part(cell: Cell, inputs: Inputs, b: int, rows_at: At, keys_at: At) -> CallSlice:
    """One query head of batch row or sequence b."""
    layout: Layout = inputs.keywords.get("layout", Dense())
    mask, sink, head = inputs.keywords.get("mask"), inputs.keywords.get("sink"), rows_at[1]
    q, k, v, dout = (layout.canonical(x.detach()) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    used = (None if x is None else x[b : b + 1] for x in (layout.seqused_q, layout.seqused_k))
    problem = Problem(
        q=q[rows_at],
        k=k[keys_at],
        v=v[keys_at],
        sink=None if sink is None else sink.detach()[head],
        layout=Dense("bhsd", *used),
        mask=shift_mask(mask, b, head.start),
        score=shift_score(inputs.keywords.get("score_mod"), q, b, head.start),
        scale=q.shape[-1] ** -0.5,
    )
    # Peers are held to what a fused backend of the machine is.
    precision = Precision.of(q.dtype, q.device, "auto")
    return CallSlice(rows_at, keys_at, problem, None if cell.mode == "forward" else dout[rows_at], None, precision)
