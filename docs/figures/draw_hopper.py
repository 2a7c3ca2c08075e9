"""Draws how the Hopper kernel works, for `performance.md`, light and dark: `python docs/figures/draw_hopper.py`.

- roles-*.svg: who is in a program of the forward, what lies in shared memory, and which barriers are between
- schedule-*.svg: what the tensor cores and the other units do while two consumers work on their tiles
- tiles-*.svg: which tiles of a mask are skipped, plain or masked, from the mask itself
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from themes import STYLES, save, styled

from saccade import Mask, causal, documents, window

LOAD, PRODUCT, SOFTMAX, SHARED = "#8957e5", "#e36209", "#2f81f7", "#3fb950"


def box(ax: Axes, x: float, y: float, w: float, h: float, color: str, text: str) -> None:
    ax.add_patch(FancyBboxPatch((x, y), w, h, "round,pad=0,rounding_size=0.08", fc=color + "40", ec=color, lw=1.2))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=8.5)


def arrow(ax: Axes, start: tuple[float, float], stop: tuple[float, float], color: str, dashed: bool = False) -> None:
    style = "--" if dashed else "-"
    ax.add_patch(FancyArrowPatch(start, stop, arrowstyle="-|>", mutation_scale=10, color=color, ls=style, lw=1.2))


def draw_roles(theme: str) -> None:
    ink = STYLES[theme]["ink"]
    figure, ax = plt.subplots(figsize=(9, 4.4), layout="constrained")
    box(ax, 0.0, 3.4, 1.9, 1.3, LOAD, "scheduler\none warp\n\ndraws work, loads q")
    box(ax, 0.0, 0.9, 1.9, 1.3, LOAD, "producer\none warp\n\nloads k and v")
    box(ax, 3.0, 3.6, 2.4, 0.9, SHARED, "query rows\n2 slots (1 at d 256)")
    box(ax, 3.0, 2.0, 2.4, 0.9, SHARED, "ring of key tiles\n2 or 3 stages")
    box(ax, 3.0, 0.4, 2.4, 0.9, SHARED, "ring of value tiles\n2 or 3 stages")
    for i in range(3):
        note = "\nwhere registers allow three" if i == 2 else ""
        text = f"consumer {i}: 4 warps, 64 rows\nq kᵀ, softmax, p v in registers{note}"
        box(ax, 6.7, 3.3 - 1.6 * i, 3.1, 1.2, PRODUCT, text)
    for y, start in ((4.05, 4.05), (2.45, 1.7), (0.85, 1.4)):
        arrow(ax, (1.95, start), (2.95, y), LOAD)
        for i in range(3):
            arrow(ax, (5.45, y), (6.65, 3.9 - 1.6 * i), SHARED)
    arrow(ax, (0.7, 3.35), (0.7, 2.25), LOAD)
    arrow(ax, (1.2, 2.25), (1.2, 3.35), ink, dashed=True)
    ax.text(0.65, 2.8, "what an\nitem is", ha="right", va="center", fontsize=8)
    ax.text(1.25, 2.8, "asks for\nthe next", ha="left", va="center", fontsize=8)
    ax.plot([8.2, 8.2, 0.95], [0.05, -0.25, -0.25], color=ink, ls="--", lw=1.2)
    arrow(ax, (0.95, -0.25), (0.95, 0.85), ink, dashed=True)
    ax.text(4.2, -0.15, "empty: named barriers, one for each stage", ha="center", va="bottom", fontsize=8.5)
    ax.text(4.2, 4.75, "full: an mbarrier counts the bytes of each stage", ha="center", fontsize=8.5)
    ax.set(xlim=(-0.2, 10), ylim=(-0.7, 5.1))
    ax.set_axis_off()
    save(figure, "roles", theme)


def draw_schedule(theme: str) -> None:
    """Time in units of a product; two consumers, four tiles."""
    figure, ax = plt.subplots(figsize=(9, 3.0), layout="constrained")

    def bar(row: float, start: float, width: float, color: str, text: str) -> None:
        ax.add_patch(Rectangle((start, row), width, 0.72, fc=color + "55", ec=color, lw=1))
        ax.text(start + width / 2, row + 0.36, text, ha="center", va="center", fontsize=8)

    for j in range(4):
        bar(4, 1.1 * j, 0.5, LOAD, f"K{j}")
        bar(4, 1.1 * j + 0.55, 0.5, LOAD, f"V{j}")
    for c in range(2):
        rows, at = (3 - 2 * c, 2 - 2 * c), 1.0 + c
        for j in range(4):
            start = at + 2 * j
            bar(rows[0], start, 0.5, PRODUCT, f"q K{j}ᵀ")
            if j:
                bar(rows[0], start + 0.5, 0.5, PRODUCT, f"p V{j - 1}")
            bar(rows[1], start + 0.5, 1.3, SOFTMAX, f"softmax of tile {j}")
    ax.set_yticks(
        [4.36, 3.36, 2.36, 1.36, 0.36],
        [
            "producer",
            "consumer 0: products",
            "consumer 0: other units",
            "consumer 1: products",
            "consumer 1: other units",
        ],
    )
    ax.set(xlim=(-0.1, 10.2), ylim=(-0.1, 4.9), xticks=[], xlabel="time →")
    ax.grid(visible=False)
    save(figure, "schedule", theme)


def draw_tiles(theme: str) -> None:
    s, q_rows, k_rows = 256, 16, 16
    ids = (torch.arange(s) >= 100).int() + (torch.arange(s) >= 190).int()
    masks: dict[str, Mask] = {
        "causal()": causal(),
        "window(63, 0)": window(63, 0),
        "causal() & documents(ids)": causal() & documents(ids[None]),
    }
    figure, axes = plt.subplots(1, 3, figsize=(9, 3.8), layout="constrained")
    colors = {"skipped": "none", "plain": PRODUCT, "masked": SOFTMAX}
    for ax, (name, mask) in zip(axes, masks.items(), strict=True):
        seen = mask.visible(s, s).reshape(-1, s, s)[0]
        tiles = seen.reshape(s // q_rows, q_rows, s // k_rows, k_rows).float().mean((1, 3))
        for i, row in enumerate(tiles.tolist()):
            for j, part in enumerate(row):
                kind = "skipped" if part == 0 else "plain" if part == 1 else "masked"
                face = colors[kind] + ("66" if kind != "skipped" else "")
                ax.add_patch(
                    Rectangle((j, i), 0.94, 0.94, fc=face if kind != "skipped" else "none", ec=STYLES[theme]["grid"])
                )
        ax.set(xlim=(0, len(tiles)), ylim=(len(tiles), 0), title=name, xticks=[], yticks=[], xlabel="tiles of keys")
        ax.set_aspect("equal")
        ax.grid(visible=False)
    axes[0].set_ylabel("tiles of queries")
    handles = [Patch(fc=color + "66", ec=color, label=kind) for kind, color in list(colors.items())[1:]]
    handles.insert(0, Patch(fc="none", ec=STYLES[theme]["grid"], label="never visited"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    save(figure, "tiles", theme)


def main() -> None:
    for theme in STYLES:
        styled(theme)
        draw_roles(theme)
        draw_schedule(theme)
        draw_tiles(theme)


if __name__ == "__main__":
    main()
