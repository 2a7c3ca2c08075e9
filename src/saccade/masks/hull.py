"""The lengths of a call, and intervals of keys, one for each query row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FARTHEST = 1 << 28
"""Positions are from -FARTHEST to FARTHEST, so that sums of a few stay inside int32."""


class Positions(NamedTuple):
    """Query row i stands at p = q + i, or at q[i] where each row has a position; key j stands at r = k + j."""

    q: int | Tensor
    """an int; a tensor (b or 1, 1), an offset for each sequence; (b or 1, s_q), or (t_q,) for queries end to end, a
    position for each row"""
    k: int | Tensor
    """an int, or (b or 1, 1)"""
    per_row: bool
    """Whether q is a position for each row."""

    @property
    def counted(self) -> bool:
        """Whether rows and keys have their numbers as positions, as far as the host knows."""
        return not (isinstance(self.q, Tensor) or isinstance(self.k, Tensor)) and self.q == 0 and self.k == 0


class Extent(NamedTuple):
    """The lengths of one call, and where its rows and keys stand: without positions query row i of batch row b is on
    the diagonal at key `i + keys[b] - rows[b]`, bottom-right aligned, and functions count rows and keys from 0."""

    s_q: int
    s_k: int
    rows: Tensor
    """(b or 1, 1) integer: query rows in use."""
    keys: Tensor
    """(b or 1, 1) integer: keys in use."""
    p: Tensor | None = None
    """(b or 1, s_q) integer: the position of each row, or None"""
    k: Tensor | None = None
    """(b or 1, 1) integer: the position of the first key; with `p`"""
    heads: int | None = None
    """query heads of the call, if it is known"""

    def at(self, positions: Positions | None) -> Extent:
        """The same extent with positions."""
        if positions is None:
            return self
        q, k = (
            x.long().clamp(-FARTHEST, FARTHEST) if isinstance(x, Tensor) else torch.full_like(self.rows[:1], x)
            for x in positions[:2]
        )
        return self._replace(p=q if positions.per_row else q + self.q_idx(), k=k)

    @property
    def differs(self) -> bool:
        """Whether batch rows have positions of their own."""
        return self.p is not None and self.k is not None and max(self.p.shape[0], self.k.shape[0]) > 1

    def q_position(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """The index by which functions know row q_idx of batch row b; all broadcast."""
        return q_idx if self.p is None else at(self.p, b, q_idx)

    def k_position(self, b: Tensor, kv_idx: Tensor) -> Tensor:
        """The index by which functions know a key."""
        return kv_idx if self.k is None else kv_idx + self.first_key(b)

    def diagonal(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """The number of the key that stands where the row does."""
        if self.p is None or self.k is None:
            off = (self.keys - self.rows)[:, 0]
            return q_idx + (off[0] if off.shape[0] == 1 else off[b])
        return at(self.p, b, q_idx) - self.first_key(b)

    def diagonals(self) -> Tensor:
        """The index of every row, (b or 1, s_q)."""
        if self.p is None or self.k is None:
            return self.q_idx() + self.keys - self.rows
        return self.p - self.k

    def first_key(self, b: Tensor) -> int | Tensor:
        """The position of key 0."""
        return 0 if self.k is None else at(self.k, b, b)

    @staticmethod
    def of(s_q: int, s_k: int, seqused_q: Tensor | None, seqused_k: Tensor | None, device: torch.device) -> Extent:
        def column(used: Tensor | None, s: int) -> Tensor:
            if used is None:
                return torch.full((1, 1), s, dtype=torch.int64, device=device)
            return used.to(torch.int64).clamp(0, s)[:, None]

        return Extent(s_q, s_k, column(seqused_q, s_q), column(seqused_k, s_k))

    def q_idx(self) -> Tensor:
        """(1, s_q)"""
        return torch.arange(self.s_q, device=self.rows.device)[None]


def at(x: Tensor, b: Tensor, i: Tensor) -> Tensor:
    """x[b, i], where one batch row, or one i, stands for all."""
    batch, row = (j if n > 1 else torch.zeros_like(j) for j, n in ((b, x.shape[0]), (i, x.shape[1])))
    return x[batch, row]


class Interval(NamedTuple):
    """Keys `[lo, hi)` for every query row; each (b or 1, s_q) integer. Empty where `hi <= lo`."""

    lo: Tensor
    hi: Tensor

    def intersection(self, other: Interval) -> Interval:
        return Interval(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def length(self) -> Tensor:
        return (self.hi - self.lo).clamp(min=0)

    def hull(self, other: Interval) -> Interval:
        """The smallest interval that holds both; an empty one does not count."""
        first, second = self.hi > self.lo, other.hi > other.lo
        lo = torch.where(first & second, torch.minimum(self.lo, other.lo), torch.where(first, self.lo, other.lo))
        hi = torch.where(first & second, torch.maximum(self.hi, other.hi), torch.where(first, self.hi, other.hi))
        return Interval(lo, hi)

    def union(self, other: Interval) -> Interval:
        """The union where it is an interval, otherwise the longer of the two."""
        touch = (self.lo <= other.hi) & (other.lo <= self.hi) & (self.length() > 0) & (other.length() > 0)
        both, longer = self.hull(other), self.length() >= other.length()
        return Interval(
            torch.where(touch, both.lo, torch.where(longer, self.lo, other.lo)),
            torch.where(touch, both.hi, torch.where(longer, self.hi, other.hi)),
        )

    def less(self, first: Tensor | None) -> Interval:
        """Of positions of keys as one of their numbers; key 0 stands at `first` (b or 1, 1)."""
        return self if first is None else Interval(*torch.broadcast_tensors(self.lo - first, self.hi - first))

    def clipped(self, extent: Extent) -> Interval:
        """Inside the keys in use; empty, at zero, for rows that are not in use."""
        used = extent.q_idx() < extent.rows
        lo = torch.where(used, self.lo.clamp(min=0), 0)
        hi = torch.where(used, torch.minimum(self.hi, extent.keys), 0)
        return Interval(*torch.broadcast_tensors(lo, torch.maximum(lo, hi)))


def everything(extent: Extent) -> Interval:
    """All keys, for every row."""
    lo = torch.zeros_like(extent.q_idx() + extent.keys)
    return Interval(lo, lo + extent.keys)


def nothing(extent: Extent) -> Interval:
    """No key, for any row."""
    lo = torch.zeros_like(extent.q_idx() + extent.keys)
    return Interval(lo, lo)
