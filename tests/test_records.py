"""What kernels take as records."""

from __future__ import annotations

import pytest
import torch

from saccade import scores
from saccade.backends.device.records import runtime_int
from saccade.backends.device.scores import data
from saccade.scores import LONGEST


@pytest.mark.parametrize("value", [0, 1, 2, 13, 16, 4096, (1 << 30) - 2])
def test_no_integer_is_special(value: int) -> None:
    """Triton compiles anew for 1 and for multiples of 16."""
    made = runtime_int(value)
    assert made != 1
    assert made % 16
    assert (made - 3) >> 1 == value
    assert made < 1 << 31


@pytest.mark.parametrize("value", [0, 1, -1, -2, 16, LONGEST, -LONGEST])
def test_no_captured_integer_is_special(value: int) -> None:
    """-1 once became 1, which then was a constant."""

    def shifted(score, b, h, q_idx, kv_idx):
        return score + (kv_idx + value)

    *_, made = data(scores.bind(shifted, torch.empty(1, 2, 8, 4)))
    assert made != 1
    assert made % 16
    assert ((made - 3) >> 1) - LONGEST == value
