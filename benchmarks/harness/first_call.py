"""What the first call costs: a new process with empty compile caches, from the call to its result.

The clock starts after torch is imported, the device is started and the inputs are drawn; it includes the provider's own
imports, tracing and compiling.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.harness.grids import Cell
from benchmarks.harness.inputs import inputs_of
from benchmarks.harness.providers import PROVIDERS, Prepared
from saccade.testing.timing import Times

SECONDS = 120
"""A child process that takes longer is stopped."""
_CACHES = "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"


def first_call(device: torch.device, cell: Cell, provider: str) -> Times:
    """The time of one call in a child process.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: the child fails, or takes too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", __name__],
            input=pickle.dumps((device, cell, provider)),
            env=os.environ | {name: os.path.join(folder, name) for name in _CACHES} | {"PYTHONPATH": _path()},
            capture_output=True,
            check=False,
            timeout=SECONDS,
        )
    if child.returncode:
        raise ValueError((child.stderr.decode().strip().splitlines() or ["no message"])[-1])
    return Times.of([float(child.stdout.split()[-1])])


def _path() -> str:
    """Where a child finds this module, wherever the command was started."""
    return os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))


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
