"""What cuDNN's graphs computed wrong on an H200 (9.19, frontend 1.32), by words: refused, as a wrong number is worse
than none. A word is lifted by deleting it, once tests of tests/backends/test_cudnn_gpu.py that have it pass.
"""

from __future__ import annotations

from collections.abc import Iterator

from saccade.backends.cudnn.modification import Modification, Steps
from saccade.problem import Problem
from saccade.scores.callbacks.graph import data_type

WRONG = ("rounding to fp16 or bf16",)
WRONG_BACKWARD = *WRONG, "a tensor of keys that is none of rows"


def wrong(problem: Problem, mod: Modification, gradient: bool) -> list[str]:
    """Which of the words the graphs of a Problem have."""
    known = WRONG_BACKWARD if gradient else WRONG
    found = {word for steps in (mod.forward, mod.backward or ()) for word in _words(problem, mod, steps)}
    return [word for word in known if word in found]


def _words(problem: Problem, mod: Modification, steps: Steps) -> Iterator[str]:
    assert problem.score is not None
    for step in steps:
        if step.made in (data_type.HALF, data_type.BFLOAT16):
            yield "rounding to fp16 or bf16"
        if step.name == "tensor":
            i, axes = mod.reads[step.attributes[0]]
            along = {axis for axis, n in zip(axes, problem.score.tensors[i].shape, strict=True) if n > 1}
            if 3 in along and 2 not in along:
                yield "a tensor of keys that is none of rows"
