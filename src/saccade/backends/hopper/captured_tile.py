"""Captured tensors with one element for each score, such as a learned bias: bulk copies bring them tile by tile."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.device import positions
from saccade.backends.device.captured_gradients import alone
from saccade.backends.device.records import FLAGS
from saccade.backends.hopper.backward.epilogue import UNIT
from saccade.backends.hopper.tma_launch import ELEMENTS
from saccade.call import Call
from saccade.scores import Traced
from saccade.util.memory_layout import ALIGNMENT, address


class CapturedTile(NamedTuple):
    """One such tensor of a call."""

    number: int
    """among the score's tensors"""
    x: Tensor
    """(b or 1, h_q or 1, s_q, s_k), a view; there may be more of each"""
    args: CapturedTileArgs

    @property
    def key(self) -> tuple[Any, ...]:
        """What kernels and descriptors depend on, and the Call's key does not hold."""
        return self.number, self.x.dtype, self.x.shape, self.x.stride(), *(x.value for x in self.args)


class CapturedTileArgs(NamedTuple):
    """Where kernels find a head's scores in the descriptor of such a tensor."""

    per_batch_row: Any
    """constexpr: each batch row has its own"""
    per_head: Any
    """constexpr: each query head has its own"""


def captured_tile(call: Call) -> CapturedTile | None:
    """The first tensor of the call that bulk copies can bring: 16-bit elements, of keys side by side, in rows at
    multiples of 16 bytes."""
    score = call.score
    if not isinstance(score, Traced) or not positions.reached(call):
        return None
    tiles = (_tile(i, score.tensors[i], indices) for i, indices in score.program.own_elements.items())
    return next(filter(None, tiles), None)


def like(tile: CapturedTile, memory: Tensor, call: Call) -> CapturedTile | None:
    """The same of other memory of its tensor's shape, without the rows and keys that the call does not have."""
    score: Any = call.score
    found = _tile(tile.number, memory, score.program.own_elements[tile.number])
    if found is None:
        return None
    x = found.x
    shape = *x.shape[:2], call.q.shape[2], call.k.shape[2]
    return found._replace(x=x.as_strided(shape, x.stride()))


def _tile(number: int, x: Tensor, indices: tuple[str | None, ...]) -> CapturedTile | None:
    if (rows := _by_scores(x, indices)) is None:
        return None
    per_batch_row, per_head = (FLAGS[name in indices and rows.shape[i] > 1] for i, name in enumerate(("b", "h")))
    return CapturedTile(number, rows, CapturedTileArgs(per_batch_row, per_head))


def _by_scores(x: Tensor, indices: tuple[str | None, ...]) -> Tensor | None:
    """x as (b or 1, h or 1, s_q, s_k), where bulk copies can read it."""
    steps = dict(zip(indices, zip(x.shape, x.stride(), strict=True), strict=True))
    # What is expanded has one element for all.
    dims = [(1, 0) if name not in steps or steps[name][1] == 0 else steps[name] for name in ("b", "h")]
    dims += steps["q_idx"], steps["kv_idx"]
    size = x.element_size()
    unaligned = any(m * size % ALIGNMENT for n, m in dims[:3] if n > 1) or address(x) % ALIGNMENT
    if x.dtype not in ELEMENTS or size != 2 or dims[3][1] != 1 or dims[2][1] == 0 or unaligned:
        return None
    return x.as_strided([n for n, _ in dims], [m for _, m in dims])


# What the backward up to d = 128 takes tiles of, of all that a score function captures, and whether it stores the
# gradient of that too.


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
    """Whether a captured tensor's gradient is wanted, and is ds of each score, in the dtype of products."""
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
    block_sparse = call.mask is not None and call.mask.block_sparse
    clears = all_of_it and not visited and not block_sparse and s_k % UNIT.value == 0
    make = torch.empty if all_of_it and (visited or clears) else torch.zeros
    return make(x.shape, dtype=x.dtype, device=x.device), clears
