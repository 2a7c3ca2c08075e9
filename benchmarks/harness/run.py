"""One interleaved run: the rows of Cell after Cell, as soon as they are measured.

A provider never stops the run. One that is not installed, does not support the Cell, raises, or is further from the
exact answer than the tolerance gets a row without a time, with the reason.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks.harness import quantizing, timing
from benchmarks.harness.cost import Cost
from benchmarks.harness.first_call import first_call
from benchmarks.harness.grids import WITH_HOST, Cell
from benchmarks.harness.inputs import inputs_of
from benchmarks.harness.machine import Run
from benchmarks.harness.providers import CEILINGS, Prepared, Provider
from benchmarks.harness.rows import BenchRow, empty_row, with_ratios
from benchmarks.harness.verify import BytesVerifier, Verifier
from saccade.api import explain
from saccade.testing.cases import Case, Inputs
from saccade.testing.timing import Clock, described, measure

Tell = Callable[[str], None]
Verifiers = dict[str, Verifier | BytesVerifier]
"""Of one Case, by mode: the answer is the same with the host's time."""


class DeviceLost(RuntimeError):
    """The device no longer answers, as after an illegal memory access: only a new process can continue.

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
    """False omits the check against the oracle, for a quick look: rows then have no error ratio."""
    tell: Tell = lambda stage: None
    """Is told each stage, for a progress bar."""


def run(bench: Bench, cells: Iterable[Cell]) -> Iterator[list[BenchRow]]:
    """The rows of each Cell.

    Raises:
        DeviceLost: the device is lost, after the rows of all earlier Cells.
    """
    last: tuple[Case, Inputs, Verifiers] | None = None
    for cell in cells:
        if last is None or last[0] != cell.case:  # consecutive modes share the inputs
            last = None
            bench.tell(f"{cell}: inputs")
            try:
                last = cell.case, inputs_of(cell.case, bench.device), {}
            except Exception as problem:  # most likely memory
                table = _CellTable(bench, cell, "")
                for name in table.rows:
                    table.failed(name, f"no inputs: {described(problem)}")
                yield list(table.rows.values())
                continue
        yield _rows(bench, cell, *last[1:])
        _forget(bench.device)


def spec_of(cell: Cell, inputs: Inputs) -> str:
    """The text form of the call's Spec."""
    return str(explain(inputs.q, inputs.k, inputs.v, deterministic=cell.deterministic, **inputs.keywords).spec)


def _rows(bench: Bench, cell: Cell, inputs: Inputs, verifiers: Verifiers) -> list[BenchRow]:
    table = _CellTable(bench, cell, spec_of(cell, inputs))
    try:
        if cell.in_new_process:
            _time_first_calls(table, inputs)
        else:
            _time(table, _ready(table, inputs, verifiers), inputs)
    except DeviceLost as lost:
        lost.rows = list(table.rows.values())
        raise
    return with_ratios(list(table.rows.values()))


class _CellTable:
    """The rows of a Cell while they are measured."""

    def __init__(self, bench: Bench, cell: Cell, spec: str) -> None:
        self.bench, self.cell = bench, cell
        self.providers = [*bench.providers, *(bench.ceilings if cell.has_rates else ())]
        self.rows = {one.name: empty_row(bench.run, cell, spec, one.name, one.role) for one in self.providers}

    def update(self, name: str, **changes: object) -> None:
        self.rows[name] = replace(self.rows[name], **changes)

    def failed(self, name: str, reason: str | Exception) -> None:
        """Records why a provider has no time.

        Raises:
            DeviceLost: its exception left the device unusable.
        """
        line = reason if isinstance(reason, str) else described(reason)
        self.update(name, reason=line)
        if isinstance(reason, Exception) and self.bench.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.bench.device)
            except RuntimeError as lost:
                raise DeviceLost(f"{name}: {line}; then {described(lost)}") from lost

    def supported(self, inputs: Inputs) -> Iterator[Provider]:
        """The providers that support the Cell."""
        for provider in self.providers:
            self.bench.tell(f"{self.cell}: {provider.name}")
            try:
                reason = provider.supports(self.cell, inputs)
            except Exception as problem:  # a peer may raise anything
                reason = problem
            if reason is None:
                yield provider
            else:
                self.failed(provider.name, reason)


def _ready(table: _CellTable, inputs: Inputs, verifiers: Verifiers) -> dict[str, Prepared]:
    """The calls of the providers that support the Cell and are right."""
    bench, cell = table.bench, table.cell
    question = cell.mode.removesuffix(WITH_HOST)
    if bench.check and question not in verifiers:
        bench.tell(f"{cell}: exact answer")
        try:
            quantizes = cell.call == "quantize"
            verifiers[question] = BytesVerifier(cell.mode, inputs) if quantizes else Verifier(cell, inputs)
        except Exception as problem:  # most likely memory
            for name in table.rows:
                table.failed(name, f"not checked, so not timed: the oracle failed: {described(problem)}")
            return {}
    verifier, ready = verifiers.get(question), dict[str, Prepared]()
    for provider in table.supported(inputs):
        name = provider.name
        try:
            prepared = provider.prepare(cell, inputs)
            if provider.role != "ceiling":
                if verifier is not None and verifier.names and provider.checked:
                    error = verifier.check(prepared)
                    table.update(name, error_ratio=error)
                    if not error <= 1 and not provider.timed_if_wrong:
                        table.failed(name, f"wrong: the error is {error:.3g} of the tolerance")
                        continue
                if cell.call == "block mask":
                    table.update(name, mib=timing.peak_mib(prepared, bench.device))
                if cell.in_graph:
                    prepared = timing.captured(prepared, bench.device)
            ready[name] = prepared
        except Exception as problem:  # a peer may raise anything
            table.failed(name, problem)
    return ready


def _time(table: _CellTable, ready: dict[str, Prepared], inputs: Inputs) -> None:
    bench, cell = table.bench, table.cell
    _forget(bench.device)
    bench.tell(f"{cell}: timing {len(ready)}")
    cost = _cost(cell, inputs) if cell.has_rates else None
    measured = timing.measure_host if cell.mode == "host" else timing.measure_with_host if cell.with_host else measure
    for name, times in measured(ready, bench.device, bench.clock, table.failed).items():
        table.rows[name] = table.rows[name].timed(times, ready[name].cost or cost)


def _cost(cell: Cell, inputs: Inputs) -> Cost:
    if cell.call == "quantize":
        return quantizing.cost(inputs, cell.mode)
    return Cost.of(cell.case, inputs, cell.call)


def _time_first_calls(table: _CellTable, inputs: Inputs) -> None:
    for provider in table.supported(inputs):
        try:
            times = first_call(table.bench.device, table.cell, provider.name)
            table.rows[provider.name] = table.rows[provider.name].timed(times, None)
        except Exception as problem:  # the child failed
            table.failed(provider.name, problem)


def _forget(device: torch.device) -> None:
    """Frees what the last one held: an out-of-memory error belongs to its cause."""
    if device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            raise DeviceLost(described(lost)) from lost
