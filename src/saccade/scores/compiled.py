"""`bind` inside of `torch.compile`: the function is traced while the region is compiled, its captures stay values.

Dynamo runs the functions here that are marked as constant, once, with the user's own function; the tensors and numbers
that it captures are reached by their paths, in code that Dynamo follows, and so become inputs of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.scores.constant import callable_of, compile_constant, standing_for
from saccade.scores.function import Function, Score, ScoreMod, name_of, pinned_program
from saccade.scores.program import Program


Plan = tuple[str, tuple[tuple[Step, ...], ...], tuple[tuple[Step, ...], ...], tuple[int, ...], tuple[int, ...]]
"""A program's identity, the paths of tensors and of numbers, and which of both it takes."""


class Bound(Score):
    """A Score inside of a compiled region."""

    def __init__(self, identity: str, tensors: Sequence[Tensor], numbers: Sequence[Any], fn: Function) -> None:
        self.identity, self.tensors, self.fn = identity, tensors, fn
        self.kind = identity.partition("~")[0]
        self.ints = [x for x in numbers if isinstance(x, int)]
        self.floats = [x for x in numbers if isinstance(x, float)]

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.fn(score, b, h, q_idx, kv_idx).to(score.dtype).expand_as(score)


def bind(score_mod: Any, q: Tensor) -> Score:
    double = q.dtype == torch.float64
    if isinstance(score_mod, ScoreMod):
        # A branch makes a constant of what a comparison of sizes does not.
        ones = (tuple(True if n == 1 else False for n in x.shape) for x in score_mod.tensors)  # noqa: SIM210
        forms = tuple((x.dtype, form) for x, form in zip(score_mod.tensors, ones, strict=True))
        callables = standing_for(score_mod.fn), standing_for(score_mod.bprop)
        plan = _plan_of_mod(*callables, getattr(score_mod, "kind", None), forms, double)
    else:
        plan = _plan_of_function(standing_for(score_mod), double)  # a closure over tensors? use ScoreMod(fn, *tensors)
    identity, tensor_paths, number_paths, wanted_tensors, wanted_numbers = plan
    tensors = [follow(score_mod, path) for path in tensor_paths]
    tensors = [x.to(q.device) if x.dim() == 0 else x for x in tensors]
    numbers = [follow(score_mod, path) for path in number_paths]
    if wanted_tensors is None:
        tensors = list(_before(identity, *tensors, *(torch.tensor(x) for x in numbers)))
    else:
        tensors = [tensors[i] for i in wanted_tensors]
    numbers = _numbers(identity, *numbers) if wanted_numbers is None else [numbers[i] for i in wanted_numbers]
    return Bound(identity, tensors, numbers, score_mod)


@compile_constant
def _plan_of_mod(standing: Any, bprop: Any, kind: str | None, forms: tuple[Any, ...], double: bool) -> Any:
    # Any sizes do, as long as a program does not depend on them.
    stand_ins = (
        torch.zeros((), dtype=dtype).expand([1 if one else 11 + 6 * i for i, one in enumerate(ones)])
        for dtype, ones in forms
    )
    fn = callable_of(standing)
    mod = ScoreMod(fn, *stand_ins, bprop=callable_of(bprop))
    return _plan(mod, kind or f"score({name_of(fn)})", double, sizes=False)


@compile_constant
def _plan_of_function(standing: Any, double: bool) -> Any:
    fn = callable_of(standing)
    return _plan(fn, f"score({name_of(fn)})", double)


def _plan(fn: Any, name: str, double: bool, sizes: bool = True) -> Any:
    program, found = pinned_program(fn, name, torch.float64 if double else torch.float32, sizes)
    tensors = [leaf for leaf in found.leaves if isinstance(leaf.value, Tensor)]
    numbers = [leaf for leaf in found.leaves if not isinstance(leaf.value, Tensor)]
    numbers = [leaf for i, leaf in enumerate(numbers) if i not in program.constants]
    # The boundary counts tensors first, then numbers.
    before, numbered = program.before, program.numbers
    return (
        program.identity,
        tuple(leaf.path for leaf in tensors),
        tuple(leaf.path for leaf in numbers),
        None if before[1] else tuple(before[0]),
        None if numbered[1] else tuple(i - len(tensors) for i in numbered[0]),
    )


@torch._dynamo.allow_in_graph
def _before(identity: str, *given: Tensor) -> tuple[Tensor, ...]:
    module: Any = _program(identity).before[1]
    return tuple(module(*given))


@compile_constant
def _numbers(identity: str, *numbers: Any) -> list[Any]:
    wide = [torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64) for x in numbers]
    module: Any = _program(identity).numbers[1]
    given = [torch.zeros(())] * (len(list(module.graph.find_nodes(op="placeholder"))) - len(wide))
    return [x.item() for x in module(*given, *wide)]


def _program(identity: str) -> Program:
    from saccade.scores.bind import program_of

    return program_of(identity)
