"""Captured tensors that have an element for each score, such as a learned bias (b, h, s_q, s_k), as bulk copies bring
them: tile by tile, beside the keys."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.backends.device import positions
from saccade.backends.device.records import FLAGS
from saccade.backends.hopper.tma_launch import ELEMENTS
from saccade.call import Call
from saccade.scores import Traced
from saccade.util.alignment import ALIGNMENT, address


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

    by_row: Any
    """constexpr: each batch row has its own"""
    by_head: Any
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
    by_row, by_head = (FLAGS[name in indices and rows.shape[i] > 1] for i, name in enumerate(("b", "h")))
    return CapturedTile(number, rows, CapturedTileArgs(by_row, by_head))


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
