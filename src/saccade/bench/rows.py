"""Results as JSON lines: one BenchRow for each provider of a Cell, in files that only grow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from saccade.bench.cost import Cost
from saccade.bench.grids import Cell
from saccade.bench.machine import Run
from saccade.bench.timing import Times
from saccade.testing.cases import Case


@dataclass(frozen=True)
class BenchRow:
    """What one provider did in one Cell of one run."""

    run: str
    date: str
    """Shared, like `run`, by the rows of one interleaved run."""
    commit: str
    gpu: str
    torch: str
    triton: str
    provider: str
    role: str
    """`saccade`, `peer` or `ceiling`."""
    mode: str
    """`forward`, `backward`, `forward+backward`, `decode`, `host`: the host's time for one call, or `first forward`,
    `first backward`: the first call's in a new process."""
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
    """Median over the samples; None when nothing was timed, and then `reason` says why."""
    ms_q1: float | None = None
    ms_q3: float | None = None
    tflops: float | None = None
    """10^12 operations of visible pairs in a second, by `Cost`."""
    gbps: float | None = None
    """10^9 bytes in a second: inputs read once, outputs written once."""
    error_ratio: float | None = None
    """Error over tolerance: at most 1. None for ceilings, and where nothing was checked."""
    ratio: float | None = None
    """The fastest peer's time over this one: above 1 is faster. The peer is another than this row's provider."""
    ratio_to: str | None = None
    """That peer."""
    of_matmul: float | None = None
    """tflops over the matrix product's in the same run."""
    of_copy: float | None = None
    """gbps over the copy's in the same run."""
    reason: str | None = None

    @property
    def cell(self) -> tuple[str, str, bool]:
        """What rows must share to be compared."""
        return self.case, self.mode, self.deterministic

    def timed(self, times: Times, work: Cost | None) -> BenchRow:
        found = replace(self, **asdict(times))
        if work is None:
            return found
        return replace(found, tflops=work.flops / times.ms / 1e9 or None, gbps=work.bytes / times.ms / 1e6)

    def json(self) -> str:
        """One line; times and rates to six digits."""
        return json.dumps({name: _rounded(value) for name, value in asdict(self).items()}, ensure_ascii=False)


def empty_row(run: Run, cell: Cell, spec: str, provider: str, role: str) -> BenchRow:
    """A BenchRow before anything is known."""
    case = cell.case
    return BenchRow(
        **asdict(run),
        provider=provider,
        role=role,
        mode=cell.mode,
        dtype=case.dtype,
        layout="packed" if case.order == "thd" else "dense" if case.used == "all" else "padded",
        mask=case.mask,
        score=case.score,
        sink=case.sink,
        b=case.b,
        h_q=case.h_q,
        h_k=case.h_k,
        s_q=case.s_q,
        s_k=case.s_k,
        d=case.d,
        d_v=case.d_v,
        deterministic=cell.deterministic,
        page_size=None,
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
    found = []
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
        found.append(row)
    return found


def append(path: Path, rows: Iterable[BenchRow]) -> None:
    """Adds rows to a file, whole lines at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(row.json() + "\n" for row in rows))


def read(*paths: Path) -> list[BenchRow]:
    """The rows of files, and of all `*.jsonl` under folders.

    Raises:
        ValueError: a line that is no BenchRow; the message names the file and the line.
    """
    names = {field.name for field in fields(BenchRow)}
    found = []
    for path in paths:
        for file in sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]:
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if not line.strip():
                    continue
                try:
                    given: dict[str, Any] = json.loads(line)
                    found.append(BenchRow(**{name: value for name, value in given.items() if name in names}))
                except (TypeError, ValueError) as wrong:
                    raise ValueError(f"{file}:{number} is no row of a benchmark: {wrong}") from wrong
    return found


def latest(rows: Iterable[BenchRow]) -> list[BenchRow]:
    """For every cell the rows of its last run: figures of different runs are never mixed within a cell."""
    newest: dict[tuple[str, str, bool], tuple[str, str]] = {}
    rows = list(rows)
    for row in rows:
        newest[row.cell] = max(newest.get(row.cell, ("", "")), (row.date, row.run))
    return [row for row in rows if (row.date, row.run) == newest[row.cell]]


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no infinity: an error ratio that is infinite is a very large one.
        return float(f"{value:.6g}") if abs(value) < 1e300 else 1e300
    return value
