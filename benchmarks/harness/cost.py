"""The cost of a call: floating-point operations and bytes, by the conventions that its peers publish with."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from saccade.layouts import Dense, Layout, Paged
from saccade.masks import Extent, Mask, of_batch_row, of_rows
from saccade.testing.cases import Case, Inputs
from saccade.testing.sdpa import visible_keys

# Products of s_q x s_k matrices: two forward; five backward, with the recomputed scores.
SHARE = {"forward": Fraction(1), "backward": Fraction(5, 2), "forward+backward": Fraction(7, 2)}

_AT_ONCE = 1 << 24
"""Pairs that are tested together where intervals do not decide."""


@dataclass(frozen=True)
class Cost:
    """The least that one call does."""

    flops: int
    """Multiplications and additions in matrix products, of visible pairs alone."""
    bytes: int
    """Every input read once, every output written once."""

    @staticmethod
    def of(case: Case, inputs: Inputs, call: str) -> Cost:
        """Forward: 2 h_q (d + d_v) for each visible pair of query and key; backward: 2.5 times that."""
        forward = 2 * case.h_q * (case.d + case.d_v) * visible_pairs(case, inputs)
        return Cost(int(forward * SHARE[call]), _bytes(case, inputs, call))


def visible_pairs(case: Case, inputs: Inputs) -> Fraction:
    """The number of visible (query, key) pairs, summed over the batch.

    A causal square counts as half of it, `s² / 2` and not `s (s + 1) / 2`, as in all published figures; so does that of
    each packed sequence.
    """
    layout: Layout = inputs.keywords.get("layout", Dense())
    mask: Mask | None = inputs.keywords.get("mask")
    used, device = (layout.seqused_q, layout.seqused_k), inputs.q.device
    if layout.ragged_keys:
        q, k = layout.canonical(inputs.q), layout.canonical(inputs.k)
        total = Fraction(0)
        for b, _, rows, _, keys in layout.sequence_slices(q, k):
            used_q, used_k = (None if x is None else x[b : b + 1] for x in used)
            extent = Extent.of(rows.stop - rows.start, keys.stop - keys.start, used_q, used_k, device)
            own = None if mask is None else of_batch_row(of_rows(mask, rows), b)
            total += _pairs(own, extent, 1, used == (None, None))
        return total
    return _pairs(mask, Extent.of(case.s_q, case.s_k, *used, device), case.b, not layout.tensors)


def _pairs(mask: Mask | None, extent: Extent, b: int, whole: bool) -> Fraction:
    """The pairs of b batch rows; `whole` says that all rows and keys are in use."""
    if whole and mask is not None and mask.kind == "causal" and extent.s_q == extent.s_k:
        return Fraction(b * extent.s_q * extent.s_k, 2)
    if mask is None:
        lengths = extent.rows * extent.keys
    elif mask.exact:
        lengths = mask.hull(extent).clipped(extent).length()
    else:
        return Fraction(_counted(mask, extent, b))
    return Fraction(int(lengths.sum()) * (b if lengths.shape[0] == 1 else 1))


def _counted(mask: Mask, extent: Extent, b: int) -> int:
    """Counts pair by pair, some rows at a time."""
    step = max(1, _AT_ONCE // max(1, b * extent.s_k))
    rows = torch.arange(extent.s_q, device=extent.rows.device)[:, None]
    return sum(int(visible_keys(mask, extent, b, part).expand(b, -1, -1).sum()) for part in rows.split(step))


def _bytes(case: Case, inputs: Inputs, call: str) -> int:
    layout = inputs.keywords.get("layout")
    if isinstance(layout, Paged):  # keys in use: a server's cache holds more
        keys, out = int(layout.seqused_k.sum()), inputs.q.shape[:-1].numel() * inputs.v.shape[-1]
        columns = inputs.k.shape[3] + (0 if case.cache == "latent" else inputs.v.shape[3])
        row = inputs.k.shape[2] * columns
        return (inputs.q.numel() + keys * row + out) * inputs.q.element_size()
    q, k, v, out, lse = (_size(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse))
    forward = q + k + v + out
    # Only a forward that trains writes the LSE, which the backward reads.
    backward = forward + lse + out + q + k + v
    return {"forward": forward, "backward": backward, "forward+backward": forward + lse + backward}[call]


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
