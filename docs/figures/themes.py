"""Light and dark, for the scripts that draw the site's pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1]
STYLES = {
    "light": {"ink": "#24292f", "grid": "#d0d7de"},
    "dark": {"ink": "#c9d1d9", "grid": "#444c56"},
}


def styled(theme: str) -> None:
    ink, grid = STYLES[theme]["ink"], STYLES[theme]["grid"]
    mpl.rcdefaults()
    mpl.rcParams.update({
        "svg.hashsalt": "saccade", "font.size": 9, "axes.grid": True, "axes.axisbelow": True, "legend.frameon": False,
        "axes.spines.top": False, "axes.spines.right": False, "grid.color": grid,
        "savefig.transparent": theme == "dark",
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
    })  # fmt: skip


def save(figure: Any, name: str, theme: str) -> None:
    figure.savefig(DOCS / f"{name}-{theme}.svg", metadata={"Date": None})
    plt.close(figure)
