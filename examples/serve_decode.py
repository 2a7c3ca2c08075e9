"""Serve a tiny language model: a server to copy, of continuous batching over a paged cache.

    python examples/serve_decode.py --requests 20

- **Pages.** Keys and values live in pages of one cache. A request takes pages when it is let in, and returns them when
  it has said what it should.
- **A shared prefix.** Most prompts begin with one system prompt. Its pages are computed once, and belong to
  all requests as far as their prompts are equal to it. Those that all requests of a step share are read once for it.
- **Chunks beside decoding.** A step has one token of each request that speaks, and chunks of the prompts of those that
  are still reading, end to end in one call, up to a number of tokens: long prompts delay nobody for long.
- **Graphs.** Steps that only decode run in batches of a few sizes. A GPU captures each once and replays it as a graph,
  whatever the lengths are.
- **Nothing waits for the host.** A step takes its tokens from the one before on the device. The host reads those of a
  step while the next one runs. `--profile` writes a trace of such steps.
- **Sampling** with a temperature and a top-p of each request. What a request says depends on its own seed alone, not on
  who else is served.

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

from saccade import Dense, Paged, append_kv, attention, causal

VOCABULARY, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 128, 2, 8, 2, 32
PAGE_SIZE, LONGEST = 16, 256
CHUNK = 48
"""Tokens of a step, those of prompts included, of which there may be a page in any case."""


def angles(device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and pair, (LONGEST, HEAD_DIM / 2)."""
    speeds = 10000.0 ** (-torch.arange(0, 1, 2 / HEAD_DIM, device=device))
    turns = torch.arange(LONGEST, device=device)[:, None] * speeds
    return turns.cos(), turns.sin()


def turned(x: Tensor, rotary: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    """x (…, h, d) turned by its positions (…): what append_kv does."""
    cos, sin = (table[positions][..., None, :] for table in rotary)
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)


@dataclass
class Step:
    """What one pass through the model is about: tokens, and where their keys are before and after it."""

    tokens: Tensor
    """(b, s), or (t,): sequences end to end"""
    before: Paged
    after: Paged


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
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.2)  # likely tokens, and unlikely ones

    def forward(self, step: Step, caches: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Logits of every token; caches (layers, 2, pages, page_size, h_k, d) get its keys and values."""
        x = self.embedding(step.tokens)
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor = k_cache, v_cache: Tensor = v_cache) -> Tensor:
                q = append_kv(k_cache, v_cache, step.before, k, v, q=q, rotary=rotary)
                return attention(q, k_cache, v_cache, mask=causal(), layout=step.after)

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
    pages: list[int] = field(default_factory=list)
    """those of the prefix that it shares, and then its own"""
    shared: int = 0
    """how many pages of the prefix"""
    cached: int = 0
    """tokens whose keys are in the cache, the prefix included"""
    unread: int = 0
    """tokens that are said after those, and which the host has not read"""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("a prompt needs a token at least: the model says what comes after it")
        check_tokens("prompt", self.prompt)
        if not isinstance(self.wanted, int) or self.wanted < 1:
            raise ValueError(f"wanted must be an integer of at least 1, got {self.wanted!r}")
        if len(self.prompt) + self.wanted > LONGEST:
            raise ValueError(
                f"a prompt and what follows may have {LONGEST} tokens, got a prompt of {len(self.prompt)} and "
                f"wanted={self.wanted}"
            )
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not -(1 << 63) <= self.seed < 1 << 63:
            raise ValueError(f"seed must have 64 bits, got {self.seed}")

    def tokens(self) -> list[int]:
        return self.prompt + self.said

    def count(self) -> int:
        """Tokens that it has said."""
        return len(self.said) + self.unread

    def missing(self) -> int:
        """Tokens that the model has not read: 1 for a request that speaks."""
        return len(self.prompt) + self.count() - self.cached


class Batch:
    """The requests of a step as tensors, which every step of `size` requests reads and writes: a graph may replay it.

    All of them begin with the same `shared` pages.

    Rows without a request have no keys, cost next to nothing, and have no page to which their token could be written.
    """

    def __init__(self, size: int, shared: int, device: torch.device) -> None:
        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.table, self.shared = integers(size, LONGEST // PAGE_SIZE), shared
        self.used, self.live, self.tokens = integers(size), integers(size), integers(size, dtype=torch.int64)
        self.seed, self.temperature, self.top_p = (
            integers(size, dtype=torch.int64),
            *torch.zeros(2, size, device=device),
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def place(self, requests: list[Request]) -> None:
        """Writes what the step needs to know."""
        width = self.table.shape[1]
        pages = [(x.pages + [-1] * width)[:width] for x in requests]
        pages += [[-1] * width] * (len(self.used) - len(requests))
        self.table.copy_(torch.tensor(pages, dtype=torch.int32))
        rows = [(x.cached, 1, x.tokens()[-1], x.seed, x.temperature, x.top_p) for x in requests]
        rows += [(0, 0, 0, 0, 0.0, 1.0)] * (len(self.used) - len(requests))
        tensors = self.used, self.live, self.tokens, self.seed, self.temperature, self.top_p
        for x, values in zip(tensors, zip(*rows, strict=True), strict=True):
            x.copy_(torch.tensor(values, dtype=x.dtype))


class Unread:
    """The tokens of a step on their way to the host, and who says them; None stands for who says nothing yet."""

    def __init__(self, requests: list[Request | None], tokens: Tensor) -> None:
        self.requests, self.event = requests, None
        for request in filter(None, requests):
            request.unread += 1
        if tokens.device.type == "cuda":
            self.tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self.tokens.copy_(tokens, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.tokens = tokens.clone()

    def read(self) -> None:
        if self.event is not None:
            self.event.synchronize()
        for request, token in zip(self.requests, self.tokens.tolist(), strict=False):
            if request is not None:
                request.said.append(token)
                request.unread -= 1


class Server:
    """Requests that run, at most `slots`, the pages of their caches, and those of a prefix that prompts may share."""

    def __init__(self, model: Model, slots: int, pages: int, prefix: list[int], device: torch.device) -> None:
        if slots < 1:
            raise ValueError(f"a server needs a slot at least, got slots={slots}")
        if len(prefix) > LONGEST or len(prefix) // PAGE_SIZE >= pages:
            raise ValueError(
                f"a prefix may have {LONGEST} tokens, and must leave a page of {PAGE_SIZE} to requests, got a prefix "
                f"of {len(prefix)} tokens and pages={pages}"
            )
        check_tokens("prefix", prefix)
        self.model, self.device, self.rotary, self.slots = model, device, angles(device), slots
        dtype = next(model.parameters()).dtype
        self.caches = torch.zeros(LAYERS, 2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
        self.free = list(range(pages))
        self.running: list[Request] = []
        # Whole pages of it are common; what is left of it is read with each prompt.
        self.prefix = [self.free.pop() for _ in range(len(prefix) // PAGE_SIZE)]
        shared = len(self.prefix) * PAGE_SIZE
        self.prefix_tokens = prefix[:shared]
        self.batches: dict[tuple[int, int], Batch] = {}
        """by their sizes, which are powers of two, and the pages that their requests share"""
        self.held: tuple[Batch, list[Request]] | None = None
        """whose tensors are up to date after the last step, and for whom"""
        self.unread: list[Unread] = []
        if shared:
            table, used = self._tensor([self.prefix]), self._tensor([0])
            after = Paged(table, used + shared)
            step = Step(self._tensor([self.prefix_tokens]).long(), Paged(table, used), after)
            self.model(step, self.caches, self.rotary)

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def needs(self, request: Request) -> tuple[int, int]:
        """Pages of the prefix that it shares, and pages of its own; ValueError if it cannot be served.

        It shares the whole pages that its prompt begins with, short of its last token, after which it speaks.
        """
        if request.pages:
            raise ValueError("a request is served once, and this one has had its pages: make another one")
        equal = 0
        for one, other in zip(request.prompt[:-1], self.prefix_tokens, strict=False):
            if one != other:
                break
            equal += 1
        shared, tokens = equal // PAGE_SIZE, len(request.prompt) + request.wanted
        own, room = -(-tokens // PAGE_SIZE) - shared, self.caches.shape[2] - len(self.prefix)
        if own > room:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens with wanted={request.wanted} needs {own} pages of its own, "
                f"and the server has {room}: {self.caches.shape[2]} less {len(self.prefix)} of the prefix"
            )
        return shared, own

    def admit(self, waiting: list[Request]) -> None:
        """Lets in, in their order, who has a slot and pages for everything that it will say."""
        while waiting and len(self.running) < self.slots:
            request = waiting[0]
            shared, own = self.needs(request)
            if own > len(self.free):
                break
            request.pages = self.prefix[:shared] + [self.free.pop() for _ in range(own)]
            request.shared, request.cached = shared, shared * PAGE_SIZE
            self.running.append(waiting.pop(0))

    def step(self) -> None:
        """One more token for every request that speaks, and chunks of prompts; those that are done leave."""
        if all(x.missing() == 1 for x in self.running):
            self._decode()
        else:
            self._mixed()
        self._read(all_but=1)
        done = [x for x in self.running if x.count() == x.wanted]
        if done:
            self._read()
        for request in done:
            self.free += request.pages[request.shared :]
            self.running.remove(request)

    def _read(self, all_but: int = 0) -> None:
        """Waits for the tokens of all steps but the last ones."""
        while len(self.unread) > all_but:
            self.unread.pop(0).read()

    def _shared(self) -> int:
        """Pages that all who run begin with."""
        return min(request.shared for request in self.running)

    def _decode(self) -> None:
        """A step of the smallest batch that has room, replayed where there are graphs."""
        key = 1 << (len(self.running) - 1).bit_length(), self._shared()
        if key not in self.batches:
            self.batches[key] = Batch(*key, self.device)
        batch = self.batches[key]
        if self.held != (batch, self.running):
            self._read()
            batch.place(self.running)
            self.held = batch, list(self.running)
        if self.device.type != "cuda":
            self._run(batch)
        else:
            if batch.graph is None:
                batch.graph = self._captured(batch)
            batch.graph.replay()
        for request in self.running:
            request.cached += 1
        self.unread.append(Unread([*self.running], batch.tokens))

    def _run(self, batch: Batch) -> None:
        """Reads and writes the batch's own tensors alone, and nothing of it waits for the host."""
        after = Paged(batch.table, batch.used + batch.live, shared_pages=batch.shared)
        step = Step(batch.tokens[:, None], Paged(batch.table, batch.used), after)
        logits = self.model(step, self.caches, self.rotary)[:, 0]
        batch.used += batch.live
        drawn = uniform(batch.seed, batch.used.long())
        batch.tokens.copy_(sample(logits, batch.temperature, batch.top_p, drawn))

    def _captured(self, batch: Batch) -> torch.cuda.CUDAGraph:
        held = [x.clone() for x in (batch.tokens, batch.used)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(batch)  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        for x, value in zip((batch.tokens, batch.used), held, strict=True):
            x.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(batch)
        return graph

    def _mixed(self) -> None:
        """Tokens of those that speak, and chunks of prompts, end to end; who has not read all of its own says none."""
        self._read()
        self.held = None
        room = max(CHUNK - sum(request.missing() == 1 for request in self.running), PAGE_SIZE)
        rows = []
        for request in self.running:
            n = min(request.missing(), room) if request.missing() > 1 else 1
            room -= n if request.missing() > 1 else 0
            rows.append(n)
        width = max(len(request.pages) for request in self.running)
        table = self._tensor([(x.pages + [-1] * width)[:width] for x in self.running])
        before, offsets = self._tensor([x.cached for x in self.running]), self._tensor([0, *accumulate(rows)])
        tokens = [t for x, n in zip(self.running, rows, strict=True) for t in x.tokens()[x.cached : x.cached + n]]
        after = Paged(table, before + offsets.diff(), offsets, shared_pages=self._shared())
        step = Step(self._tensor(tokens).long(), Paged(table, before, offsets), after)
        last = (offsets[1:].long() - 1).clamp(min=0)
        logits = self.model(step, self.caches, self.rotary)[last]
        for request, n in zip(self.running, rows, strict=True):
            request.cached += n
        numbers = [(x.temperature, x.top_p) for x in self.running]
        temperature, top_p = torch.tensor(numbers, dtype=torch.float32, device=self.device).unbind(1)
        seeds = torch.tensor([x.seed for x in self.running], dtype=torch.int64, device=self.device)
        drawn = uniform(seeds, after.seqused_k.long())
        said = sample(logits, temperature, top_p, drawn)
        self.unread.append(Unread([x if x.missing() == 0 else None for x in self.running], said))


@torch.no_grad()
def serve(requests: list[Request], slots: int, pages: int, prefix: list[int], model: Model) -> tuple[int, float]:
    """How many steps it took, and the seconds of them; ValueError, before the first, if one cannot be served."""
    server = Server(model, slots, pages, prefix, model.embedding.weight.device)
    if len({*requests}) < len(requests):
        raise ValueError("a request is served once, and one is given twice: make another one")
    for request in requests:
        server.needs(request)
    waiting, steps, start = list(requests), 0, time.perf_counter()
    while waiting or server.running:
        server.admit(waiting)
        server.step()
        steps += 1
    assert len(server.free) + len(server.prefix) == pages
    return steps, time.perf_counter() - start


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
def trace_steps(model: Model, slots: int, prefix: list[int], path: str, steps: int = 6) -> None:
    """A trace of steps in which `slots` requests speak, after some untraced ones."""
    requests = [Request([*prefix, i % VOCABULARY], wanted=LONGEST - len(prefix) - 1) for i in range(slots)]
    pages = (slots + 1) * LONGEST // PAGE_SIZE
    server = Server(model, slots, pages, prefix, model.embedding.weight.device)
    server.admit([*requests])
    while any(x.count() < 3 for x in requests):
        server.step()
    assert len(server.running) == slots, f"prompts of {slots} requests take too long to read beside their tokens"
    kinds = torch.profiler.ProfilerActivity
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as trace:
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
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--profile", metavar="PATH", help="only write a trace of decoding steps, for Perfetto")
    args = parser.parse_args()
    if args.profile and args.device == "cpu":
        parser.error("--profile is about what a GPU waits for, and needs one")
    if args.device == "cpu":
        torch.set_num_threads(1)  # these tensors are too small to share out
    torch.manual_seed(0)
    model = Model().to(args.device, torch.bfloat16 if args.device == "cuda" else torch.float32)
    prefix = [int(x) for x in torch.randint(VOCABULARY, (args.prefix,))]
    if args.profile:
        trace_steps(model, args.slots, prefix, args.profile)
        return
    requests = drawn_requests(args.requests, prefix)
    steps, seconds = serve(requests, args.slots, args.pages, prefix, model)
    said = sum(len(request.said) for request in requests)
    print(f"{len(requests)} requests, {said} tokens in {steps} steps and {seconds:.2f} s on {args.device}")
    exact = args.device == "cpu"
    pairs = [pair for x in requests for pair in zip(x.said, plain_loop(model, x, follow=not exact), strict=True)]
    same = sum(a == b for a, b in pairs)
    print(f"{same} of {len(pairs)} tokens are those of a plain loop without a cache")
    # In bfloat16 two tokens may be as good as one another.
    assert same == len(pairs) if exact else same >= 0.9 * len(pairs)


if __name__ == "__main__":
    main()
