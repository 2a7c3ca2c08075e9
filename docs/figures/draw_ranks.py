"""Draws `ranks.svg` in docs/: `python docs/figures/draw_ranks.py`. Rows are benchmarks/tables/*/*-ranks-*.jsonl.

One picture for each cell: the share of ideal that one call keeps over 1, 2, 4 and 8 GPUs by `pull`. Filled points are
measured, the geometric mean over batches of documents; lines, and open points where nothing was measured, are what the
model of `saccade.distributed.estimates` says. A cross is the best of other libraries in the same run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.predictions import rows
from benchmarks.rank_cells import cells, methods, predicted

CELLS = {
    "16k-64:8": "16k, 64:8",
    "64k-64:8": "64k, 64:8",
    "128k-64:8": "128k, 64:8",
    "16k-16:16": "16k, 16:16",
    "64k-16:16": "64k, 16:16",
    "documents-8k": "documents, 8k a rank",
    "documents-32k": "documents, 32k a rank",
    "window-128k": "128k, 64:8, window 4k",
}
MODES = "forward", "backward"
RANKS = 1, 2, 4, 8
COLORS = {"forward": "#3182bd", "backward": "#e6550d"}
Shares = dict[tuple[str, int, str, str], float]
"""By cell, ranks, direction and provider."""


def measured() -> Shares:
    """Geometric means over batches."""
    found: dict[tuple[str, int, str, str], list[float]] = {}
    for row in rows():
        found.setdefault((row["cell"], row["ranks"], row["mode"], row["provider"]), []).append(row["efficiency"])
    return {key: geometric_mean(shares) for key, shares in found.items()}


def model(cell: str, mode: str, ranks: int) -> float:
    """The same of what is predicted."""
    batches = [x for x in cells(ranks) if x.name == cell]
    return geometric_mean(predicted(x, "pull", ranks, mode == "backward") for x in batches)


def draw(ax: Axes, cell: str, found: Shares) -> None:
    for mode in MODES:
        color, told = COLORS[mode], [model(cell, mode, n) if n > 1 else 1.0 for n in RANKS]
        ax.plot(RANKS, told, color=color, linewidth=1)
        for n, share in zip(RANKS, told, strict=True):
            if n == 1:
                continue
            here = found.get((cell, n, mode, "pull"))
            ax.plot(n, here or share, "o", color=color, markerfacecolor=color if here else "white", markersize=5)
            of_others = [x for key, x in found.items() if key[:3] == (cell, n, mode) and key[3] not in methods(n)]
            if of_others:
                ax.plot(n, max(of_others), "x", color=color, markersize=5)
    ax.set_xscale("log", base=2)
    ax.set_xticks(RANKS, [str(n) for n in RANKS])
    ax.minorticks_off()
    ax.set_title(CELLS[cell], fontsize=9)
    ax.set_ylim(0, 1.15)
    ax.grid(axis="y", color="0.9", linewidth=0.6)


def legend(figure: Any) -> None:
    marks = [
        *(Line2D([], [], color=color, label=mode) for mode, color in COLORS.items()),
        Line2D([], [], color="0.3", marker="o", linestyle="", label="measured"),
        Line2D([], [], color="0.3", marker="o", linestyle="-", markerfacecolor="white", label="predicted"),
        Line2D([], [], color="0.3", marker="x", linestyle="", label="best other library, measured"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=9)


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "saccade"  # the same bytes every time
    figure, axes = plt.subplots(2, 4, figsize=(12, 5.4), layout="constrained", sharex=True, sharey=True)
    found = measured()
    for ax, cell in zip(axes.flat, CELLS, strict=True):
        draw(ax, cell, found)
    for ax in axes[-1]:
        ax.set_xlabel("H200s of one host", fontsize=9)
    figure.supylabel("share of ideal", fontsize=9)
    legend(figure)
    figure.savefig(Path(__file__).parents[1] / "ranks.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
