"""The host's time of small calls of every layout and mask, beside what users would call in their place.

For `host.py`.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from saccade import Dense, Packed, Paged, append_kv, attention, causal, documents, interval, softcap

CALLS = 200
"""In a sample."""
Step = Callable[[], Any]
DENSE = "dense causal"
sdpa = F.scaled_dot_product_attention


class Cell(NamedTuple):
    """One call, and its peers."""

    name: str
    ours: Step
    exact: Step | None
    """the result that `ours` must have"""
    peers: dict[str, Step]
    bar: float
    """of the best peer's time; without a peer, microseconds"""
    dense: float = 0.0
    """or of our dense call's, if that is more"""
    more: tuple[str, float] | None = None
    """or another cell, and the microseconds that this one may take besides"""


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def i32(*x: int) -> Tensor:
    return torch.tensor(x, device="cuda", dtype=torch.int32)


def flash_attention_3() -> Any:
    """Its operator, or None without the library."""
    if "FA3_LIBRARY" not in os.environ:
        return None
    ctypes.CDLL(os.environ["CUDART12"], mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(os.environ["FA3_LIBRARY"])
    return partial(torch.ops.flash_attn_3.fwd, num_splits=1)


def forwards() -> list[Cell]:
    """Calls without gradients: b1 h8 s128 d64, and decoding of 4 sequences of 500 keys."""
    fa3, mask = flash_attention_3(), causal()
    q, k, v, out = (random(1, 8, 128, 64) for _ in range(4))
    seen = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril()
    used, starts, at = i32(100), interval(i32(5)[:, None], None), i32(60)
    ids = torch.zeros(1, 128, dtype=torch.int32, device="cuda")
    same, table = mask & documents(ids), torch.randn(8, 33, device="cuda")
    one = q[:, :, :1]

    def by_distance(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (kv_idx - q_idx).clamp(-16, 16) + 16]

    plain = {"sdpa": lambda: sdpa(q, k, v, is_causal=True)}
    if fa3 is not None:
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        plain["fa3"] = lambda: fa3(*rows, softmax_scale=0.125, is_causal=True)
    masked = {"sdpa": lambda: sdpa(q, k, v, attn_mask=seen)}
    last = {"sdpa": lambda: sdpa(one, k, v, attn_mask=seen[60:61])}

    def cell(name: str, peers: dict[str, Step], bar: float, rows: Tensor = q, **keywords: Any) -> Cell:
        further = {name: keywords.pop(name) for name in ("dense", "more") if name in keywords}
        asked = {name: x for name, x in keywords.items() if name not in ("out", "return_lse")}
        exact = partial(attention, rows.double(), k.double(), v.double(), backend="reference", **asked)
        return Cell(name, partial(attention, rows, k, v, **keywords), exact, peers, bar, **further)

    return [
        cell(DENSE, plain, 1.0, mask=mask),
        cell("with LSE", plain, 1.1, mask=mask, return_lse=True),
        cell("out=", plain, 1.1, mask=mask, out=out),
        cell("tensor mask", masked, 0.7, mask=seen, dense=1.2),
        cell("padded", masked, 0.7, mask=mask, layout=Dense("bhsd", used, used), dense=1.2),
        cell("intervals", masked, 0.7, mask=mask & starts, dense=1.2),
        cell("static cache", last, 0.7, one, mask=mask, layout=Dense(q_offset=at), dense=1.2),
        cell("documents", masked, 0.7, mask=same, dense=1.2),
        cell("softcap", {}, 0.0, mask=mask, score_mod=softcap(20.0), more=(DENSE, 10.0)),
        cell("captured table", {}, 0.0, mask=mask, score_mod=by_distance, more=(DENSE, 10.0)),
        *of_sequences(fa3),
    ]


def of_sequences(fa3: Any) -> list[Cell]:
    """Two packed sequences, one token of four over pages, and an append."""
    mask, offsets, scale = causal(), i32(0, 50, 128), 0.125
    q, k, v = (random(128, 8, 64) for _ in range(3))
    packed = Packed(offsets, offsets, 78, 78)
    peers: dict[str, Step] = {"varlen": lambda: varlen_attn(q, k, v, offsets, offsets, 78, 78, window_size=(-1, 0))}
    token, keys, values = random(4, 1, 8, 128), random(64, 64, 2, 128), random(64, 64, 2, 128)
    table, used = torch.arange(32, device="cuda", dtype=torch.int32).view(4, 8), i32(500, 500, 500, 500)
    paged = Paged(table, used)
    decoders: dict[str, Step] = {}
    if fa3 is not None:
        lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 78, "max_seqlen_k": 78}
        peers["fa3"] = lambda: fa3(q, k, v, softmax_scale=scale, is_causal=True, **lengths)
        pages = {"page_table": table, "seqused_k": used}
        decoders["fa3"] = lambda: fa3(token, keys, values, softmax_scale=128**-0.5, is_causal=True, **pages)
    new = random(4, 1, 2, 128), random(4, 1, 2, 128)

    def exact(operands: tuple[Tensor, ...], **keywords: Any) -> Step:
        return partial(attention, *(x.double() for x in operands), backend="reference", **keywords)

    of_packed, of_pages = {"mask": mask, "layout": packed}, {"mask": mask, "layout": paged}
    return [
        Cell("packed", lambda: attention(q, k, v, **of_packed), exact((q, k, v), **of_packed), peers, 1.0),
        Cell(
            "packed softcap", lambda: attention(q, k, v, **of_packed, score_mod=softcap(20.0)),
            exact((q, k, v), **of_packed, score_mod=softcap(20.0)), {}, 0.0, more=("packed", 10.0),
        ),
        Cell(
            "paged decode", lambda: attention(token, keys, values, **of_pages),
            exact((token, keys, values), **of_pages), decoders, 1.1,
        ),
        Cell("append_kv", lambda: append_kv(keys, values, paged, *new), None, {}, 40.0),
    ]  # fmt: skip


def with_gradients() -> list[Cell]:
    """Forward and backward by autograd."""
    mask, offsets = causal(), i32(0, 50, 128)
    q, k, v = (random(1, 8, 128, 64, grad=True) for _ in range(3))
    few, fewer = (random(1, 2, 128, 64, grad=True) for _ in range(2))
    x, y, z = (random(128, 8, 64, grad=True) for _ in range(3))
    dout, of_rows = random(1, 8, 128, 64), random(128, 8, 64)
    packed = {"mask": mask, "layout": Packed(offsets, offsets, 78, 78)}

    def gradients(call: Any, operands: tuple[Tensor, ...], by: Tensor) -> Step:
        return lambda: torch.autograd.grad(call(*operands), operands, by)

    def exact(operands: tuple[Tensor, ...], by: Tensor, **keywords: Any) -> Step:
        wide = tuple(t.detach().double().requires_grad_() for t in operands)
        return gradients(partial(attention, backend="reference", **keywords), wide, by.double())

    def cell(name: str, operands: tuple[Tensor, ...], by: Tensor, peer: tuple[str, Any], bar: float, **of: Any) -> Cell:
        ours, peers = partial(attention, **of), {peer[0]: gradients(peer[1], operands, by)}
        return Cell(name, gradients(ours, operands, by), exact(operands, by, **of), peers, bar)

    dense, grouped = partial(sdpa, is_causal=True), partial(sdpa, is_causal=True, enable_gqa=True)
    varlen = partial(varlen_attn, cu_seq_q=offsets, cu_seq_k=offsets, max_q=78, max_k=78, window_size=(-1, 0))
    return [
        cell("dense, forward and backward", (q, k, v), dout, ("sdpa", dense), 1.1, mask=mask),
        cell("grouped heads, forward and backward", (q, few, fewer), dout, ("sdpa", grouped), 1.1, mask=mask),
        cell("packed, forward and backward", (x, y, z), of_rows, ("varlen", varlen), 1.0, **packed),
    ]


def check(cell: Cell) -> None:
    """Raises where the result is not what it must be."""
    given = cell.ours()
    if cell.exact is None:
        return
    given, want = (x if isinstance(x, tuple) else (x,) for x in (given, cell.exact()))
    for x, y in zip(given, want, strict=False):  # of an LSE besides nothing is compared
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)


def microseconds(step: Step, calls: int = CALLS) -> float:
    """The host's time of a call, of so many without a synchronization."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * seconds / calls


def measure(rounds: int, words: str, run: Any, out: Path | None) -> None:
    """Times all cells, each with its peers in turns, prints and writes rows."""
    with torch.no_grad():
        found = _measured(forwards(), rounds, words)
    found |= _measured(with_gradients(), rounds, words)
    dense = found[DENSE][1]["saccade"] if DENSE in found else 0.0
    for name, (cell, median) in found.items():
        us, best = median["saccade"], min((x for peer, x in median.items() if peer != "saccade"), default=0.0)
        bar = max(cell.bar * best, cell.dense * dense) if best else cell.bar
        if cell.more is not None and cell.more[0] in found:
            bar = found[cell.more[0]][1]["saccade"] + cell.more[1]
        row = {"mode": "layouts", "call": name, "us": round(us, 2), "bar_us": round(bar, 2)}
        row |= {f"{peer}_us": round(x, 2) for peer, x in median.items() if peer != "saccade"}
        told = "  ".join(f"{peer} {x:.1f}" for peer, x in median.items())
        print(f"{name:38s} {told}  (bar {bar:.1f} us){'  MISSED' if bar and us > bar else ''}", flush=True)
        run.append(out, row)


def _measured(cells: list[Cell], rounds: int, words: str) -> dict[str, tuple[Cell, dict[str, float]]]:
    found = {}
    for cell in [x for x in cells if x.name.startswith(tuple(words.split(",")))]:
        for _ in range(6):  # by the sixth call it is replayed
            check(cell)
        steps = {"saccade": cell.ours, **cell.peers}
        samples: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            microseconds(step)
        for turn in range(rounds):
            names = [*steps][turn % len(steps) :] + [*steps][: turn % len(steps)]
            for name in names:
                samples[name].append(microseconds(steps[name]))
        found[cell.name] = cell, {name: statistics.median(times) for name, times in samples.items()}
    return found
