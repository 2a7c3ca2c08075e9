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
    def forward(self, x: Tensor, stage: str) -> Tensor: ...

    @abstractmethod
    def backward(self, dy: Tensor, stage: str) -> Tensor: ...

    @abstractmethod
    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        """That of the result of a tensor of this shape."""

    def __call__(self, x: Tensor, stage: str) -> Tensor:
        return torch.ops.saccade_distributed.exchange(x, self.name, stage)

    def adjoint(self, dy: Tensor, stage: str) -> Tensor:
        return torch.ops.saccade_distributed.exchange_back(dy, self.name, stage)


_exchanges: WeakValueDictionary[str, Exchange] = WeakValueDictionary()

library = torch.library.Library("saccade_distributed", "DEF")
library.define("exchange(Tensor x, str exchange, str stage) -> Tensor")
library.define("exchange_back(Tensor dy, str exchange, str stage) -> Tensor")


def _forward(x: Tensor, exchange: str, stage: str) -> Tensor:
    return _exchanges[exchange].forward(x, stage)


def _backward(dy: Tensor, exchange: str, stage: str) -> Tensor:
    return _exchanges[exchange].backward(dy, stage)


def _fake_forward(x: Tensor, exchange: str, stage: str) -> Tensor:
    return x.new_empty(_exchanges[exchange].shape(tuple(x.shape), False))


def _fake_backward(dy: Tensor, exchange: str, stage: str) -> Tensor:
    return dy.new_empty(_exchanges[exchange].shape(tuple(dy.shape), True))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, name, ctx.stage = inputs
    ctx.exchange = _exchanges[name]  # which lives as long as the graph


def _forward_gradient(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return ctx.exchange.adjoint(dy, _back(ctx.stage)), None, None


def _backward_gradient(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    return ctx.exchange(dx, _back(ctx.stage)), None, None


def _back(stage: str) -> str:
    return f"the backward of {stage}"


for _name, _kernel, _fake, _gradient in (
    ("exchange", _forward, _fake_forward, _forward_gradient),
    ("exchange_back", _backward, _fake_backward, _backward_gradient),
):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"saccade_distributed::{_name}", _fake, lib=library)
    torch.library.register_autograd(f"saccade_distributed::{_name}", _gradient, setup_context=_setup, lib=library)
