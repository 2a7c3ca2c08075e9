"""Serve a tiny language model: a server to copy, of continuous batching over a paged cache.

    python examples/serve_decode.py --requests 20

- **Pages.** Keys and values live in pages of one cache. A request gets pages as it grows. Where none is free, the
  youngest request is evicted: its pages go to others, and later it is computed again, from all that it has said.
- **A shared prefix.** Most prompts begin with one system prompt. Its pages are computed once, and belong to
  all requests as far as their prompts are equal to it. Those that all requests of a step share are read once for it.
- **Chunks beside decoding.** A step has one token of each request that speaks, and chunks of the prompts of those that
  are still reading, end to end in one call, up to a number of tokens: long prompts delay nobody for long.
- **Drafts.** Steps that only decode guess what comes next: what followed the last two tokens where they were said
  before, the two latest times. Both guesses are a tree behind the context, checked in one call. What the model would
  have said is kept, so drafts change how fast tokens come, and no token.
- **Graphs.** Such steps run in batches of a few sizes. A GPU captures each once and replays it as a graph, whatever the
  lengths are.
- **Nothing waits for the host.** What a step needs of the one before stays on the device: tokens, lengths, who has
  ended. While a step runs, the host plans the next ones, knowing how long a request may be by then, and reads what was
  said some steps late. `--profile` writes a trace of such steps.
- **Sampling** with a temperature and a top-p of each request. What a request says depends on its own seed alone, not on
  who else is served, on drafts or on evictions.

The model has random weights. On a CPU its tokens are those of a plain loop without a cache; on a GPU, in bfloat16, the
plain model's choice after the same tokens is compared.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn

from saccade import Dense, Mask, Paged, append_kv, attention, causal, interval

VOCABULARY, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 128, 2, 8, 2, 32
PAGE_SIZE, LONGEST = 16, 256
CHUNK = 48
"""Tokens of a step, those of prompts included, of which there may be a page in any case."""
LEAST_TOP_P = 1e-6
"""Far above where float32 ends."""
BRANCHES, DRAFTS = 2, 3
"""Guesses of what a request says next, and tokens of each."""
AHEAD = 2
"""Steps whose tokens the host has not read while it plans the next one."""
ROOM = LONGEST + PAGE_SIZE * -(-BRANCHES * DRAFTS // PAGE_SIZE)
"""Tokens of a request and their drafts at most, in whole pages."""


def angles(device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, (ROOM, HEAD_DIM / 2)."""
    speeds = 10000.0 ** (-torch.arange(0, 1, 2 / HEAD_DIM, device=device))
    turns = torch.arange(ROOM, device=device)[:, None] * speeds
    return turns.cos(), turns.sin()


def turned(x: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """x (…, h, d) turned by its positions (…): what append_kv does."""
    cos, sin = (table[positions][..., None, :] for table in rotary)
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)


@dataclass
class Step:
    """What one pass through the model is about."""

    tokens: Tensor
    """(b, s), or (t,): sequences end to end; so are the next two"""
    positions: Tensor
    places: Tensor
    """where their keys and values belong in the pages, or -1"""
    layout: Paged
    """with them"""
    mask: Mask


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(DIM), nn.RMSNorm(DIM)])
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=-2)
        x = x + self.out(attend(q, k, v).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.2)  # likely tokens, and unlikely ones

    def forward(self, step: Step, caches: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Logits of every token; caches (layers, 2, pages, page_size, h_k, d) get its keys and values."""
        x = self.embedding(step.tokens)
        where = {"slot_mapping": step.places, "positions": step.positions, "rotary": rotary}
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor = k_cache, v_cache: Tensor = v_cache) -> Tensor:
                q = append_kv(k_cache, v_cache, None, k, v, q=q, **where)
                return attention(q, k_cache, v_cache, mask=step.mask, layout=step.layout)

            x = layer(x, attend)
        return self.head(self.norm(x))

    def plainly(self, tokens: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (s, vocabulary) of one sequence (s,), without a cache."""
        positions = torch.arange(len(tokens), device=tokens.device)[None]
        x = self.embedding(tokens[None])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = turned(q, rotary, positions), turned(k, rotary, positions)
            return attention(q, k, v, mask=causal(), layout=Dense("bshd"))

        for layer in self.layers:
            x = layer(x, attend)
        return self.head(self.norm(x))[0]


def chances(logits: Tensor, temperature: Tensor, top_p: Tensor) -> Tensor:
    """Probabilities (b, vocabulary) of the fewest tokens that have top_p (b,) in all; without temperature the best."""
    cold = temperature == 0
    p = (logits / torch.where(cold, 1, temperature)[:, None]).softmax(-1)
    best = p.argmax(-1, keepdim=True)
    ordered, order = p.sort(stable=True, dim=-1, descending=True)
    ordered = torch.where(ordered.cumsum(-1) - ordered < top_p[:, None], ordered, 0)  # never drops the first
    kept = torch.zeros_like(p).scatter(1, order, ordered)
    kept = torch.where(cold[:, None], torch.zeros_like(p).scatter(1, best, 1), kept)
    return kept / kept.sum(-1, keepdim=True)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each seed and position, int64 (b,): the same on every device and in every batch."""
    x = seed * 0x5851F42D4C957F2D + position * 0x14057B7EF767814F + 1
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # splitmix64
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x & ((1 << 24) - 1)).float() / (1 << 24)


def sample(logits: Tensor, temperature: Tensor, top_p: Tensor, drawn: Tensor) -> Tensor:
    """The first token (b,) whose cumulative probability exceeds the number drawn."""
    reached = chances(logits.double(), temperature, top_p).cumsum(-1)
    return (reached <= drawn[:, None] * reached[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)


def check_tokens(name: str, tokens: list[int]) -> None:
    if not isinstance(tokens, list):
        raise ValueError(f"the {name} must be a list of tokens, got {type(tokens).__name__}")
    for i, token in enumerate(tokens):
        if not isinstance(token, int) or not 0 <= token < VOCABULARY:
            raise ValueError(f"tokens must be integers in [0, {VOCABULARY}), got {token!r} at {i} of the {name}")


@dataclass(eq=False)
class Request:
    """Raises ValueError for what no server could answer."""

    prompt: list[int]
    wanted: int
    """how many tokens"""
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    said: list[int] = field(default_factory=list)
    slot: int = -1
    """its row of the server's tensors while it runs"""
    pages: list[int] = field(default_factory=list)
    """those of the prefix that it shares, and then its own"""
    shared: int = 0
    """how many pages of the prefix"""
    unread: int = 0
    """tokens at its end that the model has not been given, but for the last one"""
    ahead: int = 0
    """tokens that it may have said in steps which the host has not read"""
    taken: bool = False
    """a server has it, or had it: its pages are that one's"""

    def __post_init__(self) -> None:
        check_tokens("prompt", self.prompt)
        if not self.prompt:
            raise ValueError("a prompt needs a token at least: the model says what comes after it")
        if not isinstance(self.wanted, int) or self.wanted < 1:
            raise ValueError(f"wanted must be an integer of at least 1, got {self.wanted!r}")
        if len(self.prompt) + self.wanted > LONGEST:
            raise ValueError(
                f"a prompt and what follows may have {LONGEST} tokens, got a prompt of {len(self.prompt)} and "
                f"wanted={self.wanted}"
            )
        if not isinstance(self.temperature, (int, float)) or not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature!r}")
        if not isinstance(self.top_p, (int, float)) or not LEAST_TOP_P <= self.top_p <= 1:
            raise ValueError(f"top_p must be from {LEAST_TOP_P} to 1, got {self.top_p!r}")
        if not isinstance(self.seed, int) or not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed must be an integer of 64 bits, got {self.seed!r}")

    def tokens(self) -> list[int]:
        return self.prompt + self.said

    def longest(self) -> int:
        """Tokens that it has at most, those included that the host has not read; with all of them it would not run."""
        return len(self.prompt) + min(len(self.said) + self.ahead, self.wanted - 1)


class State:
    """What the device knows of the requests, a row for each slot. Steps read and write it, and the host only what a
    request brings along, so that no step waits for the host."""

    def __init__(self, slots: int, device: torch.device) -> None:
        def integers(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.tokens = integers(slots, ROOM)
        self.cached = integers(slots)
        """tokens whose keys are in the pages: all but the last one of a request that speaks"""
        self.left = integers(slots)
        """tokens to be said; 0 of an empty slot too"""
        self.seed, self.temperature, self.top_p = integers(slots), *torch.ones(2, slots, device=device)
        self.table = torch.full((slots, ROOM // PAGE_SIZE), -1, dtype=torch.int32, device=device)

    def place(self, request: Request, cached: int) -> None:
        tokens, slot = request.tokens(), request.slot
        self.tokens[slot, : len(tokens)].copy_(on_way(tokens, self.tokens), non_blocking=True)
        left = request.wanted - len(request.said)
        for x, value in (
            *((self.cached, cached), (self.left, left), (self.seed, request.seed)),
            *((self.temperature, request.temperature), (self.top_p, request.top_p)),
        ):
            x[slot : slot + 1].copy_(on_way([value], x), non_blocking=True)

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Where the keys of tokens belong in the pages; -1 of slots that say no more."""
        page = self.table[slots, positions // PAGE_SIZE]
        there = (page >= 0) & (self.left[slots] > 0)
        return torch.where(there, page * PAGE_SIZE + positions % PAGE_SIZE, -1)

    def drawn(self, slots: Tensor, positions: Tensor, logits: Tensor) -> Tensor:
        """The token that a slot says at a position, all (n,), from logits (n, vocabulary)."""
        drawn = uniform(self.seed[slots], positions)
        return sample(logits, self.temperature[slots], self.top_p[slots], drawn)


def on_way(values: list, like: Tensor) -> Tensor:
    """Numbers that a copy may bring to the device without waiting."""
    x = torch.tensor(values, dtype=like.dtype)
    return x.pin_memory() if like.device.type == "cuda" else x


def guesses(tokens: Tensor, last: Tensor) -> Tensor:
    """(b, BRANCHES, DRAFTS): what followed the last two tokens where these were said before; tokens (b, ROOM), whose
    last one is at `last` (b,). Where they were not, or too late, any guess is as good as another."""
    places = torch.arange(1, ROOM, device=tokens.device)
    now, before = (tokens.gather(1, (last - i).clamp(min=0)[:, None]) for i in (0, 1))
    same = (tokens[:, 1:] == now) & (tokens[:, :-1] == before) & (places + DRAFTS <= last[:, None])
    found = torch.where(same, places, 0).topk(BRANCHES, dim=1).values
    following = found[..., None] + 1 + torch.arange(DRAFTS, device=tokens.device)
    return tokens.gather(1, following.flatten(1).clamp(max=ROOM - 1)).view(-1, BRANCHES, DRAFTS)


class Unread:
    """What a step has found, on its way to the host: how many tokens each slot has said, and which."""

    def __init__(self, speaking: list[Request], found: Tensor) -> None:
        """found: (slots, 1 + most)"""
        self.speaking = [(request, request.slot) for request in speaking]
        self.most, self.event = found.shape[1] - 1, None
        for request in speaking:
            request.ahead += self.most
        if found.device.type == "cuda":
            self.found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self.found.copy_(found, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.found = found.clone()

    def read(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        rows = self.found.tolist()
        for request, slot in self.speaking:
            count, *tokens = rows[slot]
            request.said += tokens[:count]
            request.ahead -= self.most


class Server:
    """Requests that run, at most `slots`, the pages of their caches, and those of a prefix that prompts may share."""

    def __init__(
        self, model: Model, slots: int, pages: int, prefix: list[int], device: torch.device, drafts: bool = True
    ) -> None:
        if slots < 1:
            raise ValueError(f"a server needs a slot at least, got slots={slots}")
        if len(prefix) > LONGEST or len(prefix) // PAGE_SIZE >= pages:
            raise ValueError(
                f"a prefix may have {LONGEST} tokens, and must leave a page of {PAGE_SIZE} to requests, got a prefix "
                f"of {len(prefix)} tokens and pages={pages}"
            )
        check_tokens("prefix", prefix)
        self.model, self.device, self.rotary, self.slots = model, device, angles(device), slots
        self.rows = 1 + BRANCHES * DRAFTS if drafts else 1
        """of a request in a step that only decodes"""
        dtype = next(model.parameters()).dtype
        shape = len(model.layers), 2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM
        self.caches = torch.zeros(*shape, device=device, dtype=dtype)
        self.free = list(range(pages))
        self.state = State(slots, device)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        """in the order in which they came"""
        # Whole pages of it are common; what is left of it is read with each prompt.
        self.prefix = [self.free.pop() for _ in range(len(prefix) // PAGE_SIZE)]
        shared = len(self.prefix) * PAGE_SIZE
        self.prefix_tokens = prefix[:shared]
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        """by their sizes, which are powers of two, and the pages that their requests share; and what they find"""
        row = self.prefix + [-1] * (self.state.table.shape[1] - len(self.prefix))
        self.table, self.moved = torch.tensor([row] * slots, dtype=torch.int32), True
        """the pages of each slot, and whether the device knows others"""
        self.unread: list[Unread] = []
        self.evictions = 0
        if shared:
            positions = torch.arange(shared, device=device)
            pages_ = torch.tensor(self.prefix, device=device)
            places = pages_[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            layout = Paged(pages_[None].int(), torch.tensor([shared], device=device))
            tokens = torch.tensor([self.prefix_tokens], device=device)
            self.model(Step(tokens, positions[None], places[None], layout, causal()), self.caches, self.rotary)

    def submit(self, request: Request) -> None:
        """Puts it at the end of those that wait; ValueError if it cannot be served, or a server has taken it."""
        if request.taken:
            raise ValueError("a request is served once, and this one was given before: make another one")
        longest = len(request.prompt) + request.wanted - 1
        own, room = self._pages(longest) - self._shares(request), self.caches.shape[2] - len(self.prefix)
        if own > room:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with wanted={request.wanted} needs {own} pages of its own, "
                f"and the server has {room}: {self.caches.shape[2]} less {len(self.prefix)} of the prefix"
            )
        self.waiting.append(request)
        request.taken = True

    def _pages(self, tokens: int) -> int:
        """For so many tokens, the last of which has drafts behind it."""
        return -(-(tokens + self.rows - 1) // PAGE_SIZE)

    def _shares(self, request: Request) -> int:
        """The whole pages of the prefix that its prompt begins with, short of its last token, after which it speaks."""
        equal = 0
        for one, other in zip(request.prompt[:-1], self.prefix_tokens, strict=False):
            if one != other:
                break
            equal += 1
        return equal // PAGE_SIZE

    def step(self) -> None:
        """More tokens for every request that speaks, and chunks of prompts; those that are done leave."""
        self._admit()
        self._provide()
        if self.running:
            self._show_table()
            self._decode() if all(x.unread == 0 for x in self.running) else self._mixed()
        self._read(AHEAD if self.running else 0)

    def _admit(self) -> None:
        """Lets in, in their order, who has a slot and pages for all of its tokens."""
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting[0]
            shared = self._shares(request)
            missing = self._pages(len(request.tokens())) - shared
            if missing > len(self.free):
                break
            self.running.append(self.waiting.pop(0))
            request.slot = min({*range(self.slots)} - {x.slot for x in self.running})
            request.pages = self.prefix[:shared] + [self.free.pop() for _ in range(missing)]
            self._belong(request.slot, request.pages)
            request.shared, request.unread = shared, len(request.tokens()) - shared * PAGE_SIZE
            self.state.place(request, shared * PAGE_SIZE)

    def _provide(self) -> None:
        """Gives every request pages for all that the next step may write, the oldest first. Where none is free, the
        youngest is evicted; the oldest may stay, as it has room for all that it wants."""
        for request in [*self.running]:
            while request.slot >= 0 and (missing := self._pages(request.longest()) - len(request.pages)) > 0:
                if missing <= len(self.free):
                    request.pages += [self.free.pop() for _ in range(missing)]
                    self._belong(request.slot, request.pages)
                elif self.unread:
                    self._read()  # somebody may have ended, or be shorter than it might have been
                else:
                    self._evict(self.running[-1])

    def _evict(self, request: Request) -> None:
        """What it has said is kept, and becomes part of what it reads when it comes back."""
        self.state.left[request.slot : request.slot + 1].zero_()
        self._leave(request)
        self.waiting.insert(0, request)
        self.evictions += 1

    def _leave(self, request: Request) -> None:
        """Steps that are under way have read its pages before another one writes there, as they come first."""
        self.free += request.pages[request.shared :]
        self.running.remove(request)
        self._belong(request.slot, self.prefix)
        request.slot, request.pages = -1, []

    def _read(self, all_but: int = 0) -> None:
        """Waits for the tokens of all steps but the last ones; those that have said what they should leave."""
        while len(self.unread) > all_but:
            self.unread.pop(0).read()
        for request in [x for x in self.running if len(x.said) == x.wanted]:
            self._leave(request)

    def _show_table(self) -> None:
        """Brings the device's table up to date."""
        if self.moved:
            table = self.table.pin_memory() if self.device.type == "cuda" else self.table
            self.state.table.copy_(table, non_blocking=True)
            self.moved = False

    def _belong(self, slot: int, pages: list[int]) -> None:
        """Says whose pages are whose. Empty slots begin with the prefix, like the others."""
        self.table[slot] = torch.tensor(pages + [-1] * (self.table.shape[1] - len(pages)))
        self.moved = True

    def _shared(self) -> int:
        """Pages that all who run begin with."""
        return min(request.shared for request in self.running)

    def _decode(self) -> None:
        """A step of the smallest batch that has room, replayed where there are graphs."""
        size = 1 << max(request.slot for request in self.running).bit_length()
        key = min(size, self.slots), self._shared()
        if self.device.type != "cuda":
            found = self._checked(*key)
        else:
            if key not in self.graphs:
                self.graphs[key] = self._captured(*key)
            graph, found = self.graphs[key]
            graph.replay()
        self.unread.append(Unread(self.running, found))

    def _checked(self, size: int, shared: int) -> Tensor:
        """One token more for each of the first slots, and as many drafts as are right; what `Unread` reads. It reads
        and writes the state alone, and nothing of it waits for the host."""
        state, rows = self.state, self.rows
        row, slots = torch.arange(rows, device=self.device), torch.arange(size, device=self.device)[:, None]
        cached, live = state.cached[:size, None].clone(), state.left[:size] > 0
        tokens, mask, depth = state.tokens.gather(1, state.cached[:, None])[:size], causal(), row
        if rows > 1:
            drafts = guesses(state.tokens[:size], cached[:, 0])
            tokens = torch.cat([tokens, drafts.flatten(1)], dim=1)
            # Behind the context comes the last token, and then branch after branch, of which each sees itself.
            branch, depth = (row - 1).clamp(min=0) // DRAFTS, torch.where(row > 0, (row - 1) % DRAFTS + 1, 0)
            start = torch.where(row > 0, cached + 1 + branch * DRAFTS, cached)
            mask = interval(None, (cached + 1).expand(size, rows)) | interval(start, cached + row + 1)
        layout = Paged(state.table[:size], (cached[:, 0] + rows) * live, shared_pages=shared)
        step = Step(tokens, cached + depth, state.places(slots, cached + row), layout, mask)
        logits = self.model(step, self.caches, self.rotary)
        positions = (cached + depth + 1).flatten()
        said = state.drawn(slots.expand(size, rows).flatten(), positions, logits.flatten(0, 1)).view(size, rows)
        kept = said
        count = torch.ones_like(cached[:, 0])
        if rows > 1:
            kept, count = self._accepted(tokens, said, slots, cached)
        count = torch.minimum(count, state.left[:size])
        state.tokens[:size].scatter_(1, cached + 1 + torch.arange(kept.shape[1], device=self.device), kept)
        state.cached[:size] += count
        state.left[:size] -= count
        return torch.cat([count[:, None], kept], dim=1)

    def _accepted(self, tokens: Tensor, said: Tensor, slots: Tensor, cached: Tensor) -> tuple[Tensor, Tensor]:
        """What each request says, (b, 1 + DRAFTS), and how much of it holds, (b,). A draft is right if it is what the
        model says after the token before it, and that one is right. The keys of the longest branch move behind the
        context."""
        drafts = tokens[:, 1:].view(-1, BRANCHES, DRAFTS)
        after = said[:, 1:].view(-1, BRANCHES, DRAFTS)
        before = torch.cat([said[:, :1, None].expand(-1, BRANCHES, 1), after[..., :-1]], dim=-1)
        right = (drafts == before).long().cumprod(-1).sum(-1)
        best = right.argmax(1, keepdim=True)
        count = right.gather(1, best)
        kept = torch.cat([said[:, :1], after.gather(1, best[..., None].expand(-1, 1, DRAFTS))[:, 0]], dim=1)

        i = torch.arange(DRAFTS, device=self.device)
        source = self.state.places(slots, cached + 1 + best * DRAFTS + i)
        target = torch.where(i < count, self.state.places(slots, cached + 1 + i), -1)
        pages = self.caches.flatten(2, 3)
        for (k_cache, v_cache), (k, v) in zip(self.caches, pages[:, :, source.clamp(min=0)], strict=True):
            append_kv(k_cache, v_cache, None, k, v, slot_mapping=target)
        return kept, 1 + count[:, 0]

    def _captured(self, size: int, shared: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        state = self.state.tokens, self.state.cached, self.state.left
        held = [x.clone() for x in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._checked(size, shared)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        for x, value in zip(state, held, strict=True):
            x.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self._checked(size, shared)
        return graph, found

    def _mixed(self) -> None:
        """Tokens of those that speak, and chunks of what others read, end to end; who has not read all says none."""
        room, state = max(CHUNK - sum(x.unread == 0 for x in self.running), PAGE_SIZE), self.state
        lengths, speaking = [0] * self.slots, []
        for request in self.running:
            if request.unread:
                n = lengths[request.slot] = min(request.unread, room)
                room, request.unread = room - n, request.unread - n
            else:
                lengths[request.slot] = 1
            if not request.unread:
                speaking.append(request)
        numbers = [(slot, i) for slot, n in enumerate(lengths) for i in range(n)]
        slot, i = on_way(numbers, state.cached).to(self.device, non_blocking=True).unbind(1)
        said_by = {x.slot for x in speaking}
        known = [lengths, [x in said_by for x in range(self.slots)], [*accumulate(lengths)]]
        length, speaks, ends = on_way(known, state.cached).to(self.device, non_blocking=True)

        live = state.left > 0
        positions, offsets = state.cached[slot] + i, torch.cat([ends[:1] * 0, ends]).int()
        cached = state.cached + length
        layout = Paged(state.table, cached * live, offsets, shared_pages=self._shared())
        step = Step(state.tokens[slot, positions], positions, state.places(slot, positions), layout, causal())
        last = (ends - 1).clamp(min=0)
        logits = self.model(step, self.caches, self.rotary)[last]
        said = state.drawn(torch.arange(self.slots, device=self.device), cached, logits)
        count = speaks * live
        places = cached[:, None]
        state.tokens.scatter_(1, places, torch.where(count[:, None] > 0, said[:, None], state.tokens.gather(1, places)))
        state.cached += length * live
        state.left -= count
        self.unread.append(Unread(speaking, torch.stack([count, said], dim=1)))


@torch.no_grad()
def serve(
    requests: list[Request], slots: int, pages: int, prefix: list[int], model: Model, drafts: bool = True
) -> tuple[int, int, float]:
    """Steps, evictions and seconds that it took; ValueError, before the first step, if a request cannot be served. None
    of them is taken then."""
    server = Server(model, slots, pages, prefix, model.embedding.weight.device, drafts)
    try:
        for request in requests:
            server.submit(request)
    except ValueError:
        for request in server.waiting:
            request.taken = False
        raise
    steps, start = 0, time.perf_counter()
    while server.waiting or server.running:
        server.step()
        steps += 1
    assert len(server.free) + len(server.prefix) == pages
    return steps, server.evictions, time.perf_counter() - start


@torch.no_grad()
def plain_loop(model: Model, request: Request, follow: bool = False) -> list[int]:
    """What the model says without a server and without a cache; or, to `follow`, after each token that was said."""
    device, said = model.embedding.weight.device, []
    for i in range(request.wanted):
        tokens = request.prompt + (request.said[:i] if follow else said)
        logits = model.plainly(torch.tensor(tokens, device=device), angles(device))[-1:]
        temperature, top_p, seed, position = (
            torch.tensor([x], device=device) for x in (request.temperature, request.top_p, request.seed, len(tokens))
        )
        said.append(int(sample(logits, temperature, top_p, uniform(seed, position))))
    return said


def drawn_requests(n: int, prefix: list[int]) -> list[Request]:
    """Greedy and sampled ones in turns, of many lengths."""
    dice = random.Random(0)
    return [
        Request(
            prefix + [dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 90))],
            wanted=dice.randint(2, 40),
            temperature=dice.choice([0.0, 1.0, 4.0]),
            top_p=dice.choice([1.0, 0.9, 0.5]),
            seed=dice.randrange(1 << 31),
        )
        for _ in range(n)
    ]


@torch.no_grad()
def trace_steps(model: Model, slots: int, prefix: list[int], path: str, steps: int = 8) -> None:
    """A trace of steps in which `slots` requests speak, after some untraced ones."""
    requests = [Request([*prefix, i % VOCABULARY], wanted=LONGEST - len(prefix) - 1) for i in range(slots)]
    server = Server(model, slots, (slots + 1) * ROOM // PAGE_SIZE, prefix, model.embedding.weight.device)
    for request in requests:
        server.submit(request)
    while any(len(x.said) < 3 for x in requests):
        server.step()
    assert len(server.running) == slots, f"prompts of {slots} requests take too long to read beside their tokens"
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            server.step()
        torch.cuda.synchronize()
    trace.export_chrome_trace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Continuous batching of a tiny model over a paged cache.")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--pages", type=int, default=64, help=f"pages of {PAGE_SIZE} tokens in the cache")
    parser.add_argument("--prefix", type=int, default=72, help="tokens of the prompt that all requests begin with")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    parser.add_argument("--no-drafts", action="store_true", help="one token of each request in a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", metavar="PATH", help="only write a trace of decoding steps, for Perfetto")
    args = parser.parse_args()
    if args.profile and args.device == "cpu":
        parser.error("--profile is about what a GPU waits for, and needs one")
    if args.device == "cpu":
        torch.set_num_threads(1)  # these tensors are too small to share out
    torch.manual_seed(0)
    model = Model(args.layers).to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    prefix = [int(x) for x in torch.randint(VOCABULARY, (args.prefix,))]
    if args.profile:
        trace_steps(model, args.slots, prefix, args.profile)
        return
    requests = drawn_requests(args.requests, prefix)
    steps, evictions, seconds = serve(requests, args.slots, args.pages, prefix, model, not args.no_drafts)
    said = sum(len(request.said) for request in requests)
    told = f"{len(requests)} requests, {said} tokens in {steps} steps with {evictions} evictions"
    print(f"{told} and {seconds:.2f} s on {args.device}")
    exact = args.device == "cpu"
    pairs = [pair for x in requests for pair in zip(x.said, plain_loop(model, x, follow=not exact), strict=True)]
    same = sum(a == b for a, b in pairs)
    print(f"{same} of {len(pairs)} tokens are those of a plain loop without a cache")
    # In bfloat16 two tokens may be as good as one another.
    assert same == len(pairs) if exact else same >= 0.9 * len(pairs)


if __name__ == "__main__":
    main()
