"""The compile gate: every shipped tile config compiles for Hopper on a machine without a GPU, and fits.

    python -m saccade.testing.gate

Triton runs as far as the PTX, and ptxas, which comes with Triton, reports registers, spills and warnings. A kernel is
fit to ship when ptxas warns of nothing, when it spills no more than its config row says, with the reason, and when its
shared memory is within what Hopper gives one program, and when no mbarrier's place is also something else's.
"""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

SHARED_LIMIT = 232_448
"""Bytes of shared memory for one program on sm_90."""
CAPABILITY = 90


@dataclass(frozen=True)
class Fit:
    """What ptxas says of one kernel."""

    key: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    warnings: tuple[str, ...]
    """C7507: register requests ignored; C7510 to C7515: matrix products one after the other. And reused barriers."""
    allowed_spill: int
    """What the config row names."""

    @property
    def ok(self) -> bool:
        return not self.warnings and self.spill_bytes <= self.allowed_spill and self.shared_bytes <= SHARED_LIMIT

    def __str__(self) -> str:
        told = [
            "ok  " if self.ok else "FAIL",
            self.key,
            f"registers {self.registers}",
            f"spill {self.spill_bytes} (allowed {self.allowed_spill})",
            f"shared {self.shared_bytes}",
            *self.warnings,
        ]
        return "  ".join(told)


class _Hopper:
    """A driver that only names a target: what Triton asks one for before it launches."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def keys() -> Iterator[str]:
    """The rows of every shipped table, and what the formulas give for the dtypes and sizes no table has."""
    for backend in ("gluon", "triton"):
        yield from _gate(backend).keys()


def _gate(backend: str) -> Any:
    """The module that compiles a backend's rows; a row's first word names it."""
    return import_module(f"saccade.backends.{backend}.gate")


def fit(key: str) -> Fit:
    """Compiles one row."""
    from triton.runtime import driver

    target: Any = _Hopper()
    driver.set_active(target)
    compiled, allowed_spill = _gate(key.split()[0]).compiled(key)
    return _read(key, compiled, allowed_spill)


def _read(key: str, compiled: Any, allowed_spill: int) -> Fit:
    from triton.backends.nvidia.compiler import get_ptxas

    ptxas = get_ptxas(CAPABILITY)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder, "kernel.ptx")
        ptx.write_text(compiled.asm["ptx"])
        command = [ptxas.path, f"-arch=sm_{CAPABILITY}a", "-v", str(ptx), "-o", str(ptx.with_suffix(".cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    log = done.stderr
    if done.returncode:
        raise RuntimeError(f"{key}: ptxas failed\n{log}")

    def number(pattern: str) -> int:
        return max((int(found) for found in re.findall(pattern, log)), default=0)

    told = tuple(line for line in log.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line))
    told += tuple(f"mbarrier at {place} is scratch memory too" for place in reused_barriers(compiled.asm["ptx"]))
    registers, spill = number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores")
    return Fit(key, registers, spill, compiled.metadata.shared, told, allowed_spill)


def reused_barriers(ptx: str) -> list[int]:
    """Where an mbarrier is made in shared memory that plain loads read: Triton gives a barrier that nobody waits for
    away, and what comes there may be overwritten while the barrier is being made (docs/findings/gluon.md)."""
    addresses = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    made = {addresses.get(name) for name in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)}
    read = set(re.findall(r"ld\.shared\S*\s+\S+ \[global_smem\+(\d+)\]", ptx))
    return sorted(int(place) for place in made & read if place)


def main() -> None:
    import triton

    print(f"triton {triton.__version__}, sm_{CAPABILITY}a")
    failed = total = 0
    with multiprocessing.get_context("spawn").Pool(multiprocessing.cpu_count()) as pool:
        for found in pool.imap(fit, keys()):
            print(found, flush=True)
            total += 1
            failed += not found.ok
    print(f"{total - failed} passed, {failed} failed")
    sys.exit(bool(failed) or not total)


if __name__ == "__main__":
    main()
