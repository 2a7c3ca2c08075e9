"""Any Python function of the score: its three faces, the cache, what is refused, and torch.compile."""

from __future__ import annotations

import copy
import functools
import gc
import threading

import hypothesis.strategies as st
import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from torch import Tensor

import saccade
from saccade import (
    ScoreMod,
    alibi,
    attention,
    bias,
    causal,
    compose,
    explain,
    mask_mod,
    relative_bias,
    scores,
    softcap,
    t5_bias,
    window,
)
from saccade.scores import bind
from saccade.scores.codegen.emitter import EmitOptions
from saccade.scores.codegen.source import value_source
from saccade.testing.accuracy import check
from tests.support.scores import NAMES, build_score

Q = torch.zeros(1, 2, 4, 4)


def operands(s_q: int = 37, s_k: int = 45, h: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, heads, s, 16, dtype=dtype) for heads, s in ((h, s_q), (2, s_k), (2, s_k))]


@pytest.mark.sample
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_oracle(name, dtype):
    q, k, v = operands(dtype=dtype)
    check(q, k, v, mask=causal(), score_mod=build_score(name, 4, 37, 45), backend="cpu").assert_ok()


def grid(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """score (b, h, q, k) and the indices that broadcast to it."""
    index = [torch.arange(n).view([-1] + [1] * (3 - i)) for i, n in enumerate((2, 3, 5, 7))]
    return torch.randn(2, 3, 5, 7, dtype=dtype), *index


@pytest.mark.sample
@pytest.mark.parametrize("name", NAMES)
def test_graphs_are_the_function(name):
    mod = build_score(name, 3, 5, 7)
    score, *at = grid(torch.float32)
    score.requires_grad_()
    bound = bind(mod, score)
    wanted = bound(score, *at)
    torch.testing.assert_close(bound.tile(score.detach(), *at), wanted.detach())
    slope = torch.autograd.grad(wanted, score, torch.ones_like(score))[0]
    torch.testing.assert_close(bound.derivative(score.detach(), *at), slope, equal_nan=True)


# Random expressions

UNARY = [torch.tanh, torch.sigmoid, torch.abs, torch.square, torch.sin, lambda x: torch.exp(-x.abs()), torch.relu]
BINARY = [
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: x / (1 + y.abs()),
    lambda x, y: torch.where(x > y, x, y * 0.5),
]  # fmt: skip
LEAVES = ["score", "distance", "row", "table", "slope", "number"]


def evaluated(tree, values: dict[str, Tensor]) -> Tensor:
    if isinstance(tree, str):
        return values[tree]
    function, *parts = tree
    return function(*(evaluated(part, values) for part in parts))


TREES = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: st.one_of(st.tuples(st.sampled_from(UNARY), inner), st.tuples(st.sampled_from(BINARY), inner, inner)),
    max_leaves=8,
)


def function_of(tree) -> tuple[scores.ScoreMod, list[Tensor]]:
    table, slopes = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((3, 9), (3,)))
    number = 0.75

    def function(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + evaluated(tree, {
            "score": score,
            "distance": (kv_idx - q_idx).to(score.dtype) / 8,
            "row": torch.remainder(q_idx, 3).to(score.dtype),
            "table": table[h, torch.clamp(kv_idx - q_idx, -4, 4) + 4],
            "slope": slopes[h],
            "number": score * 0 + number,
        })  # fmt: skip

    return function, [table, slopes]


@given(TREES)
def test_random_expressions(tree):
    """Eager, its graph, and the derivatives."""
    function, leaves = function_of(tree)
    score, *at = grid()
    score.requires_grad_()
    bound = bind(function, score)
    wanted = bound(score, *at)
    torch.testing.assert_close(bound.tile(score.detach(), *at), wanted.detach())
    gradient = torch.randn_like(wanted)
    slope, *gradients = torch.autograd.grad(wanted, [score, *leaves], gradient, allow_unused=True)
    torch.testing.assert_close(gradient * bound.derivative(score.detach(), *at), slope)
    sums = [torch.zeros_like(x) for x in bound.tensors]
    bound.accumulate(sums, gradient, score.detach(), *at)
    found = {id(x): total for x, total in zip(bound.tensors, sums, strict=True)}
    for leaf, given_gradient in zip(leaves, gradients, strict=True):
        if given_gradient is not None:
            torch.testing.assert_close(found[id(leaf)], given_gradient)


# The cache


def traced(call) -> int:
    """How many functions are traced in a call."""
    before = saccade.cache_info().misses
    call()
    return saccade.cache_info().misses - before


def closure(cap: float, reach: int, table: Tensor):
    def mod(score, b, h, q_idx, kv_idx):
        return score * cap + table[h, torch.clamp(kv_idx - q_idx, -reach, reach) + reach]

    return mod


@pytest.mark.rare
def test_more_operations_than_python_has_frames():
    def chain(score, b, h, q_idx, kv_idx):
        for _ in range(350):
            score = score * 1.0001 + kv_idx * 1e-4
        return score

    check(*operands(7, 9), score_mod=chain, backend="cpu").assert_ok()
    program = bind(chain, Q).program
    assert value_source(program, EmitOptions(())).count(" * ") >= 350


def test_new_values_never_trace():
    """Nor do new lengths: a closure made anew, numbers, tensors and sizes that nothing reads."""
    scores.cache_clear()
    assert traced(lambda: attention(*operands(), score_mod=closure(2.0, 3, torch.randn(4, 7)))) == 1
    for s, cap, reach in ((9, 3.0, 5), (33, 0.0, 1), (1, -1.5, 16)):
        mod = closure(cap, reach, torch.randn(4, 2 * reach + 1))
        q, k, v = operands(s, s)
        assert traced(lambda mod=mod, q=q, k=k, v=v: attention(q, k, v, score_mod=mod)) == 0
        check(q, k, v, score_mod=mod, backend="cpu").assert_ok()


@pytest.mark.parametrize("make", [alibi, lambda x: compose(alibi(x), softcap(float(x[0])))])
def test_ready_scores_are_traced_once(make):
    scores.cache_clear()
    assert traced(lambda: [bind(make(torch.rand(n)), Q) for n in (2, 3, 8)]) == 1


def test_zero_dim_cpu_tensors_are_numbers():
    scores.cache_clear()

    def mod(t):
        return lambda score, b, h, q_idx, kv_idx: score * t

    bound = [bind(mod(torch.tensor(x)), Q) for x in (0.5, 2.0)]
    assert [x.floats for x in bound] == [[0.5], [2.0]]
    assert bound[0].identity == bound[1].identity
    assert not bound[0].tensors


def test_constants_of_the_program_are_in_the_key():
    """A bound of a Python loop cannot be a runtime value."""

    def mod(n):
        def power(score, b, h, q_idx, kv_idx):
            for _ in range(n):
                score = score * 0.5
            return score

        return power

    score, *at = grid(torch.float32)
    for n in (1, 3, 2, 3):
        torch.testing.assert_close(bind(mod(n), Q).tile(score, *at), score * 0.5**n)
    assert traced(lambda: bind(mod(3), Q)) == 0
    assert traced(lambda: bind(mod(4), Q)) == 1


def test_sizes_that_are_read_are_in_the_key():
    def mod(table):
        return lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx % table.shape[1]]

    score, *at = grid(torch.float32)
    for n in (4, 6, 4):
        table = torch.randn(3, n)
        torch.testing.assert_close(bind(mod(table), Q).tile(score, *at), mod(table)(score, *at))


def test_redefinition_is_another_function():
    """As in a notebook: the same name, other code; and a global that the code reads."""
    held = {"torch": torch, "factor": 2.0}

    def defined(text):
        exec(f"def mod(score, b, h, q_idx, kv_idx):\n    return {text}", held)
        return bind(held["mod"], Q)

    score, *at = grid(torch.float32)
    torch.testing.assert_close(defined("score * factor").tile(score, *at), score * 2)
    torch.testing.assert_close(defined("score + factor").tile(score, *at), score + 2)
    held["factor"] = 5.0
    torch.testing.assert_close(bind(held["mod"], Q).tile(score, *at), score + 5)
    held["inner"] = lambda x: x * 3
    torch.testing.assert_close(defined("inner(score)").tile(score, *at), score * 3)
    held["inner"] = lambda x: x * 4
    torch.testing.assert_close(bind(held["mod"], Q).tile(score, *at), score * 4)


def test_methods_partials_and_objects_hit():
    class Scale:
        def __init__(self, by):
            self.by = by

        def __call__(self, score, b, h, q_idx, kv_idx):
            return self.changed(score)

        def changed(self, score):
            return score * self.by

    def scaled(by, score, b, h, q_idx, kv_idx):
        return score * by

    for make in (Scale, lambda by: Scale(by).__call__, lambda by: functools.partial(scaled, by)):
        scores.cache_clear()
        assert [bind(make(by), Q).floats for by in (2.0, 3.0)] == [[2.0], [3.0]]
        assert saccade.cache_info().misses == 1


def test_the_cache_is_bounded(monkeypatch):
    """What was asked for again stays."""
    monkeypatch.setattr(scores.codegen.program.cache.programs, "maxsize", 3)
    scores.cache_clear()
    held = {}
    for i in range(6):
        exec(f"def mod(score, *at):\n    return score {' + score' * i}", held)
        exec("again = lambda score, *at: score * 2", held)  # other code, which no guards find
        bind(held["mod"], Q)
        bind(held["again"], Q)
    assert saccade.cache_info().currsize == 3
    assert traced(lambda: bind(lambda score, *at: score * 3, Q)) == 0


def test_gradients_outlive_the_cache():
    table = torch.randn(4, 9, requires_grad=True)
    q, k, v = operands()
    out = attention(q, k, v, score_mod=relative_bias(table))
    scores.cache_clear()
    out.sum().backward()
    assert table.grad is not None


def test_threads():
    scores.cache_clear()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(bind(closure(1.0, 2, torch.randn(2, 5)), Q).identity))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert saccade.cache_info().misses == 1


def test_copies():
    mod = relative_bias(torch.randn(2, 5))
    bind(mod, Q)
    score, *at = grid(torch.float32)
    at[1] = at[1].clamp(max=1)
    torch.testing.assert_close(copy.deepcopy(mod)(score, *at), mod(score, *at))


# What is refused


TABLE = torch.randn(2, 9)
REFUSED = {
    "branch": (lambda score, *at: score if (score > 0).any() else -score, "torch.where"),
    "sum": (lambda score, *at: score - score.sum(), "cannot reduce"),
    "softmax": (lambda score, *at: score.softmax(-1), "attention's own"),
    "in place": (lambda score, *at: score.add_(1), "in place"),
    "random": (lambda score, *at: score + torch.rand_like(score), "dropout_p"),
    "no index": (lambda score, *at: score + TABLE, "by indices"),
    "few indices": (lambda score, b, h, q, k: score + TABLE[h], "indices"),
    "no tensor": (lambda score, *at: 3.0, "a tensor"),
    "index of scores": (lambda score, b, h, q, k: score[q, k], "one value each"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, told = REFUSED[name]
    with pytest.raises(ValueError, match=told) as caught:
        attention(*operands(h=2), score_mod=function)
    if name != "no tensor":
        assert "test_scores_traced.py" in str(caught.value), "the line is quoted"


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match=r"is called with \(score, b, h, q_idx, kv_idx\)"):
        attention(*operands(h=2), score_mod=lambda score, b: score)


def test_a_wrong_derivative_is_an_error():
    def mod(bprop):
        return ScoreMod(lambda score, *at: score * score, bprop=bprop)

    bind(mod(lambda grad, score, *at: 2 * grad * score), Q)
    with pytest.raises(ValueError, match="derivative"):
        bind(mod(lambda grad, score, *at: grad * score), Q)
    with pytest.raises(ValueError, match="derivative"):
        bind(mod(lambda grad, score, *at: grad), Q)


def test_other_devices():
    with pytest.raises(ValueError, match="meta"):
        bind(alibi(torch.zeros(2, device="meta")), Q)


def test_explain_names_the_score():
    def my_score(score, b, h, q_idx, kv_idx):
        return score * 2

    q, k, v = operands()
    assert "score(my_score)" in str(explain(q, k, v, score_mod=my_score).spec)
    assert "alibi" in str(explain(q, k, v, score_mod=alibi(torch.rand(4))).spec)
    assert explain("fp32 d64 causal score(mine) cpu").backend == "cpu"


def test_t5_buckets():
    """T5's own formula, distance by distance."""
    found = scores.t5_buckets(32, True, 128)
    assert found[128] == 0
    assert found[128 - 7] == 7
    assert found[0] == 15
    assert found[-1] == 31
    assert scores.t5_buckets(32, False, 128)[129:].eq(0).all()


# Inside of torch.compile

OUTSIDE = torch.randn(4, 9, requires_grad=True)


def outside(score, b, h, q_idx, kv_idx):
    return score + OUTSIDE[h, torch.clamp(kv_idx - q_idx, -4, 4) + 4] * 0.5


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.t = torch.nn.Parameter(torch.randn(4))

    def mod(self, score, b, h, q_idx, kv_idx):
        return score * self.t[h]


LAYER = Layer()
READY = alibi(torch.rand(4))
COMPILED = {
    "a function": (lambda q, k, v, t: attention(q, k, v, score_mod=outside), [OUTSIDE]),
    "a ready score": (lambda q, k, v, t: attention(q, k, v, score_mod=READY), []),
    "a method": (lambda q, k, v, t: attention(q, k, v, score_mod=LAYER.mod), [LAYER.t]),
    "made inside": (lambda q, k, v, t: attention(q, k, v, score_mod=alibi(t[:, 0])), []),
    "a ScoreMod made inside": (
        lambda q, k, v, t: attention(q, k, v, score_mod=ScoreMod(lambda s, b, h, i, j, t: s + t[h, h * 0] * 2, t)),
        [],
    ),
    "computed before": (lambda q, k, v, t: attention(q, k, v, score_mod=t5_bias(t.mT, max_distance=10)), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compile(name):
    function, captured = COMPILED[name]
    torch._dynamo.reset()
    leaves = [*(x.requires_grad_() for x in operands()), torch.randn(4, 8, requires_grad=True)]
    wanted = function(*leaves)
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves)
    assert torch.equal(found, wanted)
    pairs = (torch.autograd.grad(x.sum(), [*leaves, *captured], allow_unused=True) for x in (found, wanted))
    for a, b in zip(*pairs, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Compiled(torch.nn.Module):
    """What people write in a compiled region."""

    def __init__(self, which: str):
        super().__init__()
        self.weight, self.table = torch.nn.Parameter(torch.randn(4)), torch.nn.Parameter(torch.randn(4, 9))
        self.scale, self.which = 2.0, which

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.weight[h] * kv_idx

    def forward(self, q, k, v, x, n):
        local = q.mean((0, 2, 3))

        def by(fn):
            return attention(q, k, v, score_mod=fn)

        def near(b, h, i, j):
            return (i - j).abs() < n

        match self.which:
            case "method":
                return by(self.score)
            case "parameter":
                return by(lambda s, b, h, i, j: s + self.weight[h] * (j - i).to(s.dtype))
            case "table":
                return by(lambda s, b, h, i, j: s + self.table[h, (j - i).clamp(-4, 4) + 4])
            case "number":
                return by(lambda s, b, h, i, j: torch.where(~(i < j), s * x, s * self.scale))
            case "local":
                return by(lambda s, b, h, i, j: s * local[h])
            case "row":
                return by(lambda s, b, h, i, j: s + (self.table[h] * self.table[h]).sum())
            case "composed":
                return by(compose(alibi(self.weight), softcap(x)))
            case "mask":
                return attention(q, k, v, mask=mask_mod(near))
            case "masks":
                return attention(q, k, v, mask=(~mask_mod(near) | causal()) & ~window(1, 1) | window(0, 0))
            case _:
                return by(bias(q.sum(-1, keepdim=True)))


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "which", ["method", "parameter", "table", "number", "local", "row", "composed", "mask", "masks", "bias"]
)
def test_compiled_regions(which, dynamic):
    """Values, gradients, and how often they are compiled: once, or once more for the first other value."""
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    module = Compiled(which)
    compiled = torch.compile(module, fullgraph=True, backend=counted, dynamic=dynamic)
    for i, (x, n, s) in enumerate(((2.5, 3, 8), (5.0, 5, 8), (7.5, 4, 8), (0.5, 7, 11), (3.0, 2, 13))):
        q, k, v = (t.requires_grad_() for t in operands(s, s))
        found, wanted = compiled(q, k, v, x, n), module(q, k, v, x, n)
        torch.testing.assert_close(found, wanted)
        leaves = [q, *module.parameters()]
        pairs = (torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) for out in (found, wanted))
        for a, b in zip(*pairs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)
        assert counted.frame_count <= (1 if dynamic else 1 + (i > 0) + (i > 2))


WRONG = {
    "branch": (lambda s, b, h, i, j: s if i > j else -s, "branching"),
    "shape": (lambda s, b, h, i, j: s * s.shape[-1], "shape of the score"),
    "in place": (lambda s, b, h, i, j: s.add_(1), "in place"),
    "softmax": (lambda s, b, h, i, j: s.softmax(-1), "attention's own"),
}


@pytest.mark.parametrize("name", WRONG)
def test_compiled_regions_say_what_is_wrong(name):
    torch._dynamo.reset()
    function, told = WRONG[name]

    def layer(q, k, v):
        return attention(q, k, v, score_mod=function)

    with pytest.raises(Exception, match=told):
        torch.compile(layer, fullgraph=True, backend="eager")(*operands())


WIDER = {
    "quotient": (lambda s, t: s / t, lambda s, t: s / t),
    "square": (lambda s, t: s / (t * t), lambda s, t: s / (t * t).double()),
    "product": (lambda s, t: s * t, lambda s, t: s * t),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", WIDER)
def test_derivatives_beside_tables_of_lower_precision(name, dtype):
    """They are in the score's precision, as the derivative that autograd takes is."""
    function, exact = WIDER[name]
    table = (torch.rand(2, 6) + 0.5).to(dtype)
    q, k, v = (torch.randn(1, 2, 6, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    found = attention(q, k, v, score_mod=lambda s, b, h, i, j: function(s, table[h, j]))
    shown = table[:, None] if name == "square" else table[:, None].double()
    wanted = exact(q @ k.mT / 4, shown).softmax(-1) @ v
    for x, y in zip(*(torch.autograd.grad(z.square().sum(), (q, k, v)) for z in (found, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


class Learned(torch.nn.Module):
    """Its functions are made in each forward."""

    def __init__(self, ready: bool) -> None:
        super().__init__()
        self.slopes, self.ready = torch.nn.Parameter(torch.tensor([0.5, 2.0])), ready

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = mask_mod(lambda b, h, i, j: j <= i + 2)
        if self.ready:
            return attention(q, k, v, mask=mask, score_mod=alibi(self.slopes))
        return attention(q, k, v, mask=mask, score_mod=lambda s, b, h, i, j: s + self.slopes[h] * (j - i))


@pytest.mark.slow
@pytest.mark.parametrize("ready", [False, True])
def test_export(ready):
    """What was exported outlives what it was exported from, and has its parameters' values at the call."""
    module, given = Learned(ready), operands(h=2)
    exported = torch.export.export(module, tuple(given), strict=False).module()
    with torch.no_grad():
        module.slopes.mul_(3.0)
        exported.slopes.mul_(3.0)
    right = module(*given)
    del module
    gc.collect()
    torch.testing.assert_close(exported(*given), right)
    with pytest.raises(Exception, match=r"strict=False"):
        torch.export.export(Learned(ready), tuple(given), strict=True)
