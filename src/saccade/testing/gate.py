"""The compile gate: every shipped tile config compiles for Hopper on a machine without a GPU, and fits.

    python -m saccade.testing.gate [gluon | triton] [configs | features | combinations] [read]

Triton compiles without a GPU, and ptxas, which comes with it, reports registers, spills and warnings. A kernel is
fit to ship if ptxas warns of nothing, if it spills no more than its config row says, with the reason, if its shared
memory is within what Hopper gives one program, if no mbarrier shares its place with anything else, and if no
instruction changes a uniform register that none has written. `read` stops where Triton has read a kernel, which takes a
tenth of the time: whether this Triton takes what another one does.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from saccade.testing.offline import SHARED_LIMIT, NamedTarget
from saccade.testing.processes import Died, in_processes

CAPABILITY = 90
TIMED = "3.6"
"""The Triton by which the rows of the tables were timed, and whose spills they name."""
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


BACKENDS = "gluon", "triton"
PARTS = "configs", "features", "combinations"
READ = "read"


def keys(words: Sequence[str] = ()) -> Iterator[str]:
    """The rows that the words choose; without a word, those of all backends and parts.

    `configs`: every row of the shipped tables, and the formulas' configs for other dtypes and sizes. `features`: what
    else a call may have. `combinations`: several features in one kernel; they take longest, and CI omits them.
    """
    if unknown := set(words) - {*BACKENDS, *PARTS, READ}:
        known = ", ".join((*BACKENDS, *PARTS, READ))
        raise SystemExit(f"the gate has no {', '.join(sorted(unknown))}, but {known}")
    for backend in [word for word in BACKENDS if word in words] or BACKENDS:
        for part in [word for word in PARTS if word in words] or PARTS:
            yield from getattr(_gate(backend), part)()


def _gate(backend: str) -> Any:
    """The module that compiles a backend's rows; a row's first word names it."""
    return import_module(f"saccade.backends.{backend}.gate")


def fit(key: str) -> Fit:
    """Compiles one row, past Triton's cache, which keeps no log of ptxas."""
    import triton
    from triton import knobs

    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled, allowed_spill = _compiled(key)
    if not triton.__version__.startswith(TIMED):
        allowed_spill += UNTIMED_SPILL
    return _fit(key, compiled, log.getvalue(), allowed_spill)


def _compiled(key: str) -> tuple[Any, int]:
    from triton import knobs
    from triton.runtime import driver

    target: Any = NamedTarget(CAPABILITY)
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
    if not re.search(r"ptxas\S* info", log):
        raise RuntimeError(f"{key}: no log of ptxas in what Triton printed:\n{log}")

    def number(pattern: str) -> int:
        return max((int(found) for found in re.findall(pattern, log)), default=0)

    told = tuple(line for line in log.splitlines() if "warning" in line.lower() or re.search(r"C75\d\d", line))
    told += tuple(f"changed before it is written: {x}" for x in unwritten(compiled.asm["cubin"]))
    told += tuple(f"mbarrier at {place} is scratch memory too" for place in reused_barriers(compiled.asm["ptx"]))
    registers, spill = number(r"Used (\d+) registers"), number(r"(\d+) bytes spill stores")
    return Fit(key, registers, spill, compiled.metadata.shared, told, allowed_spill)


def reused_barriers(ptx: str) -> list[int]:
    """The places of mbarriers in shared memory that plain loads read too, or where tiles begin, which lie first.

    Triton reuses the memory of a barrier on which no warp waits. What is stored there may be overwritten while the
    barrier is initialised (docs/findings/gluon.md).
    """
    addresses = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    addresses |= dict.fromkeys(re.findall(r"mov\.\S+\s+(%r\d+), global_smem;", ptx), "0")
    made = {addresses.get(name) for name in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)}
    read = set(re.findall(r"ld\.shared\S*\s+\S+ \[global_smem\+(\d+)\]", ptx))
    return sorted(int(place) for place in made & (read | {"0"}) if place)


# Uniform registers that are changed before anything is written to them, by what ptxas makes of matrix products. ptxas
# 12.8, which Triton 3.6 has, forgets a register where the descriptors of two products agree in their lower halves and
# differ in their upper ones, as of tiles of other widths at one place in shared memory: the products then read anything
# (docs/findings/triton.md).


NEVER = 63
"""URZ's number, if it is written as one."""
WRITERS = "U", "R2UR", "S2UR", "REDUX", "CREDUX", "VOTEU"
COMPARISONS = "UISETP", "UPLOP", "UP2"
"""Uniform instructions that write a predicate alone, or another kind of register."""
UPPER = "0x40000040", "-0x7fffffe0", "-0x3ffffff0"
"""Upper halves of descriptors, for rows of 128, 64 and 32 bytes; ptxas adds them to a zero."""
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*?) ;", re.MULTILINE)


def unwritten(cubin: bytes) -> list[str]:
    """Instructions that change a uniform register that none before them wrote, or make a descriptor of one that is not
    zero, of a kernel's machine code. Others, such as copies, may stand before what they follow in time."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return unwritten_in(text)


def unwritten_in(text: str) -> list[str]:
    """The same of nvdisasm's text.

    >>> line = "        /*0010*/                   "
    >>> unwritten_in(f"{line}UIADD3 UR26, UP0, UR26, 0x40, URZ ;")
    ['UIADD3 UR26, UP0, UR26, 0x40, URZ']
    >>> unwritten_in(f"{line}UMOV UR26, 0x8 ;\\n{line}UIADD3 UR26, UP0, UR26, 0x40, URZ ;")
    []
    """
    written: set[int] = {NEVER}
    zero: set[int] = set()
    found: list[str] = []
    for operation, rest in _INSTRUCTION.findall(text):
        operands = [x.strip() for x in rest.split(",")]
        target = _target(operation, operands)
        if target is None:
            continue
        first, sources = int(operands[target][2:]), operands[target + 1 :]
        lost = first not in written and operands[target] in sources
        if operation == "UIADD3.X" and any(x in UPPER for x in sources):
            lost |= any(int(x[2:]) not in zero for x in sources if re.fullmatch(r"UR\d+", x))
        if lost:
            found.append(f"{operation} {rest}")
        wide = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
        written.update(changed := range(first, first + wide))
        zero.difference_update(changed)
        if operation == "UMOV" and sources == ["URZ"]:
            zero.add(first)
    return found


def _target(operation: str, operands: list[str]) -> int | None:
    """Which operand is the uniform register that an instruction writes: the first after predicates."""
    if not operation.startswith(WRITERS) or operation.startswith(COMPARISONS):
        return None
    for i, x in enumerate(operands):
        if re.fullmatch(r"UR\d+", x):
            return i
        if not re.fullmatch(r"U?P\w+", x):
            break
    return None


def main() -> None:
    import triton

    print(f"triton {triton.__version__}, sm_{CAPABILITY}a")
    failed = total = 0
    work: Any = read if READ in sys.argv[1:] else fit
    for key, found in in_processes(work, keys(sys.argv[1:]), os.cpu_count() or 1):
        died = isinstance(found, Died)
        print(f"FAIL  {key}  {found}" if died else found, flush=True)
        total += 1
        failed += died or not found.ok
    print(f"{total - failed} passed, {failed} failed")
    sys.exit(bool(failed) or not total)


if __name__ == "__main__":
    main()
