"""A Program's graphs as steps of cuDNN's pointwise operations.

Integers, which are indices and what is made of them, stay INT32; all else is FLOAT, as cuDNN's own masks have it.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from saccade.scores.callbacks.graph import Step, data_type
from saccade.scores.codegen.program import Program
from saccade.scores.recording.tape import TILE
from saccade.scores.recording.trace import name_of

FLOAT, INT32, BOOLEAN = data_type.FLOAT, data_type.INT32, data_type.BOOLEAN


class NoOperation(Exception):
    """Something that cuDNN's graphs cannot express; the message is a reason for `explain`."""


def lowered(program: Program, module: fx.GraphModule) -> tuple[Step, ...]:
    """The steps of one of a Program's graphs, of which the last is its first output.

    Raises:
        NoOperation: what cuDNN has no operation for.
    """
    return _Lowering(program).of(module)


def scaled(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """`gradient * value`, the value being that of the last step."""
    *rest, last = steps
    if _is(last, 1):
        return (Step("gradient"),)
    # Where a value is zero nothing is multiplied: it is the gradient that is selected.
    if last.name == "binary_select" and (zeros := [_is(rest[i], 0) for i in last.inputs[:2]]).count(True) == 1:
        value, zero = (last.inputs[i] for i in ((0, 1) if zeros[1] else (1, 0)))
        mask = last.inputs[2]
        if zeros[0]:
            rest.append(Step("logical_not", (mask,), (), BOOLEAN, BOOLEAN))
            mask = len(rest) - 1
        rest.append(Step("gradient"))
        if not _is(rest[value], 1):
            rest.append(Step("mul", (len(rest) - 1, value), (), FLOAT, FLOAT))
        return (*rest, Step("binary_select", (len(rest) - 1, zero, mask), (), FLOAT, FLOAT))
    return (*steps, Step("gradient"), Step("mul", (len(steps), len(steps) - 1), (), FLOAT, FLOAT))


def _is(step: Step, value: float) -> bool:
    return step.name == "number" and step.attributes[0] == value


_SAME_AS = {
    "__and__": "bitwise_and", "__or__": "bitwise_or", "clamp_min": "maximum", "clamp_max": "minimum",
}  # fmt: skip
_UNARY = frozenset((
    "abs", "ceil", "cos", "erf", "exp", "floor", "log", "neg", "reciprocal", "relu", "rsqrt", "sigmoid", "sin", "sqrt",
    "tanh",
))  # fmt: skip
_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "div": "div", "maximum": "max", "minimum": "min", "fmax": "max",
    "fmin": "min", "fmod": "mod", "pow": "pow",
}  # fmt: skip
_COMPARE = {"eq": "cmp_eq", "ne": "cmp_neq", "lt": "cmp_lt", "le": "cmp_le", "gt": "cmp_gt", "ge": "cmp_ge"}
_LOGICAL = {
    "logical_and": "logical_and", "logical_or": "logical_or", "bitwise_and": "logical_and", "bitwise_or": "logical_or",
}  # fmt: skip
_WHOLE = ("abs", "neg", "add", "sub", "mul", "maximum", "minimum")
"""What integers have."""
_CLIPS = (0.0, 0.0, math.inf)
_ROUNDING = {"floor_divide": "floor", "div": None}
_POWERS = (2, 3, 4)


def _kind(dtype: torch.dtype) -> data_type:
    return FLOAT if dtype.is_floating_point else BOOLEAN if dtype == torch.bool else INT32


class _Lowering:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Step] = []
        self.kinds: list[data_type] = []
        self.made: dict[Any, int] = {}

    def of(self, module: fx.GraphModule) -> tuple[Step, ...]:
        output: Any = next(x for x in module.graph.nodes if x.op == "output").args[0]
        value = output[0] if isinstance(output, (tuple, list)) else output
        place = self.real(self.value(value))
        if place != len(self.steps) - 1:
            self.add("identity", (place,))
        return tuple(self.steps)

    def add(self, name: str, inputs: tuple[int, ...], kind: data_type = FLOAT, attributes: tuple[Any, ...] = ()) -> int:
        self.steps.append(Step(name, inputs, attributes, kind, kind))
        self.kinds.append(kind)
        return len(self.steps) - 1

    def input(self, kind: data_type, *step: Any) -> int:
        self.steps.append(Step(*step))
        self.kinds.append(kind)
        return len(self.steps) - 1

    def value(self, x: Any) -> int:
        key = x if isinstance(x, fx.Node) else (type(x), repr(x))
        if key not in self.made:
            self.made[key] = self._node(x) if isinstance(x, fx.Node) else self._number(x)
        return self.made[key]

    def _number(self, x: Any) -> int:
        kind = INT32 if isinstance(x, int) else FLOAT  # True is 1
        x = int(x) if kind == INT32 else x
        return self.input(kind, "number", (), (x, repr(x)))

    def _node(self, node: fx.Node) -> int:
        if node.op == "placeholder":
            name = str(node.target)
            if name == "score":
                return self.input(FLOAT, name)
            if name in TILE:
                return self.add("gen_index", (), INT32, (TILE.index(name) - 1,))
            i = int(name[1:])  # n0, or m0, which is the same as a tensor
            return self.input(INT32 if self.program.integral[i] else FLOAT, "runtime", (), (i,))
        name = name_of(node)
        name = _SAME_AS.get(name, name)
        if name == "index":
            return self._read(node, node.meta["at"])
        if name == "reshape":
            return self._read(node, (0,) * self.program.ranks[int(str(node.args[0].target)[1:])])
        if name == "scalar_tensor":
            return self.value(node.args[0])
        args = [None if x is None else self.value(x) for x in node.args]
        if name == "_to_copy":
            return self._converted(args[0], node.meta["val"].dtype)
        return self._operation(name, node, args)

    def _operation(self, name: str, node: fx.Node, args: list[Any]) -> int:  # noqa: C901 (a table of operations)
        kind = _kind(node.meta["val"].dtype)
        if node.kwargs.get("alpha", 1) != 1:
            args[1] = self.add("mul", (args[1], self.value(node.kwargs["alpha"])), kind)
        if name == "where":
            cond, a, b = args
            if kind == BOOLEAN:
                raise NoOperation("cuDNN selects among numbers only")
            a, b = self.whole(a), self.whole(b)
            if kind == FLOAT or FLOAT in (self.kinds[a], self.kinds[b]):
                a, b, kind = self.real(a), self.real(b), FLOAT
            return self.add("binary_select", (a, b, self.truth(cond)), kind)
        if name in _COMPARE:
            return self.add(_COMPARE[name], tuple(map(self.whole, args)), BOOLEAN)
        if kind == BOOLEAN:
            return self._logical(name, args)
        args = [None if x is None else self.whole(x) for x in args]
        if any(x is not None and self.kinds[x] != INT32 for x in args):
            kind = FLOAT
        if name == "clamp":
            return self._clamped(args, kind)
        if name in ("floor_divide", "div") and (rounding := node.kwargs.get("rounding_mode", _ROUNDING[name])):
            return self._quotient(args, rounding)
        if name == "remainder":
            multiple = self.add("mul", (self._quotient(args, "floor"), self.real(args[1])))
            return self.add("sub", (self.real(args[0]), multiple))
        if kind == INT32 and name not in _WHOLE:  # exact up to 2^24, farther than scores reach
            args, kind = [self.real(x) for x in args], FLOAT
        if name == "pow" and node.args[1] in _POWERS:
            place = args[0]
            for _ in range(int(node.args[1]) - 1):
                place = self.add("mul", (place, args[0]))
            return place
        if name in _UNARY:
            return self.add(name, (args[0],), kind, _CLIPS if name == "relu" else ())
        if name in _BINARY:
            return self.add(_BINARY[name], (args[0], args[1]), kind)
        return self._composed(name, args)

    def _composed(self, name: str, args: list[Any]) -> int:
        x = args[0]
        match name:
            case "expm1":  # as exact as what scores are used for: in absolute terms
                return self.add("sub", (self.add("exp", (x,)), self.value(1.0)))
            case "exp2":
                return self.add("exp", (self.add("mul", (x, self.value(math.log(2)))),))
            case "log1p":
                return self.add("log", (self.add("add", (x, self.value(1.0))),))
            case "log2" | "log10":
                base = self.value(1 / math.log(2 if name == "log2" else 10))
                return self.add("mul", (self.add("log", (x,)), base))
            case "trunc":
                down, up = self.add("floor", (x,)), self.add("ceil", (x,))
                return self.add("binary_select", (down, up, self.add("cmp_ge", (x, self.value(0.0)), BOOLEAN)))
            case "sign" | "sgn":
                x, zero = self.real(x), self.value(0.0)
                negative = self.add("cmp_lt", (x, zero), BOOLEAN)
                rest = self.add("binary_select", (self.value(-1.0), zero, negative))
                positive = self.add("cmp_gt", (x, zero), BOOLEAN)
                return self.add("binary_select", (self.value(1.0), rest, positive))
        raise NoOperation(f"cuDNN has no operation {name}")

    def _logical(self, name: str, args: list[Any]) -> int:
        given = tuple(map(self.truth, args))
        if name in ("logical_not", "bitwise_not"):
            return self.add("logical_not", given, BOOLEAN)
        if name not in _LOGICAL:
            raise NoOperation(f"cuDNN has no {name} of what is true or false")
        return self.add(_LOGICAL[name], given, BOOLEAN)

    def _clamped(self, args: list[Any], kind: data_type) -> int:
        place: int = args[0]
        low, high = (*args[1:], None, None)[:2]
        if low is not None:
            place = self.add("max", (place, low), kind)
        return place if high is None else self.add("min", (place, high), kind)

    def _quotient(self, args: list[Any], rounding: str) -> int:
        given, by = self.real(args[0]), self.real(args[1])
        whole = [self.kinds[x] == INT32 for x in args] == [True, True]
        if rounding == "floor" and whole and self.steps[by].name == "number" and self.steps[by].attributes[0] > 0:
            given = self.add("add", (given, self.value(0.5)))  # far from where a quotient that is not exact errs
        exact = self.add("div", (given, by))
        return self.add("floor", (exact,)) if rounding == "floor" else self._composed("trunc", [exact])

    def _converted(self, x: int, dtype: torch.dtype) -> int:
        if dtype == torch.bool:
            return self.truth(x)
        if dtype.is_floating_point:
            if dtype in (torch.float16, torch.bfloat16):
                rounded = self.add("identity", (self.real(x),), data_type(dtype))
                return self.add("identity", (rounded,))
            return self.real(x)
        if self.kinds[x] == FLOAT:
            raise NoOperation("cuDNN makes no integers of floats")
        return self.whole(x)

    def real(self, x: int) -> int:
        """A float of it."""
        x = self.whole(x)
        if self.kinds[x] != INT32:
            return x
        if self.steps[x].name == "number":
            return self.value(float(self.steps[x].attributes[0]))
        return self.add("identity", (x,))

    def whole(self, x: int) -> int:
        """A number of it."""
        if self.kinds[x] != BOOLEAN:
            return x
        return self.add("binary_select", (self.value(1.0), self.value(0.0), x))

    def truth(self, x: int) -> int:
        if self.kinds[x] == BOOLEAN:
            return x
        return self.add("cmp_neq", (x, self.value(0 if self.kinds[x] == INT32 else 0.0)), BOOLEAN)

    def _read(self, node: fx.Node, at: Any) -> int:
        """A tensor that lies along some of the dimensions of the scores."""
        i = int(str(node.args[0].target)[1:])
        axes = tuple(map(self._axis, at))
        along = [x for x in axes if isinstance(x, int)]
        if len({*along}) != len(along):
            raise NoOperation("cuDNN reads tensors that broadcast to (b, h, s_q, s_k), not their diagonals")
        dtype = self.program.dtypes[i]
        return self.input(_kind(dtype), "tensor", (), (i, axes))

    @staticmethod
    def _axis(index: Any) -> Any:
        """Which dimension an index goes along; a place that is always the same, as a tuple."""
        if isinstance(index, fx.Node) and index.op == "call_function" and name_of(index) == "scalar_tensor":
            index = index.args[0]
        if isinstance(index, int):
            return (index,)
        if isinstance(index, fx.Node) and index.op == "placeholder" and str(index.target) in TILE[1:]:
            return TILE.index(str(index.target)) - 1
        raise NoOperation("cuDNN reads tensors that broadcast to (b, h, s_q, s_k), not at computed indices")
