"""What a score modification is to cuDNN: steps of its pointwise operations, and what they read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from saccade.backends.cudnn.legal import HELD, legal
from saccade.backends.cudnn.lowered import NoOperation, lowered, scaled
from saccade.lazily import lazily
from saccade.problem import ALIGNMENT
from saccade.scores import Score, Softcap, Traced
from saccade.scores.callbacks.graph import Step, data_type

Steps = tuple[Step, ...]
Read = tuple[int, tuple[Any, ...]]
"""A tensor of the score, and for each of its dimensions the one of (b, h, s_q, s_k) that it goes along, or, in a tuple,
the one place that is read of it."""


@dataclass(frozen=True)
class Modification:
    """Steps whose inputs are `score`, `gradient` and, by their places in `reads`, in `numbers` and in `constants`,
    `tensor`, `runtime` and `number`."""

    forward: Steps
    backward: Steps | None
    """Of dP; None: the identity, which cuDNN takes where nothing is said."""
    reads: tuple[Read, ...]
    numbers: tuple[int, ...]
    """Which of the score's numbers."""
    integral: tuple[bool, ...]
    constants: tuple[Tensor, ...] = field(default=(), compare=False)
    """Passed by value too: cuDNN before 9.22 knows no constants in graphs. So graphs differ by their types alone."""
    types: tuple[torch.dtype, ...] = ()

    @lazily
    def _hash(self) -> int:
        return hash((self.forward, self.backward, self.reads, self.numbers, self.integral, self.types))

    def __hash__(self) -> int:
        return self._hash

    @lazily
    def operations(self) -> int:
        """How many nodes a graph has for it, at most."""
        steps = (*self.forward, *(self.backward or ()))
        return sum(step.name not in (*HELD, "score", "gradient") for step in steps)

    def tensors(self, score: Score) -> list[Tensor]:
        """What is given to a graph: views of four dimensions on the device, then on the CPU numbers and constants."""
        given = [_view(score.tensors[i].detach(), axes) for i, axes in self.reads]
        values = numbers(score)
        for i, integral in zip(self.numbers, self.integral, strict=True):
            dtype = torch.int32 if integral else torch.float32
            given.append(torch.full((1, 1, 1, 1), values[i], dtype=dtype))
        given += self.constants
        return given


def modification(score: Score, gradient: bool) -> Modification:
    """Of a Program it is made once.

    Raises:
        NoOperation: what cuDNN has no operation for.
    """
    if isinstance(score, Softcap):
        return SOFTCAP
    if not isinstance(score, Traced):
        raise NoOperation(f"{score.kind} is no function of tiles")
    made = score.program.emitted
    key = "cudnn", gradient
    if key not in made:
        try:
            made[key] = _of_program(score.program, gradient)
        except NoOperation as refused:
            made[key] = refused
    if isinstance(made[key], NoOperation):
        raise made[key]
    return made[key]


def _of_program(program: Any, gradient: bool) -> Modification:
    recorded, backward = program.recorded, None
    forward = recorded.forward.steps if recorded else lowered(program, program.value_decomposed)
    if gradient and recorded and recorded.backward:
        backward = recorded.backward.steps
    elif gradient:
        backward = scaled(lowered(program, program.slope))
    if backward is not None and [x.name for x in backward] == ["gradient"]:
        backward = None
    return _collected(program, legal(program, forward), None if backward is None else legal(program, backward))


def _collected(program: Any, forward: Steps, backward: Steps | None) -> Modification:
    reads: list[Read] = []
    numbers: list[int] = []
    constants: list[tuple[bool, str]] = []

    def placed(kept: list[Any], x: Any) -> int:
        if x not in kept:
            kept.append(x)
        return kept.index(x)

    def of(step: Step) -> Step:
        if step.name == "tensor":
            i, *axes = step.attributes
            rank = program.ranks[i]
            read = i, (tuple(axes[0]) if axes else tuple(range(4 - rank, 4)))
            return step._replace(attributes=(placed(reads, read),))
        if step.name == "runtime":
            return step._replace(attributes=(placed(numbers, step.attributes[0]),))
        if step.name == "number":
            value = step.attributes[0]
            return step._replace(attributes=(placed(constants, (isinstance(value, int), repr(float(value)))),))
        return step

    forward = tuple(map(of, forward))
    backward = None if backward is None else tuple(map(of, backward))
    integral = tuple(program.integral[i] for i in numbers)
    types = tuple(torch.int32 if whole else torch.float32 for whole, _ in constants)
    held = (
        torch.full((1, 1, 1, 1), float(text), dtype=dtype) for (_, text), dtype in zip(constants, types, strict=True)
    )
    return Modification(forward, backward, tuple(reads), tuple(numbers), integral, tuple(held), types)


def _softcap() -> Modification:
    score, cap = Step("score"), Step("runtime", (), (0,))
    floats = data_type.FLOAT
    inner, bent = Step("div", (0, 1), (), floats, floats), Step("tanh", (2,), (), floats, floats)
    forward = score, cap, inner, bent, Step("mul", (3, 1), (), floats, floats)
    loss = Step("mul", (3, 1), (), floats, floats)
    backward = (
        score, cap, inner, Step("gradient"), loss, Step("tanh_backward", (4, 2), (), floats, floats),
        Step("div", (5, 1), (), floats, floats),
    )  # fmt: skip
    return Modification(forward, backward, (), (0,), (False,))


SOFTCAP = _softcap()


def numbers(score: Score) -> Sequence[Any]:
    return score.numbers if isinstance(score, Traced) else score.floats


_READ = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.int32))


def _view(x: Tensor, axes: tuple[Any, ...]) -> Tensor:
    """x along the dimensions of (b, h, s_q, s_k), of one element along the others, in a type that cuDNN has."""
    for dim in reversed(range(x.dim())):
        if not isinstance(axes[dim], int):
            x = x.select(dim, axes[dim][0])
    kept = [axis for axis in axes if isinstance(axis, int)]
    x = x.permute(sorted(range(len(kept)), key=kept.__getitem__))
    for axis in range(4):
        if axis not in kept:
            x = x.unsqueeze(axis)
    if x.dtype not in _READ:
        x = x.to(torch.float32 if x.is_floating_point() else torch.int32)
    if x.data_ptr() % ALIGNMENT or any(n > 1 and m == 0 for n, m in zip(x.shape, x.stride(), strict=True)):
        x = x.clone(memory_format=torch.contiguous_format)
    # Strides of dimensions of one element mean nothing, but have to be multiples of the inner ones.
    shape = x.shape
    stride = [x.stride(i) if shape[i] != 1 else math.prod(shape[i + 1 :]) for i in range(4)]
    return x.as_strided(shape, stride)
