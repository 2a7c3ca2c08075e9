"""TFLOP/s over the sequence length as PNGs: one for each mode, head dim and mask."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from saccade.bench.rows import BenchRow

_FIXED = ("mode", "dtype", "layout", "mask", "score", "sink", "h_q", "h_k", "d", "d_v", "deterministic", "gpu")
"""The points of one plot share these; the batch shrinks as the sequence grows."""


def draw(rows: Iterable[BenchRow], folder: Path) -> list[Path]:
    """Draws and returns the files; a series of a single length gets no plot.

    Raises:
        ModuleNotFoundError: matplotlib is not installed (extra `[bench]`).
    """
    groups: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in rows:
        if row.tflops and row.s_q == row.s_k and row.provider != "copy":
            groups.setdefault(tuple(getattr(row, name) for name in _FIXED), []).append(row)
    made = []
    for group in groups.values():
        if len({row.s_q for row in group}) > 1:
            folder.mkdir(parents=True, exist_ok=True)
            made.append(_plot(group, folder))
    return made


def _plot(rows: list[BenchRow], folder: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), dpi=150)
    series: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=lambda row: row.s_q):
        series.setdefault(row.provider, []).append(row)
    order = ("saccade", "peer", "ceiling")
    for provider, points in sorted(series.items(), key=lambda item: (order.index(item[1][0].role), item[0])):
        role = points[0].role
        style: dict[str, Any] = {
            "saccade": {"marker": "o", "linewidth": 2.2},
            "peer": {"marker": ".", "linewidth": 1.2},
            "ceiling": {"linestyle": ":", "color": "grey", "linewidth": 1.2},
        }[role]
        axes.plot([row.s_q for row in points], [row.tflops or 0 for row in points], label=provider, **style)
    lengths = sorted({row.s_q for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{s // 1024}k" if s % 1024 == 0 else str(s) for s in lengths])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    row = rows[0]
    heads = f"{row.h_q} heads" if row.h_q == row.h_k else f"{row.h_q}:{row.h_k} heads"
    words = [row.mode, row.dtype, f"d {row.d}", heads, *(x for x in (row.mask, row.score) if x != "none")]
    axes.set(xlabel="sequence length", ylabel="TFLOP/s", title=f"{row.gpu}: {', '.join(words)}")
    axes.legend(fontsize=8)
    path = folder / f"{_name(row)}.png"
    figure.savefig(path, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    return path


def _name(row: BenchRow) -> str:
    heads = [] if row.h_q == row.h_k else [f"h{row.h_q}x{row.h_k}"]
    flags = [word for word in ("sink", "deterministic") if getattr(row, word)]
    layout = [] if row.layout == "dense" else [row.layout]
    words = [
        row.mode,
        row.dtype,
        f"d{row.d}",
        *heads,
        *layout,
        row.mask,
        *([] if row.score == "none" else [row.score]),
        *flags,
    ]
    return "-".join("".join(c if c.isalnum() else "_" for c in word).strip("_") for word in words)
