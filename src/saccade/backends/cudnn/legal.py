"""What cuDNN's engines ask of steps, past what graphs are valid (as of cuDNN 9.19 on Hopper).

- The first operand of an operation is computed, never read. So are both numbers of a selection, but that the second
  may be passed by value, and what selects. Graphs with others are refused, or crash the engine that looks at them.
  What a GPU has chosen that way are zeros and large negative numbers: other constants are computed.
- `logical_not` and `scale` are not used, which stood in a graph of wrong numbers: there are a comparison, and `mul`.
- Tensors of bool, which crash one, are given as integers.
- What is true or false is computed as FLOAT: a backward takes nothing else of comparisons of floats and of logic.
- Whole numbers below zero came out wrong where they are compared with: constants are floats there, others computed.
"""

from __future__ import annotations

import torch

from saccade.backends.cudnn.lowered import BOOLEAN, FLOAT, INT32
from saccade.scores.callbacks.graph import Step, data_type
from saccade.scores.codegen.program import Program

NOT_SET = data_type.NOT_SET
HELD = ("tensor", "runtime", "number")
BY_VALUE = ("runtime", "number")
_MIRRORED = {
    "add": "add", "mul": "mul", "max": "max", "min": "min", "bias": "bias", "scale": "scale",
    "logical_and": "logical_and", "logical_or": "logical_or", "cmp_eq": "cmp_eq", "cmp_neq": "cmp_neq",
    "cmp_gt": "cmp_lt", "cmp_lt": "cmp_gt", "cmp_ge": "cmp_le", "cmp_le": "cmp_ge",
}  # fmt: skip
"""The same operation with its operands the other way round."""
_LARGE = -1e9


def selectable(value: float) -> bool:
    """Whether a GPU has run selections of such a number that is passed by value."""
    return value == 0 or value <= _LARGE


def legal(program: Program, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """The same value by steps that engines take: operands change places, or what is read is added to a zero that is
    computed."""
    made = _Legal(program)
    for step in steps:
        made.take(step)
    made.computed(len(made.steps) - 1)
    return _in_use(made.steps)


class _Legal:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.steps: list[Step] = []
        self.places: list[int] = []
        """Where each of the steps that were taken is now."""
        self.computed_at: dict[int, int] = {}

    def add(self, *step: object) -> int:
        self.steps.append(Step(*step))  # pyright: ignore[reportArgumentType]
        return len(self.steps) - 1

    def take(self, step: Step) -> None:
        if step.name == "tensor" and self.program.dtypes[step.attributes[0]] == torch.bool:
            ones, none = self.computed(self.add(*step)), self.add("number", (), (0, "0"))
            self.places.append(self.add("cmp_neq", (ones, none), (), FLOAT, BOOLEAN))
            return
        name, inputs = step.name, [self.places[i] for i in step.inputs]
        if len(inputs) == 2 and name in _MIRRORED and self.held(inputs[0]) and not self.held(inputs[1]):
            name, inputs = _MIRRORED[name], inputs[::-1]
        if name == "logical_not":
            self.places.append(self.inverse(inputs[0], _types(step)[1]))
            return
        name = "mul" if name == "scale" else name
        if name.startswith("cmp_"):
            inputs[1] = self.comparable(inputs[1])
        for port, i in enumerate(inputs):
            if port == 0 or (name == "binary_select" and not (port == 1 and self.by_value(i))):
                inputs[port] = self.computed(i)
        self.places.append(self.add(name, tuple(inputs), step.attributes, *_types(step)))

    def inverse(self, i: int, made: data_type) -> int:
        """Where a step is not true: of numbers, where it is zero."""
        if self.steps[i].made != BOOLEAN:
            return self.add("cmp_eq", (self.computed(i), self.add("number", (), (0, "0"))), (), FLOAT, made)
        one, none = self.computed(self.add("number", (), (1.0, "1.0"))), self.add("number", (), (0.0, "0.0"))
        truth = self.add("binary_select", (one, none, i), (), FLOAT, FLOAT)
        return self.add("cmp_lt", (truth, self.add("number", (), (1, "1"))), (), FLOAT, made)

    def comparable(self, i: int) -> int:
        """A number to compare with: where it is whole and may be below zero as a float, or computed, if its value comes
        with the call."""
        step = self.steps[i]
        if step.name == "runtime" and self.program.integral[step.attributes[0]]:
            return self.computed(i)
        if step.name != "number" or not isinstance(step.attributes[0], int) or step.attributes[0] >= 0:
            return i
        x = float(step.attributes[0])
        return self.add("number", (), (x, repr(x)))

    def by_value(self, i: int) -> bool:
        step = self.steps[i]
        return step.name == "runtime" or (step.name == "number" and selectable(step.attributes[0]))

    def held(self, i: int) -> bool:
        return self.steps[i].name in HELD

    def computed(self, i: int) -> int:
        """A step of the same value that is computed."""
        if not self.held(i):
            return i
        if i not in self.computed_at:
            kind, row = self.kind(self.steps[i]), self.add("gen_index", (), (2,), INT32, INT32)
            number = self.add("number", (), (0, "0") if kind == INT32 else (0.0, "0.0"))
            zero = self.add("mul", (row, number), (), kind, kind)
            self.computed_at[i] = self.add("add", (zero, i), (), kind, kind)
        return self.computed_at[i]

    def kind(self, step: Step) -> data_type:
        value = step.attributes[0]
        if step.name == "tensor":
            return FLOAT if self.program.dtypes[value].is_floating_point else INT32
        whole = self.program.integral[value] if step.name == "runtime" else isinstance(value, int)
        return INT32 if whole else FLOAT


def _in_use(steps: list[Step]) -> tuple[Step, ...]:
    """Without numbers that others have taken the place of: a graph is given all that it has."""
    read = {i for step in steps for i in step.inputs}
    kept = [i for i, step in enumerate(steps) if step.name != "number" or i in read or i == len(steps) - 1]
    now = {i: place for place, i in enumerate(kept)}
    return tuple(steps[i]._replace(inputs=tuple(now[j] for j in steps[i].inputs)) for i in kept)


def _types(step: Step) -> tuple[data_type, data_type]:
    """What it is computed as, and made of, by name: so that the same steps of a callback and of its derivative, of
    which only one was written by hand, are one operation."""
    if step.name in (*HELD, "score", "gradient"):
        return step.computed, step.made
    index, truth = step.name == "gen_index", step.name.startswith(("cmp_", "logical_"))
    made = step.made if step.made != NOT_SET else INT32 if index else BOOLEAN if truth else FLOAT
    computed = INT32 if index else FLOAT if step.computed in (NOT_SET, BOOLEAN) else step.computed
    return computed, made
