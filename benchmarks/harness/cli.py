"""`saccade bench`: measure saccade and its peers, write rows, compare them with older ones."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.harness import grids, report, rows
from benchmarks.harness.grids import GRIDS, Cell
from benchmarks.harness.machine import Run, folder
from benchmarks.harness.providers import PROVIDERS, Provider, matching
from benchmarks.harness.rows import BenchRow
from benchmarks.harness.run import Bench, DeviceLost, run
from saccade.cli.console import print_whole, some_name, split_names
from saccade.testing.timing import Clock, described


def bench(
    cases: Annotated[
        str | None, typer.Option(help="Grids or cases, separated by commas; see --list.", callback=some_name)
    ] = None,
    providers: Annotated[str, typer.Option(help="Separated by commas, with *; default: those of the grid.")] = "",
    match: Annotated[str, typer.Option(help="Only the cells whose name matches this regular expression.")] = "",
    measure_host: Annotated[bool, typer.Option("--host", help="Measure the host's time for a call instead.")] = False,
    measure_first: Annotated[
        bool, typer.Option("--first", help="Measure the first call in a new process with empty caches instead.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append rows to this .jsonl file, or to one in this folder.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print rows as JSON lines instead of tables.")] = False,
    compare: Annotated[Path | None, typer.Option(help="Older rows: print the old over the new time of a case.")] = None,
    against: Annotated[Path | None, typer.Option(help="Measure nothing; use these rows as the new ones.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the GPU if there is one.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Samples of each provider; 0: the device's default.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Start no cell after this time; list the others.")] = 1e9,
    commit: Annotated[str, typer.Option(help="The commit to record in rows, if there is no git checkout.")] = "",
    check: Annotated[bool, typer.Option(help="Check every result against the oracle first.")] = True,
    show: Annotated[bool, typer.Option("--list", help="List grids and providers; measure nothing.")] = False,
) -> None:
    """Times attention: providers in turns on the same inputs, each checked against the oracle first.

    Without options: the h200 grid on a GPU, the cpu grid on a CPU. Compare times within one run only; ratios to a
    provider that two runs share compare across them.
    """
    place = _place(device)
    default = "h200" if place.type == "cuda" else "cpu"
    default = "host" if measure_host else "first-call" if measure_first else default
    names = split_names(cases) if cases else [default]
    console = Console(stderr=True, soft_wrap=True)
    try:
        old = None if compare is None else rows.read(compare)
        if against is not None:
            _finish(rows.read(against), old, json_lines)
            return
        everyone = PROVIDERS if show else grids.providers(names)
        wanted = matching([word for word in providers.split(",") if word] or everyone)
        cells = [cell for cell in grids.cells(names) if re.search(match, str(cell))]
        if not cells:
            raise ValueError(f"no cell of {', '.join(names)} matches {match!r}")
    except (ValueError, OSError, re.error) as wrong:
        raise typer.BadParameter(str(wrong)) from None
    if measure_host or measure_first:
        cells = list(dict.fromkeys(cell.on_host() if measure_host else cell.first() for cell in cells))
    reasons = {provider.name: _unavailable(provider, place) for provider in wanted}
    _list_providers(console, wanted, reasons)
    if show:
        _list_grids()
        return
    if all(reasons.values()):
        raise typer.BadParameter(f"none of {', '.join(reasons)} runs on {place}: {next(iter(reasons.values()))}")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as progress:
        task = progress.add_task("", total=len(cells))
        clock = Clock(rounds or (15 if place.type == "cuda" else 5), 4e-3 if place.type == "cuda" else 2e-2)
        setting = Bench(
            Run.now(place, commit or None),
            place,
            [provider for provider in wanted if not reasons[provider.name]],
            clock,
            check=check,
            tell=lambda stage: progress.update(task, description=stage),
        )
        file = _file(out, place, setting.run, names)
        measured = _measure(setting, run(setting, cells), cells, file, minutes, progress)
    _finish(measured, old, json_lines)


def _measure(
    setting: Bench,
    source: Iterator[list[BenchRow]],
    cells: list[Cell],
    file: Path | None,
    minutes: float,
    bar: Progress,
) -> list[BenchRow]:
    """All rows of `source`, cell by cell; the rows of a cell are in the file before the next one starts."""
    task, start, measured = bar.task_ids[0], time.monotonic(), []
    bar.console.print(f"run {setting.run.run} on {setting.run.gpu}" + (f", rows to {file}" if file else ""))
    done = 0
    try:
        while done < len(cells):
            if time.monotonic() - start > 60 * minutes:
                rest = [str(cell) for cell in cells][done:]
                bar.console.print(f"no time left for {len(rest)} cells, from {rest[0]!r} on")
                break
            of_cell = next(source)
            measured += of_cell
            if file:
                rows.append(file, of_cell)
            done += 1
            bar.advance(task)
            _print_cell(bar, of_cell)
    except DeviceLost as lost:
        measured += lost.rows
        if file:
            rows.append(file, lost.rows)
        bar.console.print(f"stopped after {done} cells, the device is lost: {lost}", markup=False)
    return measured


def _print_cell(progress: Progress, of_cell: list[BenchRow]) -> None:
    """One line for each cell, at once."""
    words = []
    for row in of_cell:
        if row.ms:
            ratio = f" x{row.ratio:.3f}" if row.ratio and row.role == "saccade" else ""
            unit = "" if row.figure.endswith("s") else f" {row.unit}"
            words.append(f"{row.provider} {row.figure}{unit}{ratio}")
        elif row.reason:
            words.append(f"{row.provider}: {row.reason}")
    line = f"{of_cell[0].case} {of_cell[0].mode}: {'; '.join(words)}"
    progress.console.print(line, markup=False, highlight=False)


def _finish(measured: list[BenchRow], old: list[BenchRow] | None, json_lines: bool) -> None:
    if json_lines:
        for row in measured:
            typer.echo(row.json())
    else:
        for mode in dict.fromkeys(row.mode for row in measured):
            typer.echo(f"\n{mode}\n{report.table([row for row in measured if row.mode == mode])}")
        typer.echo("\n" + "\n".join(report.speedups(measured)))
    if old is not None:
        typer.echo(report.comparison(measured, old), err=json_lines)


def _place(device: str) -> torch.device:
    count = torch.cuda.device_count()
    try:
        place = torch.device(device or ("cuda" if count else "cpu"))
    except RuntimeError:
        place = None
    if place is None or place.type not in ("cpu", "cuda") or (place.type == "cuda" and (place.index or 0) >= count):
        raise typer.BadParameter(f"device is cpu or one of the {count} GPUs here, got {device!r}")
    if place.type == "cuda":  # events and streams are the current device's
        place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
        torch.cuda.set_device(place)
    return place


def _unavailable(provider: Provider, place: torch.device) -> str | None:
    try:
        return provider.available(place)
    except Exception as problem:  # a peer may raise anything
        return described(problem)


def _list_providers(console: Console, wanted: list[Provider], reasons: dict[str, str | None]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for provider in wanted:
        table.add_row(provider.name, reasons[provider.name] or "available")
    print_whole(console, table)


def _list_grids() -> None:
    for name, grid in GRIDS.items():
        typer.echo(f"{name}: {len(grid.cells)} cells; {grid.what}")


def _file(out: Path | None, place: torch.device, run: Run, names: list[str]) -> Path | None:
    """`h200/2026-11-21-grid-forward-1a2b3c4d.jsonl` under a folder."""
    if out is None:
        return None
    file = out
    if out.suffix != ".jsonl":
        file = out / folder(place) / f"{run.date[:10]}-{'-'.join(names)}-{run.run}.jsonl"
    try:  # now, not after the first cell
        rows.append(file, [])
    except OSError as wrong:
        raise typer.BadParameter(f"--out: {wrong}") from None
    return file
