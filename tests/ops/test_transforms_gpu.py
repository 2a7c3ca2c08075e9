"""Batches of calls and of gradients on a GPU, whose backward runs in threads of autograd's own."""

from __future__ import annotations

import re

import pytest
import torch
from torch.func import grad, jvp, vmap

from saccade import Unsupported, alibi, attention, causal, mask_mod, softcap

pytestmark = pytest.mark.gpu
CALLS = {
    "causal": {"mask": causal()},
    "softcap": {"score_mod": softcap(5.0)},
    "alibi": {},
    "predicate": {"mask": mask_mod(lambda b, h, i, j: (i - j) % 3 != 1)},
    "of b": {"mask": mask_mod(lambda b, h, i, j: (i - j) % 3 != b)},
}


def operands(*batch: int) -> list[torch.Tensor]:
    return [torch.randn(*batch, 2, h, 130, 64, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2)]


def keywords(name: str) -> dict:
    found = dict(CALLS[name])
    if name == "alibi":
        found["score_mod"] = alibi(torch.tensor([0.5, 0.25, 0.1, 0.05], device="cuda"))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_batched_gradients(name: str, backend: str) -> None:
    """As those of one call after the other."""
    options = keywords(name)
    leaves = [x.requires_grad_() for x in operands()]
    out = attention(*leaves, backend=backend, **options)
    weights = torch.randn(3, *out.shape, device="cuda", dtype=out.dtype)
    batched = torch.autograd.grad(out, leaves, weights, is_grads_batched=True, retain_graph=True)
    loop = [torch.autograd.grad(out, leaves, w, retain_graph=True) for w in weights]
    for x, *wanted in zip(batched, *loop, strict=True):
        torch.testing.assert_close(x, torch.stack(wanted))


@pytest.mark.parametrize("name", CALLS)
def test_vmap(name: str, backend: str) -> None:
    options, (q, k, v) = keywords(name), operands(3)

    def call(q, k, v):
        return attention(q, k, v, backend=backend, **options)

    def gradients(q, k, v):
        return grad(lambda *x: call(*x).float().square().sum(), (0, 1, 2))(q, k, v)

    loop = [(call(*x), *gradients(*x)) for x in zip(q, k, v, strict=True)]
    for x, *wanted in zip((vmap(call)(q, k, v), *vmap(gradients)(q, k, v)), *loop, strict=True):
        torch.testing.assert_close(x, torch.stack(wanted))


def test_forward_mode_is_refused(backend: str) -> None:
    q, k, v = operands()
    with pytest.raises(Unsupported, match=re.escape('pass backend="reference"')):
        jvp(lambda q: attention(q, k, v, backend=backend), (q,), (q,))
