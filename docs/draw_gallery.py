"""Draws `gallery.png` beside this file: `python docs/draw_gallery.py`."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

from saccade.testing.gallery import NAMES, made

S = 64


def main() -> None:
    figure, axes = plt.subplots(3, 3, figsize=(7.5, 8), layout="constrained")
    for name, ax in zip(NAMES, axes.flat, strict=True):
        made(name, S).plot(S, ax=ax)
        ax.set(xticks=[], yticks=[], title=name, xlabel="", ylabel="")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=70)
    few_colours = Image.open(drawn).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    few_colours.save(Path(__file__).with_name("gallery.png"), optimize=True)


if __name__ == "__main__":
    main()
