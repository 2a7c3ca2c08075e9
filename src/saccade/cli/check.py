"""`saccade check`: real models' calls on this machine, against the oracle and beside PyTorch's own attention."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from saccade import Unsupported, attention
from saccade.cli.options import Backend
from saccade.layouts import Packed
from saccade.masks import Extent
from saccade.testing import accuracy
from saccade.testing.cases import MODELS, NAMED, Case, Inputs

CPU_LENGTH, CPU_KEY_HEADS = 512, 2
"""At most these on a CPU: some seconds for all models on two cores, most of them the oracle's."""
SAMPLES = 7


@dataclass(frozen=True)
class CheckRow:
    """What was found about a case."""

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
    """Error over tolerance, forward and backward, the worst tensor's: up to 1 passes. None: not finite, or not run."""
    passed: bool = False
    ms: float | None = None
    """Median time of the forward. None, as the next two, for a case that fails: wrong results have no speed."""
    sdpa_ms: float | None = None
    """The same of F.scaled_dot_product_attention. None too where that has no such function."""
    speedup: float | None = None
    reason: str = ""
    """Why it was refused."""


def check(
    backend: Backend = "auto",
    cases: Annotated[str, typer.Option(help="Names of saccade.testing.cases, with commas; none: the models.")] = "",
    length: Annotated[
        int, typer.Option(min=0, help="At most this length; 0: the real one on a GPU, 512 on a CPU.")
    ] = 0,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Runs real models' calls: error over the tolerance, time, and speed-up over PyTorch's own attention.

    The error is of the forward and the backward, the time of the forward. Exit code 1 when a case fails or is refused.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [_fitted(case, length, device) for case in _named(cases)]
    rows = []
    # The progress bar is on stderr, and only on a terminal.
    for case in track(chosen, "checking", console=Console(stderr=True), transient=True):
        rows.append(_row(case, backend, device))
        if json_lines:
            typer.echo(json.dumps(asdict(rows[-1])))
    if not json_lines:
        _print(rows)
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)


def _named(cases: str) -> list[Case]:
    names = [name.strip() for name in cases.split(",") if name.strip()]
    if unknown := [name for name in names if name not in NAMED]:
        raise typer.BadParameter(f"no case {', '.join(unknown)}; the models are {', '.join(map(str, MODELS))}")
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
    calls = [lambda: attention(inputs.q, inputs.k, inputs.v, backend=backend, **inputs.keywords)]
    calls += [sdpa] if (sdpa := _sdpa(inputs)) else []
    ms, *others = _medians(calls, device)
    sdpa_ms = others[0] if others else None
    speedup = round(sdpa_ms / ms, 3) if sdpa_ms else None
    return CheckRow(**at, passed=True, ms=ms, sdpa_ms=sdpa_ms, speedup=speedup)


def _sdpa(inputs: Inputs) -> Callable[[], Tensor] | None:
    """The same call of PyTorch's, with mask and repeated key heads made beforehand; None where it has none."""
    keywords: dict[str, Any] = inputs.keywords
    if keywords.get("score_mod") is not None or keywords.get("sink") is not None:
        return None
    layout, mask = keywords["layout"], keywords.get("mask")
    if isinstance(layout, Packed):
        return None
    q, k, v = (layout.canonical(x) for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1) for x in (k, v))
    causal = mask is not None and mask.kind == "causal" and q.shape[2] == k.shape[2] and not layout.records
    visible = None
    if not causal and (mask is not None or layout.records):
        extent = Extent.of(q.shape[2], k.shape[2], layout.seqused_q, layout.seqused_k, q.device)
        b = torch.arange(q.shape[0], device=q.device)[:, None, None]
        kv_idx = torch.arange(k.shape[2], device=q.device)
        visible = kv_idx < extent.keys[..., None]
        if mask is not None:
            visible = visible & mask.sees(extent, b, b * 0, extent.q_idx()[..., None], kv_idx)
        visible = visible.expand(q.shape[0], q.shape[2], k.shape[2])[:, None]
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal)


def _medians(calls: list[Callable[[], Tensor]], device: torch.device) -> list[float]:
    """Milliseconds of each, samples interleaved in rotating order, after one call that is not counted."""
    samples: list[list[float]] = [[] for _ in calls]
    with torch.no_grad():
        for turn in range(SAMPLES + 1):
            for at in _rotated(len(calls), turn):
                _wait(device)
                start = time.perf_counter()
                calls[at]()
                _wait(device)
                if turn:
                    samples[at].append(1e3 * (time.perf_counter() - start))
    return [round(statistics.median(found), 4) for found in samples]


def _rotated(n: int, by: int) -> Iterator[int]:
    return ((index + by) % n for index in range(n))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
    console.print(table)
    console.print("\nerror: over the tolerance, up to 1 passes, forward and backward; times: the forward's median")
    if any(row.device == "cpu" for row in rows):
        console.print(f"on a CPU: at most {CPU_KEY_HEADS} key heads; length {CPU_LENGTH}, or --length")
    for row in rows:
        if row.reason:
            console.print(f"\n{row.case}: {row.reason}", markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
