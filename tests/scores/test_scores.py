"""Score modifications: the function, its derivative, and the tensors that it travels in."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from saccade import alibi, attention, causal, scores, softcap
from saccade.testing.accuracy import check
from tests.support.devices import every_head_dim
from tests.support.scores import NAMES, build_score

MODS = [softcap(0.5), softcap(50.0)]
AT = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4))


@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_derivative(mod):
    score = torch.linspace(-200, 200, 401, dtype=torch.float64, requires_grad=True)
    modified = mod(score, *AT)
    wanted = torch.autograd.grad(modified, score, torch.ones_like(modified))[0]
    torch.testing.assert_close(mod.derivative(score.detach(), *AT), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_dtype_and_shape_stay(mod, dtype):
    score = torch.randn(2, 3, 4, 5).to(dtype)
    for x in (mod(score, *AT), mod.derivative(score, *AT)):
        assert (x.dtype, x.shape) == (dtype, score.shape)


def test_softcap_caps():
    score = torch.tensor([-1e30, -1.0, 0.0, 1.0, 1e30], dtype=torch.float64)
    capped = softcap(2.0)(score, *AT)
    assert capped.abs().max() == 2
    assert torch.equal(capped, -capped.flip(0))
    assert torch.equal(capped, capped.sort().values)


@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_text_and_records_are_the_whole_mod(mod):
    floats = list(mod.floats)
    assert scores.from_tensors(mod.identity, [], [], floats) == mod
    assert floats == []
    assert mod.kind in scores.KINDS
    assert scores.from_tensors("none", [], [], []) is None


@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_copies(mod):
    assert copy.deepcopy(mod) == pickle.loads(pickle.dumps(mod)) == mod
    assert hash(copy.deepcopy(mod)) == hash(mod)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_biases_of_narrow_slopes_are_as_exact_as_scores(dtype, backend):
    """Distances of hundreds times slopes of 8 bits: a product of 8 bits would be wrong by 1 and more."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 500, 8, dtype=torch.float64) for _ in range(3))
    slopes = torch.tensor([0.71, -0.33], dtype=dtype, requires_grad=True)
    exact = slopes.detach().double().requires_grad_()
    at = torch.arange(500)
    biased = q @ k.mT / 8**0.5 + exact[:, None, None] * (at[None] - at[:, None])
    wanted = biased.softmax(-1) @ v
    wanted.square().sum().backward()
    for run, atol in ((torch.float64, 1e-12), (torch.float32, 1e-3)):
        slopes.grad = None
        given = [x.to(run) for x in (q, k, v)]
        out = attention(*given, score_mod=alibi(slopes), backend=backend)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=atol)
        out.square().sum().backward()
        torch.testing.assert_close(slopes.grad.double(), exact.grad, rtol=2e-2, atol=0)


@pytest.mark.sample
@every_head_dim()
@pytest.mark.parametrize("name", NAMES)
def test_named(name, device):
    """Of fewer elements the plain run's largest error, by which the tolerance goes, is luck."""
    s_q, s_k = (200, 300) if device.type == "cuda" else (90, 110)
    score_mod = build_score(name, device.h_q, s_q, s_k, device.type, b=device.b)
    q, k, v = device.operands(s_q=s_q, s_k=s_k)
    check(q, k, v, mask=causal(), score_mod=score_mod, backend=device.backend).assert_ok()
