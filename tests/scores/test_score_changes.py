"""Score functions against their own meaning, one score at a time, with things changed between the calls."""

import contextlib
import enum
import functools
import importlib
import math
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from saccade import ScoreMod, attention, bias, compose, mask_mod
from saccade.scores.codegen.program import cache
from saccade.scores.tracing import guards

B, H, S, D = 1, 2, 5, 4


def rows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, S, D, generator=generator, dtype=torch.float64) for _ in range(3)]


def meaning(fn: Callable[..., Any]) -> torch.Tensor:
    """Attention in float64, with the function called for each score."""
    q, k, v = rows()
    scores = q @ k.mT / math.sqrt(D)
    for at in torch.cartesian_prod(*map(torch.arange, scores.shape)):
        scores[tuple(at)] = fn(scores[tuple(at)], *at)
    return scores.softmax(-1) @ v


def stages_of_arguments() -> Iterator[Any]:
    class Strength:
        c = 2.0

        def method(*args: Any) -> Any:
            return args[1] * args[0].c  # type: ignore[attr-defined]

    held = Strength()
    yield held.method
    held.c = 5.0
    yield held.method


def stages_of_added_methods() -> Iterator[Any]:
    c = 2.0

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s.stronger()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "stronger", lambda x: x * c, raising=False)
        yield fn
        c = 5.0
        yield fn


def stages_of_given_attributes() -> Iterator[Any]:
    table: Any = torch.tensor([0.5, 0.25])
    table.strength = 2.0

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * table.strength + table[h]

    yield fn
    table.strength = 5.0
    yield fn


def stages_of_a_module_of_another_class() -> Iterator[Any]:
    class Other(types.ModuleType):
        @property
        def c(self) -> float:
            return 5.0

    module: Any = types.ModuleType("module")
    module.c = 2.0

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * module.c

    yield fn
    module.__class__ = Other
    yield fn


def stages_of_patched_functions() -> Iterator[Any]:
    known, c = torch.tanh, 2.0

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.tanh(s) * 3

    with pytest.MonkeyPatch.context() as patch:
        yield fn
        patch.setattr(torch, "tanh", lambda x: known(x) * c)
        yield fn
        c = 4.0
        yield fn
        patch.setattr(torch, "tanh", torch.sin)
        yield fn
    yield fn


def stages_of_types() -> Iterator[Any]:
    x: Any = 1

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        match x:
            case bool():
                return s * 7
            case 1 if isinstance(x, int):
                return s * 2
            case float():
                return s * x * 3
            case [a, *_]:
                return s * a
            case {"k": v}:
                return s * v
            case _:
                return s * len(str(x))

    for x in (1, 1.0, True, 2.5, [3.0], {"k": 4.0}, "abcd", None, 8):  # noqa: B007 (the function reads it)
        yield fn


def stages_of_numbers() -> Iterator[Any]:
    x: Any = 1.0

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(i - j < x, s + min(x, 9), s + math.copysign(1.0, x) * (i - j))

    for x in (1.0, 0.0, -0.0, 0, True, 3, 1 << 20, math.inf, -2.5):  # noqa: B007
        yield fn


def stages_of_tensors() -> Iterator[Any]:
    whole = torch.arange(12.0)
    t: Any = whole[2:4]

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * t[h] + t[-1]

    yield fn
    whole.mul_(0.5)
    yield fn
    for t in (whole[::5], whole[:1].expand(2), torch.tensor([2, 3]), torch.tensor([True, False])):  # noqa: B007
        yield fn
    t = torch.ones(2)
    yield fn
    t.data = torch.tensor([0.25, 4.0])
    yield fn
    t.set_(torch.arange(6.0)[1::2])
    yield fn


def stages_of_tensors_that_are_gone() -> Iterator[Any]:
    table: Any = torch.tensor([0.5, 0.25])

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s if table is None else s * table[h]

    yield fn
    table = None
    yield fn


def stages_of_swapped_tensors() -> Iterator[Any]:
    table = torch.tensor([0.5, 0.25])

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * table[h] + table.exp()[h]

    yield fn
    torch.utils.swap_tensors(table, torch.tensor([3.0, -1.0]))
    yield fn
    torch.utils.swap_tensors(table, torch.tensor([3, -1, 2]))
    yield fn


def stages_of_renamed_keywords() -> Iterator[Any]:
    fn = functools.partial(lambda s, b, h, i, j, up=1.0, down=1.0: s * up / down, up=3.0)
    yield fn
    fn.keywords["down"] = fn.keywords.pop("up")
    yield fn


def stages_of_long_chains() -> Iterator[Any]:
    c, fn = 2.0, lambda s, b, h, i, j: s * c

    def longer(inner: Any) -> Any:
        return lambda s, b, h, i, j: inner(s, b, h, i, j) + 0.01 * j

    for _ in range(250):
        fn = longer(fn)
    yield fn
    c = 5.0
    yield fn


def stages_of_what_is_no_enumeration() -> Iterator[Any]:
    class Settings:
        __members__ = ("strength",)
        strength = 2.0

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * Settings.strength

    yield fn
    Settings.strength = 5.0
    yield fn


def stages_of_enumerations_with_code() -> Iterator[Any]:
    c = 2.0

    class Level(float, enum.Enum):
        LOW = 1.5

        def __mul__(self, other: Any) -> Any:
            return other * c

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return Level.LOW * s

    yield fn
    c = 5.0
    yield fn


def stages_of_enumerations() -> Iterator[Any]:
    class Level(enum.IntEnum):
        LOW = 2
        HIGH = 5

    levels = Level

    def fn(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s * levels.HIGH

    yield fn
    levels = enum.IntEnum("levels", {"HIGH": 3})
    yield fn


STAGES = [found for name, found in list(globals().items()) if name.startswith("stages_")]


@pytest.mark.parametrize("stages", STAGES, ids=lambda stages: stages.__name__.removeprefix("stages_of_"))
def test_a_call_is_what_the_function_says_at_it(stages):
    for fn in stages():
        want = meaning(fn)
        for _ in range(3):
            torch.testing.assert_close(attention(*rows(), score_mod=fn), want)


def asked(*_: Any) -> Any:
    raise KeyError("a function never asks for this")


def asked_objects() -> dict[str, Any]:
    """Objects that raise an error wherever they or their classes are asked for more than `c`."""

    def found(x: Any, name: str) -> Any:
        return 2.0 if name == "c" else asked()

    def same(self: Any, x: Any) -> Any:
        return x

    comparing = {"__eq__": asked, "__hash__": asked}
    by_comparison = type("ByComparison", (type,), comparing)
    by_attribute = type("ByAttribute", (type,), {"__getattribute__": found})
    held = {"c": 2.0, "__call__": same}
    classes: dict[str, Any] = {
        "missing attributes": type("Asked", (), {"__getattr__": found}),
        "attributes": type("Asked", (), {"__getattribute__": found}),
        "class": type("Asked", (), {"c": 2.0, "__class__": property(asked)}),
        "dict": type("Asked", (), {"c": 2.0, "__dict__": property(asked)}),
        "comparison": type("Asked", (), held | comparing),
        "comparison of classes": by_comparison("Asked", (), held),
        "attributes of classes": by_attribute("Asked", (), held),
    }
    return {name: kind() for name, kind in classes.items()} | {"a class": by_attribute("Asked", (), held)}


OBJECTS = [
    "missing attributes", "attributes", "class", "dict", "comparison", "comparison of classes", "attributes of classes",
    "a class",
]  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_a_proof_runs_no_code_of_the_objects_that_it_looks_at(name):
    x = asked_objects()[name]
    functions = [lambda s, b, h, i, j: s * x.c]
    if name.startswith("comparison"):
        functions.append(lambda s, b, h, i, j: x(s))
    for fn in functions:
        for _ in range(3):
            torch.testing.assert_close(attention(*rows(), score_mod=fn), meaning(fn))


def test_a_function_is_asked_for_nothing():
    c = 2.0
    called = {
        "__getattr__": asked,
        "__call__": lambda self, *args: args[0] * c if len(args) == 5 else args[-2] >= args[-1],
    }
    fn = type("Asked", (), called)()
    for c in (2.0, 3.0):  # noqa: B007
        torch.testing.assert_close(attention(*rows(), score_mod=fn), meaning(fn))
    q, k, v = rows()
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    want = (q @ k.mT / math.sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(attention(q, k, v, mask=mask_mod(fn)), want)


@pytest.mark.parametrize("ask", [float, bool, lambda score: score.shape[0], lambda score: score.add_(1)])
def test_a_refusal_that_the_function_catches_is_one(ask):
    def fn(score, b, h, q_idx, kv_idx):
        try:
            return score * (2 if ask(score) else 3)
        except Exception:
            return score

    with pytest.raises(ValueError, match=r"test_score_changes\.py"):
        attention(*rows(), score_mod=fn)


def test_a_change_between_a_recording_and_its_proof_is_seen(monkeypatch):
    x, known = 2.0, cache.program

    def fn(score, b, h, q_idx, kv_idx):
        return torch.sinc(score * x)

    def slowly(*args):
        nonlocal x
        x = 5.0  # as another thread may
        return known(*args)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "program", slowly)
        attention(*rows(), score_mod=fn)
    for _ in range(3):
        torch.testing.assert_close(attention(*rows(), score_mod=fn), meaning(fn))


def a_closure(c, table):
    return lambda score, b, h, q_idx, kv_idx: score * c + table[h] * kv_idx


def a_record(c, table):
    return ScoreMod(lambda score, b, h, q_idx, kv_idx, t: score * c + t[h] * kv_idx, table)


def a_partial(c, table):
    def fn(c, table, score, b, h, q_idx, kv_idx):
        return score * c + table[h] * kv_idx

    return functools.partial(fn, c, table)


def a_default(c, table):
    return lambda score, b, h, q_idx, kv_idx, c=c, table=table: score * c + table[h] * kv_idx


def a_composition(c, table):
    return compose(lambda score, b, h, q_idx, kv_idx: score * c, bias(table[:, None, None] * torch.arange(S)))


@pytest.mark.parametrize("define", [a_closure, a_record, a_partial, a_default, a_composition])
def test_functions_that_each_call_defines_anew(define, monkeypatch):
    """Their code and what they capture stand for them, as long as it is the same."""
    bind, recorded = importlib.import_module("saccade.scores.bind"), []
    trace_function = bind.trace_function
    monkeypatch.setattr(bind, "trace_function", lambda *of: recorded.append(of) or trace_function(*of))
    one, other = torch.tensor([0.5, 0.25]), torch.tensor([2.0, -1.0])
    for c, table in ((2.0, one), (5.0, one), (2.0, one), (-0.0, one), (0.0, one), (2.0, other), (2.0, one), (2, one)):
        for _ in range(4):
            torch.testing.assert_close(attention(*rows(), score_mod=define(c, table)), meaning(define(c, table)))
        table.mul_(-1.5)
        torch.testing.assert_close(attention(*rows(), score_mod=define(c, table)), meaning(define(c, table)))
    recorded.clear()
    for _ in range(3):
        table = one.clone().mul_(3)
        torch.testing.assert_close(attention(*rows(), score_mod=define(2, table)), meaning(define(2, table)))
    assert not recorded


def by_identity(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (x[h] if x is y else 3 * y[h])


def by_stride(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (x.stride(0) * y[h])


def by_shape(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (x.shape[0] * y[h])


def by_item(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (x[1].item() * y[h])


def by_class(x, y):
    return lambda score, b, h, q_idx, kv_idx: (
        score + 0.5 * kv_idx * (x[h] if isinstance(x, torch.nn.Parameter) else y[h])
    )


def by_method(x, y):
    return lambda score, b, h, q_idx, kv_idx: (
        score + 0.5 * kv_idx * ((x[h] - y[h]).abs().float() * (q_idx - kv_idx).clamp(min=0))
    )


def by_computed(x, y):
    return lambda score, b, h, q_idx, kv_idx: (
        score + 0.5 * kv_idx * (x.exp()[h] * torch.tanh(y.double())[None].mT[h, 0])
    )


def by_count(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (len(x[x > 0]) * y[h])


def by_selection(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (x[x > 0].sum() * y[h])


def by_branch(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * (x[h] if (y.sum() > 0) else 2 * x[h])


def by_writing(x, y):
    def fn(score, b, h, q_idx, kv_idx):
        z = x.clone()
        z += y[: len(x)]
        return score + 0.5 * kv_idx * z[h]

    return fn


def by_own_memory(x, y):
    def fn(score, b, h, q_idx, kv_idx):
        z, w = x.contiguous(), x.ravel()  # themselves, or others
        return score + 0.5 * kv_idx * z[h] * (1 if z is x else 2) * (1 if w is x else 3)

    return fn


def by_lists(x, y):
    return lambda score, b, h, q_idx, kv_idx: (
        score + 0.5 * kv_idx * (torch.stack([x[:2], y[:2]], dim=1)[h, 1] + torch.outer(x, y)[h, h])
    )


def by_one_item(x, y):
    def fn(score, b, h, q_idx, kv_idx):
        z = x[x > 0].squeeze()  # a number, a row of numbers, or none
        return score + 0.5 * kv_idx * (z.sum() + z.dim()) * y[h]

    return fn


def by_what_may_raise(x, y):
    def fn(score, b, h, q_idx, kv_idx):
        try:
            z = x[x > 0].view(1)
        except RuntimeError:
            z = y[:1]
        return score + 0.5 * kv_idx * z[h - h]

    return fn


def by_one_number(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + 0.5 * kv_idx * x.abs().sum() * y[h]


WAYS = [
    by_one_item, by_what_may_raise, by_one_number,
    by_method, by_identity, by_stride, by_shape, by_item, by_class, by_computed, by_count, by_selection, by_branch,
    by_writing, by_own_memory, by_lists,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("define", WAYS)
def test_tensors_in_the_places_of_others(define):
    """Guards are of all tensors of a form, unless a function can tell them apart."""
    wide, one, other = torch.randn(H, 3), torch.randn(H), torch.randn(H)
    pairs = [(one, one), (one, other), (other, other), (wide[:, 0], one), (one, wide[:, 1]), (torch.randn(3), one)]
    pairs += [(torch.nn.Parameter(other.clone(), requires_grad=False), one), (one, one.clone())]
    for _ in range(3):
        for x, y in pairs:
            if define in (by_identity, by_class, by_writing) and len(x) != len(y):
                continue
            for _ in range(3):
                torch.testing.assert_close(attention(*rows(), score_mod=define(x, y)), meaning(define(x, y)))


def test_a_number_that_a_transform_makes_is_no_number():
    """vmap's tensor is of the same form as those that guards know, and has no item."""

    q, k, v = rows()

    def call(t):
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: s * t)

    for i in range(4):
        call(torch.tensor(1.0 + i))
    values = torch.tensor([0.5, 2.0, 3.0])
    found = torch.vmap(call)(values)
    torch.testing.assert_close(found, torch.stack([call(t) for t in values]))


def products(x, y):
    return lambda score, b, h, q_idx, kv_idx: score + (x.exp() * torch.tanh(y))[h] * (q_idx - kv_idx)


def test_gradients_of_what_is_computed_of_captured_tensors(monkeypatch):
    """Of each call's own tensors, whatever was computed of others before."""
    bind, recorded = importlib.import_module("saccade.scores.bind"), []
    trace_function = bind.trace_function
    for i in range(5):
        if i == 2:
            monkeypatch.setattr(bind, "trace_function", lambda *of: recorded.append(of) or trace_function(*of))
        x, y = (torch.randn(H, dtype=torch.float64, requires_grad=True) for _ in range(2))
        q, k, v = (z.requires_grad_() for z in rows())
        at = torch.arange(S)[:, None] - torch.arange(S)
        exact = q @ k.mT / math.sqrt(D) + (x.exp() * torch.tanh(y))[:, None, None] * at
        found = attention(q, k, v, score_mod=products(x, y))
        wanted = torch.autograd.grad((exact.softmax(-1) @ v).square().sum(), (x, y, q))
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), (x, y, q)), wanted)
    assert not recorded


@pytest.mark.parametrize("shape", [(), (S,), (1,), (S, S), (H, 1, S), (H, S, S), (1, H, S, S), (B, 1, S, 1)])
def test_biases_that_are_new_in_each_call(shape, monkeypatch):
    bind, recorded = importlib.import_module("saccade.scores.bind"), []
    trace_function = bind.trace_function
    for i in range(5):
        if i == 2:
            monkeypatch.setattr(bind, "trace_function", lambda *of: recorded.append(of) or trace_function(*of))
        t = torch.randn(shape, dtype=torch.float64)
        q, k, v = rows()
        exact = (q @ k.mT / math.sqrt(D) + t).softmax(-1) @ v
        torch.testing.assert_close(attention(*rows(), score_mod=bias(t)), exact)
    assert not recorded


def test_a_recorder_sees_every_public_attribute():
    """On which guards rely: what it sees captured tensors asked for, but for their form, leaves no guards."""

    class Seen(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += 1
            return func(*args, **(kwargs or {}))

    unseen = []
    for name in dir(torch.Tensor):
        attribute, x = getattr(torch.Tensor, name), torch.randn(3)
        if type(attribute) not in guards._OF_C or name.startswith("_") or name.endswith("_"):
            continue
        answered = False
        with Seen() as recorder, warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            found = getattr(x, name)
            if type(attribute) is not types.GetSetDescriptorType:
                found()
            answered = True
        if answered and not recorder.count:
            unseen.append(name)
    assert unseen == []


def test_layers_that_define_functions_of_one_code_take_turns(monkeypatch):
    bind, recorded = importlib.import_module("saccade.scores.bind"), []
    trace_function = bind.trace_function
    tables = [torch.tensor([0.5, 0.25]) * i for i in range(6)]
    for turn in range(4):
        for table in tables:
            if turn == 3:
                monkeypatch.setattr(bind, "trace_function", lambda *of: recorded.append(of) or trace_function(*of))
            fn = a_closure(2.0, table)
            torch.testing.assert_close(attention(*rows(), score_mod=fn), meaning(fn))
    assert not recorded


def test_a_tensor_with_operations_of_its_own_is_refused():
    class Tripled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            found = super().__torch_function__(func, types, args, kwargs)
            return found * 3 if func is torch.Tensor.__getitem__ else found

    table = torch.ones(H).as_subclass(Tripled)
    with pytest.raises(ValueError, match="Tripled has a __torch_function__ of its own"):
        attention(*rows(), score_mod=lambda score, b, h, q_idx, kv_idx: score * table[h])


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_rows_of_tensors_that_a_compiled_region_is_given(dynamic):
    """Their lengths are constants of a program, whatever torch.compile makes of sizes."""

    def call(q, k, v, x):
        return attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (x[i] - x[j]).pow(2).sum(-1))

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, width in ((12, 5), (20, 5), (20, 3)):
        q, k, v = (torch.randn(1, 2, n, 8) for _ in range(3))
        x = torch.randn(n, width, requires_grad=True)
        found, wanted = compiled(q, k, v, x), call(q, k, v, x)
        torch.testing.assert_close(found, wanted)
        gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, wanted))
        torch.testing.assert_close(*gradients)
