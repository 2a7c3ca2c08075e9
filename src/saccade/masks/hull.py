"""The lengths of a call, and intervals of keys, one for each query row."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Extent(NamedTuple):
    """The lengths of one call: query row i of batch row b sits on key `i + keys[b] - rows[b]`, bottom-right aligned."""

    s_q: int
    s_k: int
    rows: Tensor
    """(b or 1, 1) integer: query rows in use."""
    keys: Tensor
    """(b or 1, 1) integer: keys in use."""

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
