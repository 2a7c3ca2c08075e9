"""The operators of exchanges between ranks: opaque to torch.compile, each the derivative of the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from saccade.call import needs_gradient
from saccade.ops import vmap
from saccade.ops.autograd import SingleLevel, apply, below, forward_mode

_numbers = count()


class Exchange(ABC):
    """A linear map of the tensors of all ranks, and its adjoint. Called, it is differentiable; an operator knows it by
    its name."""

    def __init__(self, *sizes: int) -> None:
        """sizes: all that `shape` depends on besides its arguments. They are part of the name, as torch.compile keeps
        graphs on disk by what operators are given, for ranks and runs whose exchanges have other sizes."""
        self.name = " ".join(map(str, (next(_numbers), *sizes)))
        _exchanges[self.name] = self

    @abstractmethod
    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]: ...

    @abstractmethod
    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]: ...

    @abstractmethod
    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        """That of the result of a tensor of this shape."""

    def awaited(self, x: Tensor) -> Tensor:
        """Memory as that of the result, for checks that come before the exchange."""
        return x.new_empty(self.shape(tuple(x.shape), False))

    def __call__(self, stage: str, *xs: Tensor) -> list[Tensor]:
        return moved(self.name, stage, *xs)

    def adjoint(self, stage: str, *dys: Tensor) -> list[Tensor]:
        return torch.ops.saccade_distributed.exchange_back(dys, self.name, stage)


def moved(exchange: str, stage: str, *xs: Tensor) -> list[Tensor]:
    """The rows that an exchange, by its name, brings."""
    return torch.ops.saccade_distributed.exchange(xs, exchange, stage)


_exchanges: WeakValueDictionary[str, Exchange] = WeakValueDictionary()


def named(name: str) -> Exchange:
    return _exchanges[name]


library = torch.library.Library("saccade_distributed", "DEF")
library.define("exchange(Tensor[] xs, str exchange, str stage) -> Tensor[]")
library.define("exchange_back(Tensor[] dys, str exchange, str stage) -> Tensor[]")


def _forward(xs: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return _exchanges[exchange].forward(xs, stage)


def _backward(dys: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return _exchanges[exchange].backward(dys, stage)


def _fake_forward(xs: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return [x.new_empty(_exchanges[exchange].shape(tuple(x.shape), False)) for x in xs]


def _fake_backward(dys: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return [dy.new_empty(_exchanges[exchange].shape(tuple(dy.shape), True)) for dy in dys]


def met(name: str) -> None:
    """Compiled graphs keep an operator of which nobody reads, as a rank does of no rows: the others wait for it."""
    has_side_effect(getattr(torch.ops.saccade_distributed, name).default)


class _Moved(SingleLevel):
    """An operator, whose derivative is the other one: see `saccade.ops.autograd`."""

    @staticmethod
    def forward(operator: Any, exchange: str, stage: str, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(below(operator, list(xs), exchange, with_gradients(stage)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operator, name, ctx.stage = inputs[:3]
        ctx.exchange = _exchanges[name]  # which lives as long as the graph

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        operators = torch.ops.saccade_distributed
        forth = ctx.operator is operators.exchange.default
        other = operators.exchange_back if forth else operators.exchange
        return None, None, None, *other(list(dys), ctx.exchange.name, back(ctx.stage))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(ctx.operator(list(tangents[3:]), ctx.exchange.name, f"the tangents of {ctx.stage}"))


def _derivative(name: str) -> Any:
    def derivative(xs: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
        operator = getattr(torch.ops.saccade_distributed, name).default
        if not needs_gradient(*xs) and not forward_mode():
            return below(operator, xs, exchange, stage)
        return list(apply(_Moved, operator, exchange, stage, *xs))

    return derivative


def with_gradients(stage: str) -> str:
    """Ranks of which one has no backward are in different exchanges."""
    return f"{stage}, with gradients"


def back(stage: str) -> str:
    return f"the backward of {stage}"


def _batch_rule(name: str) -> Any:
    """Examples go with the rest of a row, as its last dimension."""

    def batched(info: Any, in_dims: Any, xs: list[Tensor], exchange: str, stage: str) -> tuple[list[Tensor], list[int]]:
        examples = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
            for x, dim in zip(xs, in_dims[0], strict=True)
        ]
        ys = getattr(torch.ops.saccade_distributed, name)(examples, exchange, stage)
        return [y.movedim(-1, 0) for y in ys], [0] * len(ys)

    return batched


for _name, _kernel, _fake in (
    ("exchange", _forward, _fake_forward),
    ("exchange_back", _backward, _fake_backward),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    library.impl(_name, _derivative(_name), "Autograd")
    torch.library.register_fake(f"saccade_distributed::{_name}", _fake, lib=library)
    met(_name)
    vmap.register(library, _name, _batch_rule(_name))
