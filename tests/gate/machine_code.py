"""Faults that only PTX or machine code shows: mbarriers whose place has another use, and uniform registers that are
changed before anything is written to them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path


def reused_barriers(ptx: str) -> list[int]:
    """The places of mbarriers in shared memory that plain loads read too, or where tiles begin, which lie first.

    Triton reuses the memory of a barrier on which no warp waits. What is stored there may be overwritten while the
    barrier is initialised (notes/gluon.md).
    """
    addresses = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    addresses |= dict.fromkeys(re.findall(r"mov\.\S+\s+(%r\d+), global_smem;", ptx), "0")
    made = {addresses.get(name) for name in re.findall(r"mbarrier\.init\S*\s+\[(%r\d+)\]", ptx)}
    read = set(re.findall(r"ld\.shared\S*\s+\S+ \[global_smem\+(\d+)\]", ptx))
    return sorted(int(place) for place in made & (read | {"0"}) if place)


# Uniform registers that are changed before anything is written to them, by what ptxas makes of matrix products. ptxas
# 12.8, which Triton 3.6 has, forgets a register where the descriptors of two products agree in their lower halves and
# differ in their upper ones, as of tiles of other widths at one place in shared memory: the products then read anything
# (notes/triton.md).


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
