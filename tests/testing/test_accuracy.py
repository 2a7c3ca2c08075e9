"""The tolerance passes what is right and no more: wrong results fail, in every dtype."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from saccade import Dense, Partial, attention, bias, causal, compose, softcap, window
from saccade.testing import check
from saccade.testing.cases import MODELS, NAMED, Case

DTYPES = ["fp16", "bf16", "fp32", "fp64"]
CASE = Case("", h_q=4, s_q=90, s_k=110, d=64, mask="window(30,0)", score="softcap(4)", sink=True)


def ratios(function, dtype: str, case: Case = CASE, **changes) -> dict[str, float]:
    made = case.replace(dtype=dtype).inputs()
    keywords = {"dout": made.dout, "dlse": made.dlse, **made.keywords, **changes}
    return check(made.q, made.k, made.v, function=function, **keywords).ratios


class _Scaled(torch.autograd.Function):
    """The identity, with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def changed(**changes):
    """`attention` with other keywords than it was given."""

    def function(q, k, v, **keywords):
        return attention(q, k, v, **{**keywords, **changes})

    return function


def gradient_scaled(which: int, factor: float):
    def function(*tensors, **keywords):
        tensors = [_Scaled.apply(x, factor) if i == which else x for i, x in enumerate(tensors)]
        return attention(*tensors, **keywords)

    return function


def results_changed(change):
    def function(q, k, v, *, return_lse=False, **keywords):
        out, lse = change(*attention(q, k, v, return_lse=True, **keywords))
        return Partial(out, lse) if return_lse else out

    return function


def one_row_of_another_head(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    out = out.clone()
    out[0, 0, 5] = out[0, 1, 5]
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_is_within_half_of_it(dtype):
    assert max(ratios(attention, dtype, backend="reference").values()) <= 0.5


WRONG = {
    "one more key": (changed(mask=window(31, 0)), {"out"}),
    "one key less": (changed(mask=window(29, 0)), {"out"}),
    "another window": (changed(mask=window(50, 20)), {"out", "lse"}),
    "no mask": (changed(mask=None), {"out", "lse"}),
    "no sink": (
        lambda q, k, v, sink, **keywords: attention(q, k, v, sink=sink * 0 - 1e4, **keywords),
        {"dsink"},
    ),
    "no softcap": (changed(score_mod=None), {"out", "lse"}),
    "other cap": (changed(score_mod=softcap(5.0)), {"out"}),
    "other scale": (changed(scale=0.15), {"out", "lse"}),
    "out by a factor": (results_changed(lambda out, lse: (out * 1.1, lse)), {"out"}),
    "lse in base 2": (results_changed(lambda out, lse: (out, lse / math.log(2))), {"lse"}),
    "a row of another head": (results_changed(one_row_of_another_head), {"out"}),
    "no gradient of the lse": (results_changed(lambda out, lse: (out, lse.detach() + 0 * lse)), {"dq", "dk", "dsink"}),
    "dq by a factor": (gradient_scaled(0, 1.1), {"dq"}),
    "dk by a factor": (gradient_scaled(1, 1.1), {"dk"}),
    "dv by a factor": (gradient_scaled(2, 1.1), {"dv"}),
    "no dq": (gradient_scaled(0, 0.0), {"dq"}),
    "no dk": (gradient_scaled(1, 0.0), {"dk"}),
    "no dv": (gradient_scaled(2, 0.0), {"dv"}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_fail(name, dtype):
    function, wrong = WRONG[name]
    found = ratios(function, dtype)
    assert {name for name, ratio in found.items() if ratio > 1} >= wrong, found


@pytest.mark.parametrize("name", ["dq by a factor", "dk by a factor", "dv by a factor", "no dk"])
@pytest.mark.parametrize("order", ["bhsd", "sbhd"])
def test_wrong_gradients_fail_at_length_too(name, order):
    """Tolerances must not outgrow what they measure."""
    function, wrong = WRONG[name]
    case = Case("", b=1, h_q=2, h_k=1, s_q=700, s_k=700, d=128, mask="causal", order=order)
    assert {name for name, ratio in ratios(function, "bf16", case).items() if ratio > 1} == wrong


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_fails(bad):
    def spoiled(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        out = out.clone()
        out[1, 2, 7, 3] = bad
        return out, lse

    assert ratios(results_changed(spoiled), "fp32")["out"] == math.inf


def test_infinities_of_the_lse_must_coincide():
    case = CASE.replace(sink=False, s_k=50)
    for wrong in (lambda lse: lse.clamp(min=-1e30), lambda lse: torch.where(lse == lse.amin(), torch.inf, lse)):
        found = ratios(results_changed(lambda out, lse, wrong=wrong: (out, wrong(lse))), "fp32", case)
        assert found["lse"] == math.inf
    assert ratios(attention, "fp32", case)["lse"] <= 1


def test_leaks_of_padding_fail():
    """A query that reads one key beyond the used ones."""
    made = Case("", dtype="bf16", b=3, s_q=20, s_k=40, d=16, used="k").inputs()
    layout = made.keywords["layout"]
    k, v = made.k.nan_to_num(1.0), made.v.nan_to_num(1.0)

    def leaking(q, k, v, *, layout, **keywords):
        return attention(q, k, v, layout=Dense("bhsd", seqused_k=(layout.seqused_k + 1).clamp(max=40)), **keywords)

    assert check(made.q, k, v, dout=made.dout, layout=layout, function=leaking).ratio > 1
    assert check(made.q, k, v, dout=made.dout, layout=layout).ratio <= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda out, lse: (out.float(), lse),
        lambda out, lse: (out, lse.double()),
        lambda out, lse: (out[:, :, 1:], lse),
        lambda out, lse: (out, lse[..., None]),
    ],
)
def test_wrong_forms_fail(change):
    with pytest.raises(AssertionError, match="should be"):
        ratios(results_changed(change), "bf16")


def test_the_message_names_the_worst():
    made = CASE.replace(dtype="fp32").inputs()
    report = check(made.q, made.k, made.v, function=gradient_scaled(1, 2.0), **made.keywords)
    with pytest.raises(AssertionError) as raised:
        report.assert_ok()
    told = str(raised.value)
    assert told.startswith("fp32 group2 d64 dense window softcap sink aligned cpu, run by cpu: the error of dk is ")
    assert "mask=window(30,0)" in told
    assert "q (2, 4, 90, 64)" in told


def test_parts_make_no_difference(monkeypatch):
    """One head at a time or all together."""
    from saccade.testing import accuracy

    found = []
    for scores in (1, 1 << 30):
        monkeypatch.setattr(accuracy, "SCORES_AT_ONCE", scores)
        found.append(ratios(attention, "fp32", NAMED["everything"]))
    for name, ratio in found[0].items():
        assert math.isclose(ratio, found[1][name], rel_tol=torch.finfo(torch.float32).eps), name


def test_no_gradients_on_request():
    made = CASE.inputs()
    assert set(check(made.q, made.k, made.v, backward=False, **made.keywords).ratios) == {"out", "lse"}
    assert set(check(made.q, made.k, made.v, mask=causal()).ratios) == {"out", "lse", "dq", "dk", "dv"}


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_models_shrink(case):
    small = case.smaller(128)
    assert max(small.s_q, small.s_k) == 128
    assert small.mask.startswith(case.mask.split("(")[0])
    assert case.smaller(10**6) == case


NARROW = torch.randn(4, 13, generator=torch.Generator().manual_seed(0)).bfloat16()


def of_16_bits(s, b, h, i, j, table=None):
    table = NARROW if table is None else table
    return s + table[h, i % 13].sigmoid() * table[h, j % 13] * ((i + j) % 3)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.02, False)])
def test_functions_of_16_bits_may_be_computed_in_more(dtype, factor, right):
    """As a GPU does; a CPU takes torch's dtypes."""
    wide = partial(of_16_bits, table=factor * NARROW.float())
    found = ratios(changed(score_mod=wide), dtype, score_mod=of_16_bits, return_max_scores=True)
    assert (max(found.values()) <= 1) == right, found
    assert max(ratios(attention, dtype, score_mod=of_16_bits, return_max_scores=True).values()) <= 1


def test_each_operation_of_a_function_rounds():
    """The same product in another order."""
    factors = [1.1 ** (i - 9.5) for i in range(20)]

    def product(factors, s, b, h, i, j):
        y = 0.01 * (i + 0.3 * j + 1)
        for x in factors:
            y = y * x
        return 0.01 * s + y

    changed_order = changed(score_mod=partial(product, factors[::-1]))
    keywords = {"score_mod": partial(product, factors), "return_max_scores": True}
    assert max(ratios(changed_order, "fp16", **keywords).values()) <= 1


def test_derivatives_of_steep_functions():
    """What 1 - tanh^2 leaves where it cancels is rounded as much as 1 is, whatever it is multiplied by."""
    case = Case("", b=1, h_q=2, h_k=1, s_q=40, s_k=6, d=1)
    table = torch.randn(2, 40, 6).requires_grad_()

    def steep(factor):
        return compose(bias(table), lambda s, b, h, i, j: factor * 4 * torch.tanh(s / 0.05))

    assert max(ratios(attention, "fp32", case, score_mod=steep(1)).values()) <= 1
    found = ratios(changed(score_mod=steep(1.001)), "fp32", case, score_mod=steep(1))
    assert min(found["dq"], found["dk"], found["dscore0"]) > 1


@pytest.mark.parametrize(("error", "right"), [(0.0, True), (1e-3, False)])
def test_scores_of_numbers_that_cancel(error: float, right: bool) -> None:
    """Their roundings are those of the numbers, far larger than the score."""

    def plus_and_minus(far: float, error: float = 0.0):
        return lambda s, b, h, q_idx, kv_idx: (s + far) - (far - error)

    def elsewhere(*operands, **keywords):
        return attention(*operands, **{**keywords, "score_mod": plus_and_minus(1000.7, error)})

    q, k, v = (torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    score = plus_and_minus(1000.1)
    report = check(q, k, v, score_mod=score, return_max_scores=True, backend="reference", function=elsewhere)
    assert (report.ratio <= 1) is right
