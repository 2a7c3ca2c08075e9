"""Score modifications: the function, its derivative, and the tensors that it travels in."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from saccade import scores, softcap

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
