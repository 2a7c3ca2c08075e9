"""The face of scaled_dot_product_attention beside PyTorch's own."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from saccade.compat.sdpa import scaled_dot_product_attention

CASES = {
    "plain": ((2, 4), None, False),
    "causal": ((2, 4), None, True),
    "3-D": ((4,), None, True),
    "2-D": ((), (40, 40), False),
    "5-D": ((2, 3, 4), (40, 40), False),
    "5-D mask": ((2, 3, 4), (2, 1, 4, 40, 40), False),
    "rows": ((2, 4), (40, 1), False),
    "keys": ((2, 4), (2, 1, 1, 40), False),
    "heads": ((2, 4), (4, 40, 40), False),
    "batch": ((2, 4), (2, 1, 40, 40), False),
}


@pytest.mark.parametrize("floats", [False, True], ids=["bool", "added"])
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name, floats):
    outer, shape, causal = CASES[name]
    q, k, v = (torch.randn(*outer, 40, 16, requires_grad=True) for _ in range(3))
    mask = None
    if shape is not None:
        mask = torch.randn(shape, requires_grad=True) if floats else torch.rand(shape) > 0.3
    given = [x for x in (q, k, v, mask) if x is not None and x.requires_grad]
    ways = scaled_dot_product_attention, F.scaled_dot_product_attention
    results = []
    for way in ways:
        out = way(q, k, v, mask, is_causal=causal)
        results.append((out, *torch.autograd.grad(out.square().sum(), given)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("lengths", [(20, 33), (33, 20)], ids=str)
def test_causal_is_aligned_at_the_top_left(lengths):
    s_q, s_k = lengths
    q, k, v = torch.randn(1, 2, s_q, 8), torch.randn(1, 2, s_k, 8), torch.randn(1, 2, s_k, 8)
    theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, is_causal=True), theirs)


def test_heads_that_share_keys():
    q, k, v = torch.randn(1, 6, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    theirs = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.3), theirs)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, v)


def test_dropout():
    """What is kept differs from torch's choice; how much, and what all of it means, does not."""
    q, k = torch.randn(1, 2, 50, 8), torch.randn(1, 2, 50, 8)
    v = torch.eye(50).expand(1, 2, 50, 50)
    whole = scaled_dot_product_attention(q, k, v)
    torch.manual_seed(0)
    dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75)
    assert abs(kept.double().mean() - 0.75) < 4 * (0.75 * 0.25 / kept.numel()) ** 0.5
    torch.manual_seed(0)
    assert torch.equal(scaled_dot_product_attention(q, k, v, dropout_p=0.25), dropped)
    assert not scaled_dot_product_attention(q, k, v, dropout_p=1.0).any()


def test_errors():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="not both"):
        scaled_dot_product_attention(q, q, q, torch.ones(9, 9), is_causal=True)
    with pytest.raises(ValueError, match=re.escape("dropout_p must be in [0, 1)")):
        scaled_dot_product_attention(q, q, q, dropout_p=1.5)
    with pytest.raises(ValueError, match="two dimensions"):
        scaled_dot_product_attention(q[0, 0, 0], q, q)
