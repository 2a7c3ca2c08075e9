"""Draws `ranks.svg` beside this file: `python docs/draw_ranks.py`. Rows are benchmarks/tables/h200/*-ranks-*.jsonl.

Left: what two GPUs keep of twice one's speed, beside what the model of `saccade.distributed.estimates` says and beside
the best of other libraries in the same run. Right: the model's word for more ranks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from simulate_ranks import drawn

from saccade.distributed.estimates import of_pull
from saccade.distributed.pieces import Reach
from saccade.distributed.sharding import Sharding

ROWS = Path(__file__).parents[1] / "benchmarks" / "tables" / "h200"
CELLS = {
    "16k-64:8": ("16k, 64:8", (16384,), (64, 8)),
    "64k-64:8": ("64k, 64:8", (65536,), (64, 8)),
    "16k-16:16": ("16k, 16:16", (16384,), (16, 16)),
    "64k-16:16": ("64k, 16:16", (65536,), (16, 16)),
    "documents-8k": ("documents,\n8k a rank", 8192, (64, 8)),
    "documents-32k": ("documents,\n32k a rank", 32768, (64, 8)),
}
MODES = "forward", "backward"
RANKS = 2, 4, 8
COLORS = {"forward": "#3182bd", "backward": "#e6550d"}


def rows() -> list[dict[str, Any]]:
    """Of the last run of each cell."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(ROWS.glob("*-ranks-*.jsonl")):
        runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            runs[row["cell"], row["run"]].append(row)
        found |= {cell: of_run for (cell, _), of_run in runs.items()}
    return [row for of_cell in found.values() for row in of_cell if row.get("efficiency")]


def mean(found: Iterable[float]) -> float | None:
    values = [*found]
    return geometric_mean(values) if values else None


def shares(cell: str, mode: str) -> dict[str, float]:
    """Of each provider: geometric means over batches of documents."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows():
        if (row["cell"], row["mode"]) == (cell, mode):
            found[row["provider"]].append(row["efficiency"])
    return {name: geometric_mean(values) for name, values in found.items()}


def predicted(cell: str, mode: str, ranks: int) -> float:
    _, lengths, heads = CELLS[cell]
    batches = [lengths] if isinstance(lengths, tuple) else [drawn(lengths * ranks, 42 + i) for i in range(10)]
    plans = [Sharding(x, ranks, 1, Reach(None, 0)) for x in batches]
    return geometric_mean(of_pull(plan, heads, 128, backward=mode == "backward").efficiency[0] for plan in plans)


def draw_two(ax: Axes) -> None:
    for i, cell in enumerate(CELLS):
        for j, mode in enumerate(MODES):
            at, found = i + 0.4 * j - 0.2, shares(cell, mode)
            ax.bar(at, found.pop("saccade", 0), 0.36, color=COLORS[mode], label=mode if i == 0 else None)
            ax.plot(
                [at - 0.18, at + 0.18],
                [predicted(cell, mode, 2)] * 2,
                color="black",
                label="model" if i + j == 0 else None,
            )
            if found:
                ax.plot(
                    at,
                    max(found.values()),
                    "o",
                    color="0.85",
                    markeredgecolor="black",
                    label="best other" if i + j == 0 else None,
                )
    ax.set_xticks(range(len(CELLS)), [name for name, *_ in CELLS.values()], fontsize=8)
    ax.set(title="Two H200s", ylabel="share of twice one GPU's speed", ylim=(0, 1.05))
    ax.axhline(1, color="0.7", linewidth=0.8)
    ax.legend(loc="lower right", fontsize=8)


def draw_more(ax: Axes) -> None:
    for number, (cell, (name, *_)) in enumerate(CELLS.items()):
        for mode, line in zip(MODES, ("-", ":"), strict=True):
            values = [predicted(cell, mode, ranks) for ranks in RANKS]
            label = name.replace("\n", " ") if mode == "forward" else None
            ax.plot(RANKS, values, line, marker=".", color=f"C{number}", label=label)
    ax.set_xscale("log", base=2)
    ax.set_xticks(RANKS, [str(n) for n in RANKS])
    ax.set(title="The model: forward, and dotted backward", xlabel="ranks of one host", ylim=(0, 1.05))
    ax.legend(loc="lower left", fontsize=8)


def main() -> None:
    mpl.rcParams["svg.hashsalt"] = "saccade"  # the same bytes every time
    figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    draw_two(axes[0])
    draw_more(axes[1])
    figure.savefig(Path(__file__).with_name("ranks.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
