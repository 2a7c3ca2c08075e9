"""Callbacks in cuDNN's manner: what they compute, their derivatives, and when they are recorded again."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F

import saccade
from saccade import Dense, Packed, alibi, attention, causal, softcap, window
from saccade.compat.cudnn import cache_clear, cache_info, callback_key, score_callback
from saccade.testing import check
from saccade.testing.callbacks import NAMES, case


def operands(h_q, h_k, s_q, s_k, d, dtype, order="bhsd"):
    made = torch.Generator().manual_seed(0)
    shapes = (2, h_q, s_q, d), (2, h_k, s_k, d), (2, h_k, s_k, d)
    return [Dense(order).ordered(torch.randn(shape, generator=made)).contiguous().to(dtype) for shape in shapes]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", NAMES)
def test_against_the_oracle(name, order, processor):
    dtype = {"sbhd": torch.float32, "bshd": torch.bfloat16}[order]
    q, k, v = operands(4, 2, 20, 33, 8, dtype, order)
    check(q, k, v, score_mod=case(name, 4, 20, 33).score(), layout=Dense(order)).assert_ok()


def test_double_precision_and_layouts():
    """Float64 to its own precision; packed sequences; masks, sinks and dropout beside a callback."""
    q, k, v = operands(4, 2, 20, 33, 8, torch.float64)
    for name in ("causal", "softcap", "band"):
        check(q, k, v, score_mod=case(name, 4, 20, 33).score(), mask=window(9, 9)).assert_ok()
    x = [y[0].mT.contiguous().mT.transpose(0, 1).float() for y in operands(4, 2, 20, 20, 8, torch.float32)]
    offsets = torch.tensor([0, 7, 7, 20])
    layout = Packed(offsets, offsets, 13, 13)
    check(*x, score_mod=case("alibi", 4, 13, 13).score(), layout=layout, dropout_p=0.2, sink=torch.randn(4)).assert_ok()


def test_like_the_ready_ones():
    """What callbacks mean, by other means."""
    q, k, v = operands(4, 2, 20, 20, 8, torch.float32)
    torch.testing.assert_close(
        attention(q, k, v, score_mod=case("causal", 4, 20, 20).score()), attention(q, k, v, mask=causal())
    )
    torch.testing.assert_close(
        attention(q, k, v, score_mod=case("softcap", 4, 20, 20).score()), attention(q, k, v, score_mod=softcap(0.8))
    )
    learned = case("alibi", 4, 20, 20)
    slopes = learned.score_mod_tensors["slopes"]
    torch.testing.assert_close(
        attention(q, k, v, score_mod=learned.score()), attention(q, k, v, score_mod=alibi(slopes[0, :, 0, 0]))
    )


FORMULAS = {
    "add_square": (lambda a, b: a + b**2, 2),
    "bias": (torch.add, 2),
    "elu": (F.elu, 1),
    "erf": (torch.erf, 1),
    "gelu": (F.gelu, 1),
    "gelu_approx_tanh": (lambda x: F.gelu(x, approximate="tanh"), 1),
    "max": (torch.maximum, 2),
    "min": (torch.minimum, 2),
    "mod": (torch.fmod, 2),
    "neg": (torch.neg, 1),
    "relu": (torch.relu, 1),
    "rsqrt": (torch.rsqrt, 1),
    "scale": (torch.mul, 2),
    "softplus": (F.softplus, 1),
    "swish": (F.silu, 1),
    "tan": (torch.tan, 1),
    "tanh_backward": (lambda loss, x: loss * (1 - torch.tanh(x) ** 2), 2),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_operations(name):
    formula, count = FORMULAS[name]
    mod = score_callback(lambda graph, score, tensors: getattr(graph, name)(*[score, tensors["t"]][:count]), None, TWO)
    x, at = torch.randn(4, 4, dtype=torch.float64), [torch.zeros(1, 1, dtype=torch.int64)] * 4
    torch.testing.assert_close(
        mod(x, *at), formula(*[x, torch.tensor(0.25, dtype=torch.float64)][:count]), equal_nan=True
    )


TWO = {"t": torch.tensor([0.25])}


class Counted:
    """Counts how often it is recorded."""

    def __init__(self, factor, key=None):
        self.factor, self.count = factor, 0
        if key is not None:
            self.score_mod_graph_cache_key = key

    def forward(self, graph, score, tensors):
        self.count += 1
        return graph.mul(score, self.factor)

    __call__ = forward


def recorded():
    return cache_info().misses


def value(callback):
    """What it makes of a score of 4."""
    return score_callback(callback)(torch.full((1, 1), 4.0), *[torch.zeros(1, 1, dtype=torch.int64)] * 4).item()


def attended(callback, tensors=None):
    """The same, through attention."""
    q = torch.full((1, 1, 1, 1), 2.0)
    return attention(q, q, q, scale=1.0, score_mod=score_callback(callback, None, tensors), return_lse=True).lse.item()


@pytest.fixture(autouse=True)
def fresh():
    cache_clear()


def test_bound_methods_are_known_by_their_key():
    unkeyed = Counted(2.0)
    assert callback_key(unkeyed.forward) is None
    assert value(unkeyed.forward) == 8
    unkeyed.factor = 3.0
    assert value(unkeyed.forward) == 12
    assert unkeyed.count == 2
    assert cache_info().currsize == 0
    keyed = Counted(2.0, key=lambda: {"layers": [1, 2], "name": ("a", {"b"})})
    assert [value(keyed.forward), value(keyed.forward)] == [8, 8]
    assert keyed.count == 1
    same, other = Counted(2.0, key={"layers": [1, 2], "name": ("a", {"b"})}), Counted(5.0, key=("other",))
    assert callback_key(keyed.forward) == callback_key(same.forward) != callback_key(other.forward)
    assert value(other) == 20
    with pytest.raises(TypeError, match="must not hold tensors"):
        callback_key(Counted(1.0, key=torch.zeros(3)).forward)
    with pytest.raises(TypeError, match="unhashable"):
        callback_key(Counted(1.0, key=bytearray(3)).forward)


FACTOR = 2.0


def by_global(graph, score, tensors):
    return graph.mul(score, FACTOR)


def helped(graph, score, tensors):
    return by_global(graph, score, tensors)


def test_functions_are_known_by_what_they_are(monkeypatch):
    """Redefinitions, colliding names, globals, closures and partials: found while nothing changes, never stale."""
    made = {}
    for factor in ("3.0", "4.0", "3.0"):  # a notebook's cell, run again
        exec(f"def callback(graph, score, tensors):\n    return graph.mul(score, {factor})", made)
        assert value(made["callback"]) == value(made["callback"]) == 4 * float(factor)
    assert recorded() == 3
    lambdas = [lambda g, s, t: g.mul(s, 3.0), lambda g, s, t: g.mul(s, 5.0)]
    assert [value(x) for x in lambdas] == [12, 20]
    assert value(helped) == 8
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    assert value(helped) == value(by_global) == 28
    before = recorded()

    def closure(n):
        return lambda graph, score, tensors: graph.mul(score, n)

    def bound(n, graph, score, tensors):
        return graph.mul(score, n)

    for n in (2.0, 3.0):
        for callback in (closure(n), partial(bound, n)):
            assert value(callback) == value(callback) == 4 * n
    assert recorded() == before + 4
    held = Counted(2.0)  # an object may change, so that what captures it is recorded each time
    for held.factor in (2.0, 3.0):
        assert value(lambda graph, score, tensors: graph.neg(held(graph, score, tensors))) == -4 * held.factor
    assert held.count == 2


class Config:
    factor = 2.0
    nested: ClassVar = {"layers": [1, 2]}

    @classmethod
    def scaled(cls, graph, score):
        return graph.mul(score, cls.factor)


HELD = Counted(2.0)


def test_what_globals_hold(monkeypatch):
    """Attributes of modules and functions; classes and objects may change, and are looked at each time."""

    def by_class(graph, score, tensors):
        return graph.mul(Config.scaled(graph, score), float(sum(Config.nested["layers"])))

    def by_module(graph, score, tensors):
        return graph.mul(score, saccade.compat.cudnn.FACTOR)

    def by_function(graph, score, tensors):
        return graph.mul(score, helped.factor)

    def by_object(graph, score, tensors):
        return HELD.forward(graph, score, tensors)

    monkeypatch.setattr(saccade.compat.cudnn, "FACTOR", 2.0, raising=False)
    monkeypatch.setattr(helped, "factor", 2.0, raising=False)
    assert [value(x) for x in (by_class, by_module, by_function, by_object)] == [24, 8, 8, 8]
    before = recorded()
    assert value(by_module) == value(by_function) == 8
    assert recorded() == before
    assert value(by_class) == 24
    assert recorded() == before + 1
    for owner, name in ((Config, "factor"), (saccade.compat.cudnn, "FACTOR"), (helped, "factor"), (HELD, "factor")):
        monkeypatch.setattr(owner, name, 3.0)
    Config.nested["layers"].append(3)
    assert [value(x) for x in (by_class, by_module, by_function, by_object)] == [72, 12, 12, 12]
    Config.nested["layers"].pop()


def test_a_key_that_is_kept_is_that_of_what_a_function_is_now(monkeypatch):
    helper, held = (lambda graph, score: graph.mul(score, FACTOR)), 1.5

    def callback(graph, score, tensors, offset=2.0):
        return graph.add(helper(graph, score), held + offset)

    def key():
        assert callback_key(callback) == callback_key(callback)
        return callback_key(callback)

    known = [key()]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    known.append(key())
    held = 2.5
    known.append(key())
    callback.__defaults__ = (4.0,)
    known.append(key())
    helper.__code__ = (lambda graph, score: graph.add(score, FACTOR)).__code__
    known.append(key())
    monkeypatch.setitem(globals(), "add", 1.0)  # a name that the code has, as an attribute until now
    known.append(key())
    callback.scale = 1.0
    known.append(key())
    assert len(set(known)) == len(known) - 2  # nothing reads that global and that attribute


def test_values_are_those_of_the_call():
    """Of numbers on the CPU, of other tensors, and of what is computed of tensors beforehand."""
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    number, held = torch.full((1, 1, 1, 1), 0.5), torch.rand(1, 2, 8, 8)
    temperature = torch.rand(2, 1, 1).requires_grad_()

    def callback(graph, score, tensors):
        warmed = graph.mul(graph.mul(score, tensors["number"]), graph.exp(tensors["temperature"]))
        return graph.add(warmed, tensors["held"])

    given = {"number": number, "held": held, "temperature": temperature}
    kept = score_callback(callback, None, given)
    for change in (lambda: number.fill_(2.0), held.zero_, lambda: temperature.data.add_(1), lambda: None):
        change()
        fresh = attention(q, k, v, score_mod=score_callback(callback, None, given))
        found = attention(q, k, v, score_mod=kept)
        assert torch.equal(found, fresh)
        (gradient,) = torch.autograd.grad(found.sum(), temperature)
        assert gradient.abs().max() > 0
    temperature.requires_grad_(False)
    assert not attention(q, k, v, score_mod=kept).requires_grad


def test_numbers_are_read_in_each_call():
    """Changed in place, and given other memory; by the modification that the same tensors had before."""
    number = torch.tensor([2.0])

    def scaled(graph, score, tensors):
        return graph.mul(score, tensors["by"])

    found = [attended(scaled, {"by": number})]
    kept = score_callback(scaled, None, {"by": number})
    number.fill_(3.0)
    found.append(attended(scaled, {"by": number}))
    assert score_callback(scaled, None, {"by": number}) is kept
    number.data = torch.tensor([5.0])
    found.append(attended(scaled, {"by": number}))
    assert found == [8, 12, 20]


def test_scalars_and_equal_graphs_build_nothing():
    """A new value is neither recorded, nor traced; nor is the same graph of another callback's."""

    def scaled(graph, score, tensors):
        return graph.mul(score, tensors["by"])

    attended(scaled, {"by": torch.tensor([1.0])})
    before = recorded(), saccade.cache_info().misses
    assert [attended(scaled, {"by": torch.full((1, 1, 1, 1), x)}) for x in (0.5, 2.0, -3.0)] == [2, 8, -12]
    assert (recorded(), saccade.cache_info().misses) == before
    signed = [score_callback(partial(lambda zero, g, s, t: g.reciprocal(g.mul(0.0, zero)), x)) for x in (1.0, -1.0)]
    assert signed[0].fn != signed[1].fn
    first, second = Counted(2.0), Counted(2.0)
    attended(first.forward)
    before = saccade.cache_info().misses
    assert attended(second.forward) == attended(first.forward) == 8
    assert saccade.cache_info().misses == before


def test_bounded_and_safe_for_threads():
    maxsize = cache_info().maxsize
    for n in range(maxsize + 9):
        score_callback(partial(lambda n, graph, score, tensors: graph.mul(score, n), n))
    assert cache_info().currsize == maxsize

    def run(i):
        state = {}

        def forward(graph, score, tensors):
            state["inner"] = graph.div(score, float(i))
            return graph.tanh(state["inner"])

        def backward(graph, dP, tensors):
            return graph.div(graph.tanh_backward(dP, state["inner"]), float(i))

        return [score_callback(forward, backward) for _ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(1, 9)))
    assert len({mod.fn for mods in found for mod in mods}) == len({mod.bprop for mods in found for mod in mods}) == 8


def test_numbers_of_every_type():
    """Integers and truths by value, of one element in any number of dimensions."""
    q, k, v = operands(4, 2, 9, 9, 8, torch.float32)

    def mod(graph, score, tensors):
        near = graph.cmp_le(
            graph.abs(graph.sub(graph.gen_index(score, 3), graph.gen_index(score, 2))), tensors["reach"]
        )
        return graph.binary_select(score, tensors["low"], graph.logical_or(near, tensors["all"]))

    for reach, everyone in ((2, False), (4, False), (2, True)):
        given = {"reach": torch.tensor([reach]), "all": torch.tensor([[everyone]]), "low": torch.tensor(-torch.inf)}
        score_mod = score_callback(mod, None, given)
        wanted = attention(q, k, v, mask=None if everyone else window(reach, reach))
        torch.testing.assert_close(attention(q, k, v, score_mod=score_mod), wanted)


def test_scalars_are_those_of_the_forward():
    """A number that changes before the backward does not change the gradient."""
    by = torch.tensor([3.0])
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    mods = [score_callback(lambda graph, score, tensors: graph.mul(score, tensors["by"]), None, {"by": by})] * 2
    wanted, out = (attention(q, q, q, score_mod=mod).sum() for mod in mods)
    (wanted,) = torch.autograd.grad(wanted, q)
    by.fill_(5.0)
    assert torch.equal(torch.autograd.grad(out, q)[0], wanted)


@pytest.mark.parametrize("inside", [False, True])
def test_compiled(inside):
    """Made outside of a compiled region or in it, without a break of the graph."""
    for name in ("softcap", "alibi"):
        q, k, v = (x.requires_grad_() for x in operands(4, 2, 20, 20, 8, torch.float32))
        given = case(name, 4, 20, 20)
        outer = given.score()

        def call(q, k, v, given=given, outer=outer):
            return attention(q, k, v, score_mod=score_callback(*given) if inside else outer)

        out, wanted = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v), call(q, k, v)
        leaves = [q, k, v, *(x for x in (given.score_mod_tensors or {}).values() if x.requires_grad)]
        torch.testing.assert_close(out, wanted)
        for one, other in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (out, wanted)), strict=True):
            torch.testing.assert_close(one, other)


def kept(graph, score, tensors):
    LAST.append(score)
    return graph.add(score, LAST[0])


LAST = []


WRONG = {
    "no function": (lambda: score_callback(3), TypeError, "needs functions"),
    "no dict": (lambda: score_callback(helped, None, [1]), TypeError, "must be a dict"),
    "no tensor": (lambda: score_callback(helped, None, {"x": 1.0}), TypeError, "'x': float"),
    "five dimensions": (
        lambda: score_callback(helped, None, {"x": torch.zeros(2, 1, 1, 1, 1)}),
        ValueError,
        "(2, 1, 1",
    ),
    "tensors of nothing": (lambda: score_callback(helped, None, None, TWO), ValueError, "requires score_mod_bprop"),
    "no value": (lambda: score_callback(lambda g, s, t: None), TypeError, "must return a value of its graph"),
    "no operation": (lambda: score_callback(lambda g, s, t: g.matmul(s, s)), AttributeError, "no operation matmul"),
    "method of a value": (lambda: score_callback(lambda g, s, t: s.get_dim()), AttributeError, "no get_dim"),
    "an unknown argument": (lambda: score_callback(lambda g, s, t: g.mul(a=s, c=s)), TypeError, "mul takes a, b"),
    "a missing argument": (lambda: score_callback(lambda g, s, t: g.mul(a=s)), TypeError, "mul needs b"),
    "a missing number": (lambda: score_callback(lambda g, s, t: g.leaky_relu(s)), TypeError, "needs negative_slope"),
    "a tensor": (lambda: score_callback(lambda g, s, t: g.mul(s, torch.ones(3))), TypeError, "got a tensor (3,)"),
    "an axis": (lambda: score_callback(lambda g, s, t: g.gen_index(s, 4)), ValueError, "axis from 0 to 3"),
    "an index of a tensor": (
        lambda: score_callback(lambda g, s, t: g.gen_index(t["t"], 2), None, TWO),
        ValueError,
        "gen_index takes the score",
    ),
    "a type": (lambda: score_callback(lambda g, s, t: g.neg(s).set_data_type("FP8_E4M3")), ValueError, "'FP8_E4M3'"),
    "an output": (lambda: score_callback(lambda g, s, t: g.neg(s).set_output(True)), ValueError, "one output"),
    "another graph's": (lambda: [score_callback(kept) for _ in range(2)], ValueError, "another graph"),
    "no factor": (lambda: score_callback(helped, lambda g, dP, t: g.exp(dP)), ValueError, "must be linear in dP"),
    "identity for a softcap": (
        lambda: value_of(score_callback(lambda g, s, t: g.tanh(s), lambda g, dP, t: dP)),
        ValueError,
        "derivative of score(lambda) is wrong",
    ),
}


def value_of(mod):
    return attention(*torch.randn(3, 1, 1, 4, 4), score_mod=mod)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_callbacks(name):
    wrong, kind, told = WRONG[name]
    with pytest.raises(kind, match=re.escape(told)):
        wrong()


def test_tensors_in_another_order():
    """The same callback, whose dictionary lists its tensors in another order, is another program of the same kernel."""
    q = torch.randn(1, 1, 4, 8)

    def scaled(graph, score, tensors):
        return graph.add(graph.mul(score, tensors["factor"]), tensors["more"])

    for shape in ((1, 1, 1, 1), (1, 1, 4, 1)):
        given = {"factor": torch.full(shape, 2.0), "more": torch.full(shape, 0.0)}
        orders = given, dict(reversed(given.items())), {"unused": torch.ones(shape), **given}
        first, *others = (attention(q, q, q, score_mod=score_callback(scaled, None, x)) for x in orders)
        assert all(torch.equal(first, other) for other in others)


def test_what_a_callback_built_stays():
    """A ScoreMod that is kept is what its callback built; a new one is what it builds now."""
    q, k, v = (torch.randn(1, 1, 8, 8, dtype=torch.float64) for _ in range(3))
    factors = [1.0]

    def scaled(graph, score, tensors):
        return graph.mul(a=score, b=factors[0])

    def exact(factor):
        return torch.softmax(q @ k.mT / 8**0.5 * factor, -1) @ v

    kept = score_callback(scaled)
    torch.testing.assert_close(attention(q, k, v, score_mod=kept), exact(1.0))
    factors[0] = 3.0
    torch.testing.assert_close(attention(q, k, v, score_mod=kept), exact(1.0))
    torch.testing.assert_close(attention(q, k, v, score_mod=score_callback(scaled)), exact(3.0))
