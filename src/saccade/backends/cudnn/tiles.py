"""The ends of lengths that are no multiples of cuDNN's tiles.

Its backward gives modifications the scores beside them too, of which some are -inf already, others zero, and takes what
comes out as it is: where that is +inf or NaN, so are gradients. Source: PyTorch's issue 196678, for the zeros.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from saccade.backends.cudnn.modification import Modification, Steps, numbers
from saccade.problem import Problem
from saccade.scores.graph import Step, data_type
from saccade.scores.operations import computed

INT32, BOOLEAN, FLOAT = data_type.INT32, data_type.BOOLEAN, data_type.FLOAT
TILE = 128
_MOST = 4
"""Tensors of which every combination of signs is tried."""
_BESIDE = ((0, 0, 0, 1000), (0, 0, 1000, 0), (0, 0, 1000, 1000))


def beside_tiles(problem: Problem, mod: Modification) -> bool:
    """Whether a backward has scores beside its tensors that make a difference."""
    assert problem.score is not None
    if problem.q.shape[2] % TILE == problem.k.shape[2] % TILE == 0:
        return False
    return not steady(mod, tuple(numbers(problem.score)))


@lru_cache(maxsize=256)
def steady(mod: Modification, values: tuple[float, ...]) -> bool:
    """Whether a score of -inf, whatever tensors hold, becomes neither +inf nor NaN, and a gradient of zero zero."""
    if len(mod.reads) > _MOST:
        return False
    for at in _BESIDE:
        for held in itertools.product((-1.0, 0.0, 1.0), repeat=len(mod.reads)):
            given = mod, values, at, held
            found = _value(mod.forward, *given)
            slope = 0.0 if mod.backward is None else _value(mod.backward, *given)
            if not (found < math.inf and slope == 0):
                return False
    return True


def _value(
    steps: Steps, mod: Modification, values: tuple[float, ...], at: tuple[int, ...], held: tuple[float, ...]
) -> float:
    made: list[torch.Tensor] = []
    for step in steps:
        match step.name:
            case "score":
                x = torch.tensor(-math.inf)
            case "gradient":
                x = torch.tensor(0.0)
            case "tensor":
                x = torch.tensor(held[step.attributes[0]])
            case "runtime":
                x = torch.tensor(values[mod.numbers[step.attributes[0]]])
            case "number":
                x = mod.constants[step.attributes[0]].reshape(())
            case "gen_index":
                x = torch.tensor(at[step.attributes[0]])
            case name:
                inputs = [made[i] for i in step.inputs]
                x = computed(name, inputs, step.attributes, step.computed == INT32, torch.float32)
        made.append(x)
    return made[-1].item()


def inside(mod: Modification, rows: int, keys: int) -> Modification:
    """-inf and a gradient of zero where row i and key j are not `i < rows` and `j < keys`."""
    constants = [*mod.constants]

    def bounded(steps: Steps, hidden: float) -> Steps:
        made = list(steps)

        def add(name: str, *rest: Any) -> int:
            made.append(Step(name, *rest))
            return len(made) - 1

        def constant(value: float, dtype: torch.dtype) -> int:
            constants.append(torch.full((1, 1, 1, 1), value, dtype=dtype))
            return add("number", (), (len(constants) - 1,))

        value, seen = len(made) - 1, []
        for axis, bound in ((2, rows), (3, keys)):
            if bound % TILE:
                index = add("gen_index", (), (axis,), INT32, INT32)
                seen.append(add("cmp_lt", (index, constant(bound, torch.int32)), (), FLOAT, BOOLEAN))
        keep = seen[0] if len(seen) == 1 else add("logical_and", tuple(seen), (), FLOAT, BOOLEAN)
        add("binary_select", (value, constant(hidden, torch.float32), keep), (), FLOAT, FLOAT)
        return tuple(made)

    forward, backward = bounded(mod.forward, -math.inf), bounded(mod.backward or (Step("gradient"),), 0.0)
    types = tuple(x.dtype for x in constants)
    return replace(mod, forward=forward, backward=backward, constants=tuple(constants), types=types)
