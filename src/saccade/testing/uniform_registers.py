"""What ptxas makes of matrix products' descriptors: uniform registers that are read before anything is written to them.

ptxas 12.8, which Triton 3.6 has, forgets a register where the descriptors of two products agree in their lower halves
and differ in their upper ones, as of tiles of other widths at one place in shared memory: the products then read
anything (docs/findings/triton.md).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

NEVER = 63
"""URZ's number, if it is written as one."""
WRITERS = "U", "R2UR", "S2UR", "REDUX", "CREDUX", "VOTEU"
COMPARISONS = "UISETP", "UPLOP", "UP2"
"""Uniform instructions that write a predicate alone, or another kind of register."""
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*?) ;", re.MULTILINE)
_NAME = re.compile(r"(gdesc\[|desc\[)?\bUR(\d+)\b")


def unwritten(cubin: bytes) -> list[str]:
    """Instructions that read a uniform register that none before them wrote, of a kernel's machine code."""
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
    found: list[str] = []
    for operation, rest in _INSTRUCTION.findall(text):
        operands = [x.strip() for x in rest.split(",")]
        target = _target(operation, operands)
        for i, x in enumerate(operands):
            if i != target and any(not written.issuperset(_read(operation, rest, name)) for name in _NAME.finditer(x)):
                found.append(f"{operation} {rest}")
                break
        if target is not None:
            first = int(operands[target][2:])
            wide = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
            written.update(range(first, first + wide))
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


def _read(operation: str, rest: str, name: re.Match[str]) -> range:
    """The registers that a name stands for: of a product's descriptors two pairs, or the second if the left operand is
    in registers; else one, or a pair."""
    first = int(name[2])
    if name[1] == "gdesc[":
        return range(first if re.match(r"R\d+, gdesc", rest) else first + 2, first + 4)
    return range(first, first + (2 if name[1] or ".64" in operation else 1))
