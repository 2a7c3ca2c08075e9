"""The face of scaled_dot_product_attention beside PyTorch's own."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import bias

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


@pytest.mark.parametrize("causal", [False, True])
def test_nested_tensors(causal):
    offsets = torch.tensor([0, 3, 8, 10])
    parts = [torch.randn(10, 4, 8, requires_grad=True) for _ in range(3)]
    q, k, v = (torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in parts)
    out = scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).values()
    rows = [[x[i:j].transpose(0, 1) for x in parts] for i, j in itertools.pairwise(offsets.tolist())]
    wanted = torch.cat([F.scaled_dot_product_attention(*x, is_causal=causal).transpose(0, 1) for x in rows])
    torch.testing.assert_close(out, wanted)
    found, right = (torch.autograd.grad(x.square().sum(), parts) for x in (out, wanted))
    torch.testing.assert_close(found, right)


def test_nested_tensors_that_do_not_fit():
    offsets = torch.tensor([0, 3, 8, 10])
    q = torch.nested.nested_tensor_from_jagged(torch.randn(10, 4, 8), offsets).transpose(1, 2)
    k = torch.nested.nested_tensor_from_jagged(torch.randn(10, 4, 8), offsets.clone()).transpose(1, 2)
    few = torch.nested.nested_tensor_from_jagged(torch.randn(10, 2, 8), offsets).transpose(1, 2)
    flat = torch.nested.nested_tensor_from_jagged(torch.randn(10, 8), offsets)
    with pytest.raises(ValueError, match="query and key of the same offsets"):
        scaled_dot_product_attention(q, k, k, is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, few, few)
    with pytest.raises(ValueError, match="nested tensors must be"):
        scaled_dot_product_attention(flat, flat, flat)


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
    with pytest.raises(ValueError, match="same heads and length"):  # also where no row sees what one has more
        scaled_dot_product_attention(q[:, :, :5], q[:, :, :7], q, is_causal=True)
    with pytest.raises(ValueError, match="two dimensions"):
        scaled_dot_product_attention(q[0, 0, 0], q, q)


@pytest.mark.parametrize("way", ["plain", "causal", "bool", "added"])
@pytest.mark.parametrize("sizes", [sizes for sizes in itertools.product((0, 2), (0, 5), (0, 4)) if 0 in sizes], ids=str)
def test_zero_sizes(sizes, way):
    """No batch rows, queries or keys: torch's results, and its gradients."""
    b, s_q, s_k = sizes
    q, k, v = (torch.randn(b, 3, s, 8, requires_grad=True) for s in (s_q, s_k, s_k))
    masks = {"bool": torch.rand(s_q, s_k) > 0.3, "added": torch.randn(b, 1, s_q, s_k)}
    results = []
    for call in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        out = call(q, k, v, masks.get(way), is_causal=way == "causal")
        results.append((out, *torch.autograd.grad(out.sum(), (q, k, v), allow_unused=True, materialize_grads=True)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("way", ["plain", "causal", "bool", "added"])
@pytest.mark.parametrize("b", [0, 2])
def test_no_heads(b, way):
    """Nothing, of which torch 2.11 makes a division by zero."""
    q, k = (torch.randn(b, 0, s, 8, requires_grad=True) for s in (5, 4))
    masks = {"bool": torch.rand(5, 4) > 0.3, "added": torch.randn(b, 1, 5, 4)}
    out = scaled_dot_product_attention(q, k, k, masks.get(way), is_causal=way == "causal")
    assert out.shape == q.shape
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k))] == [q.shape, k.shape]


@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7), (0, 5), (5, 0)], ids=str)
@pytest.mark.parametrize("made", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_causal_bias(made, lengths):
    s_q, s_k = lengths
    q, k, v = (torch.randn(1, 2, s, 8, requires_grad=True) for s in (s_q, s_k, s_k))
    mask = made(s_q, s_k)
    seen = torch.ones(s_q, s_k).tril(s_k - s_q if made is bias.causal_lower_right else 0) > 0
    results = []
    for call, given in ((scaled_dot_product_attention, mask), (F.scaled_dot_product_attention, seen)):
        out = call(q, k, v, given)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0))
    with pytest.raises(ValueError, match=re.escape(f"the causal bias is for (s_q, s_k) = {(s_q, s_k)}")):
        scaled_dot_product_attention(q, torch.randn(1, 2, s_k + 1, 8), torch.randn(1, 2, s_k + 1, 8), mask)
    with pytest.raises(ValueError, match="not both"):
        scaled_dot_product_attention(q, k, v, mask, is_causal=True)


X = torch.randn(1, 2, 9, 8)
WRONG = {
    "mask shape": (ValueError, lambda: (X, X, X, torch.randn(9, 8)), "= (1, 2, 9, 9), got (9, 8)"),
    "mask batch": (ValueError, lambda: (X, X, X, torch.ones(2, 1, 9, 9).bool()), "got (2, 1, 9, 9)"),
    "mask rank": (ValueError, lambda: (X[0], X[0], X[0], torch.randn(1, 2, 9, 9)), "= (2, 9, 9), got (1, 2, 9, 9)"),
    "mask dtype": (ValueError, lambda: (X, X, X, torch.ones(9, 9).int()), "got torch.int32 (9, 9)"),
    "mask list": (TypeError, lambda: (X, X, X, [[True]]), "attn_mask must be a tensor, got list"),
    "query": (TypeError, lambda: (X.numpy(), X, X), "query must be a tensor, got ndarray"),
    "key": (TypeError, lambda: (X, None, X), "key must be a tensor, got NoneType"),
    "value": (TypeError, lambda: (X, X, [X]), "value must be a tensor, got list"),
    "dropout": (TypeError, lambda: (X, X, X, None, "0"), "dropout_p must be a number, got '0'"),
    "is_causal": (TypeError, lambda: (X, X, X, None, 0.0, "no"), "is_causal must be True or False, got 'no'"),
    "enable_gqa": (TypeError, lambda: (X, X, X, None, 0.0, False, None, "no"), "enable_gqa must be True or False"),
    "batch": (ValueError, lambda: (X.expand(3, -1, -1, -1), X.expand(2, -1, -1, -1), X), "query (3, 2, 9, 8), key (2,"),
    "value's heads": (ValueError, lambda: (X, X, X.repeat(1, 2, 1, 1)), "value (1, 4, 9, 8)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors(name):
    kind, made, words = WRONG[name]
    with pytest.raises(kind, match=re.escape(words)):
        scaled_dot_product_attention(*made())
