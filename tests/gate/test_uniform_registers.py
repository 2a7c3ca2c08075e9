"""Machine code in which a descriptor is lost."""

from __future__ import annotations

import pytest

from tests.gate.machine_code import unwritten_in

RIGHT = {
    "a pair": "ULDC.64 UR4, c[0x0][0x208]\nUIADD3 UR5, UP0, UR5, 0x40, URZ",
    "with a predicate": "@!UP0 UMOV UR6, 0x1\n@UP1 UIADD3 UR6, UP0, UR6, 0x2, URZ",
    "a value from a register": "R2UR UR8, R4\nULEA UR8, UR8, UR8, 0x4",
    "of another register": "UMOV UR53, UR45",
    "an upper half": "UMOV UR16, URZ\nUIADD3.X UR23, UR16, 0x40000040, URZ, UP0, !UPT",
    "a comparison writes none": "UISETP.GT.AND UP0, UPT, UR4, UR4, UPT",
}
WRONG = {
    "itself": "UIADD3 UR26, UP0, UR26, 0x40, URZ",
    "the upper half": "UMOV UR26, 0x8\nUIADD3.X UR27, UR27, -0x7fffffe0, URZ, UP0, !UPT",
    "an upper half of something else": "UIADD3 UR24, UR27, 0x1, URZ\nUIADD3.X UR24, UR24, -0x3ffffff0, URZ, UP0, !UPT",
    "after a comparison": "UISETP.GT.AND UP0, UPT, UR4, 0x1, UPT\nUIADD3 UR4, UR4, 0x1, URZ",
}


def as_printed(text: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/                   {line} ;\n" for i, line in enumerate(text.splitlines()))


@pytest.mark.parametrize("name", RIGHT)
def test_registers_that_are_written(name: str):
    assert unwritten_in(as_printed(RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_registers_that_are_not(name: str):
    assert unwritten_in(as_printed(WRONG[name])) == [WRONG[name].splitlines()[-1]]
