"""Packed sequences in named problems, and their places for the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from saccade.layouts import Layout, Packed

if TYPE_CHECKING:
    from saccade.testing.cases import Case


class PackedSide(NamedTuple):
    """The lengths of a drawn problem's queries, or of its keys."""

    offsets: Tensor
    """(b + 1); of ranges (b), where they start"""
    used: Tensor | None
    """(b)"""
    unused: Tensor
    """(t): rows after the used ones, and after the last sequence; of ranges those in none"""
    longest: int


def drawn_lengths(s: int, b: int, generator: torch.Generator) -> Tensor:
    """(b): the full length s, drawn ones, and zeros."""
    lengths = torch.randint(0, s + 1, (b,), generator=generator)
    lengths[:1] = s
    lengths[2::3] = 0
    return lengths


def sides(case: Case, generator: torch.Generator) -> tuple[PackedSide, PackedSide]:
    """Queries and keys."""
    lengths_q = torch.tensor(case.lengths) if case.lengths else drawn_lengths(case.s_q, case.b, generator)
    lengths_k = lengths_q if case.s_q == case.s_k else drawn_lengths(case.s_k, case.b, generator)
    queries = _side(lengths_q, "q" in case.used, case.tail, generator)
    if case.ranges:
        return queries, _ranges(lengths_k, case.tail, generator)
    return queries, _side(lengths_k, "k" in case.used, case.tail, generator)


def _ranges(lengths: Tensor, tail: int, generator: torch.Generator) -> PackedSide:
    """Ranges of half again as many rows as the longest has: most overlap, and some rows may be in none."""
    longest = int(lengths.max()) if len(lengths) else 0
    t = longest + longest // 2
    starts = (torch.rand(len(lengths), generator=generator) * (t - lengths + 1)).long()
    row = torch.arange(t + tail)[:, None]
    unused = ~((row >= starts) & (row < starts + lengths)).any(1)
    return PackedSide(starts.int(), lengths.int(), unused, longest)


def _side(lengths: Tensor, ragged: bool, tail: int, generator: torch.Generator) -> PackedSide:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    used = (torch.rand(len(lengths), generator=generator) * (lengths + 1)).long() if ragged else None
    in_use = lengths if used is None else used
    row = torch.arange(int(offsets[-1]) + tail)
    b = torch.bucketize(row, offsets[1:], right=True)
    inside = torch.cat([in_use, torch.zeros(1, dtype=torch.int64)])  # after the last sequence nothing is in use
    unused = row - offsets[b] >= inside[b]
    return PackedSide(
        offsets.int(), None if used is None else used.int(), unused, int(lengths.max()) if len(lengths) else 0
    )


def layout(q: PackedSide, k: PackedSide, device: torch.device | str, ranges: bool = False) -> Packed:
    used_q, used_k = (None if side.used is None else side.used.to(device) for side in (q, k))
    if ranges:
        starts = k.offsets.to(device)
        return Packed(q.offsets.to(device), None, q.longest, k.longest, used_q, used_k, starts_k=starts)
    return Packed(q.offsets.to(device), k.offsets.to(device), q.longest, k.longest, used_q, used_k)


def beyond(found: dict[str, Tensor], layout: Layout) -> Iterator[tuple[str, Tensor, float]]:
    """The rows of results after the last sequence, and the value that they must have, to the bit. Of ranges the sums
    over sequences tell it."""
    q, k = (None if x is None else int(x[-1]) for x in (layout.cu_seqlens_q, layout.cu_seqlens_k))
    for name, end in (("out", q), ("alone", q), ("dq", q), ("dk", k), ("dv", k)):
        if name in found and end is not None:
            yield name, found[name][end:], 0.0
    if q is not None:
        yield from ((name, found[name][:, q:], -torch.inf) for name in ("lse", "max_scores") if name in found)
