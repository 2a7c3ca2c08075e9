"""Rows that each rank pulls out of the others' memory, without packing: pieces of documents are contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from saccade.distributed.once import once
from saccade.distributed.peers import PeerMemory, memory_of, row_bytes
from saccade.distributed.pieces import Piece
from saccade.distributed.rows import RowExchange, Segment, sums_dtype
from saccade.distributed.transport import Transport

Range = tuple[int, int]
"""The first row, and how many."""


class PulledRows(RowExchange):
    """A RowExchange over symmetric memory. Each rank writes the rows that others need, all wait, and a kernel of each
    reads what it needs; back, each writes the gradients of what it had from others, and owners add up theirs as they
    read them, in the order of ranks."""

    def __init__(self, owned: Sequence[list[Piece]], needed: Sequence[list[Piece]], transport: Transport) -> None:
        super().__init__(owned, needed, transport)
        rank = transport.rank
        self.most = max(sum(piece.rows for piece in pieces) for pieces in (*owned, *needed))
        others = [i for i in range(transport.size) if i != rank]
        self.lent = united((s.source, s.rows) for i in others for s in self.sent[i])
        self.borrowed = united((s.target, s.rows) for i in others for s in self.received[i])
        self._there = RowSums(self.needed, self.received)
        back = ([Segment(target, source, n) for source, target, n in part] for part in self.sent)
        self._back = RowSums(self.rows, [*back])

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        return self._read(xs, self.lent, self._there, stage)

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        return self._read(dys, self.borrowed, self._back, stage)

    def _read(self, xs: list[Tensor], ranges: list[Range], rows: RowSums, stage: str) -> list[Tensor]:
        """Rows of all ranks, who write these."""
        xs = [x.contiguous() for x in xs]
        regions = self._write(xs, ranges, stage)
        rank, found = self.transport.rank, [regions(i) for i in range(self.transport.size)]
        ys = [rows.of([x if i == rank else of[t] for i, of in enumerate(found)]) for t, x in enumerate(xs)]
        regions.memory.read(self.transport.timeout)
        return ys

    def _write(self, xs: list[Tensor], ranges: list[Range], stage: str) -> Regions:
        """These rows of this rank, where others find them; returns when all ranks have written theirs."""
        regions = self._regions(xs, stage)
        for start, n in ranges:
            for mine, x in zip(regions(self.transport.rank), xs, strict=True):
                mine[start : start + n].copy_(x[start : start + n])
        self._barrier(regions, stage)
        return regions

    def _regions(self, xs: list[Tensor], stage: str) -> Regions:
        """Memory for an exchange of rows like these, which all ranks are in."""
        group = self.transport.begin(xs, stage)
        try:
            memory = memory_of(group, sum(map(self._size, xs)), xs[0].device)
            memory.begin(self.transport.timeout)
        except RuntimeError as error:
            raise RuntimeError(self.transport.told(stage, xs, error)) from error
        return Regions(self, memory, xs)

    def _barrier(self, regions: Regions, stage: str) -> None:
        try:
            regions.memory.barrier(self.transport.timeout)
        except RuntimeError as error:
            raise RuntimeError(self.transport.told(stage, regions.xs, error)) from error

    def _size(self, x: Tensor) -> int:
        """Bytes of a region for rows like these, which is aligned."""
        return -(-self.most * row_bytes(x) // 256) * 256


class RowSums:
    """Where the rows are that each row here is the sum of: for each rank, segments of its rows and of those here."""

    def __init__(self, rows: int, of_ranks: Sequence[list[Segment]]) -> None:
        self.rows, self.of_ranks = rows, of_ranks
        self._kept: dict[Any, Any] = {}

    def of(self, ranks: list[Tensor]) -> Tensor:
        """Of what each rank has, in their order."""
        like = ranks[0]
        if like.device.type == "cuda":
            table, layers = self.table(like.device)
            kernel: Any = import_module("saccade.backends.triton.rank_sums")
            return kernel.rank_sums([ranks[i] for i in layers], table, like)
        sums = torch.zeros(self.rows, *like.shape[1:], dtype=sums_dtype(like.dtype), device="cpu")
        for rank, segments in zip(ranks, self.of_ranks, strict=True):
            for source, target, n in segments:
                sums[target : target + n] += rank[source : source + n]
        return sums.to(like.dtype)

    @once
    def table(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """(layers, rows) int32: which row of a rank's is part of a sum, -1 for none, in the order of ranks; and the
        rank of each layer."""
        layers: list[Tensor] = []
        ranks: list[int] = []
        for i, segments in enumerate(self.of_ranks):
            mine: list[Tensor] = []
            for source, target, n in segments:
                _lay(mine, self.rows, target, torch.arange(source, source + n, dtype=torch.int32, device="cpu"))
            layers += mine
            ranks += [i] * len(mine)
        table = torch.stack(layers) if layers else torch.empty(0, self.rows, dtype=torch.int32, device="cpu")
        return table.to(device), ranks


def _lay(layers: list[Tensor], rows: int, first: int, places: Tensor) -> None:
    """Into the first layer with room from row `first` on."""
    stop = first + len(places)
    layer = next((x for x in layers if bool((x[first:stop] < 0).all())), None)
    if layer is None:
        layer = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
        layers.append(layer)
    layer[first:stop] = places


class Regions:
    """Where a rank's rows of each tensor are in its memory, in one exchange."""

    def __init__(self, rows: PulledRows, memory: PeerMemory, xs: list[Tensor]) -> None:
        self.rows, self.memory, self.xs = rows, memory, xs
        self.starts = [*accumulate(map(rows._size, xs), initial=0)]

    def __call__(self, rank: int) -> list[Tensor]:
        of = zip(self.starts, self.xs, strict=False)
        return [self.memory.rows(rank, start, x, self.rows.most) for start, x in of]


def united(ranges: Iterable[Range]) -> list[Range]:
    """The rows that are in some of the ranges.

    >>> united([(4, 2), (0, 3), (2, 2), (9, 1)])
    [(0, 6), (9, 1)]
    """
    whole: list[Range] = []
    for start, n in sorted(ranges):
        if whole and start <= sum(whole[-1]):
            first = whole[-1][0]
            whole[-1] = first, max(sum(whole[-1]), start + n) - first
        else:
            whole.append((start, n))
    return whole
