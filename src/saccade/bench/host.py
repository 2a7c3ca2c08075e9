"""What one call costs the host: a small call, a thousand times back to back, nothing synchronised inside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from saccade.bench.grids import Cell
from saccade.bench.providers import Prepared
from saccade.bench.rows import BenchRow, empty_row, with_ratios
from saccade.bench.run import Bench, described, inputs_of, spec_of
from saccade.bench.timing import Times, rotated
from saccade.bench.verify import Verifier

CALLS = 1000


def run(bench: Bench, cells: Iterable[Cell], calls: int = CALLS) -> Iterator[list[BenchRow]]:
    """The rows of each Cell, of mode `host`; their ms are the host's for one call, without rates."""
    for cell in cells:
        yield _rows(bench, cell, calls)


def _rows(bench: Bench, cell: Cell, calls: int) -> list[BenchRow]:
    inputs = inputs_of(cell.case, bench.device)
    spec = spec_of(cell, inputs)
    yardstick = Verifier(cell, inputs) if bench.check else None
    found: dict[str, BenchRow] = {}
    ready: dict[str, Prepared] = {}
    for provider in bench.providers:
        row = replace(empty_row(bench.run, cell, spec, provider.name, provider.role), mode="host")
        bench.tell(f"host: {provider.name}")
        try:
            reason = provider.supports(cell, inputs)
            if reason is None:
                prepared = provider.prepare(cell, inputs)
                row = replace(row, error_ratio=yardstick.check(prepared) if yardstick else None)
                if row.error_ratio is not None and not row.error_ratio <= 1:
                    reason = f"wrong: the error is {row.error_ratio:.3g} of the tolerance"
                else:
                    ready[provider.name] = prepared
        except Exception as problem:  # a peer may raise anything
            reason = described(problem)
        found[provider.name] = replace(row, reason=reason)

    bench.tell("host: timing")
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for one in ready.values():
        _seconds(one.call, max(1, calls // 20), bench.device)
    for order in rotated(list(ready), max(5, bench.clock.rounds // 2)):
        for name in order:
            samples[name].append(_seconds(ready[name].call, calls, bench.device))
    for name, seconds in samples.items():
        found[name] = found[name].timed(Times.of(seconds), None)
    return with_ratios(list(found.values()))


def _seconds(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """For one call; what the device has left to do is waited for outside."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    seconds = (time.perf_counter() - start) / calls
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return seconds
