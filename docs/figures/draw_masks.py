"""Draws `masks-light.svg` and `masks-dark.svg` in docs/: `python docs/figures/draw_masks.py`."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from themes import STYLES, save, styled

from saccade import causal, documents, prefix, window

IDS = torch.arange(32)[None] // 11
MASKS = (
    causal(),
    window(7, 0),
    window(4, 4),
    prefix(10),
    documents(IDS) & causal(),
    documents(IDS) | window(3, 3),
)


def main() -> None:
    for theme in STYLES:
        styled(theme)
        figure, axes = plt.subplots(2, 3, figsize=(9, 6.4), layout="constrained")
        for mask, ax in zip(MASKS, axes.flat, strict=True):
            mask.plot(32, ax=ax)
            ax.set(xticks=[], yticks=[])
            ax.grid(False)
        save(figure, "masks", theme)


if __name__ == "__main__":
    main()
