"""Operations as kernels are to compute them: arguments that nothing ignores, and integers of every width."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from saccade import alibi, attention, compose, mask_mod
from saccade.scores import bind
from saccade.scores.codegen.emitter import Arguments, EmitOptions
from saccade.scores.codegen.linear import linear_source
from saccade.scores.codegen.source import value_source
from saccade.scores.tracing.tape import Refused
from saccade.testing.accuracy import check
from tests.support import scores as functions
from tests.support.scores import ARGUMENTS, MASKS, WRAPPING

aten = torch.ops.aten


def operands(s: int = 40) -> list[torch.Tensor]:
    return [torch.randn(1, h, s, 16) for h in (2, 1, 1)]


def written(function, *, linear: bool = False) -> str | None:
    bound: Any = bind(function, torch.zeros(1))
    program = bound.program
    options = EmitOptions(tuple(False for _ in program.ranks))
    return linear_source(program, options) if linear else value_source(program, options)


@pytest.fixture
def captured_there(device, monkeypatch):
    """What the functions capture, on the device."""
    for name in ("KINDS", "MANY", "FAR"):
        monkeypatch.setattr(functions, name, getattr(functions, name).to(device.type))


@pytest.mark.usefixtures("captured_there")
@pytest.mark.parametrize("name", [*WRAPPING, *ARGUMENTS])
def test_scores(name, device):
    """All but reads of uint32 on a GPU, which torch, and so the oracle, has on CPUs alone."""
    if name == "uint32" and device.type == "cuda":
        return
    function = (WRAPPING | ARGUMENTS)[name]
    check(*device.operands(s_q=40, s_k=40), score_mod=function, backend=device.backend).assert_ok()
    assert device.name != "cpu" or written(function)


@pytest.mark.usefixtures("captured_there")
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, device):
    check(*device.operands(s_q=40, s_k=40), mask=mask_mod(MASKS[name]), backend=device.backend).assert_ok()


@pytest.mark.parametrize(
    ("target", "given", "left"),
    [
        (aten.round.decimals, {"decimals": 2}, "round with decimals=2"),
        (aten.gelu.default, {"approximate": "tanh"}, "gelu with approximate=tanh"),
        (aten.elu.default, {"scale": 2}, "elu with scale=2"),
    ],
)
def test_arguments_that_nothing_takes_are_refused(target, given, left):
    graph = fx.Graph()
    node = graph.call_function(target, (graph.placeholder("x"),), given)
    arguments = Arguments(node)
    assert arguments.first(1) == list(node.args)
    with pytest.raises(Refused, match=left):
        arguments.end()
    arguments.option(next(iter(given)), None)
    arguments.end()


def test_defaults_are_not_left():
    graph = fx.Graph()
    x = graph.placeholder("x")
    arguments = Arguments(graph.call_function(aten.sub.Tensor, (x, 3), {"alpha": 1}))
    assert arguments.first(2) == [x, 3]
    arguments.end()
    assert Arguments(graph.call_function(aten.clamp.default, (x, None, 3))).first(3) == [x, None, 3]
    assert Arguments(graph.call_function(aten.clamp.default, (x, 1))).first(3) == [x, 1]


@pytest.mark.parametrize("operand", ["score", "kv_idx"])
def test_more_positions_than_a_formula_has_are_refused(operand):
    graph = fx.Graph()
    arguments = Arguments(graph.call_function(aten.leaky_relu.default, (graph.placeholder(operand), 0.3)))
    arguments.first(1)
    with pytest.raises(Refused, match="negative_slope"):
        arguments.end()


def test_indices_of_32_bits_cost_what_those_of_64_do():
    for function in (
        lambda s, b, h, i, j: s * (i - j).abs() + (i - j + 7) // 3 + (i << 2) + (~i & 255),
        lambda s, b, h, i, j: (
            s * (i.int() - j.int()).abs() + (i.int() - j.int() + 7) // 3 + (i.int() << 2) + (~i & 255)
        ),
    ):
        text = written(function)
        assert text
        assert ".to(tl.int" not in text
        assert "widened" not in text


def test_only_what_does_not_wrap_is_linear():
    assert written(lambda s, b, h, i, j: s + (j.int() - i.int()) * 0.5, linear=True)
    assert not written(lambda s, b, h, i, j: s + (j.int() * 100000000) * 0.5, linear=True)
    assert not written(lambda s, b, h, i, j: s + (j * 20).to(torch.int8) * 0.5, linear=True)


def test_narrow_distances_are_no_window():
    """The distance of 200 is -56 in eight bits."""
    q, k, v = operands(300)
    for dtype in (torch.int8, torch.int16, torch.int32):

        def near(s, b, h, i, j, dtype=dtype):
            return torch.where((i - j).to(dtype) >= 0, s, -torch.inf)

        check(q, k, v, score_mod=near, backend="cpu").assert_ok()


def test_refusals_name_the_function():
    q, k, v = operands()
    far = torch.zeros(40, dtype=torch.uint64)
    for function, told in (
        (lambda s, b, h, i, j: s + far[j].float(), "uint64"),
        (lambda s, b, h, i, j: s + (j * j).to(torch.uint32).float(), "uint32"),
    ):
        with pytest.raises(Refused, match=told):
            written(function)
    with pytest.raises(ValueError, match=r"add_ writes in place"):
        attention(q, k, v, score_mod=lambda s, b, h, i, j: s.add_(1))


ROWS = torch.randint(1, 9, (40, 3), generator=torch.Generator().manual_seed(2))
QUOTIENTS = {
    "% number": lambda s, b, h, i, j: j % 8,
    "// number": lambda s, b, h, i, j: i // 3,
    "% index": lambda s, b, h, i, j: i % (j + 1),
    "number //": lambda s, b, h, i, j: 100 // (j + 1),
    "% table": lambda s, b, h, i, j: (i - j) % ROWS[j, 0],
    "fmod": lambda s, b, h, i, j: torch.fmod(i, ROWS[j, 1]),
    "remainder of rows": lambda s, b, h, i, j: (ROWS[i] % ROWS[j]).sum(-1),
    "place": lambda s, b, h, i, j: ROWS[j % 40, i % 3],
    "floor": lambda s, b, h, i, j: torch.div(i, ROWS[j, 2], rounding_mode="floor"),
}
"""Integers whose divisors no trace knows."""


@pytest.mark.parametrize("name", [*QUOTIENTS, *WRAPPING, *ARGUMENTS])
def test_the_dtype_of_a_result(name):
    """A function may ask for it before the trace ends, whatever was computed."""
    function: Any = (QUOTIENTS | WRAPPING | ARGUMENTS)[name]
    asked = []

    def converted(s, b, h, i, j):
        result = function(s, b, h, i, j)
        asked.append(result.dtype)
        return s + result.to(result.dtype) * 0.01

    s, at = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int64)
    bind(converted, torch.zeros(1))
    assert asked == [function(s, *[at] * 4).dtype] * len(asked)


def converted(s, b, h, i, j):
    return s + (j % 8).to((i // 3).dtype) * 0.1


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_quotients_before_a_dtype(backend):
    def score_after(s, b, h, i, j):
        return s + (j % 8) * 0.1

    mask, slopes = mask_mod(lambda b, h, i, j: (j % 4).to((i % 4).dtype) <= i), torch.rand(2)
    q, k, v = operands()
    right = attention(q, k, v, mask=mask, score_mod=score_after, backend="reference")
    torch.testing.assert_close(attention(q, k, v, mask=mask, score_mod=converted, backend=backend), right)
    for score_mod in compose(score_after, alibi(slopes)), compose(alibi(slopes), score_after):
        check(q, k, v, score_mod=score_mod, backend=backend).assert_ok()


def test_quotients_before_a_dtype_compiled():
    q, k, v = operands()
    compiled = torch.compile(lambda *rows: attention(*rows, score_mod=converted), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, score_mod=converted))
