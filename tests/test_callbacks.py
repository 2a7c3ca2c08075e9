"""Callbacks in cuDNN's manner: what they compute, their derivatives, and when they are recorded again."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense
from saccade.testing import check
from saccade.testing.callbacks import NAMES, case


def operands(h_q, h_k, s_q, s_k, d, dtype, order="bhsd"):
    made = torch.Generator().manual_seed(0)
    shapes = (2, h_q, s_q, d), (2, h_k, s_k, d), (2, h_k, s_k, d)
    return [Dense(order).ordered(torch.randn(shape, generator=made)).contiguous().to(dtype) for shape in shapes]


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_oracle(name, order):
    dtype = {"sbhd": torch.float32, "bshd": torch.bfloat16}[order]
    q, k, v = operands(4, 2, 20, 33, 8, dtype, order)
    check(q, k, v, score_mod=case(name, 4, 20, 33).score(), layout=Dense(order)).assert_ok()
