"""A small Llama's step by SDPA, its cuDNN kernels, FlexAttention and saccade: eager, compiled, or as CUDA graphs.

    python -m benchmarks.llama [--lengths 1024x8,8192x1] [--modes eager,compiled,reduce-overhead] [--rounds 12]
        [--kernels] [--out rows.jsonl]

Four layers of width 2048, 16 query heads on 4 key heads of 128, bf16, causal; saccade with a window of 1024 besides.
The providers of a length take turns, in an order that changes in every round, and start from the same weights; each
loss has to agree with SDPA's before a time is printed. Rows have the median and the quartiles of a step in
milliseconds, and SDPA's median over theirs as `ratio`: above 1 is faster. `--kernels` lists what the GPU did in one
step instead.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.harness.machine import Run
from saccade import Dense, attention, causal, window

WIDTH, HEADS, KEY_HEADS, D, LAYERS, WORDS = 2048, 16, 4, 128, 4, 32000
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q (b, s, h, d), k and v (b, s, h_k, d) -> (b, s, h, d)"""
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
}
"""What torch.compile takes, or None without it."""
PROVIDERS = "sdpa", "sdpa-cudnn", "saccade", "saccade-window", "flex"


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * D, bias=False)
        self.out = nn.Linear(HEADS * D, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        heads = self.qkv(self.norm(x)).view(b, s, -1, D).split((HEADS, KEY_HEADS, KEY_HEADS), 2)
        q, k = (_rotated(part, cos, sin) for part in heads[:2])
        x = x + self.out(self.attend(q, k, heads[2]).reshape(b, s, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Llama(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _saccade(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=causal(), layout=Dense("bshd"))


def _saccade_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=causal() & window(1023, None), layout=Dense("bshd"))


def _flex(s: int) -> Attend:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, s, s, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


class Step:
    """One provider's model, and its step."""

    def __init__(self, name: str, attend: Attend, inputs: tuple[Tensor, ...], mode: str) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = Llama(attend).to(torch.bfloat16)
        self.name, self.inputs = name, inputs
        options = MODES[mode]
        self.run = self.model if options is None else torch.compile(self.model, fullgraph=True, **options)
        self.context: Any = contextlib.nullcontext
        if name == "sdpa-cudnn":
            self.context = lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        self.seconds: list[float] = []

    def __call__(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        for p in self.model.parameters():
            p.grad = None
        with self.context():
            scores = self.run(*self.inputs).float().view(-1, WORDS)
            loss = F.cross_entropy(scores, self.inputs[0].view(-1))
            loss.backward()
        return loss

    def time(self) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        self()
        torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - start)


def _steps(s: int, b: int, mode: str, names: list[str]) -> Iterator[Step]:
    """Those whose loss agrees with SDPA's, the first one."""
    torch._dynamo.reset()  # lengths that change would become symbols
    torch._dynamo.config.recompile_limit = 64
    words = torch.randint(0, WORDS, (b, s), device="cuda")
    angle = torch.arange(s, device="cuda")[:, None] * 10000 ** (-torch.arange(0, D, 2, device="cuda") / D)
    inputs = words, *(x[None, :, None].bfloat16() for x in (angle.cos(), angle.sin()))
    attends: dict[str, Attend] = {
        "sdpa": _sdpa,
        "sdpa-cudnn": _sdpa,
        "saccade": _saccade,
        "saccade-window": _saccade_window,
    }
    if mode != "eager":
        attends["flex"] = _flex(s)
    expected = None
    for name, attend in attends.items():
        if name not in names:
            continue
        step = Step(name, attend, inputs, mode)
        loss = step().item()
        expected = loss if expected is None else expected
        if name != "saccade-window" and abs(loss - expected) > 2e-3 * abs(expected):
            raise SystemExit(f"{name}: a loss of {loss}, where SDPA has {expected}")
        for _ in range(2):
            step()
        yield step


def _kernels(step: Step) -> None:
    """What the GPU does in a step, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda x: -x.device_time_total)
    print(f"{step.name}: {sum(x.device_time_total for x in rows) / 1e3:.2f} ms")
    for x in rows[:26]:
        print(f"  {x.device_time_total / 1e3:8.3f} ms {x.count:4d}  {x.key[:100]}")


def _listed(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Words of a list, by commas."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [x for x in found if x not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(known)}")
        return found

    return parse


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--lengths", default="1024x8,8192x1,32768x1")
    words.add_argument("--providers", type=_listed(PROVIDERS), default=",".join(PROVIDERS))
    words.add_argument("--modes", type=_listed(MODES), default="eager,compiled")
    words.add_argument("--rounds", type=int, default=12)
    words.add_argument("--kernels", action="store_true")
    words.add_argument("--out", type=Path)
    words.add_argument("--commit")
    given = words.parse_args()
    run = Run.now(torch.device("cuda"), given.commit)
    for length in given.lengths.split(","):
        s, b = map(int, length.split("x"))
        for mode in given.modes:
            steps = [*_steps(s, b, mode, given.providers)]
            if given.kernels:
                for step in steps:
                    _kernels(step)
                continue
            for turn in range(given.rounds):
                for i in range(len(steps)):
                    steps[(turn + i) % len(steps)].time()
            base = statistics.median(steps[0].seconds)
            for step in steps:
                low, ms, high = (1e3 * x for x in statistics.quantiles(step.seconds, n=4))
                row = {"step": "llama", "provider": step.name, "mode": mode, "s": s, "b": b, "ms": ms, "ms_q1": low}
                row |= {"ms_q3": high, "ratio": 1e3 * base / ms}
                told = f"{ms:8.2f} ms  {ms / base / 1e3:.3f} of SDPA's"
                print(f"{mode:15s} s={s} b={b} {step.name:15s} {told}", flush=True)
                run.append(given.out, row)
            del steps
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
