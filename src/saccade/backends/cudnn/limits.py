"""What cuDNN's engines refuse of callbacks, crash on, or compute wrong: reasons for `explain`.

Seen on an H200 with cuDNN 9.19 and its frontend 1.32. A wrong number is worse than none. To lift a limit, delete its
lines once the tests of tests/backends/test_cudnn_gpu.py pass for it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from saccade.backends.cudnn.callbacks import ScoreGraph
from saccade.scores import Score
from saccade.scores.callbacks.graph import GraphStep, data_type

OPERATIONS = 220
"""cuDNN takes graphs of 256 nodes, of which attention itself is about 25."""


def callback_limits(score: Score, graph: ScoreGraph, gradient: bool) -> list[str]:
    """The reasons against a callback's graph, each of them once."""
    reasons = [_input_limits(score, graph, gradient)]
    reasons += [_step_limits(graph, steps) for steps in (graph.forward, graph.backward) if steps is not None]
    found = list(dict.fromkeys(reason for part in reasons for reason in part))
    if graph.operations > OPERATIONS:
        found.append(f"has graphs of up to {OPERATIONS} operations on scores, not {graph.operations}")
    return found


def _input_limits(score: Score, graph: ScoreGraph, gradient: bool) -> Iterator[str]:
    for name, place, _ in graph.inputs:
        if name != "tensor" or place is None:
            continue
        x = score.tensors[place]
        if x.dtype == torch.bool:
            yield "does not take bool tensors in a callback: pass int32"
        rows, keys = (1, 1, *x.shape)[-2:]
        if gradient and keys > 1 and rows == 1:
            yield "came out wrong backward on an H200 with a tensor that keys index and rows do not"


def _step_limits(graph: ScoreGraph, steps: tuple[GraphStep, ...]) -> Iterator[str]:
    if steps[-1].name == "input":
        yield "does not take a callback that returns an input unchanged"
    for step in steps:
        operands = [steps[i] for i in step.inputs]
        if operands and operands[0].name == "input":
            yield f"takes a computed value as the first operand of {step.name}, not a tensor or a number"
        if step.name == "binary_select" and not (operands[2].name != "input" and _selectable(graph, operands[1])):
            yield (
                "takes a computed mask in binary_select, and as its second operand a computed value, a tensor of one "
                "element on the CPU, 0, or a number up to -1e9"
            )
        if step.name.startswith("cmp_") and _may_be_negative(graph, operands[1]):
            yield "came out wrong on an H200 with comparisons with an integer that may be negative: pass a float"
        if step.name in _WRONG:
            yield f"came out wrong on an H200 with {step.name}: use {_WRONG[step.name]}"
        if step.result_type in (data_type.HALF, data_type.BFLOAT16):
            yield "came out wrong on an H200 with rounding to fp16 or bf16"


_WRONG = {"logical_not": "the opposite comparison", "scale": "mul"}


def _selectable(graph: ScoreGraph, step: GraphStep) -> bool:
    """Whether a GPU has run selections of such a value."""
    if step.name != "input":
        return True
    place = step.attributes[0]
    constant = graph.constants[place]
    if constant is None:
        return graph.inputs[place].name == "runtime"
    return constant.item() == 0 or constant.item() <= -1e9


def _may_be_negative(graph: ScoreGraph, step: GraphStep) -> bool:
    if step.name != "input" or graph.inputs[step.attributes[0]].dtype != torch.int32:
        return False
    constant = graph.constants[step.attributes[0]]
    return constant is None or constant.item() < 0
