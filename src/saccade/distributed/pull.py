"""Rows that each rank pulls out of the others' memory, without packing: pieces of documents are contiguous."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from saccade.distributed.peers import PeerMemory, memory_of, row_bytes
from saccade.distributed.pieces import Piece
from saccade.distributed.rows import RowExchange, Segment
from saccade.distributed.transport import Transport

Range = tuple[int, int]
"""The first row, and how many."""


class PulledRows(RowExchange):
    """A RowExchange over symmetric memory. Each rank writes the rows that others need, all wait, and each copies what
    it needs; back, each writes the gradients of what it had from others, and owners add up theirs in the order of
    ranks."""

    def __init__(self, owned: Sequence[list[Piece]], needed: Sequence[list[Piece]], transport: Transport) -> None:
        super().__init__(owned, needed, transport)
        rank = transport.rank
        self.most = max(sum(piece.rows for piece in pieces) for pieces in (*owned, *needed))
        self.kept = joined(self.own)
        # Peers begin at different ones.
        turns = [(rank + i) % transport.size for i in range(1, transport.size)]
        self.pulled = [(i, joined(self.received[i])) for i in turns]
        self.lent = united((s.source, s.rows) for i in turns for s in self.sent[i])
        self.borrowed = united((s.target, s.rows) for i in turns for s in self.received[i])
        self.returned = [(i, joined(self.sent[i])) for i in turns]
        # Where the rows that rank i returns are among all that are returned.
        self.first = [0, *accumulate(self.sent_rows)]
        self._tables: dict[torch.device, tuple[Tensor, int, int]] = {}

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        ys = [x.new_empty(self.needed, *x.shape[1:]) for x in xs]
        regions = self._write(xs, self.lent, stage)

        def copies() -> None:
            for i, segments in self.pulled:
                for source, target, n in segments:
                    for y, theirs in zip(ys, regions(i), strict=True):
                        y[target : target + n].copy_(theirs[source : source + n])

        event = regions.memory.copied(copies)
        for source, target, n in self.kept:
            for x, y in zip(xs, ys, strict=True):
                y[target : target + n].copy_(x[source : source + n])
        regions.memory.end(event, self.transport.timeout)
        return ys

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        dys = [dy.contiguous() for dy in dys]
        returned = [dy.new_empty(self.first[-1], *dy.shape[1:]) for dy in dys]
        regions = self._write(dys, self.borrowed, stage)

        def copies() -> None:
            for i, segments in self.returned:
                at = self.first[i]
                for _, target, n in segments:
                    for part, theirs in zip(returned, regions(i), strict=True):
                        part[at : at + n].copy_(theirs[target : target + n])
                    at += n

        event = regions.memory.copied(copies)
        regions.memory.end(event, self.transport.timeout)
        return [self._added(*pair) for pair in zip(dys, returned, strict=True)]

    def _write(self, xs: list[Tensor], ranges: list[Range], stage: str) -> Regions:
        """These rows of this rank, where others find them; returns when all ranks have written theirs."""
        group, seconds = self.transport.begin(xs, stage), self.transport.timeout
        try:
            memory = memory_of(group, sum(map(self._size, xs)), xs[0].device)
            memory.begin(seconds)
            regions = Regions(self, memory, xs)
            for start, n in ranges:
                for mine, x in zip(regions(self.transport.rank), xs, strict=True):
                    mine[start : start + n].copy_(x[start : start + n])
            memory.barrier(seconds)
        except RuntimeError as error:
            raise RuntimeError(self.transport.told(stage, xs, error)) from error
        return regions

    def _size(self, x: Tensor) -> int:
        """Bytes of a region for rows like these, which is aligned."""
        return -(-self.most * row_bytes(x) // 256) * 256

    def _added(self, dy: Tensor, returned: Tensor) -> Tensor:
        if dy.device.type == "cuda":
            sums: Any = import_module("saccade.backends.triton.rank_sums")
            return sums.rank_sums(dy, returned, *self._table(dy.device))
        parts, places = [], []
        for i, segments in enumerate(self.sent):
            at = self.first[i]
            for source, target, n in segments:
                places.append((len(parts), slice(source, source + n)))
                parts.append(dy[target : target + n] if i == self.transport.rank else returned[at : at + n])
                at += n
        return self.summed(parts or [dy[:0]], places)

    def _table(self, device: torch.device) -> tuple[Tensor, int, int]:
        """(places, own rows) int32: rows of dy or of what is returned that are parts of an own row's sum, in the order
        of ranks, -1 for none; and which of the places are in dy, those from the first number to the second."""
        if device not in self._tables:
            layers, own, stop = [], 0, 0
            for i, segments in enumerate(self.sent):
                mine, at = [], self.first[i]
                for source, target, n in segments:
                    first = target if i == self.transport.rank else at
                    _lay(mine, self.rows, source, torch.arange(first, first + n, dtype=torch.int32))
                    at += n
                layers += mine
                if i <= self.transport.rank:
                    own, stop = stop, len(layers)
            table = torch.stack(layers) if layers else torch.empty(0, self.rows, dtype=torch.int32)
            self._tables[device] = table.to(device), own, stop
        return self._tables[device]


def _lay(layers: list[Tensor], rows: int, first: int, places: Tensor) -> None:
    """Into the first layer with room from row `first` on."""
    stop = first + len(places)
    layer = next((x for x in layers if bool((x[first:stop] < 0).all())), None)
    if layer is None:
        layer = torch.full((rows,), -1, dtype=torch.int32)
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


def joined(segments: list[Segment]) -> list[Segment]:
    """The same copies, with those that continue one another as one.

    >>> joined([Segment(0, 4, 2), Segment(2, 6, 3), Segment(9, 9, 1)])
    [Segment(source=0, target=4, rows=5), Segment(source=9, target=9, rows=1)]
    """
    whole: list[Segment] = []
    for segment in segments:
        last = whole[-1] if whole else None
        if last is not None and (last.source + last.rows, last.target + last.rows) == segment[:2]:
            whole[-1] = last._replace(rows=last.rows + segment.rows)
        else:
            whole.append(segment)
    return whole


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
