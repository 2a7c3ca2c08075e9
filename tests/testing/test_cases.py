"""The named problems draw what they say."""

from __future__ import annotations

import pytest
import torch

from saccade import attention
from saccade.call.spec import TORCH_DTYPES
from saccade.testing.cases import MODELS, NAMED, SMALL, Case
from tests.support import draws


def test_names_are_unique():
    names = [case.name for case in [*MODELS, *SMALL]]
    assert len(set(names)) == len(names) == len(NAMED)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_inputs_are_as_described(case):
    made = case.inputs()
    layout = made.keywords["layout"]
    b, s_q, s_k = case.b, case.s_q, case.s_k
    if case.order == "thd":
        b, s_q, s_k = 1, made.q.shape[0], made.k.shape[0]
        assert int(layout.cu_seqlens_q[-1]) + case.tail == s_q
        assert int(layout.cu_seqlens_k[-1]) + case.tail == s_k
        assert layout.sequences == case.b
    assert layout.canonical(made.q).shape == (b, case.h_q, s_q, case.d)
    assert layout.canonical(made.k).shape == (b, case.h_k, s_k, case.d)
    assert layout.canonical(made.v).shape == (b, case.h_k, s_k, case.d_v)
    assert layout.canonical(made.dout).shape == (b, case.h_q, s_q, case.d_v)
    assert layout.canonical_lse(made.dlse).shape == (b, case.h_q, s_q)
    assert all(x.is_contiguous() and x.dtype == TORCH_DTYPES[case.dtype] for x in (made.q, made.k, made.v, made.dout))
    mask = made.keywords.get("mask")
    if mask is not None and mask.kind != "prefixes" and not mask.bounds_per_row:
        assert repr(mask) == case.mask, "masks are written as they print"
    assert ("sink" in made.keywords) == case.sink
    assert ("score_mod" in made.keywords) == (case.score != "none")


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_same_seed_draws_the_same(case):
    one, two, other = case.inputs(), case.inputs(), case.inputs(seed=1)
    assert torch.equal(one.q.nan_to_num(), two.q.nan_to_num())
    assert repr(one.keywords) == repr(two.keywords)
    if one.q.numel() and case.used == "all" and not case.tail:
        assert not torch.equal(one.q, other.q)


def test_order_and_dtype_draw_the_same_numbers():
    case = Case("", dtype="fp32", h_q=4, s_q=5, s_k=6, mask="documents", used="q")
    wanted = case.inputs()
    for order in ("bshd", "sbhd"):
        made = case.replace(order=order).inputs()
        assert torch.equal(made.keywords["layout"].canonical(made.q).nan_to_num(), wanted.q.nan_to_num())
    assert torch.equal(case.replace(dtype="bf16").inputs().k, wanted.k.bfloat16())


def test_rows_that_are_not_used_are_poisoned():
    made = Case("", b=3, s_q=9, s_k=12, used="qk").inputs()
    layout = made.keywords["layout"]
    for x, used, s in ((made.q, layout.seqused_q, 9), (made.v, layout.seqused_k, 12), (made.dout, layout.seqused_q, 9)):
        beyond = torch.arange(s) >= used[:, None]
        assert beyond.any()
        assert torch.equal(x.isnan().all(-1).all(1), beyond)
        assert torch.equal(x.isnan().any(-1).any(1), beyond)


def test_requires_grad():
    made = Case("", dtype="fp32", s_q=4, s_k=4, sink=True).inputs(requires_grad=True)
    attention(made.q, made.k, made.v, **made.keywords).backward(made.dout)
    assert all(x.grad is not None for x in (made.q, made.k, made.v, made.keywords["sink"]))


@pytest.mark.parametrize("seed", range(0, 200, 7))
def test_draws_repeat_and_describe_themselves(seed):
    case = draws.dense(seed)
    assert case == draws.dense(seed)
    assert str(seed) in case.name
    assert eval(case.describe()) == case
    assert draws.dense(seed, "fp32").dtype == "fp32"
    case.inputs()


def test_values_as_wide_as_the_usual_head_dim_are_described():
    case = Case("narrow", d=96, d_v=64)
    assert eval(case.describe()) == case


def test_draws_differ():
    drawn = [draws.dense(seed) for seed in range(300)]
    for field in ("dtype", "b", "order", "sink", "used", "ids"):
        assert len({getattr(case, field) for case in drawn}) > 1
    assert {case.mask.split("(")[0] for case in drawn} >= {
        "none",
        "causal",
        "window",
        "prefix",
        "prefixes",
        "documents",
    }
    assert any(case.d != case.d_v for case in drawn)
    assert any(case.s_q > case.s_k for case in drawn)
    assert any(case.s_q < case.s_k for case in drawn)
