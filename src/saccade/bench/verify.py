"""How far a provider's result is from the exact one, in units of the tolerance that `testing.accuracy` defines.

The oracle answers once for each Cell: for some heads of some sequences, one query head at a time, and for some rows at
a time where the mask allows it. So it holds about ten float64 score matrices of these. Every provider is measured on
those heads, and must be finite on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bench.grids import Cell
from saccade.bench.providers.base import Prepared, Results
from saccade.descale import EIGHT_BITS
from saccade.layouts import ORDERS, Dense, SequencePlace
from saccade.testing.call_slice import At, CheckedCall, Precision
from saccade.testing.cases import Inputs
from saccade.testing.error_tally import ErrorTally

_GROUPS = 4
"""Key heads that are checked, with all of their query heads."""
_SCORES = {"cuda": 1 << 31, "cpu": 1 << 25}
"""Elements of score matrices that the oracle works through for one Cell; it takes at least one group."""
_PAIRS = 1 << 28
"""Elements of the score matrix that the oracle holds at once, about ten times in float64."""

NAMES = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "forward+backward": ("dq", "dk", "dv"),
    "block mask": (),
}
"""The results of the calls that a Cell times."""


class _Answer(NamedTuple):
    """The oracle's answer for one part of a result."""

    name: str
    at: At
    ways: tuple[Tensor, Tensor, Tensor]
    """exact, eager and terms, (1, heads, s, d)"""


class Verifier:
    """The exact answer to a Cell."""

    def __init__(self, cell: Cell, inputs: Inputs) -> None:
        self.cell, self.names = cell, NAMES[cell.call]
        self.answers: list[_Answer] = []
        self.layout = inputs.keywords.get("layout", Dense())
        self.eps = torch.finfo(torch.bfloat16 if inputs.q.dtype in EIGHT_BITS else inputs.q.dtype).eps
        if not self.names:
            return
        dout = None if cell.call == "forward" else inputs.dout.detach()
        self.call = CheckedCall.of(inputs.q, inputs.k, inputs.v, dout, None, inputs.keywords).canonical()
        # Peers are held to what a fused backend of the machine is.
        self.precision = Precision.of(inputs.q.dtype, inputs.k.dtype, inputs.q.device, "auto")
        places = list(self.call.places())
        if self.layout.ragged_keys:  # the oracle may have room for one sequence: the longest
            places.sort(key=lambda place: place.rows.start - place.rows.stop)
        for b, key_head in sampled(cell, inputs.q.device.type):
            self.answers += self._answers(places[b], key_head)
        del self.call

    def error_ratio(self, results: Results, order: str) -> float:
        """The worst error over its tolerance: at most 1 passes. Infinite where something is not finite.

        Raises:
            ValueError: results of other shapes than the Cell's.
        """
        worst = 0.0
        layout = Dense(order) if order in ORDERS else self.layout
        for name, result in zip(self.names, results, strict=False):
            x = layout.canonical(result.detach())
            tally = ErrorTally(self.eps)
            for answer in self.answers:
                if answer.name == name:
                    part = x[answer.at]
                    if part.shape != answer.ways[0].shape:
                        raise ValueError(f"{name} has shape {tuple(x.shape)} in order bhsd")
                    tally.add(part, *answer.ways)
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

    def _answers(self, place: SequencePlace, key_head: int) -> Iterator[_Answer]:
        """The answers for one key head of one sequence and its query heads, one query head at a time."""
        group = self.cell.case.h_q // self.cell.case.h_k
        key_heads = slice(key_head, key_head + 1)
        keys_at = place.batch_k, key_heads, place.keys
        sums: dict[str, Tensor] = {}
        if "dk" in self.names:
            keys = {"dk": self.call.k[keys_at], "dv": self.call.v[keys_at]}
            sums = {name: torch.stack([torch.zeros_like(x, dtype=torch.float64)] * 3) for name, x in keys.items()}
        for head in range(key_head * group, (key_head + 1) * group):
            for rows in self._row_slices(place):
                part = self.call.slice(rows, slice(head, head + 1), key_heads, self.precision)
                exact = part.exact()
                results = exact, part.eager(), part.terms(exact)
                for name in self.names:
                    value, eager, terms = (result[name].detach() for result in results)
                    if name in sums:
                        # The terms hold the exact result itself once: not each part's share of it, but the sum.
                        visible = sums[name][..., : value.shape[2], :]
                        visible += torch.stack([value, eager.to(value), terms**2 - value**2])
                    else:
                        yield _Answer(name, part.rows_at, (value, eager, terms))
        for name, (value, eager, squares) in sums.items():
            yield _Answer(name, keys_at, (value, eager, (squares + value**2).sqrt()))

    def _row_slices(self, place: SequencePlace) -> Iterator[SequencePlace]:
        """Some rows at a time where their score matrices are too large for a GPU's memory, and the keys that they may
        see: calls of their own, with the same diagonal."""
        case, rows, keys = self.cell.case, place.rows, place.keys
        s_q, s_k = rows.stop - rows.start, keys.stop - keys.start
        aligned = case.mask == "none" or (case.mask == "causal" and s_q == s_k)
        if s_q * s_k <= _PAIRS or not aligned or case.score != "none" or case.used != "all":
            yield place
            return
        step = max(1, _PAIRS // s_k)
        for start in range(0, s_q, step):
            stop = min(start + step, s_q)
            visible = s_k if case.mask == "none" else stop
            yield place._replace(
                rows=slice(rows.start + start, rows.start + stop), keys=slice(keys.start, keys.start + visible)
            )


def sampled(cell: Cell, device: str) -> Iterator[tuple[int, int]]:
    """(sequence, key head): the first, the last, and some between; as many as the longest sequence allows."""
    case = cell.case
    every = case.b * case.h_k
    group = case.h_q // max(1, case.h_k)
    cost = max(1, group * case.s_q * case.s_k)
    count = min(every, _GROUPS, max(1, _SCORES.get(device, _SCORES["cpu"]) // cost))
    places = dict.fromkeys(round(i * (every - 1) / max(1, count - 1)) for i in range(count))
    for place in reversed(places):  # the last head first: where offsets overflow
        yield divmod(place, case.h_k)
