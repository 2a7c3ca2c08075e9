"""Draws `gallery-light.png` and `gallery-dark.png` in docs/: `python docs/figures/draw_gallery.py`."""

from __future__ import annotations

import io

import matplotlib as mpl
import matplotlib.pyplot as plt
from PIL import Image
from themes import DOCS, STYLES, styled

from saccade.testing.gallery import NAMES, made

S = 64


def draw(theme: str) -> None:
    styled(theme)
    mpl.rcParams["figure.facecolor"] = {"light": "#ffffff", "dark": "#1e2129"}[theme]  # a palette has no transparency
    figure, axes = plt.subplots(3, 3, figsize=(7.5, 8), layout="constrained")
    for name, ax in zip(NAMES, axes.flat, strict=True):
        made(name, S).plot(S, ax=ax)
        ax.set(xticks=[], yticks=[], title=name, xlabel="", ylabel="")
        ax.grid(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=70, transparent=False)
    plt.close(figure)
    few_colours = Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    few_colours.save(DOCS / f"gallery-{theme}.png", optimize=True)


def main() -> None:
    for theme in STYLES:
        draw(theme)


if __name__ == "__main__":
    main()
