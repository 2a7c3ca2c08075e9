"""Gradients of rows of which all that they see scores one very low number, by the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal, window
from saccade.testing.accuracy import check
from saccade.testing.cases import Case
from tests.support.non_finite import VALUES, added, filled, filled_from

CALLS = {
    "causal": {"mask": causal()},
    "window": {"mask": window(20, 3)},
    "sink": {"sink": torch.tensor([0.5, -1.0])},
    "low-sink": {"sink": torch.tensor([-1e9, -1e30])},
    "dropout": {"dropout_p": 0.3},
}


def operands():
    return [torch.randn(1, h, s, 16) for h, s in ((2, 45), (1, 60), (1, 60))]


@pytest.mark.parametrize("value", VALUES)
def test_against_the_oracle(value):
    q, k, v = operands()
    dlse = torch.randn(1, 2, 45)
    for score_mod in (filled(value), filled_from(value)):
        check(q, k, v, dlse=dlse, score_mod=score_mod, backend="triton").assert_ok()


@pytest.mark.parametrize("name", CALLS)
def test_besides(name):
    q, k, v = operands()
    check(q, k, v, score_mod=filled_from(-1e9), backend="triton", **CALLS[name]).assert_ok()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", [x for x in VALUES if x <= -1e30])
def test_captured_tensors(value, deterministic):
    q, k, v = operands()
    for keywords in ({}, {"mask": causal()}, {"sink": torch.tensor([0.5, -1.0])}):
        options = {"score_mod": added(value, 45, 60), "deterministic": deterministic, "backend": "triton"}
        check(q, k, v, **options, **keywords).assert_ok()


@pytest.mark.parametrize("value", [-1e9])
def test_packed_sequences(value):
    given = Case("", dtype="fp32", b=3, h_q=2, h_k=1, s_q=30, s_k=30, d=16, d_v=16, order="thd", tail=9).inputs()
    keywords = given.keywords | {"score_mod": filled(value)}
    check(given.q, given.k, given.v, backend="triton", **keywords).assert_ok()


def test_weights_are_equal():
    """Of one row: each key's gradient of v is that row's, divided by the keys."""
    q, k, v = operands()
    v.requires_grad_()
    out = attention(q, k, v, score_mod=filled(-1e9), backend="triton")
    (dv,) = torch.autograd.grad(out[:, 0, 1].sum(), v)
    torch.testing.assert_close(dv, torch.full_like(dv, 1 / 60))
