"""Which rows there are, and whether the kernel of a row compiles and fits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from saccade.testing.offline import SHARED_LIMIT, NamedTarget
from tests.gate.machine_code import reused_barriers, unwritten

CAPABILITY = 90
TIMED = "3.6"
"""The Triton by which the rows of the tables were timed, and whose spills they name."""
SHARED = {"sm80": 163 << 10, "sm89": 99 << 10, "sm120": 99 << 10, "gfx942": 64 << 10}
"""Other architectures, of which a row's last word may be one, and the bytes of shared memory that one program has."""
UNTIMED_SPILL = 140
"""Bytes that another Triton may spill besides. Triton 3.9 passes --regAllocOptLevel=2 to ptxas, to avoid an error of
ptxas 13: kernels spill up to 136 bytes more. Their cost has not been timed."""


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
        limit = SHARED.get(self.key.split()[-1], SHARED_LIMIT)
        return not self.warnings and self.spill_bytes <= self.allowed_spill and self.shared_bytes <= limit

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


BACKENDS = "gluon", "triton"
PARTS = "configs", "features", "combinations"
SAMPLE, READ = "sample", "read"
TODAY, OTHERS = "today", "others"


def keys(words: Sequence[str] = ()) -> list[str]:
    """The rows that the words choose; without a word, those of all backends and parts.

    `configs`: every row of the shipped tables, and the formulas' configs for other dtypes and sizes. `features`: what
    else a call may have. `combinations`: several features in one kernel. `sample`: of both, rows that together have
    every kernel, size and feature that `configs` lacks. `today`: half of each of these, drawn by SEED. `others`: the
    other half. Any other word, such as `masked`: the rows that have it.
    """
    rows: list[str] = []
    for backend in [word for word in BACKENDS if word in words] or BACKENDS:
        gate = _gate(backend)
        for part in [word for word in (*PARTS, SAMPLE) if word in words] or PARTS:
            found = [*(sampled(gate) if part == SAMPLE else getattr(gate, part)())]
            first = half(found) if {TODAY, OTHERS} & {*words} else {*found}
            rows += (row for row in found if (row in first) != (OTHERS in words))
    choices = *BACKENDS, *PARTS, SAMPLE, READ, TODAY, OTHERS
    wanted = {*words} - {*choices}
    if unknown := wanted - {word for row in rows for word in row.split()}:
        raise SystemExit(f"the gate has no {', '.join(sorted(unknown))}, but {', '.join(choices)}, and words of rows")
    return [row for row in rows if wanted <= {*row.split()}]


def half(rows: Sequence[str]) -> set[str]:
    """The rows that SEED draws, on each day others: half of them, rounded up."""
    drawn = sorted(rows, key=lambda row: hashlib.sha256(f"{os.environ['SEED']}{row}".encode()).digest())
    return {*drawn[: (len(rows) + 1) // 2]}


def sampled(gate: Any) -> Iterator[str]:
    """Next comes the row with the most words that no row before it has. The kernel is one, and so are its sizes."""
    seen = {word for row in gate.configs() for word in row.split()}
    rows = [*gate.features(), *gate.combinations()]

    def new(row: str) -> tuple[int, bool]:
        return len({*row.split()} - seen), row.split()[1] != "forward"  # which takes longest to compile

    while new(best := max(rows, key=new))[0]:
        yield best
        seen |= {*best.split()}


def _gate(backend: str) -> Any:
    """The module that compiles a backend's rows; a row's first word names it."""
    return import_module(f"tests.gate.{backend}")


def fit(key: str) -> Fit:
    """Compiles one row, past Triton's cache, which keeps no log of ptxas."""
    import triton
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled, allowed_spill = _compiled(key)
    if not triton.__version__.startswith(TIMED) and key.split()[-1] not in SHARED:
        allowed_spill += UNTIMED_SPILL
    return _fit(key, compiled, log.getvalue(), allowed_spill)


def _compiled(key: str) -> tuple[Any, int]:
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    target: Any = NamedTarget(CAPABILITY)
    word = key.split()[-1]
    if word in SHARED:
        found = GPUTarget("cuda", int(word[2:]), 32) if word.startswith("sm") else GPUTarget("hip", word, 64)
        target.get_current_target = lambda: found
        # Triton keeps a kernel's target by the number of the device.
        target.get_current_device = lambda: 1 + [*SHARED].index(word)
    driver.set_active(target)
    knobs.compilation.always_compile = True
    return _gate(key.split()[0]).compiled(key)


@dataclass(frozen=True)
class ReadKernel:
    """A row whose kernel Triton has read; its errors are raised."""

    key: str
    ok: bool = True

    def __str__(self) -> str:
        return f"read  {self.key}"


class _HasRead(Exception):
    pass


def read(key: str) -> ReadKernel:
    """Compiles one row as far as Triton's first IR."""
    from triton import knobs

    def stop(*_: Any) -> None:
        raise _HasRead

    def stages(*given: Any) -> Any:  # later Tritons ask for a key first
        if given:
            given[1].update(dict.fromkeys([*given[1]][1:], stop))
        return READ, READ

    runtime: Any = knobs.runtime
    runtime.add_stages_inspection_hook = stages
    try:
        _compiled(key)
    except _HasRead:
        return ReadKernel(key)
    finally:
        runtime.add_stages_inspection_hook = None
    raise RuntimeError(f"{key}: Triton compiled it without asking for its stages")


def _fit(key: str, compiled: Any, log: str, allowed_spill: int) -> Fit:
    if "amdgcn" in compiled.asm:
        registers, spilled = (
            int(re.findall(rf"\.{name}:\s+(\d+)", compiled.asm["amdgcn"])[-1])
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        return Fit(key, registers, 4 * spilled, compiled.metadata.shared, (), allowed_spill)
    if not re.search(r"ptxas\S* info", log):
        raise RuntimeError(f"{key}: no log of ptxas in what Triton printed:\n{log}")

    def number(pattern: str) -> int:
        return max((int(found) for found in re.findall(pattern, log)), default=0)

    told = tuple(line for line in log.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line))
    if key.split()[-1] not in SHARED:
        told += tuple(f"changed before it is written: {x}" for x in unwritten(compiled.asm["cubin"]))
    told += tuple(f"mbarrier at {place} is scratch memory too" for place in reused_barriers(compiled.asm["ptx"]))
    registers, spill = number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores")
    return Fit(key, registers, spill, compiled.metadata.shared, told, allowed_spill)
