"""The graph that callbacks build with cuDNN's operations. It records what they call, and computes nothing.

What a callback may compute is each operation of cuDNN's graphs, with its arguments, in torch. Source: the pointwise
operations of cuDNN's frontend, https://docs.nvidia.com/cudnn/operations/Pointwise
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.scores.score_mod import Named
from saccade.util.caches import cached_attribute

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


class data_type(enum.Enum):
    """cuDNN's names of the types that values may have. FLOAT, and what has no type, is the scores' own precision:
    float32, and float64 for float64 inputs."""

    NOT_SET = None
    BOOLEAN = torch.bool
    HALF = torch.float16
    BFLOAT16 = torch.bfloat16
    FLOAT = torch.float32
    DOUBLE = torch.float64
    INT32 = torch.int32
    INT64 = torch.int64


class GraphStep(NamedTuple):
    """One operation, or an input: `score`, `gradient`, `tensor`, `number`, `gen_index`."""

    name: str
    inputs: tuple[int, ...] = ()
    """Places of earlier steps."""
    attributes: tuple[Any, ...] = ()
    computed: data_type = data_type.NOT_SET
    result_type: data_type = data_type.NOT_SET


class Node:
    """A value of the graph, as a callback sees it."""

    def __init__(self, graph: Graph, index: int, rows: bool) -> None:
        self._graph, self._index, self._rows = graph, index, rows

    def set_data_type(self, value: Any) -> Node:
        """Sets the type that the value is converted to. Raises ValueError for a type that scores cannot have."""
        steps = self._graph._steps
        if steps[self._index].name in _INPUTS:
            raise ValueError("the score and the tensors of a callback keep the types that they have")
        steps[self._index] = steps[self._index]._replace(result_type=_typed(value))
        return self

    def get_data_type(self) -> data_type:
        return self._graph._steps[self._index].result_type

    def set_name(self, value: str) -> Node:
        return self

    def set_is_virtual(self, value: bool) -> Node:
        return self.set_output(not value)

    def set_output(self, value: bool) -> Node:
        if value:
            raise ValueError("a score callback has one output, the value that it returns")
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"values of a score callback's graph have no {name}: a trace serves every shape, and a value has "
            "set_data_type, get_data_type and set_name; operations are called on the graph, as graph.mul(a=…, b=…)"
        )


class Graph:
    """cuDNN's pointwise operations by their names, tensors by position or by cuDNN's keywords.

    All of them take `compute_data_type` and `name`. `gen_index(input, axis)` is the index of batch row, query head,
    query or key, for axis 0 to 3.

    Raises:
        AttributeError: an operation that is not pointwise.
        TypeError: arguments that the operation does not have.
        ValueError: a value of another graph, such as one kept from a callback's last trace.
    """

    def __init__(self) -> None:
        self._steps: list[GraphStep] = []

    def __getattr__(self, name: str) -> Callable[..., Node]:
        if name.startswith("_") or name not in OPERATIONS:
            raise AttributeError(f"a score callback's graph has no operation {name}; it has {', '.join(dir(self))}")
        return lambda *tensors, **keywords: self._operation(name, tensors, keywords)

    def __dir__(self) -> list[str]:
        return [*OPERATIONS, "gen_index", "tensor_scalar"]

    def gen_index(self, input: Any, axis: int, compute_data_type: Any = None, name: str = "") -> Node:
        """The index along an axis of (b, h, q, kv), an integer."""
        if axis not in range(4):
            raise ValueError(f"gen_index takes an axis from 0 to 3, of (b, h, q, kv), got {axis!r}")
        if not self._taken("gen_index", input)._rows:
            raise ValueError("gen_index takes the score, or a value made of it: indices are those of scores")
        return self._added(GraphStep("gen_index", (), (axis,), _typed(compute_data_type)), True)

    def tensor_scalar(self, value: float, scalar_type: Any = None) -> Node:
        """A constant, whatever cuDNN's scalar_type says of how it is kept."""
        return self._added(GraphStep("number", (), (value, repr(value))), False)  # 0.0, -0.0 and 0 differ

    def _operation(self, name: str, tensors: tuple[Any, ...], keywords: dict[str, Any]) -> Node:
        operation = OPERATIONS[name]
        compute = _typed(keywords.pop("compute_data_type", None))
        keywords.pop("name", None)
        takes = (*operation.arguments, *(attribute for attribute, _ in operation.attributes))
        arguments = dict(zip(takes, tensors, strict=False))
        doubled = arguments.keys() & keywords.keys()
        arguments |= keywords
        if len(tensors) > len(takes) or doubled or arguments.keys() - set(takes):
            raise TypeError(f"{name} takes {', '.join(takes)}, got {len(tensors)} by position and {sorted(keywords)}")
        attributes = []
        for attribute, default in operation.attributes:
            value = default if arguments.get(attribute) is None else arguments[attribute]
            if value is None:
                raise TypeError(f"{name} needs {attribute}")
            attributes.append(float(value))
        if missing := [argument for argument in operation.arguments if argument not in arguments]:
            raise TypeError(f"{name} needs {', '.join(missing)}")
        nodes = [self._taken(name, arguments[argument]) for argument in operation.arguments]
        step = GraphStep(name, tuple(x._index for x in nodes), tuple(attributes), compute)
        return self._added(step, any(x._rows for x in nodes))

    def _taken(self, name: str, x: Any) -> Node:
        if isinstance(x, Tensor):
            raise TypeError(
                f"{name} takes values of the graph, got a tensor {tuple(x.shape)}: pass it in the dictionary of "
                "tensors, and read it there by its name"
            )
        if isinstance(x, (int, float)):
            return self.tensor_scalar(x)
        if not isinstance(x, Node):
            raise TypeError(f"{name} takes values of the graph, got {x!r}")
        if x._graph is not self:
            raise ValueError(
                f"{name} was given a value of another graph: score_mod is recorded anew before score_mod_bprop, in one "
                "graph, and what it keeps holds until then"
            )
        return x

    def _added(self, step: GraphStep, rows: bool) -> Node:
        self._steps.append(step)
        return Node(self, len(self._steps) - 1, rows)

    def _input(self, name: str, *attributes: Any, result_type: data_type = data_type.NOT_SET) -> Node:
        return self._added(GraphStep(name, (), attributes, result_type=result_type), name != "tensor")


_INPUTS = ("score", "gradient", "tensor")


@dataclass(frozen=True)
class CallbackGraph(Named):
    """A callback's graph as a function of tiles: `(score, b, h, q_idx, kv_idx, *tensors) -> score`, with the gradient
    first where one is among its inputs. Equal traces compute the same."""

    name: str
    steps: tuple[GraphStep, ...]
    """The steps that the last one needs."""
    derivative: bool

    @cached_attribute
    def _hash(self) -> int:
        return hash((self.name, self.steps, self.derivative))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def of(name: str, output: Any, derivative: bool) -> CallbackGraph:
        """The steps that a callback's result needs. Raises TypeError if the callback returned something else."""
        if not isinstance(output, Node):
            raise TypeError(f"the callback {name} must return a value of its graph, got {output!r}")
        steps, needed = output._graph._steps, {output._index}
        for number in reversed(range(output._index + 1)):
            if number in needed:
                needed.update(steps[number].inputs)
        order = sorted(needed)
        needed_steps = (
            steps[number]._replace(inputs=tuple(map(order.index, steps[number].inputs))) for number in order
        )
        return CallbackGraph(name, tuple(needed_steps), derivative)

    def __call__(self, *arguments: Tensor) -> Tensor:
        gradient, arguments = arguments[0], arguments[self.derivative :]
        score, b, h, q_idx, kv_idx, *tensors = arguments
        at = b, h, q_idx, kv_idx
        wide = torch.float64 if score.dtype == torch.float64 else torch.float32
        values: list[Tensor] = []
        for step in self.steps:
            match step.name:
                case "score":
                    value = score
                case "gradient":
                    value = gradient
                case "tensor":
                    value = _read(tensors[step.attributes[0]], at)
                case "number":
                    x = step.attributes[0]
                    value = score.new_full((), x, dtype=torch.tensor(x, device="cpu").dtype)
                case "gen_index":
                    value = at[step.attributes[0]]
                case _:
                    integral = step.computed in (data_type.INT32, data_type.INT64)
                    inputs = [values[index] for index in step.inputs]
                    value = computed(step.name, inputs, step.attributes, integral, wide)
            values.append(value if step.name in _INPUTS else _converted(value, step.result_type, wide))
        return values[-1].to(wide)


def _read(t: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """The element that belongs to a score, of a tensor that broadcasts to (b, h, s_q, s_k)."""
    if not t.dim():
        return t
    zero = torch.zeros_like(at[0])  # of b's shape, so that the read has no larger one than the tensor asks for
    return t[tuple(zero if n == 1 else i for i, n in zip(at[4 - t.dim() :], t.shape, strict=True))]


def _converted(x: Tensor, target: data_type, wide: torch.dtype) -> Tensor:
    if target == data_type.NOT_SET:
        return x
    dtype: Any = wide if target in (data_type.FLOAT, data_type.DOUBLE) else target.value
    integral = not x.is_floating_point() and x.dtype != torch.bool
    if x.dtype == dtype or (integral and target in (data_type.INT32, data_type.INT64)):
        return x
    return x != 0 if dtype == torch.bool else x.to(dtype)


def _typed(value: Any) -> data_type:
    """One of ours, of cuDNN's own, or of torch's."""
    if value is None or isinstance(value, data_type):
        return value or data_type.NOT_SET
    name = str(getattr(value, "name", ""))
    if name in data_type.__members__:
        return data_type[name]
    if isinstance(value, torch.dtype) and value in {x.value for x in data_type}:
        return data_type(value)
    raise ValueError(f"scores have the types {', '.join(data_type.__members__)}, not {value!r}")
