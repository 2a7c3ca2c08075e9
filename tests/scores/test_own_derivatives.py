"""Derivatives that a function of the score says itself: Functions, no_grad and detach, eager and compiled."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import attention

HOW = {
    "eager": lambda call: call,
    "compiled": lambda call: torch.compile(call, backend="aot_eager", fullgraph=True),
    "with breaks": lambda call: torch.compile(call, backend="aot_eager"),
}


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, g, 0.0)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -g * ctx.by, None


class Turned(torch.autograd.Function):
    """Its result is its argument itself."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return -g


class Constant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx, g):
        return g * 100


class Graded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.clamp(-0.1, 0.1)


class Scaled(torch.autograd.Function):
    """With a setup_context, and two arguments that have a derivative."""

    @staticmethod
    def forward(x, by):
        return (x * by).round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, by = ctx.saved_tensors
        return g * by, g * x


class Outer(torch.autograd.Function):
    """Its forward calls another."""

    @staticmethod
    def forward(ctx, x):
        return StraightThrough.apply(x) * 2

    @staticmethod
    def backward(ctx, g):
        return g * 5


class Inner(torch.autograd.Function):
    """Its backward calls another, and adds to zeros."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return torch.zeros_like(g) + Reversed.apply(g, 2.0)


class Shifted(Cut):
    @staticmethod
    def backward(ctx, g):
        return torch.ones_like(g) + g


class Stepped(Cut):
    """By a division that rounds."""

    @staticmethod
    def backward(ctx, g):
        return torch.div(g, 0.25, rounding_mode="floor")


class Whole(Cut):
    """By a conversion that truncates."""

    @staticmethod
    def backward(ctx, g):
        return g.to(torch.int64).to(g.dtype)


def no_gradient(s, b, h, i, j):
    with torch.no_grad():
        y = s * 2
    return s + y


def no_gradient_of_a_function(s, b, h, i, j):
    with torch.no_grad():
        y = Graded.apply(s)
    return s + y


def no_gradient_of_itself(s, b, h, i, j):
    """What torch returns as it is keeps its derivative."""
    with torch.no_grad():
        y = (+s).to(torch.float64).contiguous().double()
    return s * y


class Needed(torch.autograd.Function):
    """Of integers and of captured tensors that need none a gradient is not asked for."""

    @staticmethod
    def forward(ctx, x, y, z):
        ctx.save_for_backward(x)
        return x * y * z

    @staticmethod
    def backward(ctx, g):
        return g * sum((3, 5, 7)[i] for i in range(3) if ctx.needs_input_grad[i]), None, None


def some_gradient(s, b, h, i, j):
    with torch.no_grad():
        y = s * 2
        with torch.enable_grad():
            z = s.sin()
    return s + y + z


OWN = {
    "straight through": lambda s, b, h, i, j: StraightThrough.apply(s * 1.5),
    "reversed": lambda s, b, h, i, j: Reversed.apply(s, 2.0),
    "turned": lambda s, b, h, i, j: Turned.apply(s) * 2,
    "constant": lambda s, b, h, i, j: Constant.apply(s) + s,
    "graded": lambda s, b, h, i, j: Graded.apply(s),
    "scaled": lambda s, b, h, i, j: Scaled.apply(s, s.sin()),
    "outer": lambda s, b, h, i, j: Outer.apply(s),
    "inner": lambda s, b, h, i, j: Inner.apply(s),
    "no_grad": no_gradient,
    "no_grad of a function": no_gradient_of_a_function,
    "no_grad of itself": no_gradient_of_itself,
    "needed": lambda s, b, h, i, j: Needed.apply(s, h + 1, torch.ones((), dtype=torch.float64)),
    "enable_grad": some_gradient,
    "detach": lambda s, b, h, i, j: s * s.detach() + s.data,
}


@pytest.fixture(autouse=True)
def _no_compiled_functions():
    torch._dynamo.reset()


def operands() -> list[Tensor]:
    return [torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3)]


def results(call: Any, *more: Tensor) -> list[Any]:
    """What a call returns, and its gradients."""
    torch.manual_seed(7)
    leaves = [x.detach().clone().requires_grad_() for x in (*operands(), *more)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OWN)
def test_own_derivatives(name, how):
    call = functools.partial(attention, score_mod=OWN[name])
    found = results(HOW[how](call))
    torch.testing.assert_close(found, results(functools.partial(call, backend="reference")))


@pytest.mark.parametrize("how", HOW)
def test_derivatives_of_captured_tensors(how):
    """By a Function of what is read by index, and by one of the tensor itself."""

    def call(q, k, v, table, backend="auto"):
        def fn(s, b, h, i, j):
            return s + StraightThrough.apply(table[h] * 3) + Reversed.apply(table, 2.0)[h]

        return attention(q, k, v, score_mod=fn, backend=backend)

    table = torch.tensor([0.2, 0.6], dtype=torch.float64)
    wanted = results(functools.partial(call, backend="reference"), table)
    torch.testing.assert_close(results(HOW[how](call), table), wanted)


class Product(Scaled):
    @staticmethod
    def forward(x, by):
        return x * by


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_derivatives_of_one_number(shape, how):
    """That a Function takes as it is, beside the score or an index."""

    def call(q, k, v, w, backend="auto"):
        def fn(s, b, h, i, j):
            return Product.apply(s, w) + Product.apply((i - j).abs().to(torch.float64), w * 2)

        if backend == "reference":
            given = w.reshape(())

            def fn(s, b, h, i, j):
                return s * given + (i - j).abs() * (given * 2)

        return attention(q, k, v, score_mod=fn, backend=backend)

    w = torch.full(shape, 1.3, dtype=torch.float64)
    wanted = results(functools.partial(call, backend="reference"), w)
    torch.testing.assert_close(results(HOW[how](call), w), wanted)


@pytest.mark.parametrize("name", ["jvp", "vjp"])
@pytest.mark.parametrize("how", HOW)
def test_transforms_of_values_are_refused(name, how):
    def fn(s, b, h, i, j):
        if name == "jvp":
            return torch.func.jvp(torch.sin, (s,), (s,))[1]
        return torch.func.vjp(torch.sin, s)[1](s)[0]

    with pytest.raises(Exception, match="where nothing sees it"):
        HOW[how](lambda q, k, v: attention(q, k, v, score_mod=fn))(*operands())


# Of an older name: where it is not seen, it must not get the derivative of what its forward does.
clip = StraightThrough.apply


def test_a_name_of_apply():
    for _ in range(2):
        with pytest.raises(ValueError, match=r"write Clip.apply\(score\)"):
            attention(*operands(), score_mod=lambda s, b, h, i, j: clip(s * 1.5))


@pytest.mark.parametrize("how", ["compiled", "with breaks"])
def test_a_name_of_apply_that_is_compiled(how):
    found = results(HOW[how](lambda q, k, v: attention(q, k, v, score_mod=lambda s, *_: clip(s * 1.5))))
    wanted = results(lambda q, k, v: attention(q, k, v, score_mod=OWN["straight through"], backend="reference"))
    torch.testing.assert_close(found, wanted)


def test_functions_of_others_are_compiled_as_before():
    results(lambda q, k, v: attention(q, k, v, score_mod=OWN["reversed"]))
    x = torch.randn(3, requires_grad=True)
    torch.compile(Outer.apply, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 5.0))


def test_a_function_that_is_not_given_what_it_uses():
    table = torch.randn(2, requires_grad=True)

    def by_closure(s, b, h, i, j):
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x[h] * s

            @staticmethod
            def backward(ctx, g):
                return g

        return Scaled.apply(table)

    for _ in range(2):
        with pytest.raises(ValueError, match="not among its arguments"):
            attention(*operands(), score_mod=by_closure)


_KEPT: list[Any] = []


class OfKept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * _KEPT[0]

    @staticmethod
    def backward(ctx, g):
        return g


def test_a_compiled_function_that_is_not_given_what_it_uses():
    def by_a_list(s, b, h, i, j):
        _KEPT[:] = [s]
        return OfKept.apply(torch.ones(()))

    with pytest.raises(Exception, match="not among its arguments"):
        HOW["compiled"](lambda q, k, v: attention(q, k, v, score_mod=by_a_list))(*operands())


def test_calls_inside_of_a_function():
    """Whose own arguments are nothing to a score function."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return attention(q, k, v, score_mod=OWN["straight through"])

        @staticmethod
        def backward(ctx, g):
            return g, None, None

    given = operands()
    right = attention(*given, score_mod=lambda s, b, h, i, j: (s * 1.5).round())
    for _ in range(2):
        torch.testing.assert_close(Layer.apply(*given), right)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("function", [Cut, Shifted, Stepped, Whole])
def test_a_backward_that_is_no_derivative(function, how):
    with pytest.raises(Exception, match="not linear"):
        HOW[how](lambda q, k, v: attention(q, k, v, score_mod=lambda s, b, h, i, j: function.apply(s)))(*operands())
