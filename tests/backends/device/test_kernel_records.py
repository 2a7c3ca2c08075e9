"""What kernels take as records."""

from __future__ import annotations

import pytest
import torch

from saccade import scores
from saccade.backends.device.records import runtime_int
from saccade.backends.device.scores import data, form
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


@pytest.mark.parametrize("value", [LONGEST + 1, -LONGEST - 1, 1 << 30, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63)])
def test_far_integers_are_wide_and_not_special(value: int) -> None:
    """Two halves, which Triton always takes for 64 bits."""

    def shifted(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx < value, score, -score)

    bound = scores.bind(shifted, torch.empty(1, 2, 8, 4))
    *_, halves = data(bound)
    assert all(half % 2 and 1 << 31 < half < 1 << 63 for half in halves)
    low, high = (((half - 3) >> 1) - (1 << 40) for half in halves)
    assert ((high - (1 << 31)) << 32) + low == value
    assert form(bound).wide_integers == {0}
    assert form(scores.bind(lambda score, *at, n=7: score * n, torch.empty(1, 2, 8, 4))).wide_integers == frozenset()
