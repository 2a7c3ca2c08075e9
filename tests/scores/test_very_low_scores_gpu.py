"""Gradients of rows of which all that they see scores one very low number, by each backend's own kernels."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal, window
from saccade.testing.accuracy import check
from saccade.testing.cases import Case
from tests.support.non_finite import VALUES, added, filled, filled_from

pytestmark = pytest.mark.gpu
CALLS = {
    "plain": {},
    "causal": {"mask": causal()},
    "window": {"mask": window(100, 3)},
    "sink": {"sink": torch.tensor([0.5, -1.0, 3.0, 0.0])},
    "low-sink": {"sink": torch.tensor([-1e4, -1e9, -1e30, 0.0])},
    "dropout": {"dropout_p": 0.3, "mask": causal()},
    "deterministic": {"deterministic": True, "mask": causal()},
}


def operands(d: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    shapes = ((2, h, s, d) for h, s in ((4, 300), (2, 333), (2, 333)))
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", VALUES)
def test_against_the_oracle(value: float, name: str, d: int, backend: str) -> None:
    keywords = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in CALLS[name].items()}
    dlse = torch.randn(2, 4, 300, device="cuda")
    for score_mod in (filled(value), filled_from(value)):
        for dtype in (torch.bfloat16, torch.float16):
            given = operands(d, dtype)
            check(*given, dlse=dlse, score_mod=score_mod, backend=backend, **keywords).assert_ok()


def test_float32() -> None:
    for value in VALUES:
        check(*operands(64, torch.float32), score_mod=filled(value), backend="triton").assert_ok()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("value", [x for x in VALUES if x <= -1e30])
def test_captured_tensors(value: float, d: int, deterministic: bool, backend: str) -> None:
    for keywords in ({}, {"mask": causal()}):
        options = {"score_mod": added(value, 300, 333, "cuda"), "deterministic": deterministic, "backend": backend}
        check(*operands(d), **options, **keywords).assert_ok()


@pytest.mark.parametrize("value", VALUES)
def test_packed_sequences(value: float, backend: str) -> None:
    case = Case("", b=3, h_q=4, h_k=2, s_q=200, s_k=200, d=64, d_v=64, order="thd", mask="causal", tail=50)
    given = case.inputs("cuda")
    keywords = given.keywords | {"score_mod": filled(value)}
    check(given.q, given.k, given.v, backend=backend, **keywords).assert_ok()


def test_weights_are_equal(backend: str) -> None:
    """Of one row: each key's gradient of v is that row's, divided by the keys."""
    q, k, v = operands(64)
    v.requires_grad_()
    for value in VALUES:
        out = attention(q, k, v, score_mod=filled(value), backend=backend)
        (dv,) = torch.autograd.grad(out[:, 0, 1].sum(), v)
        torch.testing.assert_close(dv[:, 0], torch.full_like(dv[:, 0], 1 / 333))
