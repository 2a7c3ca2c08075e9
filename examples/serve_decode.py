"""Serve a tiny language model: continuous batching over a paged cache, with a CUDA graph where there is a GPU.

    python examples/serve_decode.py --requests 20

Requests of different lengths come and go. Their keys and values live in pages of one cache: a request takes pages as
it grows, and returns them when it ends. A step decodes one token for every running request, in a batch of a fixed size.
The launches are the same each time, so a GPU replays them as one graph, whatever the lengths are. New requests enter
between steps, all their prompts in one call, end to end. The model has random weights; its output is checked against
the same model without a cache.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from saccade import Dense, Paged, append_kv, attention, causal

VOCABULARY, DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 256, 128, 2, 8, 2, 32
PAGE_SIZE, LONGEST = 16, 256


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
class Batch:
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
        self.norm = nn.RMSNorm(DIM)

    def forward(self, batch: Batch, caches: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Logits of every token; caches (layers, 2, pages, page_size, h_k, d) get its keys and values."""
        x = self.embedding(batch.tokens)
        for layer, (k_cache, v_cache) in zip(self.layers, caches, strict=True):

            def attend(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor = k_cache, v_cache: Tensor = v_cache) -> Tensor:
                q = append_kv(k_cache, v_cache, batch.before, k, v, q=q, rotary=rotary)
                return attention(q, k_cache, v_cache, mask=causal(), layout=batch.after)

            x = layer(x, attend)
        return F.linear(self.norm(x), self.embedding.weight)

    def plainly(self, tokens: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Logits (s, vocabulary) of one sequence (s,), without a cache."""
        positions = torch.arange(len(tokens), device=tokens.device)[None]
        x = self.embedding(tokens[None])

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = turned(q, rotary, positions), turned(k, rotary, positions)
            return attention(q, k, v, mask=causal(), layout=Dense("bshd"))

        for layer in self.layers:
            x = layer(x, attend)
        return F.linear(self.norm(x), self.embedding.weight)[0]


@dataclass
class Request:
    prompt: list[int]
    wanted: int
    """how many tokens"""
    said: list[int] = field(default_factory=list)
    slot: int = -1
    """its row in the batch"""
    pages: list[int] = field(default_factory=list)

    def length(self) -> int:
        return len(self.prompt) + len(self.said)


class Server:
    """A batch of `slots` requests, and the pages of their caches."""

    def __init__(self, model: Model, slots: int, pages: int, device: torch.device) -> None:
        self.model, self.device, self.rotary = model, device, angles(device)
        dtype = next(model.parameters()).dtype
        self.caches = torch.zeros(LAYERS, 2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
        self.free, self.slots = list(range(pages)), list(range(slots))
        self.running: list[Request] = []
        # The batch of a step. Slots without a request have no page and no keys, and cost nothing.
        self.table = torch.full((slots, LONGEST // PAGE_SIZE), -1, dtype=torch.int32, device=device)
        self.used, self.live, self.tokens = (torch.zeros(slots, dtype=torch.int32, device=device) for _ in range(3))
        self.graph: torch.cuda.CUDAGraph | None = None

    def admit(self, waiting: list[Request]) -> None:
        """Lets in who has a slot and pages for everything that it will say, and reads the prompts."""
        new: list[Request] = []
        while waiting and self.slots:
            need = math.ceil((len(waiting[0].prompt) + waiting[0].wanted) / PAGE_SIZE)
            if need > len(self.free):
                break
            request = waiting.pop(0)
            request.slot, request.pages = self.slots.pop(), [self.free.pop() for _ in range(need)]
            self.table[request.slot, :need] = torch.tensor(request.pages, dtype=torch.int32)
            new.append(request)
        if not new:
            return
        lengths = torch.tensor([len(request.prompt) for request in new], dtype=torch.int32, device=self.device)
        offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        table = self.table[[request.slot for request in new]]
        tokens = torch.tensor([token for request in new for token in request.prompt], device=self.device)
        before, after = (Paged(table, used, offsets) for used in (torch.zeros_like(lengths), lengths))
        logits = self.model(Batch(tokens, before, after), self.caches, self.rotary)
        for request, token in zip(new, logits[offsets[1:].long() - 1].argmax(-1).tolist(), strict=True):
            request.said.append(token)
            self.used[request.slot], self.live[request.slot] = len(request.prompt), 1
            self.tokens[request.slot] = token
        self.running += new

    def step(self) -> None:
        """One more token for every request that runs; those that are done give back what they had."""
        if self.device.type == "cuda":
            if self.graph is None:
                self._capture()
            assert self.graph is not None
            self.graph.replay()
        else:
            self._decode()
        found = self.tokens.tolist()
        for request in self.running:
            request.said.append(found[request.slot])
            if len(request.said) == request.wanted:
                self.free += request.pages
                self.slots.append(request.slot)
                self.table[request.slot], self.used[request.slot], self.live[request.slot] = -1, 0, 0
        self.running = [request for request in self.running if len(request.said) < request.wanted]

    def _decode(self) -> None:
        """Reads and writes the batch's own tensors alone, and nothing of it waits for the host."""
        before, after = Paged(self.table, self.used), Paged(self.table, self.used + self.live)
        logits = self.model(Batch(self.tokens.long()[:, None], before, after), self.caches, self.rotary)
        self.tokens.copy_(logits[:, 0].argmax(-1))
        self.used += self.live

    def _capture(self) -> None:
        held = [x.clone() for x in (self.tokens, self.used)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        for x, value in zip((self.tokens, self.used), held, strict=True):
            x.copy_(value)
        with torch.cuda.graph(self.graph):
            self._decode()


@torch.no_grad()
def serve(requests: list[Request], slots: int, pages: int, device: torch.device) -> tuple[Model, int, float]:
    """The model, how many steps it took, and the seconds of them."""
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    server, waiting, steps = Server(model, slots, pages, device), list(requests), 0
    start = time.perf_counter()
    while waiting or server.running:
        server.admit(waiting)
        server.step()
        steps += 1
    return model, steps, time.perf_counter() - start


@torch.no_grad()
def agreement(model: Model, request: Request) -> float:
    """How far the logits of what was said lie below the best ones, if the model is run without a cache."""
    device = model.embedding.weight.device
    tokens = torch.tensor(request.prompt + request.said, device=device)
    logits = model.plainly(tokens[:-1], angles(device))[len(request.prompt) - 1 :].float()
    said = logits.gather(1, tokens[len(request.prompt) :, None])[:, 0]
    return float((logits.amax(1) - said).max() / logits.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Continuous batching of a tiny model over a paged cache.")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--pages", type=int, default=64, help=f"pages of {PAGE_SIZE} tokens in the cache")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)  # these tensors are too small to share out
    dice = random.Random(0)
    requests = [
        Request([dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 90))], dice.randint(2, 40))
        for _ in range(args.requests)
    ]
    model, steps, seconds = serve(requests, args.slots, args.pages, torch.device(args.device))
    said = sum(len(request.said) for request in requests)
    print(f"{len(requests)} requests, {said} tokens in {steps} steps and {seconds:.2f} s on {args.device}")
    worst = max(agreement(model, request) for request in requests)
    print(f"against the model without a cache: the tokens' logits are within {worst:.1e} of the best ones")
    raise SystemExit(0 if worst < 0.05 else 1)


if __name__ == "__main__":
    main()
