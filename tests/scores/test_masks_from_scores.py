"""Score functions that hide keys by large negative numbers, as masks that are added do."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import (
    Dense,
    Packed,
    ScoreMod,
    attention,
    cache_info,
    causal,
    documents,
    explain,
    mask_mod,
    prefix,
    scores,
    window,
)
from saccade.ops import dispatch
from saccade.ops.score_windows import split_score
from saccade.testing import check
from saccade.testing.callbacks import case

VALUES = [-1e9, -1e12, torch.finfo(torch.float32).min, -math.inf]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def wide(score):
    """So that eager halves have room for the number."""
    return score if score.dtype == torch.float64 else score.float()


def operands(place):
    shapes = (1, 2, 150, 64), (1, 1, 600, 64), (1, 1, 600, 64)
    return [torch.randn(shape, device=place.device, dtype=DTYPES[place.dtype]) for shape in shapes]


@pytest.mark.sample
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_tiles_before_and_behind(value, place):
    def band(score, b, h, q_idx, kv_idx):
        return torch.where((kv_idx >= q_idx + 200) & (kv_idx < q_idx + 300), wide(score), value)

    check(*operands(place), score_mod=band, backend=place.backend).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_whole_rows(value, place):
    """Of equal scores the softmax is the mean, and of -inf alone nothing. Nobody asks for these rows' gradients, and
    they spoil no others."""

    def thirds(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx % 3 > 0, wide(score), value)

    q, k, v = operands(place)
    dout = torch.randn_like(q)
    dout[:, :, ::3] = 0
    check(q, k, v, score_mod=thirds, dout=dout, backend=place.backend).assert_ok()


def test_whole_rows_of_a_linear_score(place):
    def thirds(score, b, h, q_idx, kv_idx):
        return score + 0.01 * (kv_idx - q_idx) + torch.where(q_idx % 3 > 0, 0.5, -math.inf)

    check(*operands(place), score_mod=thirds, backend=place.backend).assert_ok()


# What a score function hides by distance runs as a mask. The oracle knows nothing of it.

BOUNDS = {
    "q_idx + n >= kv_idx": lambda q_idx, kv_idx, n: q_idx + n >= kv_idx,
    "kv_idx - q_idx < n": lambda q_idx, kv_idx, n: kv_idx - q_idx < n,
    "n - kv_idx > -q_idx": lambda q_idx, kv_idx, n: n - kv_idx > -q_idx,
    "not kv_idx > q_idx": lambda q_idx, kv_idx, n: ~(kv_idx > q_idx),
    "q_idx - kv_idx <= n": lambda q_idx, kv_idx, n: q_idx - kv_idx <= n,
    "q_idx < kv_idx + n": lambda q_idx, kv_idx, n: torch.lt(q_idx, kv_idx + n),
    "neither": lambda q_idx, kv_idx, n: torch.logical_not((kv_idx > q_idx) | (q_idx > kv_idx + n)),
    "abs": lambda q_idx, kv_idx, n: (q_idx - kv_idx).abs() <= n,
    "floats": lambda q_idx, kv_idx, n: kv_idx.float() - q_idx <= 3.0,
}
RESTS = {
    "nothing": lambda score, h, kv_idx, table: score,
    "scale": lambda score, h, kv_idx, table: 1.5 * score,
    "tanh": lambda score, h, kv_idx, table: 2 * torch.tanh(score) + 0.01 * kv_idx,
    "table": lambda score, h, kv_idx, table: score + table[h, kv_idx],
}
FORMS = {
    "select": torch.where,
    "other branch": lambda seen, rest, value: torch.where(~seen, value, rest),
    "masked_fill": lambda seen, rest, value: rest.masked_fill(~seen, value),
    "added": lambda seen, rest, value: rest + torch.where(seen, 0.0, value),
    "whole numbers": lambda seen, rest, value: torch.where(seen, 0, value) + rest,
}


def hiding(bounds, form="select", rest="nothing", value=-math.inf, nested=False, table=None):
    """A score function that hides what one of the bounds does, each a name and a number."""
    tests, form, rest = [(BOUNDS[name], n) for name, n in bounds], FORMS[form], RESTS[rest]

    def score_mod(score, b, h, q_idx, kv_idx):
        seen = [test(q_idx, kv_idx, n) for test, n in tests]
        rested = rest(score, h, kv_idx, table)
        if nested:
            for one in seen:
                rested = form(one, rested, value)
            return rested
        return form(functools.reduce(torch.logical_and, seen), rested, value)

    return score_mod


def tensors(s_q, s_k, dtype=torch.float32):
    shapes = (2, 2, s_q, 8), (2, 1, s_k, 8), (2, 1, s_k, 8)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("form", FORMS)
def test_selects_that_leave_no_key(form):
    """One inside of the other: the window of the outer one alone would be a part of what is hidden."""
    score_mod = hiding([("kv_idx - q_idx < n", 0), ("abs", 0)], form, nested=True)
    q, k, v = tensors(9, 9)
    check(q, k, v, score_mod=score_mod, return_max_scores=True).assert_ok()
    assert explain(q, k, v, score_mod=score_mod).hidden is None


@given(
    bounds=st.lists(st.tuples(st.sampled_from(sorted(BOUNDS)), st.integers(-2, 12)), min_size=1, max_size=3),
    form=st.sampled_from(sorted(FORMS)),
    rest=st.sampled_from(sorted(RESTS)),
    value=st.sampled_from([-math.inf, -1e9]),
    nested=st.booleans(),
    lengths=st.sampled_from([(9, 9), (20, 20), (14, 9), (9, 14)]),
    mask=st.sampled_from([None, causal(), window(4, 3)]),
)
@settings(max_examples=10)
def test_any_of_them_as_a_mask(bounds, form, rest, value, nested, lengths, mask):
    table = torch.randn(2, 20, requires_grad=rest == "table")
    score_mod = hiding(bounds, form, rest, value, nested, table)
    s_q, s_k = lengths
    q, k, v = tensors(s_q, s_k)
    check(q, k, v, score_mod=score_mod, mask=mask, return_max_scores=True).assert_ok()
    told = explain(q, k, v, score_mod=score_mod, mask=mask)
    i, j = torch.arange(s_q)[:, None], torch.arange(s_k)
    seen = functools.reduce(torch.logical_and, [BOUNDS[name](i, j, n) for name, n in bounds]).expand(s_q, s_k)
    own = seen.new_ones(s_q, s_k) if mask is None else mask.visible(s_q, s_k)[0]
    if told.hidden is not None:
        assert torch.equal(told.hidden.visible(s_q, s_k)[0], seen)
        assert value == -math.inf or bool(((seen & own).any(1) | ~own.any(1)).all())
        assert ("score" in str(told.spec)) == (rest != "nothing")
    elif value == -math.inf or rest != "table":  # then for a reason
        off = s_k - s_q
        last = i + off  # the diagonal that ends in the corner, along which windows lie
        outside = ((last < 0) | (last >= s_k))[:, 0]
        holds = seen.gather(1, last.clamp(0, s_k - 1))[:, 0] | outside
        assert not holds.all() or (value != -math.inf and not (seen & own).any(1).all())


def test_callbacks_without_a_rest():
    """The plain kernels run, forward and backward."""
    q, k, v = (x.requires_grad_() for x in tensors(20, 20))
    score_mod = case("causal", 2, 20, 20).score()
    told = explain(q, k, v, score_mod=score_mod)
    assert told.spec == explain(q, k, v, mask=causal()).spec
    assert "runs as the mask causal" in str(told)
    outs = attention(q, k, v, score_mod=score_mod), attention(q, k, v, mask=causal())
    assert torch.equal(*outs)
    for x, y in zip(*(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in outs), strict=True):
        assert torch.equal(x, y)
    rest = explain(q, k, v, score_mod=case("scaled_causal", 2, 20, 20).score(), mask=window(5, None)).spec
    assert (rest.mask, rest.score) == ("window", "score(scaled_causal)")


def whole(*arguments, **keywords):
    """Whether nothing of a score function runs as a mask."""
    told = explain(*arguments, **keywords)
    return told.hidden is None and told.spec.score != "none" and "runs as" not in str(told)


def test_what_stays_a_score():
    square, wide = tensors(12, 12), tensors(9, 14)
    causal_bounds = [("q_idx + n >= kv_idx", 0)]
    table = torch.randn(2, 12)

    def of(body):
        return lambda score, b, h, q_idx, kv_idx: body(score, q_idx, kv_idx)

    stay = {
        "numbers that may be scores": hiding(causal_bounds, value=-65504.0),
        "zero": hiding(causal_bounds, value=0.0),
        "captured tensors beside a finite number": hiding(causal_bounds, rest="table", value=-1e9, table=table),
        "large factors": of(lambda score, q_idx, kv_idx: torch.where(q_idx >= kv_idx, 1e3 * score, -1e9)),
        "another large number": of(lambda s, i, j: torch.where(i >= j, torch.where(i % 2 == j % 2, s, -1e8), -1e9)),
        "rows without a key": hiding([("q_idx < kv_idx + n", 3), ("q_idx + n >= kv_idx", -2)], value=-1e9),
        "not along a diagonal": of(lambda score, q_idx, kv_idx: torch.where(q_idx + kv_idx < 9, score, -math.inf)),
        "either": of(lambda s, i, j: torch.where((i >= j) | (j < 4), s, -math.inf)),
        "what only the kernel knows": of(lambda s, i, j: torch.where(i >= j + table[i % 2, 0].long(), s, -math.inf)),
        "not outermost": of(lambda s, i, j: 2 * torch.where(i >= j, s, -1e9)),
        "without the diagonal": hiding([("q_idx + n >= kv_idx", -1)]),
    }
    for name, score_mod in stay.items():
        assert whole(*square, score_mod=score_mod), name
    check(*square, score_mod=stay["rows without a key"]).assert_ok()
    assert whole(*wide, score_mod=hiding(causal_bounds))  # more keys than rows, from the first on
    for backend in ("reference", "cudnn"):
        assert explain(*square, score_mod=hiding(causal_bounds), backend=backend).hidden is None
    # Where the call's own mask may hide all that is left, -inf alone can hide.
    odd = mask_mod(lambda b, h, q_idx, kv_idx: kv_idx > q_idx)
    for value in (-math.inf, -1e9):
        score_mod = hiding(causal_bounds, value=value)
        assert whole(*square, score_mod=score_mod, mask=odd) == (value != -math.inf)
        check(*square, score_mod=score_mod, mask=odd).assert_ok()


def test_layouts():
    """Where rows and keys of each sequence are as many, which one vector of lengths tells."""
    score_mod = hiding([("abs", 4)], rest="scale", value=-1e9)
    ids = torch.tensor([[3, 3, 1, 1, 1, 3, 3, 2, 2, 2, 2, 2]])
    q, k, v = tensors(12, 12)
    used, other = torch.tensor([12, 5]), torch.tensor([12, 6])
    offsets = torch.tensor([0, 5, 5, 12])
    flat = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    calls = [
        (True, (q, k, v), {"mask": documents(ids)}),
        (False, (q, k, v), {"mask": ~documents(ids)}),  # of which some rows see hidden keys alone
        (False, (q, k, v), {"mask": causal() & ~window(2, 0)}),
        (True, (q, k, v), {"mask": ~causal() | documents(ids)}),
        (True, (q, k, v), {"mask": prefix(3) & causal(), "sink": torch.randn(2)}),
        (True, (q, k, v), {"layout": Dense("bhsd", used, used)}),
        (False, (q, k, v), {"layout": Dense("bhsd", used, other)}),
        (False, (q, k, v), {"layout": Dense("bhsd", None, other)}),
        (True, flat, {"layout": Packed(offsets, offsets, 7, 7)}),
        (False, flat, {"layout": Packed(offsets, torch.tensor([0, 4, 6, 12]), 7, 7)}),
    ]
    for moved, operands, keywords in calls:
        assert whole(*operands, score_mod=score_mod, **keywords) != moved, keywords
        check(*operands, score_mod=score_mod, **keywords).assert_ok()


def test_own_derivatives():
    """They select by the same comparisons, at any place, or by none."""

    def cut(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx >= kv_idx) & (q_idx - kv_idx < 5), score * score, -math.inf)

    def slope(grad, score, b, h, q_idx, kv_idx):
        return 2 * torch.where((q_idx < kv_idx) | (5 + kv_idx <= q_idx), 0, grad) * score

    def all_over(grad, score, b, h, q_idx, kv_idx):
        return 2 * score * grad * (q_idx >= kv_idx) * (q_idx - kv_idx < 5)

    q, k, v = tensors(12, 12, torch.float64)
    for bprop in (None, slope, all_over):
        score_mod = ScoreMod(cut, bprop=bprop)
        assert explain(q, k, v, score_mod=score_mod).spec.mask == "window"
        check(q, k, v, score_mod=score_mod).assert_ok()
    rest = split_score(scores.bind(ScoreMod(cut, bprop=slope), q))[1]
    assert "where" not in str(rest.program.slope.graph)


def test_slopes_that_overflow_where_nothing_is_seen():
    """As long as the user's own derivative is none there."""

    def decayed(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, score * torch.exp((kv_idx - q_idx) * 1.0), -math.inf)

    def slope(grad, score, b, h, q_idx, kv_idx):
        return torch.where(q_idx >= kv_idx, grad * torch.exp((kv_idx - q_idx) * 1.0), 0)

    leaves = [x.requires_grad_() for x in tensors(150, 150)]
    out = attention(*leaves, score_mod=ScoreMod(decayed, bprop=slope))
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), leaves)))


def test_new_numbers_trace_nothing():
    q, k, v = tensors(12, 12)
    widths = set()
    for n, value in ((3, -math.inf), (5, -math.inf), (5, -1e9), (7, -1.0)):
        told = explain(q, k, v, score_mod=hiding([("abs", n)], value=value))
        widths.add(repr(told.hidden))
        if n == 3:
            traced = cache_info().misses
    assert cache_info().misses == traced
    assert widths == {"window(3,3)", "window(5,5)", "None"}


def test_compiled(monkeypatch):
    """The operator's own doing: in a compiled region, and in its gradient."""
    planned, specs = dispatch.planned, []

    def noted(*arguments, **keywords):
        specs.append(planned(*arguments, **keywords)[0].spec)
        return planned(*arguments, **keywords)

    monkeypatch.setattr(dispatch, "planned", noted)
    table = torch.randn(2, 20, requires_grad=True)
    score_mod = ScoreMod(lambda s, b, h, i, j, t: torch.where(i >= j, s + t[h, j], -math.inf), table)
    q, k, v = (x.requires_grad_() for x in tensors(12, 12))
    call = functools.partial(attention, score_mod=score_mod)
    outs = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v)
    for out in outs:
        out.gradients = torch.autograd.grad(out.square().sum(), (q, k, v, table))
    for x, y in zip((outs[0], *outs[0].gradients), (outs[1], *outs[1].gradients), strict=True):
        torch.testing.assert_close(x, y)
    assert {(spec.mask, spec.score != "none") for spec in specs} == {("causal", True)}
