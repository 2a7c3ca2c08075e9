"""A server attacked by chance: admission, chunks, decoding, trees and branches of drafts, shared prefixes and eviction,
all in one batch. Each step is checked against attention in float64 over keys that no cache has seen. Pages that nobody
holds, and rows that nobody uses, are NaN. A sample of steps runs by default, a thousand with `--everything`."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from saccade import Paged, alibi, append_kv, attention, causal, interval, mask_mod, softcap, window
from saccade.ops import shared_pages
from saccade.testing import check

H_Q, H_K, D, SIZE = 4, 2, 16, 8
SLOTS, LONGEST, PAGES, DRAFTS = 6, 128, 30, 10
PREFIXES = 3, 6
"""Pages of the prompts that requests begin with."""
FAR = 1 << 20


@dataclass(eq=False)
class Request:
    """Its keys and values, the prefix included, and how many of them are in the cache."""

    prefix: int
    k: Tensor
    v: Tensor
    total: int
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    asks: bool = False
    """It ends inside of the prefix, and only asks: it has no key of its own."""


class Part(NamedTuple):
    """What one request has in a step."""

    request: Request
    rows: int
    parents: list[int] | None = None
    """of drafts; None for tokens that follow one another"""
    branch: int = 0
    """the length of branches, where drafts are such"""


class Server:
    def __init__(self, seed: int, device: str) -> None:
        self.dice, self.device = random.Random(seed), device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.generator = torch.Generator().manual_seed(seed)
        self.caches = torch.full((2, PAGES, SIZE, H_K, D), torch.nan, device=device, dtype=self.dtype)
        self.free = list(range(PAGES))
        self.dice.shuffle(self.free)
        self.prefixes = [([self.free.pop() for _ in range(n)], self.drawn(2, n * SIZE, H_K, D)) for n in PREFIXES]
        for pages, both in self.prefixes:
            self.caches[:, pages] = both.unflatten(1, (-1, SIZE))
        self.running: list[Request] = []
        self.seen: dict[str, int] = {}

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def count(self, *events: str) -> None:
        for event in events:
            self.seen[event] = self.seen.get(event, 0) + 1

    def admit(self) -> None:
        dice = self.dice
        while len(self.running) < SLOTS and dice.random() < 0.7:
            prefix = dice.choice([0, 0, 1])
            pages, both = self.prefixes[prefix]
            k, v = self.drawn(2, LONGEST, H_K, D)
            n = len(pages) * SIZE
            k[:n], v[:n] = both
            request = Request(prefix, k, v, dice.randint(n + 1, LONGEST - DRAFTS), list(pages), n)
            if dice.random() < 0.15:
                request.asks, request.cached = True, dice.randint(0, n)
            self.running.append(request)
            self.count("asks" if request.asks else "admitted")

    def leave(self, request: Request) -> None:
        """Gives back its own pages, which nobody may read any more; what it shares stays."""
        self.running.remove(request)
        own = request.pages[len(self.prefixes[request.prefix][0]) :]
        self.caches[:, own] = torch.nan
        self.free += own
        self.dice.shuffle(self.free)

    def grow(self, request: Request, n: int) -> bool:
        """Whether there are pages for n more tokens; it has them then."""
        missing = -(-(request.cached + n) // SIZE) - len(request.pages)
        if missing > len(self.free):
            return False
        request.pages += [self.free.pop() for _ in range(missing)]
        return True

    def part(self, request: Request) -> Part | None:
        dice = self.dice
        if request.asks:
            return Part(request, dice.randint(0, 5))
        kind = dice.choice(["decode", "chunk", "tree", "branches", "rest"])
        n = {"decode": 1, "chunk": dice.randint(2, 30), "rest": 0}.get(kind, dice.randint(2, DRAFTS))
        n = min(n, request.total - request.cached)
        if not self.grow(request, n):
            self.count("evicted")
            self.leave(request)
            return None
        self.count(kind)
        if kind == "tree" and n:
            return Part(request, n, [dice.randint(-1, i - 1) for i in range(n)])
        if kind == "branches" and n:
            length = dice.randint(1, n)
            return Part(request, n, [i - 1 if i % length else -1 for i in range(n)], length)
        return Part(request, n)

    def step(self) -> float:
        """The error of one step, as a share of the tolerance."""
        dice = self.dice
        for request in [x for x in self.running if x.cached >= x.total or dice.random() < (0.5 if x.asks else 0.07)]:
            self.count("evicted" if request.cached < request.total and not request.asks else "done")
            self.leave(request)
        self.admit()
        one = dice.random() < 0.6  # a batch of those that begin alike
        chosen = [x for x in self.running if not one or x.prefix == 0]
        dice.shuffle(chosen)
        parts = [part for part in map(self.part, chosen) if part is not None]
        if not parts:
            return 0.0
        return self.run(parts)

    def run(self, parts: list[Part]) -> float:
        rows = [part.rows for part in parts]
        table, before, new = self.layout(parts)
        q = self.drawn(sum(rows) + 3, H_Q, D)
        q[sum(rows) :] = torch.nan
        offsets = self.integers([0, *accumulate(rows)] + [sum(rows)] * (SLOTS - len(parts)))
        appended = self.integers(
            [0, *accumulate(0 if x.request.asks else x.rows for x in parts)] + [len(new[0])] * (SLOTS - len(parts))
        )
        append_kv(*self.caches, Paged(table, before, appended), *new)
        after, shared = before + appended.diff(), self.shared_pages(parts)
        k, v = self.truth(parts, new)
        true = Paged(torch.arange(SLOTS, device=self.device)[:, None], after, offsets)
        layout = Paged(table, after, offsets, self.dice.choice([None, None, 1, 3]), shared_pages=shared)

        def over_pages(q: Tensor, k: Tensor, v: Tensor, *, layout_: Any = layout, **keywords: Any) -> Any:
            return attention(q, *self.caches, **{**keywords, "layout": layout_})

        score = self.dice.choice([None, None, softcap(4.0), alibi(torch.linspace(0.1, 1, H_Q, device=self.device))])
        sink = self.drawn(H_Q).float() if self.dice.random() < 0.3 else None
        mask = self.mask(parts, after)
        report = check(q, k, v, layout=true, mask=mask, score_mod=score, sink=sink, function=over_pages)
        self.count(*(["shared"] if shared else []), "steps")
        self.accept(parts, new)
        return report.ratio

    def integers(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def layout(self, parts: list[Part]) -> tuple[Tensor, Tensor, Tensor]:
        """The table, the lengths before the step, and its new keys and values; pages that are not there are -1."""
        table = torch.full((SLOTS, LONGEST // SIZE), -1, dtype=torch.int32)
        before, new = [0] * SLOTS, [torch.zeros(2, 0, H_K, D, device=self.device, dtype=self.dtype)]
        for i, (request, n, parents, _) in enumerate(parts):
            table[i, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            before[i] = request.cached
            if not request.asks:
                own = torch.stack([x[request.cached : request.cached + n] for x in (request.k, request.v)])
                new.append(own if parents is None else self.drawn(2, n, H_K, D))
        return table.to(self.device), self.integers(before), torch.cat(new, 1)

    def shared_pages(self, parts: list[Part]) -> int:
        """At most the columns that all rows have in common."""
        common = min(len(x.request.pages) for x in parts)
        first = parts[0].request.pages
        alike = [all(x.request.pages[j] == first[j] for x in parts) for j in range(common)]
        return self.dice.randint(0, alike.index(False) if False in alike else common)

    def truth(self, parts: list[Part], new: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every slot as one page of its own, in the order of the sequence."""
        both, start = torch.zeros(2, SLOTS, LONGEST, H_K, D, device=self.device, dtype=self.dtype), 0
        for i, (request, n, *_) in enumerate(parts):
            both[:, i, : request.cached] = torch.stack([request.k, request.v])[:, : request.cached]
            if not request.asks:
                both[:, i, request.cached : request.cached + n] = new[:, start : start + n]
                start += n
        return both[0], both[1]

    def mask(self, parts: list[Part], after: Tensor) -> Any:
        """Bounds of rows where drafts are branches; a predicate where one is a tree; else any."""
        if not any(x.parents for x in parts):
            return self.dice.choice([causal(), causal(), window(40, 0), window(50, 2), None])
        if all(x.branch for x in parts if x.parents):
            bounds = [bound for x in parts for bound in self.bounds(x)] + [(0, 0, 0)] * 3
            context, start, stop = self.integers(bounds).unbind(1)
            return interval(None, context.contiguous()) | interval(start.contiguous(), stop.contiguous())
        contexts, seen = torch.full((SLOTS,), FAR), torch.zeros(SLOTS, DRAFTS, DRAFTS, dtype=torch.bool)
        for i, (request, _, parents, _) in enumerate(parts):
            if parents is not None:
                contexts[i] = request.cached
                for j in range(len(parents)):
                    seen[i, j, path(parents, j)] = True
        contexts, seen = contexts.to(self.device), seen.to(self.device)

        def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            i, j = ((x - contexts[b]).clamp(0, DRAFTS - 1) for x in (q_idx, kv_idx))
            return (kv_idx < contexts[b]) | seen[b, i, j]

        return causal() & mask_mod(sees)

    def bounds(self, part: Part) -> list[tuple[int, int, int]]:
        """Of each row: the end of what all see, and the first and the end of its own branch."""
        request, n, parents, length = part
        if parents is None:
            ends = request.cached + (0 if request.asks else n)
            return [(ends - n + i + 1, 0, 0) for i in range(n)]
        first = request.cached
        return [(first, first + i // length * length, first + i + 1) for i in range(n)]

    def accept(self, parts: list[Part], new: Tensor) -> None:
        """Keeps one path of each tree, in the places behind the context; what else was drafted becomes NaN."""
        start = 0
        for request, n, parents, _ in parts:
            if request.asks:
                continue
            kept = list(range(n)) if parents is None else path(parents, self.dice.randrange(n))
            values, first = new[:, start : start + n][:, kept], request.cached
            start += n
            request.cached += len(kept)
            if parents is not None:
                request.k[first : request.cached], request.v[first : request.cached] = values
                rows = torch.arange(first, first + n)
                pages = torch.tensor(request.pages)[rows // SIZE]
                self.caches[:, pages, rows % SIZE] = torch.nan
                table = self.integers([request.pages])
                append_kv(*self.caches, Paged(table, self.integers([first])), values[0][None], values[1][None])


def path(parents: list[int], i: int) -> list[int]:
    """From the root to draft i."""
    return [*([] if parents[i] < 0 else path(parents, parents[i])), i]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("torch_device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_serving(torch_device: str, seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "LEAST_SAVED", 0)  # which decides on a GPU
    monkeypatch.setattr(shared_pages, "LEAST_KEYS", 0)
    server = Server(seed, torch_device)
    for i in range(1000 if request.config.getoption("--everything") else 60):
        error = server.step()
        assert error <= 1, f"step {i}: {error} of the tolerance"
    for event in ("admitted", "asks", "decode", "chunk", "tree", "branches", "shared", "evicted"):
        assert server.seen.get(event, 0) > 2, f"{event}: {server.seen}"
