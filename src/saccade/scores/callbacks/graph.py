"""The graph that callbacks build with cuDNN's operations. It records what they call, and computes nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.lazily import lazily
from saccade.scores.callbacks.operations import OPERATIONS, computed
from saccade.scores.score_mod import Named


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

    def __init__(self, graph: Graph, place: int, rows: bool) -> None:
        self._graph, self._place, self._rows = graph, place, rows

    def set_data_type(self, value: Any) -> Node:
        """Sets the type that the value is converted to.

        Raises:
            ValueError: a type that scores cannot have.
        """
        steps = self._graph._steps
        if steps[self._place].name in _INPUTS:
            raise ValueError("the score and the tensors of a callback keep the types that they have")
        steps[self._place] = steps[self._place]._replace(result_type=_typed(value))
        return self

    def get_data_type(self) -> data_type:
        return self._graph._steps[self._place].result_type

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
            f"values of a score callback's graph have no {name}: a recording serves every shape, and a value has "
            "set_data_type, get_data_type and set_name; operations are called on the graph, as graph.mul(a=…, b=…)"
        )


class Graph:
    """cuDNN's pointwise operations by their names, tensors by position or by cuDNN's keywords.

    All of them take `compute_data_type` and `name`. `gen_index(input, axis)` is the index of batch row, query head,
    query or key, for axis 0 to 3.

    Raises:
        AttributeError: an operation that is not pointwise.
        TypeError: arguments that the operation does not have.
        ValueError: a value of another graph, such as one kept from a callback's last recording.
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
        step = GraphStep(name, tuple(x._place for x in nodes), tuple(attributes), compute)
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
class CallbackRecording(Named):
    """A callback's graph as a function of tiles: `(score, b, h, q_idx, kv_idx, *tensors) -> score`, with the gradient
    first where one is among its inputs. Equal recordings compute the same."""

    name: str
    steps: tuple[GraphStep, ...]
    """The steps that the last one needs."""
    derivative: bool

    @lazily
    def _hash(self) -> int:
        return hash((self.name, self.steps, self.derivative))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def of(name: str, output: Any, derivative: bool) -> CallbackRecording:
        """The steps that a callback's result needs.

        Raises:
            TypeError: the callback returned something else.
        """
        if not isinstance(output, Node):
            raise TypeError(f"the callback {name} must return a value of its graph, got {output!r}")
        steps, needed = output._graph._steps, {output._place}
        for place in reversed(range(output._place + 1)):
            if place in needed:
                needed.update(steps[place].inputs)
        order = sorted(needed)
        needed_steps = (steps[place]._replace(inputs=tuple(map(order.index, steps[place].inputs))) for place in order)
        return CallbackRecording(name, tuple(needed_steps), derivative)

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
                    inputs = [values[place] for place in step.inputs]
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
