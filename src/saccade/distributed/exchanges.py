"""The operators of exchanges between ranks: opaque to torch.compile, each the derivative of the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_numbers = count()


class Exchange(ABC):
    """A linear map of the tensors of all ranks, and its adjoint. Called, it is differentiable; an operator knows it by
    its name."""

    def __init__(self) -> None:
        self.name = str(next(_numbers))
        _exchanges[self.name] = self

    @abstractmethod
    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]: ...

    @abstractmethod
    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]: ...

    @abstractmethod
    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        """That of the result of a tensor of this shape."""

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


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, name, ctx.stage = inputs
    ctx.exchange = _exchanges[name]  # which lives as long as the graph


def _forward_gradient(ctx: Any, dys: list[Tensor]) -> tuple[Any, ...]:
    return ctx.exchange.adjoint(back(ctx.stage), *dys), None, None


def _backward_gradient(ctx: Any, dxs: list[Tensor]) -> tuple[Any, ...]:
    return ctx.exchange(back(ctx.stage), *dxs), None, None


def back(stage: str) -> str:
    return f"the backward of {stage}"


for _name, _kernel, _fake, _gradient in (
    ("exchange", _forward, _fake_forward, _forward_gradient),
    ("exchange_back", _backward, _fake_backward, _backward_gradient),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"saccade_distributed::{_name}", _fake, lib=library)
    torch.library.register_autograd(f"saccade_distributed::{_name}", _gradient, setup_context=_setup, lib=library)
