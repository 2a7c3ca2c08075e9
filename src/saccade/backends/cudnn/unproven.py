"""What no GPU has computed right yet in cuDNN's graphs, by words: refused, as a wrong number is worse than none.

They were found one by one on an H200 (cuDNN 9.19, frontend 1.32). A word is lifted by deleting it, once tests of
tests/test_cudnn_gpu.py that have it pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from saccade.backends.cudnn.legal import BY_VALUE, HELD
from saccade.backends.cudnn.modification import Modification, Steps, numbers
from saccade.problem import Problem
from saccade.scores.graph import Step, data_type

UNPROVEN = (
    "a whole number below zero",  # wrong in a comparison, where it is a float since
    # Not run.
    "add_square", "log", "mod", "pow", "reciprocal", "rsqrt", "sqrt", "tan",
    "rounding to fp16 or bf16",
)  # fmt: skip
# Wrong backward, right forward: the product of a tensor of rows and one of keys.
UNPROVEN_BACKWARD = *UNPROVEN, "a tensor of rows or keys as a first operand"


def unproven(problem: Problem, mod: Modification, gradient: bool) -> list[str]:
    """Which of the words the graphs of a Problem have."""
    known = UNPROVEN_BACKWARD if gradient else UNPROVEN
    found = {*_words(problem, mod, mod.forward), *_words(problem, mod, mod.backward or ())}
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
        if name not in HELD:
            yield name
        if step.made in (data_type.HALF, data_type.BFLOAT16):
            yield "rounding to fp16 or bf16"
        if len(step.inputs) == 2 and steps[step.inputs[1]].name == "tensor" and _is_zero(steps, step.inputs[0], value):
            i, axes = mod.reads[steps[step.inputs[1]].attributes[0]]
            along = {axis for axis, n in zip(axes, problem.score.tensors[i].shape, strict=True) if n > 1}
            if along & {2, 3}:
                yield "a tensor of rows or keys as a first operand"


def _of_numbers(step: Step, steps: Steps, value: Callable[[int], Any]) -> Iterator[str]:
    """What a step does with a number that is passed by value as its second operand."""
    if len(step.inputs) < 2 or steps[step.inputs[1]].name not in BY_VALUE:
        return
    x = value(step.inputs[1])
    if isinstance(x, int) and x < 0:
        yield "a whole number below zero"


def _is_zero(steps: Steps, i: int, value: Callable[[int], Any]) -> bool:
    """The zero that `legal` computes, for operands that are read."""
    step = steps[i]
    if step.name != "mul" or steps[step.inputs[0]].name != "gen_index" or steps[step.inputs[1]].name != "number":
        return False
    return value(step.inputs[1]) == 0
