"""What the backward up to d = 128 takes tiles of, of all that a score function captures, and whether it stores the
gradient of that too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.device.captured_gradients import alone
from saccade.backends.hopper.backward.clear import UNIT
from saccade.backends.hopper.captured_tile import CapturedTile, captured_tile, like
from saccade.call import Call
from saccade.scores import Traced


class BackwardCapture(NamedTuple):
    """A captured tensor with an element for each score."""

    tile: CapturedTile
    memory: Tensor | None
    """its gradient, if the main kernel stores that: its shape, contiguous"""
    gradient: CapturedTile | None
    """the same as kernels see it"""
    clears: bool
    """a kernel of its own clears what the main one leaves out"""

    @staticmethod
    def of(call: Call, saved: Saved) -> BackwardCapture | None:
        """None where score functions load what they capture."""
        if call.scoreless or (tile := captured_tile(call)) is None:
            return None
        if not _is_ds(call, saved, tile.number):
            return BackwardCapture(tile, None, None, False)
        memory, clears = _memory(call, tile)
        gradient = like(tile, memory, call)
        return BackwardCapture(tile, None if gradient is None else memory, gradient, clears and gradient is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of descriptors."""
        return (self.tile.x,) if self.gradient is None else (self.tile.x, self.gradient.x)

    @property
    def args(self) -> tuple[Any, Any]:
        """Of both."""
        return self.tile.args, None if self.gradient is None else self.gradient.args

    @property
    def made(self) -> dict[int, Tensor]:
        """Gradients that the main kernel stores, by the numbers of their tensors."""
        return {} if self.memory is None else {self.tile.number: self.memory}

    @property
    def key(self) -> tuple[Any, ...]:
        """What kernels and descriptors depend on, and the Call's key does not hold."""
        return self.tile.key, None if self.gradient is None else self.gradient.key, self.clears


def _is_ds(call: Call, saved: Saved, number: int) -> bool:
    """Whether the gradient of a captured tensor is wanted, and is what the kernel computes of each score, in the dtype
    of its products."""
    score = call.score
    assert isinstance(score, Traced)
    wanted = bool(saved.wanted) and saved.wanted[number]
    same = score.tensors[number].dtype == call.q.dtype
    return wanted and same and number in score.program.added and number in alone(call, score, saved.wanted)


def _memory(call: Call, tile: CapturedTile) -> tuple[Tensor, bool]:
    """For the gradient, and whether its tiles that the main kernel leaves out are to be cleared: they are zeros already
    where lists choose them, and where the tensor has more than the call."""
    score: Any = call.score
    x, layout, s_k = score.tensors[tile.number], call.layout, call.k.shape[2]
    all_of_it = x.numel() == call.q.shape[:3].numel() * s_k
    visited = call.mask is None and layout.seqused_q is None and layout.seqused_k is None
    listed = call.mask is not None and call.mask.listed
    clears = all_of_it and not visited and not listed and s_k % UNIT.value == 0
    make = torch.empty if all_of_it and (visited or clears) else torch.zeros
    return make(x.shape, dtype=x.dtype, device=x.device), clears
