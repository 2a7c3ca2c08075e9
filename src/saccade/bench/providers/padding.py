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
        assert layout.cu_seqlens_k is not None
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
        return (~self.q.in_use[:, :, None] & self.k.in_use[:, None])[:, None]

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
    in_use: Tensor
    """bool (b, longest): which rows of the padded batch are"""
    source: Tensor
    """(n): the packed row of each row in use"""
    total: int
    """t of the packed tensor"""

    @staticmethod
    def of(offsets: Tensor, used: Tensor | None, total: int) -> PaddedSide:
        lengths = offsets.diff()
        used = (lengths if used is None else used).long()
        in_use = torch.arange(int(lengths.max()), device=used.device) < used[:, None]
        row, place = in_use.nonzero(as_tuple=True)
        return PaddedSide(used, in_use, offsets.long()[row] + place, total)

    def padded(self, x: Tensor) -> Tensor:
        """(b, h, s, d) of (t, h, d), with zeros in the padding."""
        padded = x.new_zeros(*self.in_use.shape, *x.shape[1:])
        padded[self.in_use] = x.detach()[self.source]
        return padded.transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """(t, h, d) of (b, h, s, d)."""
        packed = x.new_zeros(self.total, x.shape[1], x.shape[3])
        packed[self.source] = x.transpose(1, 2)[self.in_use]
        return packed
