"""The host's time for a small call beside SDPA's: eager, with gradients, compiled, with functions, by other names; and
of every layout and mask beside the best of SDPA, `varlen_attn` and FlashAttention-3 that can do the call.

    python -m benchmarks.host [--rounds 7] [--out rows.jsonl]        about 200 s on one GPU, most of it compiling
    python -m benchmarks.host --modes training --calls gluon
    python -m benchmarks.host --modes layouts                        FA3_LIBRARY names FlashAttention-3's library

One call of `1 8 128 64`, bf16, many times without a synchronization. All calls of a mode take turns, in an order that
changes in every round; a row has the median in microseconds, its ratio to SDPA's of the same mode, and for score
functions and faces what they cost beside saccade's plain call. Each result is compared with the reference's first.
`bar` is what the project wants; a mark says where it is missed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import host_layouts
from benchmarks.harness.machine import Run
from saccade import Dense, alibi, attention, relative_bias, softcap
from saccade.compat import flash_attn, sdpa
from saccade.integrations.transformers import attention_forward

CALLS = 300
"""In a sample."""
BARS = {"forward": 1.0, "training": 1.1, "compiled": 1.25, "compiled training": 1.25}
"""Times SDPA's."""
LAYOUTS = "layouts"
"""The mode of `host_layouts.py`."""
MORE = 10
"""Microseconds of score functions and faces, beside a plain call."""
VIEWS = "views, and back"
"""A plain call of views: what faces that take them, as SDPA does, cost besides. The four views are not theirs."""
Call = Callable[..., Any]
"""(q, k, v) -> out"""


class Timed(NamedTuple):
    """What is timed."""

    mode: str
    name: str
    call: Call
    exact: Call
    base: str
    """The call of the mode that it is compared with: a ratio to SDPA's, or microseconds more than saccade's own."""
    rows: bool = False
    """Whether it takes (b, s, h, d), or views of it, as models have them, and returns that."""


def _calls() -> list[Timed]:
    slopes, table = torch.rand(8, device="cuda"), torch.rand(8, 257, device="cuda")

    def own(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    functions: dict[str, Any] = {
        "softcap": softcap(5.0), "alibi": alibi(slopes), "own function": own, "relative_bias": relative_bias(table),
    }  # fmt: skip
    found = []
    for mode in BARS:
        compiled = torch.compile if "compiled" in mode else lambda call: call
        found.append(Timed(mode, "sdpa", compiled(F.scaled_dot_product_attention), attention, ""))
        for backend in ("gluon", "triton"):
            plain = partial(attention, backend=backend)
            found.append(Timed(mode, backend, compiled(_free(plain)), attention, "sdpa"))
            if mode not in ("forward", "training"):
                continue
            for name, function in functions.items():
                call, exact = partial(plain, score_mod=function), partial(attention, score_mod=function)
                found.append(Timed(mode, f"{backend} {name}", call, exact, backend))
            if mode == "forward":
                call, exact = partial(plain, sink=slopes), partial(attention, sink=slopes)
                found.append(Timed(mode, f"{backend} sink", call, exact, backend))
    exact = partial(attention, layout=Dense("bshd"))
    bases = dict.fromkeys(("compat.sdpa", "transformers"), VIEWS)
    faces = _faces().items()
    found += [Timed("forward", name, call, exact, bases.get(name, "gluon"), rows=True) for name, call in faces]
    return found


def _free(call: Call) -> Call:
    """A function, which torch.compile takes and a partial is not."""

    def free(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(q, k, v)

    return free


def _faces() -> dict[str, Call]:
    """Of tensors (b, s, h, d), from which models make the views that SDPA and transformers take."""
    layer: Any = SimpleNamespace(is_causal=False, layer_idx=0)

    def views(call: Call) -> Call:
        return lambda q, k, v: call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))

    def of_transformers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_forward(layer, q, k, v, None, scaling=0.125, is_causal=False)[0]

    own = views(attention)
    return {
        VIEWS: lambda q, k, v: own(q, k, v).transpose(1, 2),
        "compat.sdpa": lambda q, k, v: views(sdpa.scaled_dot_product_attention)(q, k, v).transpose(1, 2),
        "compat.flash_attn": flash_attn.flash_attn_func,
        "transformers": views(of_transformers),
    }


def _step(timed: Timed, operands: list[Tensor], dout: Tensor) -> Callable[[], Any]:
    if timed.mode.endswith("training"):
        return lambda: torch.autograd.grad(timed.call(*operands), operands, dout)

    return lambda: timed.call(*operands)


def _check(timed: Timed, operands: list[Tensor], dout: Tensor) -> None:
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in operands]
    given = [timed.call(*operands)]
    want = [timed.exact(*wide, backend="reference")]
    if timed.mode.endswith("training"):
        given += torch.autograd.grad(given[0], operands, dout)
        want += torch.autograd.grad(want[0], wide, dout.double())
    for x, y in zip(given, want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=7)
    words.add_argument("--modes", default=",".join([*BARS, LAYOUTS]), help="of the calls, with commas")
    words.add_argument("--calls", default="", help="words that a call's name begins with, with commas; all if omitted")
    words.add_argument("--out", type=Path)
    words.add_argument("--commit")
    given = words.parse_args()
    if not torch.cuda.is_available():
        words.error("needs a GPU")
    run = Run.now(torch.device("cuda"), given.commit)
    torch._dynamo.config.recompile_limit = 64
    dout, *operands = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    learned = [x.clone().requires_grad_() for x in operands]
    wanted = "sdpa", *given.calls.split(",")  # which others are compared with
    calls = [x for x in _calls() if x.name.startswith(wanted)]
    for mode in given.modes.split(","):
        if mode == LAYOUTS:
            host_layouts.measure(given.rounds, given.calls, run, given.out)
            continue
        bar = BARS[mode]
        tensors = learned if mode.endswith("training") else operands
        here = [x for x in calls if x.mode == mode]
        by_rows = [x.transpose(1, 2).contiguous() for x in operands]
        given_to = [by_rows if x.rows else tensors for x in here]
        steps = [_step(x, own, dout) for x, own in zip(here, given_to, strict=True)]
        for x, own, step in zip(here, given_to, steps, strict=True):
            for _ in range(5):  # by the fifth call all are replayed
                _check(x, own, dout)
            host_layouts.microseconds(step, CALLS)
        samples: list[list[float]] = [[] for _ in here]
        for turn in range(given.rounds):
            for i in range(len(here)):
                place = (turn + i) % len(here)
                samples[place].append(host_layouts.microseconds(steps[place], CALLS))
        median = {x.name: statistics.median(times) for x, times in zip(here, samples, strict=True)}
        for x, times in zip(here, samples, strict=True):
            us = median[x.name]
            row = {"mode": mode, "call": x.name, "us": round(us, 2), "least": round(min(times), 2)}
            row |= {"of_sdpa": round(us / median["sdpa"], 3)}
            told = f"{mode:18s} {x.name:22s} {us:8.1f} us  {row['of_sdpa']:5.2f} of SDPA's"
            if x.base == "sdpa":
                told += f"  (bar {bar})" + ("  MISSED" if us > bar * median["sdpa"] else "")
            elif x.base:
                row["more"] = round(us - median[x.base], 2)
                told += f"  {row['more']:+6.1f} (bar +{MORE})" + ("  MISSED" if row["more"] > MORE else "")
            print(told, flush=True)
            run.append(given.out, row)


if __name__ == "__main__":
    main()
