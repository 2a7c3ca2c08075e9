"""What no GPU has computed right yet in cuDNN's graphs, by words: refused, as a wrong number is worse than none.

An H200 (cuDNN 9.19, frontend 1.32) gave wrong numbers for three functions of tests/test_cudnn_gpu.py, each of which has
several of these words, and has run none of the others. A word is lifted by deleting its line, once these tests pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from saccade.backends.cudnn.legal import BY_VALUE, HELD, selectable
from saccade.backends.cudnn.modification import Modification, Steps, numbers
from saccade.backends.cudnn.tiles import beside_tiles
from saccade.problem import Problem
from saccade.scores.graph import Step, data_type

UNPROVEN = (
    # Wrong forward, `band`: one of these, or of logical_not and scale, which are other operations since.
    "cmp_le",
    "one number in device memory",
    "a tensor of heads as a first operand",
    "a comparison with a number that is not whole, or below zero",
    # Not run forward.
    "abs", "add_square", "ceil", "cos", "erf", "exp", "log", "max", "min", "mod", "neg", "pow", "reciprocal", "rsqrt",
    "sin", "sqrt", "tan",
    "an index of batches or heads",
    "rounding to fp16 or bf16",
    "a choice of numbers other than zero and large negative ones",
)  # fmt: skip
UNPROVEN_BACKWARD = (
    *UNPROVEN,
    # Wrong backward, right forward, `read_first`: one of these.
    "a tensor as a first operand",
    "cmp_eq", "cmp_gt", "cmp_neq",
    "floor",
    "identity",
    "logical_or",
    # Wrong backward, `derivatives`: mended by tiles.inside, which no GPU has run.
    "lengths that are no multiples of 128",
)  # fmt: skip


def unproven(problem: Problem, mod: Modification, gradient: bool) -> list[str]:
    """Which of the words the graphs of a Problem have."""
    known = UNPROVEN_BACKWARD if gradient else UNPROVEN
    found = {*_words(problem, mod, mod.forward), *_words(problem, mod, mod.backward or ())}
    if gradient and beside_tiles(problem, mod):
        found.add("lengths that are no multiples of 128")
    return [word for word in known if word in found]


def _words(problem: Problem, mod: Modification, steps: Steps) -> Iterator[str]:
    assert problem.score is not None
    values = numbers(problem.score)

    def value(i: int) -> Any:
        kind, place = steps[i].name, steps[i].attributes[0]
        return mod.constants[place].item() if kind == "number" else values[mod.numbers[place]]

    for step in steps:
        yield from _of_numbers(step, steps, value)
        name = step.name
        if name == "tensor":
            i, axes = mod.reads[step.attributes[0]]
            shape: Sequence[int] = problem.score.tensors[i].shape
            if math.prod(n for n, axis in zip(shape, axes, strict=True) if isinstance(axis, int)) == 1:
                yield "one number in device memory"
        elif name not in HELD:
            yield name
        if name == "gen_index" and step.attributes[0] < 2:
            yield "an index of batches or heads"
        if step.made in (data_type.HALF, data_type.BFLOAT16):
            yield "rounding to fp16 or bf16"
        if len(step.inputs) == 2 and steps[step.inputs[1]].name == "tensor" and _is_zero(steps, step.inputs[0], value):
            i, axes = mod.reads[steps[step.inputs[1]].attributes[0]]
            along = {axis for axis, n in zip(axes, problem.score.tensors[i].shape, strict=True) if n > 1}
            yield "a tensor as a first operand"
            if along & {0, 1}:
                yield "a tensor of heads as a first operand"


def _of_numbers(step: Step, steps: Steps, value: Callable[[int], Any]) -> Iterator[str]:
    """What a step does with a number that is passed by value as its second operand."""
    if len(step.inputs) < 2 or steps[step.inputs[1]].name not in BY_VALUE:
        return
    x = value(step.inputs[1])
    if step.name.startswith("cmp_") and not (isinstance(x, int) and x >= 0):
        yield "a comparison with a number that is not whole, or below zero"
    if step.name == "binary_select" and not selectable(x):
        yield "a choice of numbers other than zero and large negative ones"


def _is_zero(steps: Steps, i: int, value: Callable[[int], Any]) -> bool:
    """The zero that `legal` computes, for operands that are read."""
    step = steps[i]
    if step.name != "mul" or steps[step.inputs[0]].name != "gen_index" or steps[step.inputs[1]].name != "number":
        return False
    return value(step.inputs[1]) == 0
