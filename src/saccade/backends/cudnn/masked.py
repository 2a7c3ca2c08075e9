"""A window of keys as a part of a score modification: beside one, cuDNN has no masks of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from saccade.backends.cudnn.modification import Modification
from saccade.masks import Window
from saccade.scores.callbacks.graph import Step, data_type

INT32, BOOLEAN, FLOAT = data_type.INT32, data_type.BOOLEAN, data_type.FLOAT


def masked(mod: Modification, window: Window, off: int) -> Modification:
    """-inf where row i does not see key j: `i + off - left <= j <= i + off + right`.

    The derivative is mod's own: where a probability is zero, so is the gradient that it is given. Bounds are passed by
    value, as constants are.
    """
    steps = list(mod.forward)
    constants = list(mod.constants)

    def add(name: str, *rest: Any) -> int:
        steps.append(Step(name, *rest))
        return len(steps) - 1

    def constant(value: float, dtype: torch.dtype = torch.int32) -> int:
        constants.append(torch.full((1, 1, 1, 1), value, dtype=dtype))
        return add("number", (), (len(constants) - 1,))

    value = len(steps) - 1
    row, key = (add("gen_index", (), (axis,), INT32, INT32) for axis in (2, 3))
    seen = []
    if window.right is not None:
        last = add("add", (row, constant(off + window.right)), (), INT32, INT32)
        seen.append(add("cmp_ge", (last, key), (), FLOAT, BOOLEAN))
    if window.left is not None:
        first = add("add", (row, constant(off - window.left)), (), INT32, INT32)
        seen.append(add("cmp_ge", (key, first), (), FLOAT, BOOLEAN))
    if not seen:
        return mod
    keep = seen[0] if len(seen) == 1 else add("logical_and", tuple(seen), (), FLOAT, BOOLEAN)
    add("binary_select", (value, constant(-math.inf, torch.float32), keep), (), FLOAT, FLOAT)
    types = tuple(x.dtype for x in constants)
    return replace(mod, forward=tuple(steps), constants=tuple(constants), types=types)
