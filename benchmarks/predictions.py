"""What `saccade.distributed.estimates` says beside what was measured, of every row in tables/*/*-ranks-*.jsonl.

    python benchmarks/predictions.py

A share is of ideal: one GPU's time over that of all ranks. Old rows call the method `pull` "saccade".
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rank_cells import Cell, cells, methods, predicted

TABLES = Path(__file__).with_name("tables")
OWN_FIRST = {"8c0deff6"}
"""Runs whose forwards began with own keys, before rows said so."""


def rows() -> list[dict[str, Any]]:
    """Of the last run of each cell, by number of ranks, in the order of files."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for file in sorted(TABLES.glob("*/*-ranks-*.jsonl")):
        runs: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            row["provider"] = "pull" if row["provider"] == "saccade" else row["provider"]
            row.setdefault("own_first", row["run"] in OWN_FIRST)
            runs[row["cell"], row["ranks"], row["run"]].append(row)
        found |= {(cell, ranks): of_run for (cell, ranks, _), of_run in runs.items()}
    return [row for of_cell in found.values() for row in of_cell if row.get("efficiency")]


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell of a row's name and seed."""
    found = (x for x in cells(row["ranks"]) if (x.name, x.seed) == (row["cell"], row["seed"]))
    return next(found)


class Pair(tuple[str, float, float]):
    """What was measured, the share, and the prediction."""

    @property
    def off(self) -> float:
        return self[2] / self[1] - 1


def pairs() -> Iterator[Pair]:
    for row in rows():
        if row["provider"] in methods(row["ranks"]):
            seed = "" if row["seed"] is None else f" {row['seed']}"
            name = f"{row['ranks']} {row['provider']} {row['cell']}{seed} {row['mode']}"
            share = predicted(cell_of(row), row["provider"], row["ranks"], row["mode"] == "backward", row["own_first"])
            yield Pair((name, row["efficiency"], share))


def main() -> None:
    print("| ranks, method, cell | measured | predicted | off |\n|---|---|---|---|")
    found = [*pairs()]
    for pair in found:
        name, measured, told = pair
        print(f"| {name} | {measured:.3f} | {told:.3f} | {pair.off:+.1%} |")
    spread = geometric_mean([1 + abs(pair.off) for pair in found]) - 1
    print(f"\n{len(found)} measured; {spread:.1%} off in the mean, {max(abs(pair.off) for pair in found):.1%} at most")


if __name__ == "__main__":
    main()
