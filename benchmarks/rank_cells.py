"""The cells of ranks.py: what is attended to, over how many ranks, and by which ways of saccade's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "figures"))

from simulate_ranks import drawn

from saccade import alibi, causal, relative_bias, window
from saccade.distributed import estimates
from saccade.distributed.sharding import Sharding, reach_of

D = 128
WINDOW, REACH = 4096, 1024
"""Keys before a row that it sees; distances that a table has numbers for."""
MASKS = {"causal": causal(), "full": None, "window": window(WINDOW - 1, 0)}
GQA, MHA = (64, 8), (16, 16)
SMALLER = 512
"""What lengths are divided by where processors are to compute a cell within a moment."""


class Cell(NamedTuple):
    """bfloat16."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    mask: str = "causal"
    score: str | None = None
    """`alibi` or `table`, whose numbers get gradients."""
    seed: int | None = None
    """Of documents."""
    d: int = D

    @property
    def dense(self) -> bool:
        return len(self.lengths) == 1

    @property
    def rows(self) -> int:
        return sum(self.lengths)

    def smaller(self) -> Cell:
        """For processors that are to compute it within a moment."""
        lengths = tuple(-(-n // SMALLER) for n in self.lengths)
        return self._replace(lengths=lengths, heads=(8, max(2, 8 * self.heads[1] // self.heads[0])), d=16)

    @property
    def operations(self) -> float:
        """Of a forward: two products for every pair of row and key that is seen."""
        reach = reach_of(MASKS[self.mask])
        return 4.0 * self.heads[0] * self.d * sum(reach.area(n, 0, n) for n in self.lengths)

    def captured(self, like: Tensor) -> list[Tensor]:
        """What the score function captures, the same on all ranks."""
        h = self.heads[0]
        if self.score is None:
            return []
        slopes = 2.0 ** torch.linspace(-1, -8, h, device=like.device)
        if self.score == "alibi":
            return [slopes]
        distance = torch.arange(-REACH, REACH + 1, device=like.device).abs()
        return [torch.cos(slopes[:, None] * distance)]

    def score_mod(self, captured: list[Tensor]) -> Any:
        return {None: lambda: None, "alibi": alibi, "table": relative_bias}[self.score](*captured)


def cells(ranks: int, seeds: int = 10) -> list[Cell]:
    """All, the most important first: those with bars, then what stands beside them."""

    def documents(each: int, first: int, last: int) -> list[Cell]:
        name = f"documents-{each // 1024}k"
        return [
            Cell(name, drawn(ranks * each, 42 + i), GQA, seed=42 + i)
            for i in range(min(first, seeds), min(last, seeds))
        ]

    return [
        Cell("64k-64:8", (65536,), GQA),
        *documents(8192, 0, 3),
        *documents(32768, 0, 2),
        Cell("64k-16:16", (65536,), MHA),
        Cell("16k-64:8", (16384,), GQA),
        Cell("16k-16:16", (16384,), MHA),
        Cell("128k-64:8", (131072,), GQA),
        *documents(8192, 3, 10),
        Cell("full-64k-64:8", (65536,), GQA, "full"),
        Cell("window-128k", (131072,), GQA, "window"),
        Cell("alibi-64k", (65536,), GQA, score="alibi"),
        Cell("table-16k", (16384,), GQA, score="table"),
        *documents(32768, 2, 10),
        Cell("full-16k-64:8", (16384,), GQA, "full"),
        Cell("full-128k-64:8", (131072,), GQA, "full"),
    ]


def chosen(ranks: int, seeds: int, words: str) -> list[Cell]:
    """Those whose names begin with one of the words, with commas between."""
    found = [cell for cell in cells(ranks, seeds) if cell.name.startswith(tuple(words.split(",")))]
    if not found:
        names = sorted({cell.name for cell in cells(ranks, seeds)})
        raise ValueError(f"no cell's name begins with {words!r}; there are {', '.join(names)}")
    return found


def methods(ranks: int) -> list[str]:
    """`pull`, `gather`, `ulysses`, and meshes of parts and of ranks that divide heads, such as `2x4`."""
    meshes = [f"{n}x{ranks // n}" for n in range(2, ranks) if not ranks % n]
    return ["pull", "gather", "ulysses", *meshes]


def asked(method: str) -> str:
    """What `plan` calls a method."""
    return "pull" if "x" in method else method


def sharding_of(cell: Cell, method: str, ranks: int) -> Sharding:
    parts, heads = map(int, method.split("x")) if "x" in method else (1, ranks) if method == "ulysses" else (ranks, 1)
    return Sharding(cell.lengths, parts, heads, reach_of(MASKS[cell.mask]))


def predicted(cell: Cell, method: str, ranks: int, backward: bool) -> float:
    """The share of ideal that the model says."""
    name = "ulysses×pull" if "x" in method else method
    positions = cell.score is not None
    found = estimates.expected(sharding_of(cell, method, ranks), name, cell.heads, cell.d, backward, positions)
    return found.efficiency[0]


def gigabytes(cell: Cell, ranks: int, works: int) -> float:
    """At most, of one GPU that has the whole, its results, and so many providers' parts of 1 / ranks.

    Operands, results, a copy of the operands and what a backward writes of the whole; of each part what a call keeps,
    all keys among it, and of the largest one what its backward writes. dq is summed in float32.
    """
    h_q, h_k = cell.heads
    rows = cell.rows * cell.d / 1e9
    queries, keys = 2 * h_q * rows, 4 * h_k * rows
    whole = 2 * (2 * queries + keys) + (queries + keys) + 3 * queries + 2 * keys
    part = (4 * queries + keys) / ranks + 2 * keys
    repeated = 12 * h_q * rows / ranks  # torch's ring has as many key heads as query heads
    return whole + works * part + repeated + 4 * 2 * keys
