"""Draws `serving-light.svg` and `serving-dark.svg` in docs/: `python docs/figures/draw_serving.py`."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from themes import STYLES, save, styled

SHARED, OWN, EMPTY = "#9ecae1", ("#fdd0a2", "#c7e9c0", "#dadaeb"), "#f7f7f7"
PREFIX = [4, 9]
PAGES = [[1, 6], [7], [2, 10, 5]]
"""Of three requests, after those of the prefix."""
PARENTS = [-1, 0, 0, 1, 1, 2]
DRAFTS = ["the", "cat", "dog", "sat", "ran", "bit"]


def box(ax: Axes, x: float, y: float, color: str, text: str = "") -> None:
    ax.add_patch(Rectangle((x, y), 0.92, 0.8, facecolor=color, edgecolor="0.4", linewidth=0.8))
    ax.text(x + 0.46, y + 0.4, text, ha="center", va="center", fontsize=8, color="black")


def draw_pages(ax: Axes) -> None:
    owner = dict.fromkeys(PREFIX, SHARED)
    for i, own in enumerate(PAGES):
        owner |= dict.fromkeys(own, OWN[i])
        ax.text(-0.2, 3.4 - i, f"request {i}", ha="right", va="center", fontsize=8)
        for j, page in enumerate(PREFIX + own):
            box(ax, j, 3 - i, owner[page], str(page))
    for page in range(12):
        box(ax, page % 6, -0.8 - page // 6, owner.get(page, EMPTY), str(page))
    ax.text(-0.2, -0.8, "cache", ha="right", va="center", fontsize=8)
    ax.set(title="block_table, and the pages of the cache", xlim=(-2, 6.2), ylim=(-2, 4))


def draw_prefix(ax: Axes) -> None:
    """Two calls: rows of all requests over the prefix, and each over its own."""
    for i in range(3):
        box(ax, -1.4, 3 - i, OWN[i], f"q {i}")
    for j, page in enumerate(PREFIX):
        ax.add_patch(Rectangle((j, 1), 0.92, 2.8, facecolor=SHARED, edgecolor="0.4", linewidth=0.8))
        ax.text(j + 0.46, 2.4, str(page), ha="center", va="center", fontsize=8, color="black")
    for i, own in enumerate(PAGES):
        for j, page in enumerate(own):
            box(ax, 2.5 + j, 3 - i, OWN[i], str(page))
    ax.text(0.96, 0.6, "read once\nfor all rows", ha="center", va="top", fontsize=8)
    ax.text(3.9, 0.6, "read by each\nfor itself", ha="center", va="top", fontsize=8)
    ax.text(2.2, -1.2, "merged by the LSE", ha="center", va="center", fontsize=8)
    ax.set(title="shared_pages=2", xlim=(-1.7, 5.8), ylim=(-2, 4))


def draw_tree(ax: Axes) -> None:
    n = len(PARENTS)
    for i in range(n):
        at, seen = i, set()
        while at >= 0:
            seen.add(at)
            at = PARENTS[at]
        for j in range(-3, n):
            color = SHARED if j < 0 else OWN[0] if j in seen else EMPTY
            box(ax, j, n - 1 - i, color)
        ax.text(-3.2, n - 0.6 - i, DRAFTS[i], ha="right", va="center", fontsize=8)
    for j, word in enumerate(DRAFTS):
        ax.text(j + 0.46, n + 0.1, word, ha="center", fontsize=8)
    ax.text(-1.5, n + 0.1, "context", ha="center", fontsize=8)
    ax.set(title="a tree of drafts: each sees its own path", xlim=(-5, n + 0.2), ylim=(-0.3, n + 0.8))


def main() -> None:
    for theme in STYLES:
        styled(theme)
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
        for draw, ax in zip((draw_pages, draw_prefix, draw_tree), axes, strict=True):
            draw(ax)
            ax.set_axis_off()
            ax.title.set_visible(True)
        save(figure, "serving", theme)


if __name__ == "__main__":
    main()
