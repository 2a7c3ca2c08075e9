"""Machine code in which a descriptor is lost."""

from __future__ import annotations

import pytest

from saccade.testing.uniform_registers import unwritten_in

RIGHT = {
    "a pair for a pair": "ULDC.64 UR4, c[0x0][0x208]\nLDG.E R0, desc[UR4][R2.64]",
    "with a predicate": "@!UP0 UMOV UR6, 0x1\n@UP1 UIADD3 UR7, UP0, UR6, 0x2, URZ",
    "a value from a register": "R2UR UR8, R4\nULEA UR9, UR8, UR8, 0x4",
    "a product of registers": "UMOV UR10, 0x8\nUMOV UR11, 0x40\nHGMMA.64x32x16.F32 R88, R24, gdesc[UR8].tnspB, R88",
    "a product of memory": "ULDC.128 UR8, c[0x0][0x210]\nHGMMA.64x64x16.F32 R8, gdesc[UR8], R8",
    "a comparison writes none": "UMOV UR4, 0x1\nUISETP.GT.AND UP0, UPT, UR4, 0x1, UPT",
}  # fmt: skip
WRONG = {
    "itself": "UIADD3 UR26, UP0, UR26, 0x40, URZ",
    "half of a descriptor": "UMOV UR10, 0x8\nHGMMA.64x32x16.F32 R88, R24, gdesc[UR8].tnspB, R88",
    "half of a pair": "UMOV UR4, 0x8\nLDG.E R0, desc[UR4][R2.64]",
    "a comparison": "UISETP.GT.AND UP0, UPT, UR4, 0x1, UPT",
    "in an address": "LDS R30, [R31+UR17+0x8000]",
}


def as_printed(text: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/                   {line} ;\n" for i, line in enumerate(text.splitlines()))


@pytest.mark.parametrize("name", RIGHT)
def test_registers_that_are_written(name: str):
    assert unwritten_in(as_printed(RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_registers_that_are_not(name: str):
    assert unwritten_in(as_printed(WRONG[name])) == [WRONG[name].splitlines()[-1]]
