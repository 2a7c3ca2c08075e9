"""Rows that each rank pulls out of the others' memory, without packing: pieces of documents are contiguous."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.distributed.peers import PeerMemory, memory_of, row_bytes
from saccade.distributed.pieces import Piece
from saccade.distributed.rows import RowExchange, Segment
from saccade.distributed.transport import Transport


class PulledRows(RowExchange):
    """A RowExchange over symmetric memory. Each rank writes what it has, all wait, and each copies what it needs; back,
    each writes the gradients of what it needed, and owners add up theirs in the order of ranks."""

    def __init__(self, owned: Sequence[list[Piece]], needed: Sequence[list[Piece]], transport: Transport) -> None:
        super().__init__(owned, needed, transport)
        rank = transport.rank
        self.most = max(sum(piece.rows for piece in pieces) for pieces in (*owned, *needed))
        order = [(rank + i) % transport.size for i in range(transport.size)]  # peers begin at different ones
        self.pulled = [(i, joined(self.received[i])) for i in order]
        self.returned = [joined(part) for part in self.sent]

    def forward(self, x: Tensor, stage: str) -> Tensor:
        x = x.contiguous()
        memory = self._memory(x, stage)
        memory.begin()
        memory.rows(self.transport.rank, x, self.rows).copy_(x)
        y = x.new_empty(self.needed, *x.shape[1:])
        memory.barrier()
        for i, segments in self.pulled:
            theirs = x if i == self.transport.rank else memory.rows(i, x, self.most)
            for source, target, n in segments:
                y[target : target + n].copy_(theirs[source : source + n])
        memory.end()
        return y

    def backward(self, dy: Tensor, stage: str) -> Tensor:
        dy = dy.contiguous()
        memory = self._memory(dy, stage)
        memory.begin()
        memory.rows(self.transport.rank, dy, self.needed).copy_(dy)
        wide = dy.dtype if dy.dtype in (torch.float32, torch.float64) else torch.float32
        dx = torch.zeros(self.rows, *dy.shape[1:], dtype=wide, device=dy.device)
        memory.barrier()
        for i, segments in enumerate(self.returned):
            theirs = dy if i == self.transport.rank else memory.rows(i, dy, self.most)
            for source, target, n in segments:
                part = theirs[target : target + n]
                # By a copy engine first: a kernel that reads a peer's memory is slower than both.
                dx[source : source + n] += part if i == self.transport.rank else part.clone()
        memory.end()
        return dx.to(dy.dtype)

    def _memory(self, x: Tensor, stage: str) -> PeerMemory:
        return memory_of(self.transport.begin(x, stage), self.most * row_bytes(x), x.device)


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
