"""Draws the speed shown in `performance.md`, light and dark, from committed rows: `python docs/figures/draw_speed.py`.

- speed-*.svg: TFLOP/s over the length, forward and backward, beside peers and the ceiling of a matrix product
- decode-*.svg: GB/s of decoding over pages, beside FlashAttention-3 and a device copy
- memory-*.svg: memory of a call over the length, on a CPU and on an H200, from the rows of benchmarks/memory.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from themes import STYLES, save, styled

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.harness.rows import BenchRow, latest, read

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
TABLES = ROOT / "benchmarks" / "tables"
COLORS = {
    "saccade-gluon": "#e36209", "auto": "#e36209", "saccade": "#e36209", "fa3": "#2f81f7", "fa4": "#8957e5",
    "sdpa-cudnn": "#3fb950", "SDPA": "#3fb950", "matmul": "#8b949e", "copy": "#8b949e", "plain": "#8b949e",
}  # fmt: skip
NAMES = {
    "saccade-gluon": "saccade", "auto": "saccade", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4",
    "sdpa-cudnn": "cuDNN", "matmul": "a matrix product", "copy": "a device copy",
    "plain": "softmax(q k) v, written out",
}  # fmt: skip


def length(s: int) -> str:
    return f"{s // 1024}k" if s % 1024 == 0 and s >= 1024 else str(s)


def line(ax: Axes, name: str, points: list[tuple[int, float]]) -> None:
    style = {"linestyle": ":"} if name in ("matmul", "copy") else {"marker": "o", "markersize": 3}
    width = 2.2 if NAMES.get(name, name) == "saccade" else 1.2
    ax.plot(*zip(*sorted(points), strict=True), label=NAMES.get(name, name), color=COLORS[name], lw=width, **style)


def over_lengths(ax: Axes, lengths: Iterable[int]) -> None:
    lengths = sorted({*lengths})
    ax.set_xscale("log", base=2)
    ax.set_xticks(lengths, [length(s) for s in lengths])
    ax.minorticks_off()
    ax.set_ylim(bottom=0)


def draw_speed(rows: list[BenchRow], theme: str) -> None:
    """Dense, bf16, d 128, 16 heads: b s = 16k, causal and not."""
    rows = latest(rows, ("saccade-gluon", "fa3", "fa4", "sdpa-cudnn"))
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
    for i, mode in enumerate(("forward", "backward")):
        for j, mask in enumerate(("none", "causal")):
            shape = {"mode": mode, "dtype": "bf16", "layout": "dense", "mask": mask, "score": "none", "sink": False}
            shape |= {"h_q": 16, "h_k": 16, "d": 128, "d_v": 128, "deterministic": False}
            own = [r for r in rows if r.tflops and all(getattr(r, name) == x for name, x in shape.items())]
            for name in ("saccade-gluon", "fa3", "fa4", "sdpa-cudnn", "matmul"):
                line(axes[i, j], name, [(r.s_q, r.tflops or 0) for r in own if r.provider == name])
            over_lengths(axes[i, j], (r.s_q for r in own if r.provider == "saccade-gluon"))
            axes[i, j].set_title(f"{mode}, {'causal' if mask == 'causal' else 'no mask'}")
        axes[i, 0].set_ylabel("TFLOP/s")
    for ax in axes[1]:
        ax.set_xlabel("sequence length")
    axes[0, 0].set_ylim(0, 850)
    axes[0, 0].legend(loc="lower right")
    save(figure, "speed", theme)


def draw_decode(rows: list[BenchRow], theme: str) -> None:
    """One new token over 8k keys for each sequence, bf16, 8 key heads of 128."""
    shape = {"mode": "decode", "dtype": "bf16", "h_k": 8, "s_q": 1, "s_k": 8192, "d": 128, "d_v": 128, "score": "none"}
    own = [r for r in latest(rows, ("auto", "fa3")) if r.gbps and all(getattr(r, key) == x for key, x in shape.items())]
    own = [r for r in own if "cache" not in r.case]
    cells = sorted({(r.page_size or 0, r.h_q, r.b) for r in own})
    figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
    for i, name in enumerate(("auto", "fa3", "copy")):
        found = {(r.page_size, r.h_q, r.b): r.gbps or 0 for r in own if r.provider == name}
        places = [x + 0.27 * (i - 1) for x in range(len(cells))]
        ax.bar(places, [found[cell] for cell in cells], 0.25, label=NAMES[name], color=COLORS[name])
    ax.set_xticks(
        range(len(cells)), [f"{b} sequences\n{h} heads\npages of {size}" for size, h, b in cells], fontsize=7.5
    )
    ax.set(ylabel="GB/s of keys and values", ylim=(0, 5400))
    ax.legend(ncols=3, loc="upper left")
    save(figure, "decode", theme)


def draw_memory(theme: str) -> None:
    """A causal window of 1024, forward and backward."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for ax, gpu, name in zip(axes, ("cpu", "h200"), ("a CPU, float32", "an H200, bfloat16"), strict=True):
        text = (TABLES / gpu / "memory.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(one) for one in text.splitlines()]
        for what in ("saccade", "SDPA", "plain"):
            line(ax, what, [(row["s"], row["mib"]) for row in rows if row["what"] == what])
        ax.set_yscale("symlog", linthresh=10)
        over_lengths(ax, (row["s"] for row in rows))
        ax.set(xlabel="sequence length", title=name)
    axes[0].set_ylabel("MiB beyond operands, result, gradients")
    axes[0].legend()
    save(figure, "memory", theme)


def main() -> None:
    rows = list(read(ROOT / "benchmarks" / "results" / "h200"))
    for theme in STYLES:
        styled(theme)
        draw_speed(rows, theme)
        draw_decode(rows, theme)
        draw_memory(theme)


if __name__ == "__main__":
    main()
