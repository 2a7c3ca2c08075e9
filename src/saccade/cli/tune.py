"""`saccade tune`: measures the tile configs on this GPU, and writes the user's own table."""

from __future__ import annotations

import datetime
import os
import re
from dataclasses import asdict, replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import saccade
from saccade.backends import backend_module, configs
from saccade.ops import dispatch
from saccade.util import hardware

TUNED = ("gluon", "triton")
"""Backends with a table of configs, each in its module `tuning`."""


def tune(
    dims: Annotated[str, typer.Option(help="Head dims, separated by commas; 192/128 is d and d_v.")] = "64,128,256",
    backend: Annotated[str, typer.Option(help=f"{' or '.join(TUNED)}; default: each that runs here.")] = "",
    dry_run: Annotated[bool, typer.Option(help="Print the fastest configs, and write nothing.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile; 0: one per core.")] = 0,
) -> None:
    """Times every candidate config of the GPU kernels, and keeps the fastest for this GPU and this user.

    No call of attention times kernels, so that ranks and repeats agree. Only this command does.
    """
    sizes = _sizes(dims)
    if backend and backend not in TUNED:
        raise typer.BadParameter(f"{backend!r} has no configs to tune; choose {' or '.join(TUNED)}")
    if not torch.cuda.is_available():
        raise typer.BadParameter("tuning needs a GPU; torch sees none")
    rows = [row for name in ([backend] if backend else TUNED) for row in _rows(name, sizes)]
    if not rows:
        raise typer.BadParameter(f"no tunable backend runs head dims {dims} on this GPU")
    gpu = configs.gpu_name(torch.cuda.current_device())
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        found = _fastest(_able(rows, jobs, progress), progress)
    table = Table("row", "config", "ms")
    for key, row in found.items():
        table.add_row(
            key, " ".join(f"{name} {value}" for name, value in row["config"].items()), str(row["measured"]["ms"])
        )
    Console().print(table)
    if not dry_run:
        console.print(f"written to {configs.save(gpu, found)}")


def _sizes(dims: str) -> list[tuple[int, int]]:
    """
    >>> _sizes("64,192/128")
    [(64, 64), (192, 128)]
    """
    sizes = [re.fullmatch(r" *(\d+)(?:/(\d+))? *", size) for size in dims.split(",")]
    if not all(size and int(size[1]) and int(size[2] or 1) for size in sizes):
        raise typer.BadParameter(
            f"head dims are integers from 1 on, or pairs like 192/128, separated by commas, got {dims!r}"
        )
    return [(int(size[1]), int(size[2] or size[1])) for size in sizes if size]


def _rows(backend: str, sizes: list[tuple[int, int]]) -> list[Any]:
    """The rows of a backend that runs on this GPU."""
    device = hardware.name(torch.device("cuda", torch.cuda.current_device()))
    rows = backend_module(backend, "tuning").rows(sizes)
    return [row for row in rows if not dispatch.reasons_against(backend, replace(row.spec(), device=device))]


def _able(rows: list[Any], jobs: int, progress: Progress) -> dict[Any, list[Any]]:
    """The candidates of each row that compile and run."""
    from saccade.backends.device import tuning
    from saccade.testing.offline import in_processes

    tasks = [(row, tile) for row in rows for tile in row.candidates()]
    # Triton compiles a kernel in one thread. All processes share what any of them compiled.
    compiling = progress.add_task("compile", total=len(tasks))
    able: dict[Any, list[Any]] = {row: [] for row in rows}
    processes = min(jobs or os.cpu_count() or 1, len(tasks))
    for (row, tile), reason in in_processes(tuning.compile_one, tasks, processes):
        if reason is None:
            able[row].append(tile)
        progress.advance(compiling)
    return able


def _fastest(able: dict[Any, list[Any]], progress: Progress) -> dict[str, dict[str, Any]]:
    """The rows of the table: the fastest candidate of each, with its time."""
    timing = progress.add_task("time", total=sum(map(len, able.values())))
    found: dict[str, dict[str, Any]] = {}
    best: dict[Any, dict[str, Any]] = {}
    for row, tiles in able.items():
        # Kernels that are timed together use the fastest configs so far.
        others = best.setdefault((type(row), row.d, row.d_v, row.masked), {})
        milliseconds = row.milliseconds(others)
        measured = []
        for tile in tiles:
            measured.append((milliseconds(tile), tile))
            progress.advance(timing)
        if not measured:
            continue
        ms, tile = min(measured, key=lambda pair: pair[0])
        others[row.kernel] = tile
        config = {name: value for name, value in asdict(tile).items() if name != "spill"}
        found[row.key()] = {"config": config, "measured": _measurement(row, ms)}
    return found


def _measurement(row: Any, milliseconds: float) -> dict[str, Any]:
    import triton

    return {
        "date": datetime.date.today().isoformat(),
        "saccade": saccade.__version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "timed": row.timed,
        "ms": round(milliseconds, 4),
    }
