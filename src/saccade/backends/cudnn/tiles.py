"""The ends of lengths that are no multiples of cuDNN's tiles.

Its backward gives modifications the scores beside them too, of which some are -inf already, others zero, and takes what
comes out as it is: where that is +inf or NaN, so are gradients. Source: PyTorch's issue 196678, for the zeros.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from saccade.backends.cudnn.modification import Modification, Steps, numbers
from saccade.problem import Problem
from saccade.scores.callbacks.graph import Step, data_type
from saccade.scores.callbacks.operations import computed

INT32, BOOLEAN, FLOAT = data_type.INT32, data_type.BOOLEAN, data_type.FLOAT
TILE = 128
_MOST = 4
"""Operands of which every combination of values is tried."""
_TRUTHS, _SIGNS = (False, True), (-1.0, 0.0, 1.0)


def beside_tiles(problem: Problem, mod: Modification) -> bool:
    """Whether a backward has scores beside its tensors that make a difference."""
    assert problem.score is not None
    if problem.q.shape[2] % TILE == problem.k.shape[2] % TILE == 0:
        return False
    return not steady(mod, tuple(numbers(problem.score)))


@lru_cache(maxsize=256)
def steady(mod: Modification, values: tuple[float, ...]) -> bool:
    """Whether a score of -inf becomes neither +inf nor NaN, and a gradient of zero zero, whatever tensors
    hold there, and indices."""
    slopes = _values(mod.backward, mod, values) if mod.backward else ()
    return all(x < math.inf for x in _values(mod.forward, mod, values)) and all(x == 0 for x in slopes)


def _values(steps: Steps, mod: Modification, values: tuple[float, ...]) -> Iterator[float]:
    """What the last step may be; NaN if there are too many."""
    scored: set[int] = set()
    fixed: set[int] = set()
    for i, step in enumerate(steps):
        if step.name in ("score", "gradient") or not scored.isdisjoint(step.inputs):
            scored.add(i)
        elif step.name in ("number", "runtime") or (step.inputs and fixed.issuperset(step.inputs)):
            fixed.add(i)
    read = {i for at in scored for i in steps[at].inputs} | {len(steps) - 1}
    free = sorted(read - scored - fixed)
    if len(free) > _MOST:
        yield math.nan
        return
    for drawn in itertools.product(*(_TRUTHS if steps[i].made == BOOLEAN else _SIGNS for i in free)):
        yield _value(steps, mod, values, dict(zip(free, drawn, strict=True)), scored | fixed)


def _value(
    steps: Steps, mod: Modification, values: tuple[float, ...], drawn: dict[int, float], known: set[int]
) -> float:
    made: dict[int, torch.Tensor] = {}
    for i, step in enumerate(steps):
        match step.name:
            case _ if i in drawn:
                made[i] = torch.tensor(drawn[i])
            case _ if i not in known:
                continue
            case "score":
                made[i] = torch.tensor(-math.inf)
            case "gradient":
                made[i] = torch.tensor(0.0)
            case "runtime":
                made[i] = torch.tensor(values[mod.numbers[step.attributes[0]]])
            case "number":
                made[i] = mod.constants[step.attributes[0]].reshape(())
            case name:
                inputs = [made[j] for j in step.inputs]
                made[i] = computed(name, inputs, step.attributes, step.computed == INT32, torch.float32)
    return made[len(steps) - 1].item()


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
