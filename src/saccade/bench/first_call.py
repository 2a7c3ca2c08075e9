"""What the first call costs: a new process with empty compile caches, from the call to its result.

Importing torch, starting the device and drawing the inputs come before the clock; the provider's own imports, tracing
and compiling are inside.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from saccade.bench.grids import Cell
from saccade.bench.providers import PROVIDERS, Prepared
from saccade.bench.rows import BenchRow, empty_row, with_ratios
from saccade.bench.run import Bench, described, inputs_of, spec_of
from saccade.bench.timing import Times

SECONDS = 120
"""After this long a child is given up."""
_CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


def run(bench: Bench, cells: Iterable[Cell]) -> Iterator[list[BenchRow]]:
    """The rows of each Cell, of mode `first forward` and so on: one call of each provider, without rates."""
    for cell in cells:
        yield _rows(bench, cell)


def _rows(bench: Bench, cell: Cell) -> list[BenchRow]:
    inputs = inputs_of(cell.case, bench.device)
    spec = spec_of(cell, inputs)
    found = []
    for provider in bench.providers:
        bench.tell(f"first call: {provider.name} {cell}")
        row = replace(empty_row(bench.run, cell, spec, provider.name, provider.role), mode=f"first {cell.mode}")
        row = replace(row, reason=provider.supports(cell, inputs))
        if not row.reason:
            try:
                row = row.timed(_child(bench.device, cell, provider.name), None)
            except (OSError, ValueError, subprocess.SubprocessError) as problem:
                row = replace(row, reason=described(problem))
        found.append(row)
    return with_ratios(found)


def _child(device: torch.device, cell: Cell, provider: str) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__],
            input=pickle.dumps((device, cell, provider)),
            env=os.environ | {name: os.path.join(folder, name) for name in _CACHES},
            capture_output=True,
            check=False,
            timeout=SECONDS,
        )
    if done.returncode:
        raise ValueError((done.stderr.decode().strip().splitlines() or ["no message"])[-1])
    return Times.of([float(done.stdout.split()[-1])])


def seconds(device: torch.device, cell: Cell, provider: str) -> float:
    """In this process, from preparing the call to its result."""
    inputs = inputs_of(cell.case, device)
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    torch.mm(*torch.ones(2, 64, 64, device=device))
    wait()
    start = time.perf_counter()
    prepared: Prepared = PROVIDERS[provider].prepare(cell, inputs)
    if prepared.before:
        prepared.before()
    prepared.call()
    wait()
    return time.perf_counter() - start


if __name__ == "__main__":
    print(seconds(*pickle.load(sys.stdin.buffer)))
