"""How far a provider's result is from the exact one, in units of the tolerance that `testing.accuracy` defines.

The oracle answers once for each Cell: for some heads of some sequences, one query head at a time, and for some rows at
a time where the mask allows it. So it holds about ten float64 score matrices of these. Every provider is measured on
those heads, and must be finite on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.bench.grids import Cell
from saccade.bench.providers.base import Prepared, Results
from saccade.layouts import SequencePlace, view_layout
from saccade.testing.call_slice import At, CheckedCall, Precision
from saccade.testing.cases import Inputs
from saccade.testing.error_tally import ErrorTally

_GROUPS = 4
"""Key heads that are checked, with all of their query heads."""
_SCORES = {"cuda": 1 << 31, "cpu": 1 << 25}
"""Elements of score matrices that the oracle works through for one Cell; it takes at least one group."""
_PAIRS = 1 << 28
"""Elements of the score matrix that the oracle holds at once, about ten times in float64."""

_Answer = tuple[Tensor, Tensor, Tensor]
"""exact, eager and terms"""

NAMES = {
    "forward": ("out",),
    "backward": ("dq", "dk", "dv"),
    "forward+backward": ("dq", "dk", "dv"),
    "block mask": (),
}
"""The results of the calls that a Cell times."""


@dataclass(frozen=True)
class _GroupAnswer:
    """The oracle's answer for one group of heads of one sequence; each tensor is (1, heads, s, d)."""

    rows_at: At
    keys_at: At
    answers: dict[str, _Answer]


class Verifier:
    """The exact answer to a Cell."""

    def __init__(self, cell: Cell, inputs: Inputs) -> None:
        self.cell, self.names, self.groups = cell, NAMES[cell.call], []
        self.eps = torch.finfo(inputs.q.dtype).eps
        if not self.names:
            return
        dout = None if cell.call == "forward" else inputs.dout.detach()
        self.call = CheckedCall(inputs.q, inputs.k, inputs.v, dout, None, inputs.keywords).canonical()
        # Peers are held to what a fused backend of the machine is.
        self.precision = Precision.of(inputs.q.dtype, inputs.q.device, "auto")
        places = list(self.call.places())
        if self.call.layout.ragged_keys:  # the oracle may have room for one sequence: the longest
            places.sort(key=lambda place: place.rows.start - place.rows.stop)
        self.groups = [self._group(places[b], head) for b, head in sampled(cell, inputs.q.device.type)]
        del self.call

    def error_ratio(self, results: Results, order: str) -> float:
        """The worst error over its tolerance: at most 1 passes. Infinite where something is not finite.

        Raises:
            ValueError: results of other shapes than the Cell's.
        """
        worst = 0.0
        layout = view_layout(order)
        for name, result in zip(self.names, results, strict=False):
            x = layout.canonical(result.detach())
            tally = ErrorTally(self.eps)
            for group in self.groups:
                answer = group.answers[name]
                part = x[group.keys_at if name in ("dk", "dv") else group.rows_at]
                if part.shape != answer[0].shape:
                    raise ValueError(f"{name} has shape {tuple(x.shape)} in order bhsd")
                tally.add(part, *answer)
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

    def _group(self, place: SequencePlace, key_head: int) -> _GroupAnswer:
        group = self.cell.case.h_q // self.cell.case.h_k
        heads = slice(key_head * group, (key_head + 1) * group)
        answers = [self._head(place, head, key_head) for head in range(heads.start, heads.stop)]
        keys_at = place.batch_k, slice(key_head, key_head + 1), place.keys
        return _GroupAnswer((place.batch_q, heads, place.rows), keys_at, _together(answers, dim=1))

    def _head(self, place: SequencePlace, head: int, key_head: int) -> dict[str, _Answer]:
        """The oracle on one query head of one sequence."""
        answers = []
        at = slice(head, head + 1), slice(key_head, key_head + 1)
        for rows in self._row_slices(place):
            part = self.call.slice(rows, *at, self.precision)
            exact = part.exact()
            eager, terms = part.eager(), part.terms(exact)
            answer = {name: (exact[name].detach(), eager[name].detach(), terms[name].detach()) for name in self.names}
            omitted = (0, 0, 0, place.keys.stop - rows.keys.stop)
            for name in {"dk", "dv"} & answer.keys():
                one, other, third = answer[name]
                answer[name] = pad(one, omitted), pad(other, omitted), pad(third, omitted)
            answers.append(answer)
        return answers[0] if len(answers) == 1 else _together(answers, dim=2)

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


def _together(parts: list[dict[str, _Answer]], dim: int) -> dict[str, _Answer]:
    """Parts of a call side by side in a dimension; gradients of keys are summed."""
    return {name: _joined(name, [answers[name] for answers in parts], dim) for name in parts[0]}


def _joined(name: str, parts: list[_Answer], dim: int) -> _Answer:
    exact, eager, terms = zip(*parts, strict=True)
    if name not in ("dk", "dv"):
        return torch.cat(exact, dim), torch.cat(eager, dim), torch.cat(terms, dim)
    if len(parts) == 1:
        return parts[0]
    total = torch.stack(exact).sum(0)
    # The terms hold the exact result itself once: not each part's share of it, but the sum.
    squares = sum(term**2 - own**2 for term, own in zip(terms, exact, strict=True)) + total**2
    return total, torch.stack(eager).sum(0), squares.sqrt()
