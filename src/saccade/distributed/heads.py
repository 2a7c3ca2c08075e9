"""All rows of some heads instead of some rows of all heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.distributed.exchanges import Exchange
from saccade.distributed.rows import sums_dtype
from saccade.distributed.transport import Transport


def heads_of(rank: int, ranks: int, h: int, h_q: int) -> tuple[int, int]:
    """Which of h heads a rank has that has its share of h_q query heads: the first, and how many.

    >>> heads_of(1, 4, 8, 8), heads_of(3, 4, 2, 8)
    ((2, 2), (1, 1))
    """
    if h % ranks == 0:
        return rank * (h // ranks), h // ranks
    return rank * h // ranks, 1


def heads_error(ranks: int, h_q: int, h_k: int) -> str | None:
    """Why so many ranks cannot divide these heads."""
    if h_q % ranks == 0 and (h_k % ranks == 0 or ranks % h_k == 0):
        return None
    return (
        f"{ranks} ranks divide query heads that are a multiple of {ranks}, and key heads that are a multiple or a "
        f"divisor of it, not {h_q} and {h_k}"
    )


class HeadExchange(Exchange):
    """(own rows, h, …) -> (rows of all ranks, own heads, …). Its adjoint adds up the heads that several ranks have, in
    their order; of heads that one rank has each it is the inverse."""

    def __init__(self, rows: Sequence[int], h: int, h_q: int, transport: Transport) -> None:
        self.rows, self.h, self.transport = list(rows), h, transport
        self.heads = [heads_of(i, transport.size, h, h_q) for i in range(transport.size)]
        self.own = self.heads[transport.rank][1]
        super().__init__(self.rows[transport.rank], sum(self.rows), h, self.own)

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        (x,) = xs
        rest = x.shape[2:]
        sent = torch.cat([x[:, first : first + n].flatten() for first, n in self.heads])
        each = self.own * rest.numel()
        received = self.transport.all_to_all(
            sent, [n * each for n in self.rows], [len(x) * n * rest.numel() for _, n in self.heads], stage, xs
        )
        return [received.view(sum(self.rows), self.own, *rest)]

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        (dy,) = dys
        rest, rows = dy.shape[2:], self.rows[self.transport.rank]
        each = self.own * rest.numel()
        counts = [rows * n * rest.numel() for _, n in self.heads]
        received = self.transport.all_to_all(dy.flatten(), counts, [n * each for n in self.rows], stage, dys)
        shared = sum(n for _, n in self.heads) > self.h
        dx = torch.zeros(rows, self.h, *rest, dtype=sums_dtype(dy.dtype) if shared else dy.dtype, device=dy.device)
        for (first, n), part in zip(self.heads, received.split(counts), strict=True):
            dx[:, first : first + n] += part.view(rows, n, *rest)
        return [dx.to(dy.dtype)]

    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        if backward:
            return self.rows[self.transport.rank], self.h, *given[2:]
        return sum(self.rows), self.own, *given[2:]
