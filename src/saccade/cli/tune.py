"""`saccade tune`: measure the tile configs again, on this GPU, into the user's own table."""

from __future__ import annotations

import datetime
import multiprocessing
import os
from dataclasses import asdict
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import saccade
from saccade import configs


def tune(
    dims: Annotated[str, typer.Option(help="Head dims, with commas between.")] = "64,128,256",
    dry_run: Annotated[bool, typer.Option(help="Print what is the fastest, and write nothing.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile; 0: one for each core.")] = 0,
) -> None:
    """Times every candidate tile of the Triton kernels and keeps the fastest, for this machine's GPU and this user.

    No call ever times kernels by itself, so that ranks and repeats agree; this command is the only one that does.
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("tuning needs a GPU, and torch sees none")
    from saccade.backends.triton import tuning

    try:
        rows = tuning.rows([int(d) for d in dims.split(",")])
    except ValueError:
        raise typer.BadParameter(f"head dims are integers with commas between, got {dims!r}") from None
    gpu = configs.gpu_name(torch.cuda.current_device())
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        tasks = [(row, tile) for row in rows for tile in row.candidates()]
        # Triton compiles a kernel in one thread; a kernel that was compiled by any process is compiled for all.
        compiling = progress.add_task("compile", total=len(tasks))
        able: dict[tuning.Row, list[Any]] = {row: [] for row in rows}
        processes = min(jobs or os.cpu_count() or 1, len(tasks))
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            for row, tile, reason in pool.imap_unordered(tuning.compile_one, tasks):
                if reason is None:
                    able[row].append(tile)
                progress.advance(compiling)
        timing = progress.add_task("time", total=sum(map(len, able.values())))
        found: dict[str, dict[str, Any]] = {}
        best: dict[tuple[int, bool], dict[str, Any]] = {}
        for row, tiles in able.items():
            others = best.setdefault((row.d, row.masked), {})
            timer = tuning.Timer(row, others, gpu)
            measured = []
            for tile in tiles:
                measured.append((timer.milliseconds(tile), tile))
                progress.advance(timing)
            if not measured:
                continue
            milliseconds, tile = min(measured, key=lambda pair: pair[0])
            others[row.kernel] = tile
            kept = {name: value for name, value in asdict(tile).items() if name != "spill"}
            found[row.key()] = {"config": kept, "measured": _measurement(row, milliseconds)}
    table = Table("row", "config", "ms")
    for key, row in found.items():
        table.add_row(
            key, " ".join(f"{name} {value}" for name, value in row["config"].items()), str(row["measured"]["ms"])
        )
    Console().print(table)
    if not dry_run:
        console.print(f"written to {configs.save(gpu, found)}")


def _measurement(row: Any, milliseconds: float) -> dict[str, Any]:
    import triton

    return {
        "date": datetime.date.today().isoformat(),
        "saccade": saccade.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "timed": "forward" if row.kernel == "forward" else "the whole backward",
        "ms": round(milliseconds, 4),
    }
