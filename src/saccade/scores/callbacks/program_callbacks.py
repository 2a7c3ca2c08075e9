"""The callbacks of a Program as they were written, for a backend that has their operations itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from saccade.scores.callbacks.graph import CallbackRecording, GraphStep
from saccade.scores.callbacks.score_callback import CallbackMod
from saccade.scores.codegen.program import Program
from saccade.scores.recording.tape import Tape


class ProgramCallbacks(NamedTuple):
    """Recordings that read what the Program does: a step `tensor` has its number among the Program's tensors, and a
    step `runtime` among its numbers."""

    forward: CallbackRecording
    backward: CallbackRecording | None
    """None: the derivative is autograd's."""


def callbacks_of(mod: CallbackMod, program: Program, tape: Tape) -> ProgramCallbacks | None:
    """None where a recording reads something that is not an input of the Program."""
    if program.before[1] is not None or program.numbers[1] is not None:
        return None
    places = [_place(x, program, tape) for x in mod.tensors]
    forward, backward = mod.fn, mod.bprop
    assert isinstance(forward, CallbackRecording)
    assert backward is None or isinstance(backward, CallbackRecording)
    if any(
        step.name == "tensor" and places[step.attributes[0]] is None
        for recording in (forward, backward)
        if recording is not None
        for step in recording.steps
    ):
        return None

    def placed(recording: CallbackRecording) -> CallbackRecording:
        steps = (places[x.attributes[0]] or x if x.name == "tensor" else x for x in recording.steps)
        return replace(recording, steps=tuple(steps))

    return ProgramCallbacks(placed(forward), None if backward is None else placed(backward))


def _place(x: Tensor, program: Program, tape: Tape) -> GraphStep | None:
    """The step that reads one of the callback's tensors of a Program's inputs, which are picked from the tensors and
    then the numbers of a tape."""
    for name, captures, first, (picked, _) in (
        ("tensor", tape.tensors, 0, program.before),
        ("runtime", tape.sources, len(tape.tensors), program.numbers),
    ):
        i = _index(captures, x)
        if i is not None and first + i in picked:
            return GraphStep(name, (), (picked.index(first + i),))
    return None


def _index(captures: Sequence[Tensor | None], x: Tensor) -> int | None:
    return next((i for i, other in enumerate(captures) if other is x), None)
