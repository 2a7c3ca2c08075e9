"""`saccade check`: the attention calls of real models on this machine, beside the oracle and PyTorch's attention."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from saccade import Unsupported, attention
from saccade.cli.console import Backend, print_whole, some_name, split_names
from saccade.testing import accuracy
from saccade.testing.cases import MODELS, NAMED, Case
from saccade.testing.sdpa import sdpa
from saccade.testing.timing import Clock, medians

CPU_LENGTH, CPU_KEY_HEADS = 512, 2
"""The limits on a CPU: all models take some seconds on two cores, most of them in the oracle."""
SAMPLES = 7


@dataclass(frozen=True)
class CheckRow:
    """The result of one case."""

    case: str
    spec: str = ""
    backend: str = ""
    device: str = ""
    b: int = 0
    h_q: int = 0
    h_k: int = 0
    s_q: int = 0
    s_k: int = 0
    error_ratio: float | None = None
    """The worst error over tolerance, forward and backward: up to 1 passes. None: not finite, or not run."""
    passed: bool = False
    ms: float | None = None
    """Median time of the forward. None, like the next two, for a case that fails: wrong results have no speed."""
    sdpa_ms: float | None = None
    """The same of F.scaled_dot_product_attention; None where it has no such function."""
    speedup: float | None = None
    reason: str = ""
    """Why it was refused."""


def check(
    backend: Backend = "auto",
    cases: Annotated[
        str | None,
        typer.Option(
            help="Names in saccade.testing.cases, separated by commas; default: the models.", callback=some_name
        ),
    ] = None,
    length: Annotated[
        int, typer.Option(min=0, help="Cut sequences to this length; 0: the real length on a GPU, 512 on a CPU.")
    ] = 0,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object for each case, in a line.")] = False,
) -> None:
    """Runs the attention calls of real models: error over tolerance, time, and speed-up over PyTorch's own attention.

    The error covers forward and backward; the time is of the forward. The exit code is 1 if a case fails or is refused.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    named = _named(cases)
    longest = max(named, key=lambda case: max(case.s_q, case.s_k))
    if length > (most := max(longest.s_q, longest.s_k)):
        raise typer.BadParameter(
            f"--length {length} makes no sequence longer: the longest, of {longest.name}, has {most}"
        )
    chosen = [_fitted(case, length, device) for case in named]
    rows = []
    # The progress bar is on stderr, and only on a terminal.
    for case in track(chosen, "checking", console=Console(stderr=True), transient=True):
        rows.append(_row(case, backend, device))
        if json_lines:
            typer.echo(json.dumps(asdict(rows[-1])))
    if not json_lines:
        _print(rows)
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)


def _named(cases: str | None) -> list[Case]:
    names = split_names(cases or "")
    if unknown := [name for name in names if name not in NAMED]:
        raise typer.BadParameter(f"no case is named {', '.join(unknown)}; the models are {', '.join(map(str, MODELS))}")
    return [NAMED[name] for name in names] or MODELS


def _fitted(case: Case, length: int, device: torch.device) -> Case:
    if device.type == "cpu":
        h_k = min(case.h_k, CPU_KEY_HEADS)
        case = case.replace(h_k=h_k, h_q=case.h_q // max(case.h_k, 1) * h_k)
        length = length or CPU_LENGTH
    return case.smaller(length) if length else case


def _row(case: Case, backend: str, device: torch.device) -> CheckRow:
    inputs = case.inputs(device)
    at: dict[str, Any] = {"case": case.name, "device": str(device)}
    at |= {name: getattr(case, name) for name in ("b", "h_q", "h_k", "s_q", "s_k")}
    try:
        report = accuracy.check(
            *(inputs.q, inputs.k, inputs.v), dout=inputs.dout, dlse=inputs.dlse, backend=backend, **inputs.keywords
        )
    except Unsupported as refused:
        return CheckRow(**at, backend=backend, reason=str(refused))
    at |= {"spec": report.spec, "backend": report.backend}
    at |= {"error_ratio": round(report.ratio, 4) if math.isfinite(report.ratio) else None}
    if not report.ratio <= 1:
        return CheckRow(**at)
    # Without the LSE, as models call it.
    calls = {"ms": lambda: attention(inputs.q, inputs.k, inputs.v, backend=backend, **inputs.keywords)}
    if peer := sdpa(case, inputs):
        calls["sdpa_ms"] = peer
    with torch.no_grad():
        times = medians(calls, device, Clock(SAMPLES, 0.0))
    ms, sdpa_ms = times["ms"], times.get("sdpa_ms")
    return CheckRow(**at, passed=True, ms=ms, sdpa_ms=sdpa_ms, speedup=round(sdpa_ms / ms, 3) if sdpa_ms else None)


def _print(rows: list[CheckRow]) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("case", "q x k", "backend", "error", "ms", "SDPA ms", "speed-up", ""):
        table.add_column(name, justify="left" if name in ("case", "backend", "") else "right", no_wrap=True)
    for row in rows:
        verdict = "ok" if row.passed else "refused" if row.reason else "FAILS"
        table.add_row(
            *(row.case, f"{row.s_q} x {row.s_k}", row.backend),
            *map(_number, (row.error_ratio, row.ms, row.sdpa_ms, row.speedup)),
            verdict,
        )
    console = Console(soft_wrap=True)
    print_whole(console, table)
    console.print(
        "\nerror: error over tolerance, forward and backward; up to 1 passes. Times: the median of the forward."
    )
    if any(row.device == "cpu" for row in rows):
        console.print(f"On a CPU: at most {CPU_KEY_HEADS} key heads, and length {CPU_LENGTH} or --length.")
    for row in rows:
        if row.reason:
            console.print(f"\n{row.case}: {row.reason}", markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
