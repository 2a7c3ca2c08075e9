"""What a serving engine does around attention: requests in chunks, pages and slots, and what a step must give."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Packed, attention
from saccade.call.partial import Partial
from saccade.testing import check
from saccade.testing.accuracy import random

UNTOUCHED = 7.0


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer."""

    q: int = 4
    k: int = 2
    d: int = 32
    d_v: int = 32


@dataclass
class Step:
    """A batch: rows of requests end to end, in their order, then padding."""

    q: Tensor
    """(tokens, h_q, d); padding is NaN, as are k_new's and v_new's."""
    k_new: Tensor
    v_new: Tensor
    offsets: Tensor
    """(b + 1,) int32: where each request's rows begin"""
    used: Tensor
    """(b,) int32: keys of each request, with the new ones"""
    table: Tensor
    """(b, width) int32; entries that no request uses are what memory held before"""
    slots: Tensor
    """(tokens,) int64, -1 for padding"""
    keys: Tensor
    """(t_k, h_k, d): all keys of the batch's requests end to end, as they were given; values alike"""
    values: Tensor
    longest: int

    @property
    def rows(self) -> int:
        """of requests, without padding"""
        return int(self.offsets[-1])

    def layout(self) -> Packed:
        """What the oracle reads: the same requests with keys and values of their own."""
        ends = torch.nn.functional.pad(self.used.cumsum(0), (1, 0)).int()
        return Packed(self.offsets, ends, len(self.q), len(self.keys))

    def assert_right(self, run: Any, **meaning: Any) -> None:
        """`run(q, out)` writes the batch's rows of `out` and no others, and they are right, by the tolerance policy."""

        def face(q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, backend: str = "auto", **keywords: Any):
            out = q.new_full((*q.shape[:-1], v.shape[-1]), UNTOUCHED)
            out = run(q, out)
            assert (out[self.rows :] == UNTOUCHED).all()
            out[self.rows :] = 0
            return Partial(out, attention(q, k, v, return_lse=True, **keywords).lse) if return_lse else out

        given = self.q, self.keys, self.values
        check(*given, function=face, backward=False, layout=self.layout(), **meaning).assert_ok()


class Requests:
    """Keys and values of some requests, and how many of them are in the cache."""

    def __init__(
        self, count: int, heads: Heads, page_size: int, device: str, dtype: torch.dtype, width: int = 0
    ) -> None:
        self.heads, self.page_size, self.device, self.dtype = heads, page_size, device, dtype
        self.width = width or -(-130 // page_size)
        self.pages = count * self.width + 3
        self.tables = torch.randperm(self.pages)[: count * self.width].view(count, self.width)
        self.k = random((count, 130, heads.k, heads.d), dtype, device)
        self.v = random((count, 130, heads.k, heads.d_v), dtype, device, seed=2)
        self.cached = [0] * count
        self.drawn = 0

    def step(self, lengths: list[int], padding: int = 0, idle: int = 0) -> Step:
        """The next rows of each request, and `idle` requests that only fill up the batch: no rows, no keys."""
        size, heads = self.page_size, self.heads
        before, self.cached = self.cached, [n + new for n, new in zip(self.cached, lengths, strict=True)]
        starts = [0, *accumulate([*lengths, *[0] * idle])]
        tokens = starts[-1] + padding
        used = torch.tensor([*self.cached, *[0] * idle], dtype=torch.int32)
        # A table entry that is not in use names a page that is another request's, or none.
        table = torch.tensor([0, self.pages + 5, -1])[torch.arange(self.width) % 3].repeat(len(used), 1)
        slots = torch.full((tokens,), -1)
        new = [
            torch.full((tokens, *x.shape[2:]), torch.nan, device=self.device, dtype=self.dtype)
            for x in (self.k, self.v)
        ]
        for i, (start, n) in enumerate(zip(starts, lengths, strict=False)):
            mapped = -(-self.cached[i] // size)
            table[i, :mapped] = self.tables[i, :mapped]
            at = torch.arange(before[i], before[i] + n)
            slots[start : start + n] = self.tables[i, at // size] * size + at % size
            for x, all_rows in zip(new, (self.k, self.v), strict=True):
                x[start : start + n] = all_rows[i, before[i] : before[i] + n]
        self.drawn += 1
        q = random((tokens, heads.q, heads.d), self.dtype, self.device, seed=10 + self.drawn)
        q[starts[-1] :] = torch.nan
        keys, values = (torch.cat([x[i, :n] for i, n in enumerate(self.cached)]) for x in (self.k, self.v))
        offsets = torch.tensor(starts, dtype=torch.int32)
        moved = (x.to(self.device) for x in (offsets, used, table.int(), slots))
        return Step(q, *new, *moved, keys, values, max(lengths))


SERVED = {
    "prompts": [[40, 7, 90]],
    "chunks and tokens": [[40, 7, 0], [33, 1, 20], [1, 1, 33], [1, 0, 1], [5, 1, 1]],
    "tokens": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
    "one": [[1], [1]],
    "nothing": [[9, 3], [0, 0]],
}
"""New rows of each request, step by step."""


@pytest.fixture
def device(torch_device):
    """The engines leave the backend to the dispatch."""
    return torch_device


@pytest.fixture(params=SERVED, ids=lambda name: name.replace(" ", "-"))
def served(request) -> list[list[int]]:
    return SERVED[request.param]


@pytest.fixture
def requests_of():
    """Makes `Requests`, of `Heads` by keywords."""

    def made(count: int, page_size: int, device: str, dtype: torch.dtype | None = None, **heads: int) -> Requests:
        dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        return Requests(count, Heads(**heads), page_size, device, dtype)

    return made
