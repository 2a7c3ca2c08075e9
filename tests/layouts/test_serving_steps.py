"""Hundreds of steps of a server: requests enter, some of them left-padded, come in chunks, grow, are evicted and come
back, over caches that are views. Each step is checked against the oracle, on keys and values that no cache has seen."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import Packed, Paged, append_kv, attention, causal, interval, softcap, window
from saccade.backends import hopper as gluon
from saccade.call.partial import Partial
from saccade.testing import check, paged

H_Q, H_K, D, PAIRS = 4, 2, 32, 12
LONGEST, SLOTS, TOKENS = 120, 6, 96
"""Tokens of a request, requests of a batch, and rows of a step, those that nobody uses included."""


class World(NamedTuple):
    """What does not change, so that few kernels are compiled."""

    page_size: int
    cache: str
    """As in a Case."""
    by_slot: bool
    """Rows are appended by slots, not by the lengths of their sequences."""
    left: int | None = None
    cap: float | None = None
    sink: bool = False
    num_splits: int | None = None


WORLDS = {
    "heads": World(16, "heads", True),
    "single rows": World(1, "rows", False, cap=5.0, sink=True),
    "layers": World(8, "pages", True, left=40, sink=True),
    "one split": World(32, "heads", False, left=25, num_splits=1),
}


@dataclass(eq=False)
class Request:
    """Keys and values of all tokens, padding included, as they are after rotation, and how many are in the cache."""

    k: Tensor
    v: Tensor
    padding: int
    prompt: int
    """Tokens that may come at once, padding included; all that were there when the request was evicted."""
    slot: int = -1
    pages: list[int] | None = None
    cached: int = 0


class Step(NamedTuple):
    """Requests and how many rows they have in a step; rows end to end in the order of the batch."""

    rows: list[tuple[Request, int]]
    lengths: list[int]
    """of each slot"""


def quarter_turns(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin (positions, pairs) of whole quarters: a rotation by them is exact in every dtype."""
    quarter = torch.arange(LONGEST)[:, None] * torch.arange(1, PAIRS + 1) % 4
    values = torch.tensor([1.0, 0.0, -1.0, 0.0])
    return values[quarter].to(device, dtype), values[(quarter + 3) % 4].to(device, dtype)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rows (n, h, d) rotated by quarters, as permutations with signs."""
    one, two = x[..., :PAIRS], x[..., PAIRS : 2 * PAIRS]
    ways = torch.stack([torch.cat(y, -1) for y in ((one, two), (-two, one), (-one, -two), (two, -one))])
    quarter = (positions[:, None] * torch.arange(1, PAIRS + 1, device=x.device) % 4).repeat(1, 2)
    chosen = ways.gather(0, quarter[None, :, None].expand(1, *x.shape[:2], -1))[0]
    return torch.cat([chosen, x[..., 2 * PAIRS :]], -1)


class Server:
    """The caches, whose rows are NaN but those in use, and who has which pages."""

    def __init__(self, world: World, seed: int, device: str, backend: str) -> None:
        self.world, self.dice, self.device, self.backend = world, random.Random(seed), device, backend
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.generator = torch.Generator().manual_seed(seed)
        self.width, self.count = -(-LONGEST // world.page_size), 3 * LONGEST // world.page_size
        rows, like = (self.count, world.page_size, H_K), torch.empty(0, device=device, dtype=dtype)
        self.caches = [x.fill_(torch.nan) for x in paged.empty(world.cache, rows, D, D, like)]
        self.free, self.slots = list(range(self.count)), list(range(SLOTS))
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.evicted = 0
        self.rotary = quarter_turns(device, dtype)
        sink = torch.randn(H_Q, generator=self.generator).to(device)
        self.keywords: dict[str, Any] = {
            "score_mod": None if world.cap is None else softcap(world.cap),
            "sink": sink if world.sink else None,
        }

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.caches[0].dtype)

    def _leave(self, request: Request) -> None:
        """Gives back its slot and its pages, which nobody may read any more."""
        self.running.remove(request)
        self.slots.append(request.slot)
        for cache in self.caches:
            cache[request.pages] = torch.nan
        self.free += request.pages or []
        self.dice.shuffle(self.free)
        request.pages, request.cached = None, 0

    def _evict(self, request: Request) -> None:
        request.prompt = max(request.prompt, request.cached)
        self._leave(request)
        self.waiting.insert(0, request)
        self.evicted += 1

    def _grow(self, request: Request, n: int) -> bool:
        """Whether there are pages for n more tokens; it has them then."""
        assert request.pages is not None
        missing = -(-(request.cached + n) // self.world.page_size) - len(request.pages)
        if missing > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(missing)]
        return True

    def schedule(self) -> Step:
        """Who has how many tokens next: those that run, then new ones, as pages and rows allow."""
        dice = self.dice
        for request in [x for x in self.running if x.cached == len(x.k)]:
            self._leave(request)
        if self.running and dice.random() < 0.05:
            self._evict(dice.choice(self.running))
        while len(self.waiting) < 2:
            padding, prompt = dice.choice([0, dice.randint(1, 20)]), dice.randint(1, 60)
            n = min(padding + prompt + dice.randint(1, 20), LONGEST)
            self.waiting.append(Request(self.drawn(n, H_K, D), self.drawn(n, H_K, D), padding, padding + prompt))
        while self.slots and self.waiting and dice.random() < 0.7:
            request = self.waiting.pop(0)
            request.slot, request.pages = self.slots.pop(), []
            self.running.append(request)
        rows, room = [], TOKENS - dice.randint(0, 9)
        for request in sorted(self.running, key=lambda x: -x.cached):
            chunk = min(max(request.prompt - request.cached, 1), dice.randint(1, 40), room)
            if chunk and self._grow(request, chunk):
                rows.append((request, chunk))
                room -= chunk
            elif chunk and request.cached:
                self._evict(request)
        rows.sort(key=lambda row: row[0].slot)
        lengths = [0] * SLOTS
        for request, n in rows:
            lengths[request.slot] = n
        return Step(rows, lengths)

    def layouts(self, step: Step) -> tuple[Paged, Paged]:
        """Before and after the step; pages that are not there are -1, or beyond the cache."""
        before = torch.zeros(SLOTS, dtype=torch.int32)
        table = torch.tensor([-1, self.count, 1 << 30])[torch.arange(self.width) % 3].repeat(SLOTS, 1).int()
        for request, _ in step.rows:
            assert request.pages is not None
            before[request.slot] = request.cached
            table[request.slot, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
        offsets = torch.tensor([0, *accumulate(step.lengths)], dtype=torch.int32).to(self.device)
        table, splits = table.to(self.device), self.world.num_splits
        after = before + torch.tensor(step.lengths, dtype=torch.int32)
        return Paged(table, before.to(self.device), offsets), Paged(table, after.to(self.device), offsets, splits)

    def where(self, step: Step) -> dict[str, Tensor]:
        """The slots and positions of the rows; padding stands at 0, and rows that nobody uses are nowhere."""
        slots, positions = torch.full((TOKENS,), -1), torch.zeros(TOKENS, dtype=torch.int64)
        start, size = 0, self.world.page_size
        for request, n in step.rows:
            at = torch.arange(request.cached, request.cached + n)
            slots[start : start + n] = torch.tensor(request.pages)[at // size] * size + at % size
            positions[start : start + n] = (at - request.padding).clamp(min=0)
            start += n
        return {"slot_mapping": slots.to(self.device), "positions": positions.to(self.device)}

    def run(self) -> tuple[bool, float]:
        """One step: whether what is in the caches is right to the bit, and the error of attention."""
        step = self.schedule()
        if not step.rows:
            return True, 0.0
        before, after = self.layouts(step)
        new, q = self.drawn(2, TOKENS, H_K, D), self.drawn(TOKENS, H_Q, D)
        where = self.where(step)
        start, used = 0, sum(step.lengths)
        for request, n in step.rows:
            rows = slice(request.cached, request.cached + n)
            if not self.world.by_slot:
                where["positions"][start : start + n] = torch.arange(rows.start, rows.stop)
            # What the request holds is after rotation; an evicted one brings the same tokens again.
            new[1, start : start + n] = request.v[rows]
            request.k[rows] = turned(new[0, start : start + n], where["positions"][start : start + n])
            start += n
        new[:, used:], q[used:] = torch.nan, torch.nan
        given = (None, *new) if self.world.by_slot else (before, *new)
        rotated = append_kv(*self.caches, *given, q=q, rotary=self.rotary, **where if self.world.by_slot else {})
        right = torch.equal(rotated[:used], turned(q[:used], where["positions"][:used]))
        for request, n in step.rows:
            request.cached += n
            right &= self._holds(request)
        return right, self._error(step, after, torch.cat([rotated[:used], q[used:]]))

    def _holds(self, request: Request) -> bool:
        """Whether the request's pages have its keys and values, and NaN after them."""
        for cache, x in zip(self.caches, (request.k, request.v), strict=True):
            rows = cache[request.pages].flatten(0, 1)
            if not torch.equal(rows[: request.cached], x[: request.cached]) or rows[request.cached :].isfinite().any():
                return False
        return True

    def _error(self, step: Step, after: Paged, q: Tensor) -> float:
        """Of the step's attention over pages, against that of packed keys and values, which the requests have."""
        starts = torch.zeros(SLOTS, 1, dtype=torch.int64)
        k, v = torch.zeros(2, 0, H_K, D, device=self.device, dtype=q.dtype)
        for request, _ in step.rows:
            starts[request.slot] = request.padding
            k, v = (torch.cat([x, y[: request.cached]]) for x, y in ((k, request.k), (v, request.v)))
        left = self.world.left
        mask = (causal() if left is None else window(left, 0)) & interval(starts.to(self.device), None)
        ends = F.pad(after.seqused_k.cumsum(0), (1, 0)).int()

        def over_pages(q: Tensor, k: Tensor, v: Tensor, *, layout: Packed, **options: Any) -> Tensor | Partial:
            return attention(q, *self.caches, layout=after, **options)

        assert after.cu_seqlens_q is not None
        layout = Packed(after.cu_seqlens_q, ends, TOKENS, LONGEST)
        keywords = {"mask": mask, "layout": layout, "backend": self.backend, **self.keywords}
        return check(q, k, v, function=over_pages, backward=False, **keywords).ratio


PLACES = [
    *((name, "cpu") for name in WORLDS),
    *(pytest.param(name, "triton", marks=pytest.mark.gpu) for name in WORLDS),
    *(pytest.param(name, "gluon", marks=pytest.mark.gpu) for name in ("heads", "layers")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), PLACES)
def test_serving(name, backend, monkeypatch, request):
    # Hopper's kernels leave so few rows to others.
    monkeypatch.setattr(gluon, "LEAST_ROWS", 0)
    monkeypatch.setattr(gluon, "LEAST_ITEMS", 0)
    server = Server(WORLDS[name], 0, "cpu" if backend == "cpu" else "cuda", backend)
    with torch.no_grad():
        steps = 250 if backend != "cpu" or request.config.getoption("--everything") else 100
        for i in range(steps):
            right, error = server.run()
            assert right, f"step {i}: a key, a value or a query is not what was given"
            assert error <= 1, f"step {i}: {error} of the tolerance"
    assert server.evicted > steps / 25
