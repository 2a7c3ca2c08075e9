"""Partials over disjoint keys merge to attention over all of them."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade import Dense, Partial, attention, causal, merge, window
from saccade.testing import check
from saccade.testing.cases import Case

S_K = 37
SPLITS = {
    "whole": [],
    "halves": [19],
    "one-token-first": [1],
    "one-token-last": [S_K - 1],
    "empty-first": [0],
    "empty-last": [S_K],
    "empty-between": [20, 20, 20],
    "four": [5, 6, 30],
    "every-token": list(range(1, S_K)),
}


def in_parts(cuts: list[int]):
    """`attention` by parts of the keys; the first carries the sink."""

    def function(q, k, v, *, layout, mask=None, sink=None, return_lse=False, **keywords):
        def rows(x, start, stop):
            return layout.ordered(layout.canonical(x)[:, :, start:stop])

        s_k, partials = layout.canonical(k).shape[2], []
        # Of q once for each part: torch adds their gradients up in float32, and not one by one in q's dtype.
        queries = q.expand(len(cuts) + 1, *q.shape).unbind()
        for part, start, stop in zip(queries, [0, *cuts], [*cuts, s_k], strict=True):
            # Bottom-right alignment: the diagonal stays where it was when keys are missing on its right.
            part_mask = None if mask is None else mask if stop == s_k else window(None, s_k - stop)
            keywords |= {"layout": layout, "mask": part_mask, "sink": sink if start == 0 and not partials else None}
            partials.append(attention(part, rows(k, start, stop), rows(v, start, stop), return_lse=True, **keywords))
        found = merge(*partials, layout=layout)
        return found if return_lse else found.out

    return function


@pytest.mark.parametrize("cuts", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_any_split(cuts, mask, place):
    case = Case("", dtype=place.dtype, h_q=4, s_q=23, s_k=S_K, d=16, d_v=24, mask=mask)
    made = case.inputs(place.device)
    gradients = {"dout": made.dout, "dlse": made.dlse}
    function = in_parts(cuts)
    check(made.q, made.k, made.v, backend=place.backend, function=function, **gradients, **made.keywords).assert_ok()


@given(st.lists(st.integers(0, S_K)).map(sorted), st.integers(1, 50), st.booleans())
def test_any_split_at_all(cuts, s_q, sink):
    made = Case("", dtype="fp32", b=1, s_q=s_q, s_k=S_K, d=8, mask="causal", sink=sink).inputs()
    gradients = {"dout": made.dout, "dlse": made.dlse}
    check(made.q, made.k, made.v, function=in_parts(cuts), **gradients, **made.keywords).assert_ok()


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
def test_orders_and_one_sink(order, place):
    case = Case("", dtype=place.dtype, h_q=4, s_q=9, s_k=S_K, d=16, mask="causal", sink=True, order=order)
    made = case.inputs(place.device)
    gradients = {"dout": made.dout, "dlse": made.dlse}
    function = in_parts([10, 30])
    check(made.q, made.k, made.v, backend=place.backend, function=function, **gradients, **made.keywords).assert_ok()


def _partial(*shape: int, dtype: torch.dtype = torch.float64) -> Partial:
    return Partial(torch.randn(shape, dtype=dtype), torch.randn(shape[:-1], dtype=dtype))


def test_one_partial_is_itself():
    alone = _partial(2, 3, 4, 5)
    merged = merge(alone)
    assert torch.equal(merged.out, alone.out)
    torch.testing.assert_close(merged.lse, alone.lse)


def test_rows_without_keys():
    """-inf in one Partial leaves the other as it is; in all of them, out is 0 and gradients are 0."""
    some, none = (
        _partial(1, 2, 3, 4),
        Partial(torch.zeros(1, 2, 3, 4).double(), torch.full((1, 2, 3), -torch.inf).double()),
    )
    for order in ((some, none), (none, some), (none, some, none)):
        merged = merge(*order)
        assert torch.equal(merged.out, some.out)
        torch.testing.assert_close(merged.lse, some.lse)
    leaves = [x.clone().requires_grad_() for x in (*none, *none)]
    merged = merge(Partial(*leaves[:2]), Partial(*leaves[2:]))
    assert not merged.out.any()
    assert (merged.lse == -torch.inf).all()
    gradients = torch.autograd.grad(merged, leaves, [torch.ones_like(merged.out), torch.ones_like(merged.lse)])
    assert not any(gradient.any() for gradient in gradients)


def test_gradients_where_one_has_no_keys():
    some = [x.requires_grad_() for x in _partial(1, 2, 3, 4)]
    out, lse = torch.randn(1, 2, 3, 4).double().requires_grad_(), torch.full((1, 2, 3), -torch.inf).double()

    def merged(*leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return merge(Partial(*leaves[:2]), Partial(leaves[2], lse))

    assert torch.autograd.gradcheck(merged, (*some, out))


def test_gradcheck():
    leaves = [x.requires_grad_() for _ in range(3) for x in _partial(1, 2, 2, 3)]

    def merged(*leaves: torch.Tensor) -> Partial:
        return merge(*(Partial(*leaves[i : i + 2]) for i in range(0, 6, 2)))

    assert torch.autograd.gradcheck(merged, leaves)
    assert torch.autograd.gradgradcheck(merged, leaves)


def test_gradcheck_through_attention():
    q, k, v = (torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def merged(q, k, v):
        left = attention(q, k[:, :, :2], v[:, :, :2], mask=window(None, 3), return_lse=True)
        return merge(left, attention(q, k[:, :, 2:], v[:, :, 2:], mask=causal(), return_lse=True))

    assert torch.autograd.gradcheck(merged, (q, k, v))


def test_far_apart():
    """Nothing overflows, and a Partial that weighs nothing changes nothing."""
    heavy, light = _partial(1, 1, 2, 3), _partial(1, 1, 2, 3)
    merged = merge(Partial(heavy.out, heavy.lse + 1e5), Partial(light.out, light.lse - 1e5))
    assert torch.equal(merged.out, heavy.out)
    assert torch.equal(merged.lse, heavy.lse + 1e5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes_of_the_first(dtype):
    out = torch.randn(1, 2, 3, 4).to(dtype)
    merged = merge(Partial(out, torch.zeros(1, 2, 3)), Partial(out, torch.zeros(1, 2, 3)))
    assert (merged.out.dtype, merged.lse.dtype) == (dtype, torch.float32)
    assert torch.equal(merged.out, out)


def test_errors():
    with pytest.raises(ValueError, match="at least one"):
        merge()
    with pytest.raises(ValueError, match=re.escape("out (1, 2, 3, 4) with lse (1, 2, 3), out (1, 2, 4, 4)")):
        merge(_partial(1, 2, 3, 4), _partial(1, 2, 4, 4))
    bshd = Partial(torch.randn(1, 3, 2, 4), torch.randn(1, 2, 3))
    with pytest.raises(ValueError, match=re.escape("layout=Dense('bshd')")):
        merge(bshd, bshd)
    assert merge(bshd, layout=Dense("bshd")).out.shape == (1, 3, 2, 4)
