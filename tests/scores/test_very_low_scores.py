"""Gradients of rows of which all that they see scores one very low number."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal, window
from saccade.testing.accuracy import check
from saccade.testing.cases import Case
from tests.support.non_finite import VALUES, added, filled, filled_from

CALLS = {
    "plain": {},
    "causal": {"mask": causal()},
    "window": {"mask": window(20, 3)},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "low-sink": {"sink": torch.tensor([-1e9, -1e30])},
    "dropout": {"dropout_p": 0.3},
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def operands(dtype):
    return [torch.randn(1, h, s, 16).to(dtype) for h, s in ((2, 70), (1, 90), (1, 90))]


@pytest.mark.sample
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_against_the_oracle(dtype, value, name):
    dlse = torch.randn(1, 2, 70, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for score_mod in (filled(value), filled_from(value)):
        check(*operands(dtype), dlse=dlse, score_mod=score_mod, **CALLS[name]).assert_ok()


@pytest.mark.parametrize("value", [x for x in VALUES if x <= -1e30])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_tensors(dtype, value):
    for keywords in ({}, {"mask": causal()}, {"sink": torch.tensor([0.5, -1.0])}):
        check(*operands(dtype), score_mod=added(value, 70, 90), **keywords).assert_ok()


@pytest.mark.parametrize("value", VALUES)
def test_packed_sequences(value):
    given = Case("", dtype="fp32", b=3, h_q=2, h_k=1, s_q=30, s_k=30, d=16, d_v=16, order="thd", tail=9).inputs()
    check(given.q, given.k, given.v, **given.keywords | {"score_mod": filled(value)}).assert_ok()


def test_weights_are_equal():
    """Of one row: each key's gradient of v is that row's, divided by the keys."""
    q, k, v = operands(torch.float32)
    v.requires_grad_()
    for value in VALUES:
        (dv,) = torch.autograd.grad(attention(q, k, v, score_mod=filled(value))[:, 0, 1].sum(), v)
        torch.testing.assert_close(dv, torch.full_like(dv, 1 / 90))
