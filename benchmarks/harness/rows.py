"""Results as JSON lines: one BenchRow for each provider of a Cell, in append-only files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.cost import Cost
from benchmarks.harness.grids import GRIDS, Cell
from benchmarks.harness.machine import Run
from saccade.testing.cases import Case
from saccade.testing.timing import Times


@dataclass(frozen=True)
class BenchRow(Run):
    """The result of one provider for one Cell, with the fields of its run."""

    provider: str
    role: str
    """`saccade`, `peer` or `ceiling`."""
    mode: str
    """As in a Cell."""
    dtype: str
    layout: str
    """`dense`, `padded`, `packed`, `paged`."""
    mask: str
    """As masks print: `none`, `causal`, `window(1023,0)`, `documents&causal`."""
    score: str
    sink: bool
    b: int
    h_q: int
    h_k: int
    s_q: int
    s_k: int
    d: int
    d_v: int
    deterministic: bool
    page_size: int | None
    lengths: str
    """The name of the length distribution."""
    case: str
    """One string, the same for every provider of a Cell."""
    spec: str
    """The Spec's text form."""
    ms: float | None = None
    """Median over the samples; None when nothing was timed, for a `reason`."""
    ms_q1: float | None = None
    ms_q3: float | None = None
    tflops: float | None = None
    """10^12 operations of visible pairs in a second, by `Cost`."""
    gbps: float | None = None
    """10^9 bytes in a second: inputs read once, outputs written once."""
    error_ratio: float | None = None
    """Error over tolerance: at most 1. None for ceilings, and where nothing was checked."""
    ratio: float | None = None
    """The time of the fastest other peer over this one: above 1 is faster."""
    ratio_to: str | None = None
    """That peer."""
    of_matmul: float | None = None
    """tflops over the matrix product's in the same run."""
    of_copy: float | None = None
    """gbps over the copy's in the same run."""
    mib: float | None = None
    """The most device memory that one call allocates; measured for block masks."""
    reason: str | None = None

    @property
    def cell(self) -> tuple[str, str, bool]:
        """Rows compare where these are equal."""
        return self.case, self.mode, self.deterministic

    @property
    def cache(self) -> str:
        """How keys and values lie in a paged cache, as `testing.cases.Case` has it: the case's name says it."""
        found = re.search(r"cache-(\w+)", self.case)
        return found[1] if found else "apart"

    def timed(self, times: Times, cost: Cost | None) -> BenchRow:
        row = replace(self, **asdict(times))
        if cost is None:
            return row
        return replace(row, tflops=cost.flops / times.ms / 1e9 or None, gbps=cost.bytes / times.ms / 1e6)

    @property
    def figure(self) -> str:
        """The time or the rate, whichever the row is about, in its unit."""
        ms = self.ms or 0
        match self.unit:
            case "microseconds":
                return f"{1e3 * ms:.1f} µs"
            case "seconds":
                return f"{1e-3 * ms:.2f} s"
            case "milliseconds":
                return f"{ms:.3g} ms"
            case "GB/s":
                return _three_digits(self.gbps or 0)
            case _:
                return _three_digits(self.tflops or 0)

    @property
    def unit(self) -> str:
        """Of `UNITS`; TFLOP/s in other modes, of what computes something."""
        return UNITS.get(self.mode.split()[0]) or ("GB/s" if self.gbps and not self.tflops else "TFLOP/s")

    def json(self) -> str:
        """One line; times and rates to six digits."""
        return json.dumps({name: _rounded(value) for name, value in asdict(self).items()}, ensure_ascii=False)


UNITS = {"host": "microseconds", "first": "seconds", "decode": "GB/s", "quantize": "GB/s", "block": "milliseconds"}
"""By the first word of a mode."""

_OF_CASE = "dtype", "mask", "score", "sink", "b", "h_q", "h_k", "s_q", "s_k", "d", "d_v"


def empty_row(run: Run, cell: Cell, spec: str, provider: str, role: str) -> BenchRow:
    """A BenchRow before anything is measured."""
    case = cell.case
    return BenchRow(
        **asdict(run),
        **{name: getattr(case, name) for name in _OF_CASE},
        provider=provider,
        role=role,
        mode=cell.mode,
        layout=cell.layout,
        deterministic=cell.deterministic,
        page_size=case.page_size if cell.layout == "paged" else None,
        lengths=_lengths(case),
        case=case.name,
        spec=spec,
    )


def _lengths(case: Case) -> str:
    if case.lengths:
        return f"{min(case.lengths)} to {max(case.lengths)}, {sum(case.lengths)} tokens"
    return "full" if case.used == "all" else f"ragged-{case.used}"


def with_ratios(rows: list[BenchRow]) -> list[BenchRow]:
    """The rows of one Cell with their ratios to the best peer and to the ceilings."""
    timed = {row.provider: row for row in rows if row.ms}
    ceilings = {row.provider: row for row in timed.values() if row.role == "ceiling"}
    peers = sorted((row for row in timed.values() if row.role == "peer"), key=lambda row: row.ms or 0)
    matmul, copy = ceilings.get("matmul"), ceilings.get("copy")
    compared = []
    for row in rows:
        best = next((peer for peer in peers if peer.provider != row.provider), None)
        if row.ms and row.role != "ceiling":
            row = replace(
                row,
                ratio=best.ms / row.ms if best and best.ms else None,
                ratio_to=best.provider if best else None,
                of_matmul=row.tflops / matmul.tflops if matmul and matmul.tflops and row.tflops else None,
                of_copy=row.gbps / copy.gbps if copy and copy.gbps and row.gbps else None,
            )
        compared.append(row)
    return compared


def append(path: Path, rows: Iterable[BenchRow]) -> None:
    """Adds rows to a file, whole lines at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(row.json() + "\n" for row in rows))


def read(*paths: Path) -> list[BenchRow]:
    """The rows of files, and of all `*.jsonl` under folders.

    Raises:
        ValueError: a line is not a BenchRow; the message names the file and the line.
    """
    names = {field.name for field in fields(BenchRow)}
    rows = []
    for path in paths:
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if not line.strip():
                    continue
                try:
                    values: dict[str, Any] = json.loads(line)
                    rows.append(BenchRow(**{name: value for name, value in values.items() if name in names}))
                except (TypeError, ValueError) as wrong:
                    raise ValueError(f"{file}:{number} is not a row of a benchmark: {wrong}") from wrong
    return rows


def latest(rows: Iterable[BenchRow], providers: Iterable[str] = ()) -> list[BenchRow]:
    """The rows of one run for each cell, the last of those that timed most of the providers.

    Figures of different runs are never mixed within a cell, and a run without a peer does not hide an earlier one with
    it.
    """
    rows, providers = list(rows), {*providers}
    timed: dict[tuple[str, str, bool], dict[tuple[str, str], set[str]]] = {}
    for row in rows:
        of_run = timed.setdefault(row.cell, {}).setdefault((row.date, row.run), set())
        of_run.update({row.provider} & providers if row.ms else ())
    chosen = {cell: max(runs, key=lambda run: (len(runs[run]), run)) for cell, runs in timed.items()}
    return [row for row in rows if (row.date, row.run) == chosen[row.cell]]


def parsed(query: str, *others: str) -> dict[str, list[str]]:
    """What a page asks for: fields of a BenchRow, `gpu`, `grid` and `others`, and their values.

    >>> parsed("gpu=h200 d=64|128 mode=forward")
    {'gpu': ['h200'], 'd': ['64', '128'], 'mode': ['forward']}
    """
    found = {}
    for word in query.split():
        name, equals, value = word.partition("=")
        if not equals or (name not in ("gpu", "grid", *others) and name not in BenchRow.__dataclass_fields__):
            raise ValueError(f"{word!r} in {query!r} is not field=value of a row")
        found[name] = value.split("|")
    return found


def selected(rows: Iterable[BenchRow], query: dict[str, list[str]]) -> list[BenchRow]:
    """The rows with these values of these fields, and of the cells of a `grid`.

    Raises:
        ValueError: a grid that does not exist.
    """
    fields, grids = dict(query), query.get("grid", [])
    fields.pop("grid", None)
    if unknown := [name for name in grids if name not in GRIDS]:
        raise ValueError(f"no grid is named {', '.join(unknown)}")
    cells = {(cell.case.name, cell.mode, cell.deterministic) for name in grids for cell in GRIDS[name].cells}
    return [
        row
        for row in rows
        if all(str(getattr(row, name)) in values for name, values in fields.items())
        and (not grids or row.cell in cells)
    ]


def geometric_mean(values: Iterable[float]) -> float:
    """
    >>> round(geometric_mean([0.5, 2.0]), 6)
    1.0
    """
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def _three_digits(rate: float) -> str:
    """
    >>> _three_digits(1234.5), _three_digits(1.2345)
    ('1234', '1.23')
    """
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.3g}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinity: an error ratio that is infinite is a very large one.
        return float(f"{value:.6g}") if abs(value) < 1e300 else 1e300
    return value
