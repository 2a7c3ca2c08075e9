"""Where rows live: orders, used lengths, and what comes out."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch

from saccade import Dense, Partial, attention, causal, prefix
from saccade.layouts import ORDERS, empty_like_rows, from_tensors
from saccade.testing import check
from saccade.testing.cases import Case

SHAPES = {"bhsd": (2, 3, 4, 5), "bshd": (2, 4, 3, 5), "sbhd": (4, 2, 3, 5)}


@pytest.mark.parametrize("order", ORDERS)
def test_orders(order):
    layout, x = Dense(order), torch.randn(SHAPES[order])
    view = layout.canonical(x)
    assert view.shape == SHAPES["bhsd"]
    assert view.data_ptr() == x.data_ptr()
    back = layout.ordered(view)
    assert back.shape == x.shape
    assert back.stride() == x.stride()
    name = "bhsd"
    for dim, size in enumerate(view.shape):
        assert x.shape[order.index(name[dim])] == size


@pytest.mark.parametrize("order", ["bshd", "sbhd"])
@pytest.mark.parametrize("used", ["all", "qk"])
def test_orders_agree_to_the_bit(order, used, place):
    """The same memory, called by another order, gives the same bits."""
    case = Case("", dtype=place.dtype, b=3, h_q=4, s_q=33, s_k=40, d=24, d_v=16, mask="causal", sink=True, used=used)
    made = case.replace(order=order).inputs(place.device)
    layout = made.keywords["layout"]

    def results(x_layout, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        keywords = made.keywords | {"layout": x_layout, "backend": place.backend, "return_lse": True}
        out, lse = attention(*leaves, **keywords)
        return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [tensors[3], made.dlse])

    tensors = made.q, made.k, made.v, made.dout
    canonical = Dense("bhsd", layout.seqused_q, layout.seqused_k)
    in_order = results(layout, *tensors)
    wanted = results(canonical, *map(layout.canonical, tensors))
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), in_order, wanted, strict=True):
        assert torch.equal(x if name == "lse" else layout.canonical(x), y), name


def test_out_is_in_the_memory_order_of_q(place):
    made = Case("", dtype=place.dtype, h_q=4, s_q=9, s_k=9, d=8).inputs(place.device)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (made.q, made.k, made.v))
    out = attention(q, k, v, backend=place.backend)
    assert out.shape == q.shape
    if place.backend != "reference":
        assert out.stride() == q.stride()


@pytest.mark.parametrize("permutation", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_empty_like_rows(permutation):
    made = torch.empty([(2, 3, 4)[dim] for dim in permutation] + [5])
    x = made.permute(*(permutation.index(dim) for dim in range(3)), 3)
    assert x.shape == (2, 3, 4, 5)
    assert empty_like_rows(x, 5).stride() == x.stride()
    assert empty_like_rows(x, 7).shape == (2, 3, 4, 7)


@pytest.mark.sample
@pytest.mark.parametrize("mask", ["none", "causal", "window(3,2)", "prefixes"])
@pytest.mark.parametrize("order", ORDERS)
def test_used_lengths_are_slices(order, mask, place):
    """The padded call is, batch row by batch row, the call on the used rows alone; beyond them zero and -inf."""
    case = Case("", dtype=place.dtype, b=3, s_q=12, s_k=15, d=8, mask=mask, order=order, used="qk")

    def sliced(q, k, v, *, layout, mask=None, return_lse=False, **keywords):
        q, k, v = map(layout.canonical, (q, k, v))
        outs, lses = [], []
        for b in range(3):
            n_q, n_k = int(layout.seqused_q[b]), int(layout.seqused_k[b])
            row = [x[b : b + 1, :, :n] for x, n in ((q, n_q), (k, n_k), (v, n_k))]
            row_mask = prefix(mask.n[b : b + 1]) if mask is not None and mask.kind == "prefixes" else mask
            out, lse = attention(*row, mask=row_mask, return_lse=True, **keywords)
            outs.append(torch.nn.functional.pad(out, (0, 0, 0, 12 - n_q)))
            lses.append(torch.nn.functional.pad(lse, (0, 12 - n_q), value=-torch.inf))
        out = layout.ordered(torch.cat(outs))
        return Partial(out, torch.cat(lses)) if return_lse else out

    made = case.inputs(place.device, seed=3)
    for function in (attention, sliced):
        gradients = {"dout": made.dout, "dlse": made.dlse}
        check(
            made.q, made.k, made.v, backend=place.backend, function=function, **gradients, **made.keywords
        ).assert_ok()


def test_beyond_the_used_rows_is_nothing(place):
    case = Case("", dtype=place.dtype, b=3, h_q=4, s_q=12, s_k=15, d=8, mask="causal", sink=True, used="qk")
    made = case.inputs(place.device, seed=3, requires_grad=True)
    found = attention(made.q, made.k, made.v, return_lse=True, backend=place.backend, **made.keywords)
    gradients = torch.autograd.grad(found, (made.q, made.k, made.v), [made.dout, made.dlse])
    layout = made.keywords["layout"]
    rows = torch.arange(12, device=place.device) >= layout.seqused_q[:, None]
    keys = torch.arange(15, device=place.device) >= layout.seqused_k[:, None]
    assert rows.any()
    assert keys.any()
    for x, beyond in zip((found.out, *gradients), (rows, rows, keys, keys), strict=True):
        assert not x.transpose(1, 2)[beyond].any()
    assert (found.lse.transpose(1, 2)[rows] == -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_both_integer_dtypes(dtype, place):
    made = Case("", dtype=place.dtype, b=2, s_q=20, s_k=30, mask="causal").inputs(place.device)
    used = {name: torch.tensor(n, dtype=dtype, device=place.device) for name, n in (("q", [20, 7]), ("k", [30, 9]))}
    layout = Dense("bhsd", used["q"], used["k"])
    check(made.q, made.k, made.v, mask=causal(), layout=layout, backend=place.backend).assert_ok()


def test_text_and_records_are_the_whole_layout():
    for used in ({}, {"seqused_q": torch.tensor([1])}, {"seqused_k": torch.tensor([2])}):
        for order in ORDERS:
            layout = Dense(order, **used)
            tensors = list(layout.tensors)
            again = from_tensors(layout.text, tensors, [])
            assert tensors == []
            assert (again.order, again.seqused_q, again.seqused_k) == (order, layout.seqused_q, layout.seqused_k)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layout: pickle.loads(pickle.dumps(layout))], ids=["copy", "pickle"]
)
def test_copies(copied):
    layout = Dense("sbhd", seqused_k=torch.tensor([3, 4]))
    again = copied(layout)
    assert repr(again) == repr(layout) == "Dense('sbhd', seqused_k=[2])"
    assert torch.equal(again.seqused_k, layout.seqused_k)
    assert again.seqused_q is None


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Dense("hbsd"), "'hbsd'"),
        (lambda: Dense(seqused_q=torch.ones(2)), "torch.float32 (2,)"),
        (lambda: Dense(seqused_k=torch.ones(2, 1, dtype=torch.int32)), "torch.int32 (2, 1)"),
        (lambda: Dense(seqused_k=[3, 4]), "[3, 4]"),
    ],
)
def test_errors(made, words):
    with pytest.raises(TypeError if words == "[3, 4]" else ValueError, match=re.escape(words)):
        made()
