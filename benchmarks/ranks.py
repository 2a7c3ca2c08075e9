"""Attention over ranks beside one GPU and beside other libraries, of the cells of rank_cells.py.

    python -m benchmarks.ranks --out benchmarks/tables/h200/DATE-ranks-COMMIT.jsonl      # all, on all GPUs
    python -m benchmarks.ranks --ranks 4 --cells documents-8k,16k --budget 300
    python -m benchmarks.ranks --smoke --ranks 8                        # tiny lengths on CPUs: whether everything runs
    python -m benchmarks.ranks --list                                   # the cells, and the memory that each takes

A time is that of the slowest rank, from a barrier of all devices to the call's last kernel: exchange included, plan and
shards made before. `efficiency` is one GPU's time on the whole over the ranks' number times that; all GPUs compute the
whole at the same time, by plain `attention`, in turns with the others. A provider whose result is not one GPU's has a
`reason` instead of a time. `predicted` is what `saccade.distributed.estimates` says.

Cells run in the order of their importance, until the budget is over. The rows of a cell are printed and written when it
is done; the same command goes on with the cells that the file does not have. A provider that ends a process, or is at
work when a cell's time is over, is left out of that cell, which then begins anew in other processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import rank_work
from benchmarks.harness.machine import Run
from benchmarks.rank_cells import Cell, cells, chosen, gigabytes, methods
from benchmarks.rank_work import FEWEST, MODES, Options
from tests.support.ranks import Pool

STARTS = 3
"""Times that a cell begins: with so many providers less one that end it."""
LEAST = 20.0
"""Seconds for which a cell is still begun."""
OTHERS = 5
"""Providers of other libraries, for the memory that cells take."""


class Bench:
    """Cells on a pool of ranks."""

    def __init__(self, pool: Pool, options: Options, timeout: float, budget: float) -> None:
        self.pool, self.options, self.timeout = pool, options, timeout
        self.end = time.monotonic() + budget

    def left(self) -> float:
        return self.end - time.monotonic()

    def rows(self, cell: Cell) -> list[dict[str, Any]]:
        """Of all providers; those that ended a process or took too long have a reason."""
        skipped: dict[str, str] = {}
        for _ in range(STARTS):
            if self.left() < LEAST:
                break
            try:
                return self.run(cell, skipped)
            except RuntimeError as error:
                name = Path(self.options.progress).read_text(encoding="utf-8")
                skipped[name] = last_line(error)
                if name == "one GPU":
                    break
        reasons = skipped or {"one GPU": "the budget is over"}
        return [{"provider": name, "mode": mode, "reason": x} for name, x in reasons.items() for mode in MODES]

    def run(self, cell: Cell, skipped: dict[str, str]) -> list[dict[str, Any]]:
        Path(self.options.progress).write_text("one GPU", encoding="utf-8")
        options = self.options._replace(skipped=skipped)
        seconds = min(self.timeout, self.left())
        return self.pool.run(rank_work.measured, self.pool.size, cell, options, seconds=seconds)[0]


def last_line(error: BaseException) -> str:
    """Of the first rank's words, which end with the error."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("rank ")]
    return (lines or [str(error)])[-1].strip()[:200]


def told(row: dict[str, Any]) -> str:
    heads = "{}:{}".format(*row["heads"])
    seed = "" if row["seed"] is None else f" seed {row['seed']}"
    head = f"{row['cell'] + seed:24} {heads:6} {row['mode']:9} {row['provider']:14}"
    if row.get("reason"):
        return f"{head} {row['reason']}"
    share = "" if row["efficiency"] is None else f", efficiency {row['efficiency']:.3f}"
    share += f" (predicted {row['predicted']:.3f})" if "predicted" in row else ""
    return f"{head} {row['ms']:9.3f} ms, {row['tflops']:4.0f} TFLOP/s a GPU{share}, error {row['error']:.1e}"


def means(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Geometric means over seeds."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.get("efficiency"):
            found.setdefault((row["cell"], row["mode"], row["provider"]), []).append(row["efficiency"])
    for key, shares in found.items():
        yield f"{' '.join(key):50} {statistics.geometric_mean(shares):.3f} of {len(shares)}"


def key(row: dict[str, Any]) -> tuple[str, Any, int]:
    return row["cell"], row["seed"], row["ranks"]


def read(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def fields(cell: Cell, ranks: int) -> dict[str, Any]:
    found = {"cell": cell.name, "seed": cell.seed, "heads": cell.heads, "d": cell.d, "mask": cell.mask}
    return found | {"score": cell.score, "ranks": ranks, "rows": cell.rows, "documents": len(cell.lengths)}


def folder_of_peers(given: Path | None) -> str | None:
    """Which has the package ring_flash_attn: the given one, or that of installed packages."""
    if given is None:
        spec = importlib.util.find_spec("ring_flash_attn")
        locations = spec.submodule_search_locations if spec is not None else None
        return str(Path(next(iter(locations))).parent) if locations else None
    if not (given / "ring_flash_attn").is_dir():
        raise SystemExit(f"--peers {given}: it holds no folder ring_flash_attn")
    return str(given.resolve())


def measure(bench: Bench, todo: list[Cell], run: dict[str, Any], out: Path | None) -> list[dict[str, Any]]:
    """Rows of the cells for which there is time."""
    rows: list[dict[str, Any]] = []
    for cell in todo:
        if bench.left() < LEAST:
            print(f"{cell.name} {cell.seed or ''}: not begun, the budget is over", flush=True)
            continue
        began = time.monotonic()
        found = [run | fields(cell, bench.pool.size) | row for row in bench.rows(cell)]
        rows += found
        print(*map(told, found), f"  {time.monotonic() - began:.1f} s", sep="\n", flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in found)
    return rows


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure attention over ranks.")
    parser.add_argument("--ranks", type=int, default=0, help="2 to 8; as many as there are GPUs if omitted")
    parser.add_argument("--cells", default="", help="words that a cell's name begins with, with commas")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is taken")
    parser.add_argument("--seconds", type=float, default=6.0, help="for the rounds of a direction: fewer, if they last")
    parser.add_argument("--seeds", type=int, default=10, help="batches of documents")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for a cell")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for all cells")
    parser.add_argument("--peers", type=Path, help="a folder with the package ring_flash_attn, if it is not installed")
    parser.add_argument(
        "--out", type=Path, help="a .jsonl file that rows are added to, and whose cells are not repeated"
    )
    parser.add_argument("--commit", help="where files lie without git")
    parser.add_argument("--smoke", action="store_true", help="tiny lengths on CPUs, by gloo")
    parser.add_argument("--list", action="store_true", help="print the cells and leave")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    ranks = args.ranks or (2 if args.smoke else torch.cuda.device_count())
    if args.list:
        works = len(methods(ranks or 8)) + OTHERS
        for cell in cells(ranks or 8, args.seeds):
            print(f"{cell.name:16} {cell.seed or '':4} at most {gigabytes(cell, ranks or 8, works):4.0f} GB a GPU")
        return 0
    if args.rounds < FEWEST:
        raise SystemExit(f"--rounds is at least {FEWEST}, for quartiles; got {args.rounds}")
    if not 2 <= ranks <= 8 or (not args.smoke and ranks > torch.cuda.device_count()):
        raise SystemExit(f"2 to 8 ranks, each with a GPU; got {ranks} and {torch.cuda.device_count()} GPUs")
    done = {key(row) for row in read(args.out)}
    todo = [cell for cell in chosen(ranks, args.seeds, args.cells) if (cell.name, cell.seed, ranks) not in done]
    device = torch.device("cpu" if args.smoke else "cuda")
    if args.smoke:
        todo = [cell.smaller() for cell in todo]
    run = asdict(Run.now(device, args.commit))
    with tempfile.TemporaryDirectory() as folder:
        options = Options(
            device.type, torch.bfloat16, args.rounds, args.seconds,
            folder_of_peers(args.peers), {}, str(Path(folder) / "progress"),
        )  # fmt: skip
        with Pool(ranks, "gloo" if args.smoke else "nccl") as pool:
            rows = measure(Bench(pool, options, args.timeout, args.budget), todo, run, args.out)
    print(*means(rows), sep="\n", flush=True)
    wrong = [row for row in rows if row["provider"] in ("one GPU", *methods(ranks)) and row.get("reason")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
