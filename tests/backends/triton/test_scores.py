"""Emitted score functions in the portable kernels, gradients of captured tensors among them."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from saccade import Dense, alibi, attention, causal, mask_mod, relative_bias, window
from saccade.backends.device import scores as device_scores
from saccade.backends.device.pointwise import index_float, quotient
from saccade.scores import bind
from saccade.scores.codegen import source
from saccade.scores.codegen.emitter import EmitOptions
from saccade.testing.accuracy import check
from saccade.testing.call_slice import Precision
from tests.support.non_finite import TABLES, operands, table_results
from tests.support.scores import build_score, halved_from, near_or_third

HEADS, PLACES = torch.randn(2, 110, requires_grad=True), torch.randn(110, 8, requires_grad=True)


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


WRITTEN = {
    "rows": lambda s, b, h, i, j: s + 0.1 * (PLACES[i] - PLACES[j]).pow(2).sum(-1),
    "one by one": lambda s, b, h, i, j: s + HEADS[h][j] * 0.5,
    "own derivative": lambda s, b, h, i, j: s + 0.1 * Through.apply(s * 3),
    "functions": lambda s, b, h, i, j: s + torch.tan(s * 0.1) + torch.sinh(s * 0.1) + torch.cosh(s * 0.1),
    "inverses": lambda s, b, h, i, j: (
        s + torch.atanh(torch.tanh(s) * 0.5) + torch.acosh(s.abs() + 1.5) + s.frac() * 0.1
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_as_people_write_them(name):
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 90), (1, 110), (1, 110)))
    check(q, k, v, mask=causal(), score_mod=WRITTEN[name], backend="triton").assert_ok()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kernels_compute_with_tensors_without_dimensions_in_float32(dtype):
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 90), (1, 110), (1, 110)))
    z = torch.tensor(0.3, dtype=torch.float64).to(dtype)
    same = z.float()
    out, right = (
        attention(
            q, k, v, score_mod=lambda s, b, h, i, j, z=z: s + z * j + torch.where(i > j, z, z**h), backend="triton"
        )
        for z in (z, same)
    )
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e9, 1e20])
def test_linear_scores_beside_a_large_scale(scale):
    """What such a score adds is not divided by the scale there."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, s, 16).half() for s in (4, 9, 9))
    _, lse = attention(
        q, k, v, mask=causal(), score_mod=alibi(torch.ones(1)), scale=scale, backend="triton", return_lse=True
    )
    wanted = (q.double() @ k.double().mT * scale).masked_fill(~torch.ones(4, 9, dtype=torch.bool).tril(5), -torch.inf)
    torch.testing.assert_close(lse.double(), wanted.logsumexp(-1), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["relative_bias", "ids", "bias", "temperature"])
def test_repeatable_gradients_of_captured_tensors(name):
    """Added up as integers; tables that end within reach and beyond it, and dropout besides."""
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 137), (1, 145), (1, 145)))
    score_mod = build_score(name, 2, 137, 145, b=1)
    check(q, k, v, score_mod=score_mod, backend="triton", deterministic=True, dropout_p=0.2).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("used", [90, 70])
@pytest.mark.parametrize("table", TABLES)
def test_rows_beyond_the_end_reach_no_gradient(table, used):
    """In the last block of rows every tile is masked, though all its keys are seen."""
    given = operands(torch.float32, rows=90, keys=90)
    keywords = {"rows": used, "layout": Dense("bhsd", *torch.tensor([[used], [90]])), "deterministic": used == 70}
    for x, y in zip(*(table_results(table, given, backend, **keywords) for backend in ("triton", "cpu")), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
        assert x.isfinite().all()


def test_gradients_of_captured_tensors_may_be_infinite():
    q, k, v = torch.randn(3, 1, 2, 20, 16)
    table = torch.zeros(2, 5, requires_grad=True)
    out = attention(q, k, v, score_mod=relative_bias(table), backend="triton", deterministic=True)
    (found,) = torch.autograd.grad(out, table, torch.full_like(out, torch.inf))
    assert found.isnan().all()


@triton.jit
def faces_kernel(score, value, slope, record, S_Q: tl.constexpr, S_K: tl.constexpr):
    """The modified scores and their slopes, (S_Q, S_K), of one head."""
    q_idx = tl.arange(0, S_Q)[:, None]
    kv_idx = tl.arange(0, S_K)[None, :]
    place = q_idx * S_K + kv_idx
    x = tl.load(score + place)
    h = tl.program_id(0)
    tl.store(value + h * S_Q * S_K + place, record.apply(record.data, x, 0, h, q_idx, kv_idx))
    tl.store(slope + h * S_Q * S_K + place, x * 0 + record.slope(record.data, x, 0, h, q_idx, kv_idx))


@triton.jit
def linear_kernel(value, record, OFF: tl.constexpr, S_Q: tl.constexpr, S_K: tl.constexpr):
    """What is added to scores, (S_Q, S_K) from what `pitch` and `bias` say of one key."""
    q_idx = tl.arange(0, S_Q)[:, None]
    kv_idx = tl.arange(0, S_K)[None, :]
    h = tl.program_id(0)
    key = q_idx + OFF
    pitch = record.pitch(record.data, 0, h, q_idx, key)
    bias = record.bias(record.data, 0, h, q_idx, key)
    tl.store(value + h * S_Q * S_K + q_idx * S_K + kv_idx, bias + pitch * (kv_idx - key))


ROWS = torch.randn(2, 16)
LINEAR = {
    "alibi": alibi(torch.tensor([0.5, -0.25])),
    "number": lambda score, b, h, q_idx, kv_idx: score + 0.5 * (kv_idx - q_idx) - ROWS[h, q_idx],
    "turned": lambda score, b, h, q_idx, kv_idx: 3 * kv_idx.float() + (score - (q_idx - kv_idx) * ROWS[h, 0]),
    "of_rows": lambda score, b, h, q_idx, kv_idx: ROWS[h, q_idx] + score,
}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_scores(name):
    """Of a score that is linear in the key's index, two numbers for each row say all."""
    score = torch.randn(2, 16, 32)
    bound = bind(LINEAR[name], score)
    record = device_scores.unplaced(bound)
    assert record.linear.value
    value = torch.empty_like(score)
    linear_kernel[(2,)](value, record, 16, 16, 32)
    h, q_idx, kv_idx = torch.arange(2)[:, None, None], torch.arange(16)[None, :, None], torch.arange(32)[None, None, :]
    exact = (
        LINEAR[name](score.double() * 0, torch.zeros_like(h), h, q_idx, kv_idx)
        if name != "alibi"
        else (torch.tensor([0.5, -0.25]).double()[:, None, None] * (kv_idx - q_idx))
    )
    torch.testing.assert_close(value, exact.float().expand_as(value))


WHOLE_ROWS = torch.randn(2, 200)
WHOLE_ROWS[0, 3], WHOLE_ROWS[1, 5:9] = -torch.inf, -1e9
TILTED = {
    "alibi": alibi(torch.tensor([0.3, -0.1])),
    "rows": lambda score, b, h, q_idx, kv_idx: score + WHOLE_ROWS[h, q_idx] - 0.2 * kv_idx,
}


@pytest.mark.sample
@pytest.mark.parametrize("mask", [None, causal(), window(40, 9)], ids=str)
@pytest.mark.parametrize("name", TILTED)
def test_linear_scores_of_16_bits(name, mask, monkeypatch):
    """One multiply-add for each score, with remainders of rows and keys, rows that are masked, and without a scale."""

    def report(score_mod, **keywords):
        q, k, v = (torch.randn(2, h, s, 16, dtype=torch.float16) for h, s in ((2, 150), (1, 140), (1, 140)))
        return check(q, k, v, mask=mask, score_mod=score_mod, backend="triton", **keywords)

    report(TILTED[name]).assert_ok()
    report(TILTED[name], scale=0.0).assert_ok()
    emit = device_scores.linear_source
    monkeypatch.setattr(device_scores, "linear_source", lambda *given: emit(*given).replace("return", "return 1.1 *"))
    assert report(lambda s, b, h, i, j: s + (WHOLE_ROWS[h, i * 0 + 20] + 2) * (j - i)).ratios["out"] > 1


def test_linear_scores_of_few_keys(monkeypatch):
    """Rows far before the diagonal have small scores, which no sum with numbers of far keys may round; the tolerance is
    that of a GPU, whose exponentials have more bits than a CPU's."""
    monkeypatch.setattr(Precision, "of", classmethod(lambda cls, *_: cls(torch.float32, torch.float32)))
    q, k, v = (torch.randn(1, 1, s, 16, dtype=torch.float16) for s in (900, 6, 6))
    check(q, k, v, score_mod=alibi(torch.tensor([0.3])), backward=False, backend="triton").assert_ok()


def test_linear_scores_near_the_diagonal(monkeypatch):
    """Keys of one tile are far from one another: numbers of their distances round what they leave."""
    monkeypatch.setattr(Precision, "of", classmethod(lambda cls, *_: cls(torch.float32, torch.float32)))
    q, k, v = torch.randn(3, 1, 1, 130, 128, dtype=torch.float16)
    check(q, k, v, mask=causal(), score_mod=alibi(torch.tensor([0.8])), backward=False, backend="triton").assert_ok()


@pytest.mark.parametrize(
    "function",
    [
        lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs() * 0.5,
        lambda score, b, h, q_idx, kv_idx: score * 2 + kv_idx,
        lambda score, b, h, q_idx, kv_idx: score + score + kv_idx,
        lambda score, b, h, q_idx, kv_idx: score + kv_idx * kv_idx,
        lambda score, b, h, q_idx, kv_idx: kv_idx * 0.5 - score,
        lambda score, b, h, q_idx, kv_idx: score + kv_idx.to(torch.bfloat16),
        lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx > 3, score, score + kv_idx),
    ],
)
def test_other_scores_are_not_linear(function):
    assert not device_scores.unplaced(bind(function, torch.randn(4, 4))).linear.value


UNARY = [
    torch.tanh, torch.sigmoid, torch.abs, torch.square, torch.relu, torch.erf, torch.floor, torch.round, torch.trunc,
    torch.sign, torch.nn.functional.gelu, torch.nn.functional.silu, torch.nn.functional.softplus, torch.log1p,
    torch.expm1, torch.nn.functional.logsigmoid, torch.sin,
]  # fmt: skip
BINARY = [torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: torch.where(x > y, x, y * 0.5)]


@hypothesis.given(st.lists(st.sampled_from(UNARY), min_size=1, max_size=3), st.sampled_from(BINARY))
@hypothesis.settings(max_examples=25)
def test_random_functions(unary, join):
    """The emitted function and its derivative beside the graph's."""
    slopes = torch.tensor([0.5, -0.25])

    def function(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        x = score
        for step in unary:
            x = step(x.abs() if step is torch.log1p else x.clamp(-5.0, 5.0))
        return join(x, slopes[h] * (kv_idx - q_idx) + torch.remainder(kv_idx - q_idx, 3))

    score = torch.randn(16, 32)
    bound = bind(function, score)
    value, slope = torch.empty(2, 16, 32), torch.empty(2, 16, 32)
    faces_kernel[(2,)](score, value, slope, device_scores.unplaced(bound), 16, 32)
    at = torch.zeros(1, 1, 1, dtype=torch.int64), torch.arange(2)[:, None, None], torch.arange(16)[:, None]
    at = (*at, torch.arange(32))
    torch.testing.assert_close(value, bound.tile(score.expand(2, 16, 32), *at), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slope, bound.derivative(score.expand(2, 16, 32), *at), rtol=1e-4, atol=1e-5)


def test_equal_sources_are_one_function():
    text = source.value_source(bind(build_score("alibi", 2, 8, 8), torch.zeros(1)).program, EmitOptions((False,)))
    assert device_scores.jit(text)["apply"] is device_scores.jit(text)["apply"]
    assert device_scores.jit(text)["apply"] is not device_scores.jit(text.replace("x0", "y0"))["apply"]


def test_new_values_emit_nothing():
    before = len(device_scores._sources)
    for n in (9, 21, 33):
        device_scores.unplaced(bind(build_score("relative_bias", 2, n, n), torch.zeros(1)))
        device_scores.unplaced(bind(lambda score, *at, by=float(n): score * by, torch.zeros(1)))
    assert len(device_scores._sources) <= before + 2


def test_large_tensors_have_wide_places(monkeypatch):
    monkeypatch.setattr(device_scores, "NARROW_LIMIT", 0)
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    check(q, k, v, score_mod=build_score("bias", 2, 33, 33, b=1), backend="triton").assert_ok()


@triton.jit
def quotient_kernel(i, out, j, N: tl.constexpr):
    """floor(i / j) of N integers; j: a pointer to one."""
    place = tl.arange(0, N)
    tl.store(out + place, quotient(index_float(tl.load(i + place)), tl.load(j)))


@pytest.mark.parametrize("fused", [False, True])
def test_quotients(fused, monkeypatch):
    """By one multiply-add, at whole quotients and beside them. Where it is rounded twice, as here, it holds while
    |i| + |j| / 2 < 2^22; rounded once, as on a GPU, for all: float64 holds the product, and more of the sum than
    decides."""
    if fused:
        monkeypatch.setattr(InterpreterBuilder, "create_fma", lambda self, *x: _once(*x), raising=True)
    made, whole = torch.Generator().manual_seed(0), 1 << 22
    for size in (1, 2, 3, 7, 64, 127, 128, 4095, (1 << 21) + 1, whole - 1, whole):
        for j in (size, -size):
            most = whole if fused else whole - 1 - size // 2
            near = torch.randint(-(most // size), most // size + 1, (4000,), generator=made) * size
            ends = torch.tensor([0, 1, most - 1, most])
            drawn = torch.randint(-most, most + 1, (177,), generator=made)
            i = torch.cat([near, near - 1, near + 1, near + size - 1, ends, -ends, drawn]).clamp(-most, most).int()
            i = torch.cat([i, i.new_zeros((1 << 14) - len(i))])
            out, divisor = torch.empty_like(i), torch.tensor([j], dtype=torch.int32)
            quotient_kernel[(1,)](i, out, divisor, len(i))
            assert torch.equal(out, torch.div(i, j, rounding_mode="floor")), j


def _once(x, y, z):
    total = x.data.astype(np.float64) * y.data + z.data
    return TensorHandle(total.astype(np.float32), z.dtype.scalar)


def divided(n: int):
    """Quotients and remainders of indices, of their distance and of a table, for the sign of any n."""
    table = torch.arange(-20, 20)

    def function(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance, read = kv_idx - q_idx, table[kv_idx]
        total = distance // n + 3 * (distance % n) + torch.fmod(distance, n) * 7 + kv_idx // n * 11
        total = total + torch.div(distance, n, rounding_mode="trunc") * 13 + read // n * 17 + read % n * 19
        total = total + (read.clamp(-5, 5) + 1) * 23 + torch.fmod(kv_idx, n) * 29 + kv_idx // table[(kv_idx + 30) % 40]
        return score + total + table[(q_idx // n) % 8]

    return function


@pytest.mark.parametrize("n", [1, 5, -3])
def test_integer_division(n):
    score = torch.randn(16, 16)
    bound = bind(divided(n), score)
    value, slope = torch.empty(2, 1, 16, 16)
    faces_kernel[(1,)](score, value, slope, device_scores.unplaced(bound), 16, 16)
    at = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.arange(16)[:, None]
    torch.testing.assert_close(value[0], bound.tile(score, *at, torch.arange(16)[None]))


def test_division_by_zero_stays_inside():
    """It may give anything that is a place in the table."""
    text = source.value_source(bind(divided(0), torch.zeros(1)).program, EmitOptions((False,)))
    assert "widened(q_idx)" not in text
    value, slope = torch.empty(2, 1, 16, 16)
    faces_kernel[(1,)](torch.randn(16, 16), value, slope, device_scores.unplaced(bind(divided(0), value)), 16, 16)
    assert value.isfinite().all()


def far(n: int, sign: int):
    """What functions do with a sentinel: compare with it, choose, cut off, add and take it off again."""

    def function(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        end = torch.where(kv_idx % 3 == 0, n, q_idx)
        score = torch.where(kv_idx * sign < end, score, score * 2)
        return score + (kv_idx + n - n) + torch.clamp(q_idx, max=abs(n)) + (n % 7) + torch.minimum(end, kv_idx) % 5

    return function


FAR = (1 << 22) + 1, 1 << 30, -(1 << 30), (1 << 31) - 1, 1 << 31, -(1 << 40), (1 << 62) + 5


@pytest.mark.parametrize("n", [5, *FAR])
def test_integers_of_64_bits(n):
    score = torch.randn(16, 16)
    bound = bind(far(n, 1 if n > 0 else -1), score)
    value, slope = torch.empty(2, 1, 16, 16)
    faces_kernel[(1,)](score, value, slope, device_scores.unplaced(bound), 16, 16)
    at = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), torch.arange(16)[:, None]
    torch.testing.assert_close(value[0], bound.tile(score, *at, torch.arange(16)[None]))


def test_near_and_far_integers_in_turns():
    """One program, in whose kernels the same number is 32 bits wide, or 64."""
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 33), (1, 45), (1, 45)))
    for n in (9, 1 << 30, 12, -(1 << 40), 1 << 30):
        check(q, k, v, score_mod=halved_from(n), mask=mask_mod(near_or_third(n)), backend="triton").assert_ok()


def test_another_thread_finds_no_half_of_a_source(monkeypatch):
    """It asks while the first one reads it."""
    others = []

    def read(*given):
        if not others:
            others.append(None)
            others.append(device_scores.jit("def whole():\n    return 1\n")["whole"])
        return compile(*given)

    monkeypatch.setattr(device_scores, "compile", read, raising=False)
    assert device_scores.jit("def whole():\n    return 1\n")["whole"] is others[1]
