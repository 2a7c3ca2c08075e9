"""Results against the oracle, and the bytes of `quantize` against what they must be, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import Prepared, Results
from benchmarks.harness.quantizing import options
from saccade.call.descale import BLOCK, EIGHT_BITS, NAMES
from saccade.layouts import ORDERS, Dense, SequenceSlice
from saccade.ops.quantization import Quantized
from saccade.testing.accuracy import ErrorTally
from saccade.testing.call_slice import At, CheckedCall, Precision
from saccade.testing.cases import Inputs

_GROUPS = 4
"""Key heads that are checked, with all of their query heads."""
_SCORES = {"cuda": 1 << 31, "cpu": 1 << 25}
"""Elements of score matrices that the oracle works through for one Cell; it takes at least one group."""
_PAIRS = 1 << 28
"""Elements of the score matrix that the oracle holds at once, about ten times in float64."""

RESULTS = {
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
        self.cell, self.names = cell, RESULTS[cell.call]
        self.answers: list[_Answer] = []
        self.layout = inputs.keywords.get("layout", Dense())
        self.eps = torch.finfo(torch.bfloat16 if inputs.q.dtype in EIGHT_BITS else inputs.q.dtype).eps
        if not self.names:
            return
        dout = None if cell.call == "forward" else inputs.dout.detach()
        self.call = CheckedCall.of(inputs.q, inputs.k, inputs.v, dout, None, inputs.keywords).canonical()
        # Peers are held to what a fused backend of the machine is.
        self.precision = Precision.of(inputs.q.dtype, inputs.k.dtype, inputs.q.device, "auto")
        places = list(self.call.sequence_slices())
        if self.layout.ragged_keys:  # the oracle may have room for one sequence: the longest
            places.sort(key=lambda sequence: sequence.rows.start - sequence.rows.stop)
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

    def _answers(self, sequence: SequenceSlice, key_head: int) -> Iterator[_Answer]:
        """The answers for one key head of one sequence and its query heads, one query head at a time."""
        group = self.cell.case.h_q // self.cell.case.h_k
        key_heads = slice(key_head, key_head + 1)
        keys_at = sequence.batch_k, key_heads, sequence.keys
        sums: dict[str, Tensor] = {}
        if "dk" in self.names:
            keys = {"dk": self.call.k[keys_at], "dv": self.call.v[keys_at]}
            sums = {name: torch.stack([torch.zeros_like(x, dtype=torch.float64)] * 3) for name, x in keys.items()}
        for head in range(key_head * group, (key_head + 1) * group):
            for rows in self._row_slices(sequence):
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

    def _row_slices(self, sequence: SequenceSlice) -> Iterator[SequenceSlice]:
        """Some rows at a time where their score matrices are too large for a GPU's memory, and the keys that they may
        see: calls of their own, with the same diagonal."""
        case, rows, keys = self.cell.case, sequence.rows, sequence.keys
        s_q, s_k = rows.stop - rows.start, keys.stop - keys.start
        aligned = case.mask == "none" or (case.mask == "causal" and s_q == s_k)
        if s_q * s_k <= _PAIRS or not aligned or case.score != "none" or case.used != "all":
            yield sequence
            return
        step = max(1, _PAIRS // s_k)
        for start in range(0, s_q, step):
            stop = min(start + step, s_q)
            visible = s_k if case.mask == "none" else stop
            yield sequence._replace(
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
    for sequence in reversed(places):  # the last head first: where offsets overflow
        yield divmod(sequence, case.h_k)


STEP = 2.0**-9
"""Between the least numbers of e4m3."""


class BytesVerifier:
    """What `quantize` must return for dense operands, in float64, one key head at a time."""

    names = NAMES

    def __init__(self, mode: str, inputs: Inputs) -> None:
        self.options, self.inputs = options(mode), inputs

    def check(self, prepared: Prepared) -> float:
        return self.error_ratio(cast(Quantized, prepared.call()))

    def error_ratio(self, made: Quantized) -> float:
        """The worst error over what a byte's half step and float32's sums allow: at most 1 passes."""
        return max(ratio for name in NAMES for ratio in self._ratios(name, made))

    def _ratios(self, name: str, made: Quantized) -> Iterator[float]:
        given, codes, descale = getattr(self.inputs, name), getattr(made, name), getattr(made.descale, name)
        b, h_k, s, _ = self.inputs.k.shape if name != "q" else (*self.inputs.k.shape[:2], *given.shape[2:])
        group = given.shape[1] // h_k
        # (b, h_k, n)
        factor = descale.double().expand(b, h_k) if descale.dim() < 3 else descale.double()
        factor = factor if factor.dim() == 3 else factor[..., None]
        largest = torch.zeros_like(factor)
        for i in range(b):
            for j in range(h_k):
                heads = slice(j * group, (j + 1) * group)
                x, shift = self._exact(name, i, heads, j)
                blocks = factor.shape[2]
                by_row = factor[i, j].repeat_interleave(BLOCK)[:s] if blocks > 1 else factor[i, j].expand(s)
                sizes = x.abs().amax((0, 2))
                sizes = torch.nn.functional.pad(sizes, (0, -s % BLOCK)).view(-1, BLOCK).amax(1)
                largest[i, j] = sizes if blocks > 1 else sizes.amax()
                yield _ratio(codes[i, heads].double(), x, by_row[:, None])
                if shift is not None and made.shift is not None:
                    # A sum of d products of numbers, in float32.
                    room = 2.0**-20 * (self.inputs.q[i, heads].double().norm(dim=-1) * self.norm + 1e-30)
                    yield float(((made.shift[i, heads] - shift).abs() / room).amax())
        if self.options["per"] == "tensor":
            largest = largest.amax().expand_as(largest)
        wanted = largest / torch.finfo(codes.dtype).max
        yield float(((factor - wanted).abs() / (wanted * 2.0**-18)).amax())

    def _exact(self, name: str, i: int, heads: slice, j: int) -> tuple[Tensor, Tensor | None]:
        """[group, s, d]: what becomes bytes, and q's product with the mean of keys."""
        x = getattr(self.inputs, name)[i, heads].double()
        shift = None
        if "smooth_k" in self.options and name != "v":
            mean = self.inputs.k[i, j].double().mean(0)
            self.norm = mean.norm()
            x, shift = (x - mean, None) if name == "k" else (x, x @ mean)
        return x @ _hadamard(x.shape[2], x) if "rotate" in self.options and name != "v" else x, shift


def _ratio(codes: Tensor, x: Tensor, factor: Tensor) -> float:
    """The worst `|codes factor - x|` over half a step of the code, and what float32 adds."""
    exponent = torch.frexp(codes).exponent - 4
    half = torch.ldexp(torch.ones_like(codes), exponent).clamp(min=STEP) / 2
    room = half * factor + x.norm(dim=-1, keepdim=True) * 2.0**-21
    return float(torch.nan_to_num((codes * factor - x).abs() / room, nan=torch.inf).amax())


def _hadamard(d: int, like: Tensor) -> Tensor:
    """[d, d]: of neighbouring elements, as many as the largest power of two that divides d."""
    made = like.new_ones(1, 1)
    while d % (2 * len(made)) == 0:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return torch.block_diag(*[made / len(made) ** 0.5] * (d // len(made)))
