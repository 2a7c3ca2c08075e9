"""One interleaved run: Cell after Cell, its rows as soon as they are there.

A provider never stops the run. One that is not here, does not do the Cell, raises, or is further from the exact answer
than the tolerance has a row without a time, which says why.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from saccade.api import explain
from saccade.bench import timing
from saccade.bench.cost import Cost
from saccade.bench.grids import Cell
from saccade.bench.machine import Run
from saccade.bench.providers import CEILINGS, Prepared, Provider
from saccade.bench.rows import BenchRow, empty_row, with_ratios
from saccade.bench.timing import Clock
from saccade.bench.verify import Verifier
from saccade.testing.cases import Case, Inputs

Tell = Callable[[str], None]


class DeviceLost(RuntimeError):
    """The device answers nothing any more, as after an illegal memory access: only a new process can go on.

    Attributes:
        rows: of the Cell in which it happened, none of them timed.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.rows: list[BenchRow] = []


@dataclass(frozen=True)
class Bench:
    """Who is measured, where and how long."""

    run: Run
    device: torch.device
    providers: list[Provider]
    """Available ones."""
    clock: Clock = field(default_factory=Clock)
    ceilings: tuple[Provider, ...] = CEILINGS
    check: bool = True
    """False leaves the yardstick out, for a quick look: no row has an error ratio then."""
    tell: Tell = lambda stage: None
    """Hears what is being done, for a progress bar."""


def run(bench: Bench, cells: Iterable[Cell]) -> Iterator[list[BenchRow]]:
    """The rows of each Cell.

    Raises:
        DeviceLost: the device is lost; the rows of the Cells before were given.
    """
    last: tuple[Case, Inputs] | None = None
    for cell in cells:
        if last is None or last[0] != cell.case:  # consecutive modes share the inputs
            last = None
            bench.tell(f"{cell}: inputs")
            try:
                last = cell.case, inputs_of(cell.case, bench.device)
            except Exception as problem:  # most likely memory
                table = _Table.of(bench, cell, "")
                for name in table.rows:
                    table.failed(name, f"no inputs: {described(problem)}")
                yield list(table.rows.values())
                continue
        yield _rows(bench, cell, last[1])
        _forget(bench.device)


def inputs_of(case: Case, device: torch.device) -> Inputs:
    """The Case's tensors; its sink rounded to bfloat16, since some peers take nothing finer."""
    inputs = case.inputs(device)
    if "sink" not in inputs.keywords:
        return inputs
    sink = inputs.keywords["sink"].detach()
    return replace(inputs, keywords=inputs.keywords | {"sink": sink.bfloat16().to(sink.dtype)})


def spec_of(cell: Cell, inputs: Inputs) -> str:
    """The text form of the call's Spec."""
    return str(explain(inputs.q, inputs.k, inputs.v, deterministic=cell.deterministic, **inputs.keywords).spec)


def _rows(bench: Bench, cell: Cell, inputs: Inputs) -> list[BenchRow]:
    table = _Table.of(bench, cell, spec_of(cell, inputs))
    try:
        ready = _ready(bench, cell, inputs, table)
        _forget(bench.device)
        bench.tell(f"{cell}: timing {len(ready)}")
        work = Cost.of(cell.case, inputs, cell.mode)
        for name, times in timing.measure(ready, bench.device, bench.clock, table.failed).items():
            table.rows[name] = table.rows[name].timed(times, ready[name].work or work)
    except DeviceLost as lost:
        lost.rows = list(table.rows.values())
        raise
    return with_ratios(list(table.rows.values()))


@dataclass(frozen=True)
class _Table:
    """A Cell's rows while they are being made."""

    device: torch.device
    rows: dict[str, BenchRow]

    @staticmethod
    def of(bench: Bench, cell: Cell, spec: str) -> _Table:
        everyone = [*bench.providers, *bench.ceilings]
        return _Table(
            bench.device, {one.name: empty_row(bench.run, cell, spec, one.name, one.role) for one in everyone}
        )

    def failed(self, name: str, reason: str | Exception) -> None:
        """Says why a provider has no time.

        Raises:
            DeviceLost: its exception was the device's end.
        """
        line = reason if isinstance(reason, str) else described(reason)
        self.rows[name] = replace(self.rows[name], reason=line)
        if isinstance(reason, Exception) and self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as lost:
                raise DeviceLost(f"{name}: {line}; then {described(lost)}") from lost


def _ready(bench: Bench, cell: Cell, inputs: Inputs, table: _Table) -> dict[str, Prepared]:
    """The providers that do the Cell, and do it right."""
    yardstick = None
    if bench.check:
        bench.tell(f"{cell}: exact answer")
        try:
            yardstick = Verifier(cell, inputs)
        except Exception as problem:  # most likely memory
            for name in table.rows:
                table.failed(name, f"not checked, so not timed: the oracle failed: {described(problem)}")
            return {}
    ready: dict[str, Prepared] = {}
    for provider in [*bench.providers, *bench.ceilings]:
        bench.tell(f"{cell}: {provider.name}")
        try:
            if against := provider.supports(cell, inputs):
                table.failed(provider.name, against)
                continue
            prepared = provider.prepare(cell, inputs)
            if yardstick is not None and provider.role != "ceiling":
                error = yardstick.check(prepared)
                table.rows[provider.name] = replace(table.rows[provider.name], error_ratio=error)
                if not error <= 1:
                    table.failed(provider.name, f"wrong: the error is {error:.3g} of the tolerance")
                    continue
            ready[provider.name] = prepared
        except Exception as problem:  # a peer may raise anything
            table.failed(provider.name, problem)
    return ready


def described(problem: BaseException) -> str:
    """One line."""
    lines = str(problem).strip().splitlines() or [""]
    return f"{type(problem).__name__}: {lines[0]}"[:300]


def _forget(device: torch.device) -> None:
    """Gives back what the last one held: an out-of-memory error belongs to whoever caused it."""
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(described(lost)) from lost
