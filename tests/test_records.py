"""What kernels take as records."""

from __future__ import annotations

import pytest

from saccade.backends.device.records import runtime_int
from saccade.scores import LONGEST


@pytest.mark.parametrize("value", [0, 1, 2, -1, -2, 13, -13, 16, 4096, LONGEST, -LONGEST, (1 << 30) - (1 << 25)])
def test_no_integer_is_special(value: int) -> None:
    """Triton compiles anew for 1 and for multiples of 16; -1 once became 1, which then was a constant."""
    made = runtime_int(value)
    assert made != 1
    assert made % 16
    assert (made - runtime_int(0)) >> 1 == value
    assert -(1 << 31) <= made < 1 << 31
