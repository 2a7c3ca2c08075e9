"""Packed sequences as a padded batch, for functions that take nothing else, and their results packed again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.bench.providers.base import Prepared, Results
from saccade.layouts import Dense, Packed
from saccade.testing.cases import Inputs


@dataclass(frozen=True)
class Padding:
    """Where each packed row is in a batch (b, h, s, d) whose rows are as long as the longest sequence."""

    q: PaddedSide
    k: PaddedSide

    @staticmethod
    def of(inputs: Inputs) -> Padding:
        layout = inputs.keywords["layout"]
        assert isinstance(layout, Packed)
        q = PaddedSide.of(layout.cu_seqlens_q, layout.seqused_q, inputs.q.shape[0])
        return Padding(q, PaddedSide.of(layout.cu_seqlens_k, layout.seqused_k, inputs.k.shape[0]))

    def inputs(self, packed: Inputs) -> Inputs:
        """The same problem as a padded batch."""
        layout = Dense("bhsd", self.q.used, self.k.used)
        q, dout = self.q.padded(packed.q), self.q.padded(packed.dout)
        keywords = packed.keywords | {"layout": layout}
        return Inputs(q, self.k.padded(packed.k), self.k.padded(packed.v), dout, packed.dlse, keywords)

    def unseen(self) -> Tensor:
        """bool (b, 1, s_q, s_k): rows that are not in use, and keys that are."""
        rows = torch.arange(self.q.longest, device=self.q.used.device) >= self.q.used[:, None]
        keys = torch.arange(self.k.longest, device=self.k.used.device) < self.k.used[:, None]
        return (rows[:, :, None] & keys[:, None])[:, None]

    def undone(self, prepared: Prepared) -> Prepared:
        """The call, with results that are packed again, untimed."""

        def after(results: Results) -> Results:
            sides = (self.q,) if len(results) == 1 else (self.q, self.k, self.k)
            return tuple(side.packed(x) for side, x in zip(sides, results, strict=False))

        return replace(prepared, order="thd", after=after)


@dataclass(frozen=True)
class PaddedSide:
    """The rows of queries, or of keys."""

    used: Tensor
    """(b): rows in use"""
    longest: int
    row: Tensor
    """(n): the batch row of each row that is in use"""
    place: Tensor
    """(n): its place in that batch row"""
    source: Tensor
    """(n): its packed row"""
    total: int
    """t of the packed tensor"""

    @staticmethod
    def of(offsets: Tensor, used: Tensor | None, total: int) -> PaddedSide:
        lengths = offsets.diff()
        in_use = lengths if used is None else used
        longest = int(lengths.max())
        row, place = (torch.arange(longest, device=in_use.device) < in_use[:, None]).nonzero(as_tuple=True)
        return PaddedSide(in_use.long(), longest, row, place, offsets.long()[row] + place, total)

    def padded(self, x: Tensor) -> Tensor:
        """(b, h, s, d) of (t, h, d), with zeros in the padding."""
        padded = x.new_zeros(len(self.used), x.shape[1], self.longest, x.shape[2])
        padded[self.row, :, self.place] = x.detach()[self.source]
        return padded

    def packed(self, x: Tensor) -> Tensor:
        """(t, h, d) of (b, h, s, d)."""
        packed = x.new_zeros(self.total, x.shape[1], x.shape[3])
        packed[self.source] = x[self.row, :, self.place]
        return packed
