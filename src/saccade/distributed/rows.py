"""Rows from the ranks that have them to those that need them, and sums of their gradients back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.distributed.exchanges import Exchange
from saccade.distributed.once import once
from saccade.distributed.pieces import Piece
from saccade.distributed.transport import Transport


class Segment(NamedTuple):
    """`rows` rows from `source` on, in the rank that has them, which are those from `target` on where needed."""

    source: int
    target: int
    rows: int


def segments(owned: list[Piece], needed: list[Piece]) -> list[Segment]:
    """Which of the needed rows a rank with these pieces has, in the order of its own.

    >>> segments([Piece(0, 4, 8), Piece(1, 0, 2)], [Piece(0, 0, 6), Piece(1, 1, 2)])
    [Segment(source=0, target=4, rows=2), Segment(source=5, target=6, rows=1)]
    """
    of_document: dict[int, list[tuple[Piece, int]]] = defaultdict(list)
    target = 0
    for piece in needed:
        of_document[piece.document].append((piece, target))
        target += piece.rows
    found, source = [], 0
    for mine in owned:
        for piece, first in of_document.get(mine.document, ()):
            start, stop = max(mine.start, piece.start), min(mine.stop, piece.stop)
            if start < stop:
                found.append(Segment(source + start - mine.start, first + start - piece.start, stop - start))
        source += mine.rows
    return found


class RowExchange(Exchange):
    """Rows of all ranks to the ranks that need them: `x[own rows] -> y[needed rows]`, and its adjoint, in which each
    row is the sum over the ranks that had it, in their order, so that its bits repeat."""

    def __init__(self, owned: Sequence[list[Piece]], needed: Sequence[list[Piece]], transport: Transport) -> None:
        rank = transport.rank
        self.transport = transport
        self.rows = sum(piece.rows for piece in owned[rank])
        self.needed = sum(piece.rows for piece in needed[rank])
        super().__init__(self.rows, self.needed)
        self.sent = [segments(owned[rank], wanted) for wanted in needed]
        self.received = [segments(pieces, needed[rank]) for pieces in owned]
        self.own = self.sent[rank]
        self.sent_rows, self.received_rows = (
            [0 if i == rank else sum(segment.rows for segment in part) for i, part in enumerate(parts)]
            for parts in (self.sent, self.received)
        )
        self._kept: dict[Any, Any] = {}

    @once
    def indices(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """For each rank, which own rows it needs, and where its rows are among those needed here."""
        sources = [numbers([(s.source, s.rows) for s in part], device) for part in self.sent]
        return sources, [numbers([(s.target, s.rows) for s in part], device) for part in self.received]

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        sources, targets = self.indices(xs[0].device)
        rank, others = self.transport.rank, self.others
        ys = [x.new_empty(self.needed, *x.shape[1:]) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            y[targets[rank]] = x[sources[rank]]
        if others:
            sent = side_by_side(xs, torch.cat([sources[i] for i in others]))
            received = self.transport.all_to_all(sent, self.received_rows, self.sent_rows, stage, xs)
            target = torch.cat([targets[i] for i in others])
            for y, part in zip(ys, apart(received, ys), strict=True):
                y[target] = part
        return ys

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        sources, targets = self.indices(dys[0].device)
        rank, others = self.transport.rank, self.others
        parts = [[dy[target] if i == rank else dy[:0] for i, target in enumerate(targets)] for dy in dys]
        if others:
            sent = side_by_side(dys, torch.cat([targets[i] for i in others]))
            received = self.transport.all_to_all(sent, self.sent_rows, self.received_rows, stage, dys)
            for mine, theirs in zip(parts, apart(received, dys), strict=True):
                mine[:] = [mine[i] if i == rank else part for i, part in enumerate(theirs.split(self.sent_rows))]
        return [self.summed(mine, [*enumerate(sources)]) for mine in parts]

    @property
    def others(self) -> list[int]:
        return [i for i in range(self.transport.size) if i != self.transport.rank]

    def summed(self, parts: list[Tensor], places: list[tuple[int, Any]]) -> Tensor:
        """Own rows, each the sum of the ranks' parts in their order: `parts[i]` goes to the rows `place`."""
        like = parts[0]
        dx = torch.zeros(self.rows, *like.shape[1:], dtype=sums_dtype(like.dtype), device=like.device)
        for i, place in places:
            dx[place] += parts[i]  # a rank has a row once
        return dx.to(like.dtype)

    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        return (self.rows if backward else self.needed, *given[1:])


class Broadcast(Exchange):
    """Rank 0's numbers to all ranks."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.transport = transport

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        return [self.transport.broadcast(x.clone(), stage) for x in xs]

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        raise RuntimeError(f"{stage}: what rank 0 tells has no gradient")

    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        return given


def side_by_side(xs: list[Tensor], rows: Tensor) -> Tensor:
    """These rows of all tensors, flat, as rows of one."""
    return torch.cat([x[rows].reshape(len(rows), x.shape[1:].numel()) for x in xs], 1)


def apart(both: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The rows of each tensor, in the form of its own."""
    widths = [x.shape[1:].numel() for x in like]
    return [x.view(len(both), *y.shape[1:]) for x, y in zip(both.split(widths, 1), like, strict=True)]


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def numbers(parts: list[tuple[int, int]], device: torch.device | str) -> Tensor:
    """The rows of segments (start, rows), one after the other."""
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=device)
    starts, rows = zip(*parts, strict=True)
    shift = [start - end + n for start, n, end in zip(starts, rows, accumulate(rows), strict=True)]
    return (torch.arange(sum(rows), device="cpu") + repeated(shift, rows)).to(device)


def repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    """int64 on the CPU: each value so many times."""
    both = torch.tensor([values, times], dtype=torch.int64, device="cpu").view(2, -1)
    return both[0].repeat_interleave(both[1])
