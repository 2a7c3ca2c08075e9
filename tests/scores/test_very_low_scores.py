"""Gradients of rows of which all that they see scores one very low number."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal, window
from saccade.testing.accuracy import check
from tests.support.devices import Device, every_head_dim
from tests.support.non_finite import VALUES, added, filled, filled_from

CALLS = {
    "plain": {},
    "causal": {"mask": causal()},
    "window": {"mask": window(20, 3)},
    "wide-window": {"mask": window(100, 3)},
    "sink": {"sink": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "low-sink": {"sink": torch.tensor([-1e9, -1e30, -1e4, 0.0])},
    "dropout": {"dropout_p": 0.3, "mask": causal()},
    "dropout-of-all": {"dropout_p": 0.3},
    "deterministic": {"deterministic": True, "mask": causal()},
}
LOWEST = [x for x in VALUES if x <= -1e30]


def call(name: str, device: Device) -> dict:
    """With a sink for each head."""
    keywords = CALLS[name] | {"backend": device.backend}
    return device.moved(keywords | {"sink": keywords["sink"][: device.h_q]} if "sink" in keywords else keywords)


@pytest.mark.slow
@pytest.mark.sample
@every_head_dim()
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", VALUES)
def test_against_the_oracle(value: float, name: str, device: Device) -> None:
    for dtype in device.dtypes:
        dlse = device.randn(device.b, device.h_q, device.s_q, dtype=device.lse_dtype(dtype))
        for score_mod in (filled(value), filled_from(value)):
            check(*device.operands(dtype), dlse=dlse, score_mod=score_mod, **call(name, device)).assert_ok()


@pytest.mark.slow
@every_head_dim()
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("value", LOWEST)
def test_captured_tensors(value: float, deterministic: bool, device: Device) -> None:
    options = {"score_mod": added(value, device.s_q, device.s_k, device.type), "deterministic": deterministic}
    for dtype in device.dtypes:
        for name in ("plain", "causal", "sink"):
            check(*device.operands(dtype), **options, **call(name, device)).assert_ok()


@pytest.mark.parametrize("value", VALUES)
def test_packed_sequences(value: float, device: Device) -> None:
    for mask in ("none", "causal"):
        given = device.case(b=3, s_k=device.s_q, order="thd", mask=mask, tail=9).inputs(device.type)
        keywords = given.keywords | {"score_mod": filled(value), "backend": device.backend}
        check(given.q, given.k, given.v, **keywords).assert_ok()


def test_weights_are_equal(device: Device) -> None:
    """Of one row: each key's gradient of v is that row's, divided by the keys."""
    q, k, v = device.operands()
    v.requires_grad_()
    for value in VALUES:
        out = attention(q, k, v, score_mod=filled(value), backend=device.backend)
        (dv,) = torch.autograd.grad(out[:, 0, 1].sum(), v)
        torch.testing.assert_close(dv[:, 0], torch.full_like(dv[:, 0], 1 / device.s_k))
