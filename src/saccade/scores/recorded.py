"""The recordings behind a Program: callbacks as they were written, for a backend that has their operations itself."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from saccade.scores.callback import CallbackMod
from saccade.scores.graph import Recording, Step
from saccade.scores.program import Program
from saccade.scores.survey import Survey


class Recorded(NamedTuple):
    """Recordings that read what the Program does: a step `tensor` has its number among the Program's tensors, and a
    step `runtime` among its numbers."""

    forward: Recording
    backward: Recording | None
    """None: there is no derivative of the user's own."""


def recorded(mod: CallbackMod, program: Program, found: Survey) -> Recorded | None:
    """None where a Program has no place for something that the recordings read."""
    places = _places(mod, program, found)
    forward, backward = mod.fn, mod.bprop
    assert isinstance(forward, Recording)
    assert backward is None or isinstance(backward, Recording)
    if places is None or any(
        step.name == "tensor" and places[step.attributes[0]] is None
        for recording in (forward, backward)
        if recording is not None
        for step in recording.steps
    ):
        return None

    def placed(recording: Recording) -> Recording:
        steps = (places[x.attributes[0]] or x if x.name == "tensor" else x for x in recording.steps)
        return replace(recording, steps=tuple(steps))

    return Recorded(placed(forward), None if backward is None else placed(backward))


def _places(mod: CallbackMod, program: Program, found: Survey) -> list[Step | None] | None:
    """For each of the callback's tensors the step that reads it of a Program's inputs."""
    leaves = [leaf.value for leaf in found.leaves]
    if len(leaves) != len(mod.tensors) or program.before[1] is not None or program.numbers[1] is not None:
        return None
    # What Programs pick from: the tensors, then the numbers that are no constants.
    tensors, numbers, constants = [], [], []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors.append(i)
        else:
            (constants if len(numbers) + len(constants) in program.constants else numbers).append(i)
    order = [*tensors, *numbers]
    found_at: list[Step | None] = [None] * len(leaves)
    for i in constants:
        found_at[i] = Step("number", (), (leaves[i], repr(leaves[i])))
    for name, (picked, _) in (("tensor", program.before), ("runtime", program.numbers)):
        for j, place in enumerate(picked):
            found_at[order[place]] = Step(name, (), (j,))
    return found_at
