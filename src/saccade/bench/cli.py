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

from saccade.bench import first_call, grids, host, report, rows
from saccade.bench.grids import GRIDS, Cell
from saccade.bench.machine import Run, folder
from saccade.bench.providers import PROVIDERS, Provider, matching
from saccade.bench.rows import BenchRow
from saccade.bench.run import Bench, DeviceLost, described, run
from saccade.bench.timing import Clock


def bench(
    cases: Annotated[str, typer.Option(help="Grids or cases, with commas between; see --list.")] = "",
    providers: Annotated[str, typer.Option(help="With commas between, * allowed; default: the grid's own.")] = "",
    match: Annotated[str, typer.Option(help="Only cells whose name matches this regular expression.")] = "",
    measure_host: Annotated[bool, typer.Option("--host", help="The host's time for one small call instead.")] = False,
    measure_first: Annotated[
        bool, typer.Option("--first", help="The first call in a new process with empty caches instead.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Append rows under this folder, or to this .jsonl file.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print rows as JSON lines instead of tables.")] = False,
    compare: Annotated[Path | None, typer.Option(help="Older rows: print old over new time for each case.")] = None,
    against: Annotated[Path | None, typer.Option(help="Measure nothing: take these rows as the new ones.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the GPU if there is one.")] = "",
    rounds: Annotated[int, typer.Option(min=0, help="Samples of each provider; 0: the device's default.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Start no cell after this many; the rest is listed.")] = 1e9,
    commit: Annotated[str, typer.Option(help="What the rows say, where git cannot be asked.")] = "",
    check: Annotated[bool, typer.Option(help="Check every result against the oracle first.")] = True,
    show: Annotated[bool, typer.Option("--list", help="List grids and providers, and measure nothing.")] = False,
) -> None:
    """Times attention: providers in turns on the same inputs, each checked against the oracle first.

    Without options: the h200 grid on a GPU, the cpu grid on a CPU. Times of one run compare; those of two runs do only
    through what is in both.
    """
    place = _place(device)
    source, default = run, "h200" if place.type == "cuda" else "cpu"
    if measure_host:
        source, default = host.run, "host"
    elif measure_first:
        source, default = first_call.run, "first-call"
    names = [name for name in cases.split(",") if name] or [default]
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
    reasons = {provider.name: _available(provider, place) for provider in wanted}
    _list_providers(console, wanted, reasons)
    if show:
        _list_grids()
        return
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
        found = _measure(setting, source(setting, cells), cells, file, minutes, progress)
    _finish(found, old, json_lines)


def _measure(
    setting: Bench,
    source: Iterator[list[BenchRow]],
    cells: list[Cell],
    file: Path | None,
    minutes: float,
    bar: Progress,
) -> list[BenchRow]:
    """All rows of `source`, which makes those of one cell after the other; they are in the file before the next."""
    task, start, found = bar.task_ids[0], time.monotonic(), []
    bar.console.print(f"run {setting.run.run} on {setting.run.gpu}" + (f", rows to {file}" if file else ""))
    done = 0
    try:
        while done < len(cells):
            if time.monotonic() - start > 60 * minutes:
                rest = [str(cell) for cell in cells][done:]
                bar.console.print(f"no time left for {len(rest)} cells, from {rest[0]!r} on")
                break
            made = next(source)
            found += made
            if file:
                rows.append(file, made)
            done += 1
            bar.advance(task)
            _say(bar, made)
    except DeviceLost as lost:
        found += lost.rows
        if file:
            rows.append(file, lost.rows)
        bar.console.print(f"stopped after {done} cells, the device is lost: {lost}", markup=False)
    return found


def _say(progress: Progress, made: list[BenchRow]) -> None:
    """One line for a cell, so that a log tells what happened while it happens."""
    words = []
    for row in made:
        if row.ms:
            words.append(f"{row.provider} {_rate(row)}")
        elif row.reason:
            words.append(f"{row.provider}: {row.reason}")
    progress.console.print(f"{made[0].case} {made[0].mode}: {'; '.join(words)}", markup=False, highlight=False)


def _rate(row: BenchRow) -> str:
    if row.mode == "host":
        return f"{1e3 * (row.ms or 0):.1f} us"
    if row.mode.startswith("first"):
        return f"{1e-3 * (row.ms or 0):.2f} s"
    ratio = f" x{row.ratio:.3f}" if row.ratio and row.role == "saccade" else ""
    return f"{row.tflops:.4g} TF{ratio}" if row.tflops else f"{row.gbps or 0:.0f} GB/s"


def _finish(found: list[BenchRow], old: list[BenchRow] | None, json_lines: bool) -> None:
    if json_lines:
        for row in found:
            typer.echo(row.json())
    else:
        for mode in dict.fromkeys(row.mode for row in found):
            typer.echo(f"\n{mode}\n{report.table([row for row in found if row.mode == mode])}")
        typer.echo("\n" + "\n".join(_summary(found)))
    if old is not None:
        typer.echo(report.comparison(found, old), err=json_lines)


def _summary(found: list[BenchRow]) -> list[str]:
    """For each saccade backend and peer, over the cells that both have: worst and geometric mean of the speed-up."""
    times = {(*row.cell, row.provider): row.ms for row in found if row.ms}
    names = {row.provider: row.role for row in found if row.ms}
    lines = []
    for mode in dict.fromkeys(row.mode for row in found):
        for own in (name for name, role in names.items() if role == "saccade"):
            for peer in (name for name, role in names.items() if role == "peer"):
                both = [
                    times[*key, peer] / times[*key, own]
                    for key in dict.fromkeys(row.cell for row in found if row.mode == mode)
                    if (*key, own) in times and (*key, peer) in times
                ]
                if both:
                    mean = report.geometric_mean(both)
                    lines.append(f"{mode}: {own} / {peer}: mean {mean:.3f}, least {min(both):.3f}, {len(both)} cells")
    return lines


def _place(device: str) -> torch.device:
    count = torch.cuda.device_count()
    try:
        found = torch.device(device or ("cuda" if count else "cpu"))
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda") or (found.type == "cuda" and (found.index or 0) >= count):
        raise typer.BadParameter(f"device is cpu or one of the {count} GPUs here, got {device!r}")
    if found.type == "cuda":  # events and streams are the current device's
        found = torch.device("cuda", torch.cuda.current_device() if found.index is None else found.index)
        torch.cuda.set_device(found)
    return found


def _available(provider: Provider, place: torch.device) -> str | None:
    try:
        return provider.available(place)
    except Exception as problem:  # a peer may raise anything
        return described(problem)


def _list_providers(console: Console, wanted: list[Provider], reasons: dict[str, str | None]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for provider in wanted:
        table.add_row(provider.name, reasons[provider.name] or "here")
    console.print(table, markup=False)


def _list_grids() -> None:
    for name, grid in GRIDS.items():
        typer.echo(f"{name}: {len(grid.cells)} cells; {grid.what}")


def _file(out: Path | None, place: torch.device, run: Run, names: list[str]) -> Path | None:
    """`h200/2026-11-21-grid-forward-1a2b3c4d.jsonl` under a folder."""
    if out is None or out.suffix == ".jsonl":
        return out
    return out / folder(place) / f"{run.date[:10]}-{'-'.join(names)}-{run.run}.jsonl"
