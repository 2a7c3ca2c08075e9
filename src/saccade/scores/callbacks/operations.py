"""What a callback in cuDNN's manner may compute: each operation of its graphs, with its arguments, in torch.

Source: the pointwise operations of cuDNN's frontend, https://docs.nvidia.com/cudnn/operations/Pointwise
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


class Operation(NamedTuple):
    """One kind of step."""

    arguments: tuple[str, ...]
    """The names of its tensors, in their order."""
    numbers: str
    """Types of its tensors: `real`, floats; `whole`, integers where all of them are, else floats; `bool`."""
    value: Callable[..., Tensor]
    attributes: tuple[tuple[str, float | None], ...] = ()
    """Names of the Python numbers that it takes, with their defaults; None: required."""


def _mask(x: Tensor) -> Tensor:
    return x if x.dtype == torch.bool else x != 0


def _select(input0: Tensor, input1: Tensor, mask: Tensor) -> Tensor:
    return torch.where(_mask(mask), input0, input1)


def _swish(x: Tensor, swish_beta: float) -> Tensor:
    return x * torch.sigmoid(swish_beta * x)


def _relu(x: Tensor, negative_slope: float, lower_clip: float, upper_clip: float) -> Tensor:
    above = torch.where(x >= upper_clip, upper_clip, x) if upper_clip < math.inf else x
    below = lower_clip + negative_slope * (x - lower_clip) if negative_slope else lower_clip
    return torch.where(x <= lower_clip, below, above)


def _relu_slope(x: Tensor, negative_slope: float, lower_clip: float, upper_clip: float) -> Tensor:
    above = torch.where(x >= upper_clip, 0.0, torch.ones_like(x)) if upper_clip < math.inf else torch.ones_like(x)
    return torch.where(x <= lower_clip, negative_slope, above)


def _gelu_slope(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    t = torch.tanh(_SQRT_2_OVER_PI * (x + _CUBIC * x * x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _SQRT_2_OVER_PI * (1 + 3 * _CUBIC * x * x)


def _swish_slope(x: Tensor, swish_beta: float) -> Tensor:
    s = torch.sigmoid(swish_beta * x)
    return s + swish_beta * x * s * (1 - s)


def _times(slope: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda loss, x, *attributes: loss * slope(x, *attributes)


_CLIPS = (("negative_slope", 0.0), ("lower_clip", 0.0), ("upper_clip", math.inf))
_LEAK = (("negative_slope", None),)
_BETA = (("swish_beta", 1.0),)


def _unary(numbers: str, **values: Callable[..., Tensor]) -> dict[str, Operation]:
    return {name: Operation(("input",), numbers, value) for name, value in values.items()}


def _binary(numbers: str, arguments: tuple[str, str], **values: Callable[..., Tensor]) -> dict[str, Operation]:
    return {name: Operation(arguments, numbers, value) for name, value in values.items()}


def _of_torch(names: str) -> dict[str, Callable[..., Tensor]]:
    """Operations that torch has by the same name."""
    return {name: getattr(torch, name) for name in names.split()}


OPERATIONS: dict[str, Operation] = {
    **_unary("whole", identity=lambda x: x, **_of_torch("abs neg")),
    **_unary("real", **_of_torch("ceil cos erf exp floor log reciprocal rsqrt sigmoid sin sqrt tanh")),
    **_unary("real", elu=F.elu, gelu=F.gelu, softplus=F.softplus, tan=lambda x: torch.sin(x) / torch.cos(x)),
    **_unary("real", gelu_approx_tanh=lambda x: F.gelu(x, approximate="tanh")),
    **_unary("bool", **_of_torch("logical_not")),
    **_binary("whole", ("a", "b"), add_square=lambda a, b: a + b * b, **_of_torch("add mul sub")),
    **_binary("real", ("a", "b"), **_of_torch("div")),
    **_binary("bool", ("a", "b"), **_of_torch("logical_and logical_or")),
    **_binary("whole", ("input0", "input1"), max=torch.maximum, min=torch.minimum, mod=torch.fmod),
    **_binary("real", ("input0", "input1"), **_of_torch("pow")),
    **_binary(
        "whole",
        ("input", "comparison"),
        cmp_neq=torch.ne,
        **{f"cmp_{name}": value for name, value in _of_torch("eq ge gt le lt").items()},
    ),
    "bias": Operation(("input", "bias"), "whole", torch.add),
    "scale": Operation(("input", "scale"), "whole", torch.mul),
    "binary_select": Operation(("input0", "input1", "mask"), "whole", _select),
    "relu": Operation(("input",), "real", _relu, _CLIPS),
    "leaky_relu": Operation(("input",), "real", lambda x, slope: torch.where(x > 0, x, slope * x), _LEAK),
    "swish": Operation(("input",), "real", _swish, _BETA),
    **_binary(
        "real",
        ("loss", "input"),
        elu_backward=_times(lambda x: torch.where(x > 0, torch.ones_like(x), torch.exp(x))),
        gelu_backward=_times(_gelu_slope),
        gelu_approx_tanh_backward=_times(_gelu_tanh_slope),
        sigmoid_backward=_times(lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x))),
        softplus_backward=_times(torch.sigmoid),
        tanh_backward=_times(lambda x: 1 - torch.tanh(x) * torch.tanh(x)),
    ),
    "relu_backward": Operation(("loss", "input"), "real", _times(_relu_slope), _CLIPS),
    "leaky_relu_backward": Operation(
        ("loss", "input"), "real", _times(lambda x, slope: torch.where(x > 0, torch.ones_like(x), slope)), _LEAK
    ),
    "swish_backward": Operation(("loss", "input"), "real", _times(_swish_slope), _BETA),
}


def computed(name: str, tensors: list[Tensor], attributes: tuple[float, ...], integral: bool, wide: Any) -> Tensor:
    """The value of one step; floats are computed in the dtype `wide`. With `integral`, floats become integers first,
    and quotients are cut off."""
    operation = OPERATIONS[name]
    if operation.numbers == "bool":
        return operation.value(*map(_mask, tensors))
    if integral and name != "binary_select":
        tensors = [x.to(torch.int64) if x.is_floating_point() else x for x in tensors]
        if name == "div":
            return torch.div(*tensors, rounding_mode="trunc")
    first = tensors[:2] if name == "binary_select" else tensors
    whole = operation.numbers == "whole" and all(not x.is_floating_point() and x.dtype != torch.bool for x in first)
    if not whole and not (name in BOOLEAN and all(x.dtype == torch.bool for x in first)):
        first = [x if x.dtype == wide else x.to(wide) for x in first]
    return operation.value(*first, *tensors[len(first) :], *attributes)


BOOLEAN = frozenset(("cmp_eq", "cmp_neq", "binary_select", "identity"))
"""Operations that take what is true or false as it is."""
