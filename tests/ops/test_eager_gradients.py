"""Eager calls with gradients, which pass by the dispatcher: what others do to the tensors that a backward saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from saccade import Dense, Packed, attention, causal, interval

TABLE = torch.randn(2, 7, generator=torch.Generator().manual_seed(1))
LAYOUTS: dict[str, Callable[[], Any]] = {
    "dense": Dense,
    "padded": lambda: Dense("bshd", torch.tensor([5, 3], dtype=torch.int32), torch.tensor([6, 2], dtype=torch.int32)),
    "packed": lambda: Packed.from_lengths([4, 0, 3]),
}
SHAPES = {"dense": (2, 2, 7, 8), "padded": (2, 7, 2, 8), "packed": (7, 2, 8)}


def leaves(layout: str) -> list[Tensor]:
    torch.manual_seed(3)
    operands = [torch.randn(SHAPES[layout], dtype=torch.float64) for _ in range(3)]
    return [x.requires_grad_() for x in (*operands, torch.randn(2, dtype=torch.float64), TABLE.double())]


def call(layout: str, *tensors: Tensor, backend: str = "auto") -> Tensor:
    q, k, v, sink, table = tensors
    mask = causal() & interval(torch.tensor([[1]]), None)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h, kv_idx % 7]

    out, lse = attention(
        q, k, v, mask=mask, score_mod=score_mod, sink=sink, layout=LAYOUTS[layout](), return_lse=True, backend=backend
    )
    return out.square().sum() + lse.clamp(min=-10).sum()


def checkpointed(use_reentrant: bool) -> Callable[..., Tensor]:
    return lambda layout, *tensors: checkpoint(call, layout, *tensors, use_reentrant=use_reentrant)  # pyright: ignore[reportReturnType]


def within(context: Callable[[], Any]) -> Callable[..., Tensor]:
    def run(layout: str, *tensors: Tensor) -> Tensor:
        with context():
            return call(layout, *tensors)

    return run


WAYS = {
    "plain": within(contextlib.nullcontext),
    "copies": within(lambda: saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone())),
    "numpy": within(lambda: saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy)),
    "save_on_cpu": within(save_on_cpu),
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
}


@pytest.mark.parametrize("layout", SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients(way: str, layout: str) -> None:
    """Those of the reference, whoever keeps the saved tensors."""
    given, own = leaves(layout), leaves(layout)
    WAYS[way](layout, *given).backward()
    call(layout, *own, backend="reference").backward()
    for x, y in zip(given, own, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("number", range(5))
def test_writes_before_the_backward_are_refused(number: int) -> None:
    given = leaves("dense")
    result = call("dense", *given)
    with torch.no_grad():
        given[number].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_second_derivatives_are_refused() -> None:
    q = leaves("dense")[0]
    out = attention(q, q, q, mask=causal())
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives in reverse mode alone"):
        gradient.sum().backward()
