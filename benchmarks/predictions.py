"""What `saccade.distributed.estimates` says beside what was measured on H200s, of the rows in tables/*/*-ranks-*.jsonl.

    python -m benchmarks.predictions

A share is of ideal: one GPU's time over that of all ranks. Old rows call the method `pull` "saccade".
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks.rank_cells import Cell, cells, methods, predicted

TABLES = Path(__file__).with_name("tables")


def rows(gpu: str = "") -> list[dict[str, Any]]:
    """Of the last run of each cell, by number of ranks, on GPUs of which the name has that word."""
    runs: dict[tuple[str, int, str], list[dict[str, Any]]] = defaultdict(list)
    for file in TABLES.glob("*/*-ranks-*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if gpu in row["gpu"]:
                row["provider"] = "pull" if row["provider"] == "saccade" else row["provider"]
                runs[row["cell"], row["ranks"], row["run"]].append(row)
    in_order = sorted(runs.items(), key=lambda item: item[1][0]["date"])
    last = {(cell, ranks): of_run for (cell, ranks, _), of_run in in_order}
    return [row for of_cell in last.values() for row in of_cell if row.get("efficiency")]


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
    for row in rows("H200"):
        if row["provider"] in methods(row["ranks"]) and not _is_past(row):
            seed = "" if row["seed"] is None else f" {row['seed']}"
            name = f"{row['ranks']} {row['provider']} {row['cell']}{seed} {row['mode']}"
            share = predicted(cell_of(row), row["provider"], row["ranks"], row["mode"] == "backward")
            yield Pair((name, row["efficiency"], share))


def _is_past(row: dict[str, Any]) -> bool:
    """Whether saccade did otherwise than the model says now: causal forwards of `pull` began when all keys had come, or
    ran in two calls."""
    causal = row["mask"] == "causal" and row["score"] is None
    return row["provider"] == "pull" and row["mode"] == "forward" and causal and not row.get("arrives")


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
