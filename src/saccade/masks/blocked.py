"""A mask with the states of its tiles."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from saccade.arguments import broadcasts
from saccade.masks.base import Mask, WrappedMask
from saccade.scores import Sizes

TILE = 64
"""Query rows and keys of a tile that has a state."""
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False, repr=False)
class Blocked(WrappedMask):
    """A mask with the states of its tiles, computed beforehand for calls of one shape. Combined, it is a mask again."""

    MARK: ClassVar[str] = "@"
    states: Tensor
    """uint8 (b or 1, h_q or 1, tiles of rows, tiles of keys): EMPTY, PARTIAL or FULL"""
    lengths: tuple[int, int] | None = None
    """s_q and s_k, where they are known: tiles alone do not say where the last ones end"""
    kept: bool = True
    """Whether calls take the states: not those of compiled code, where torch counts no writes to a mask's tensors"""

    @property
    def identity(self) -> str:
        return (self.MARK if self.kept else "") + self.mask.identity

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.mask.tensors, *([self.states] if self.kept else [])]

    def leaves(self) -> Iterator[Mask]:
        return self.mask.leaves()

    def unblocked(self) -> Mask:
        return self.mask

    def shape_error(self, sizes: Sizes) -> str | None:
        b, h, s_q, s_k, _ = sizes
        blocks, tiles = tuple(self.states.shape), (-(-s_q // TILE), -(-s_k // TILE))
        if not (broadcasts(blocks[:2], (b, h)) and blocks[2:] == tiles):
            return f"a block mask of {blocks} tiles is for another shape than (b, h_q, s_q, s_k) = {(b, h, s_q, s_k)}"
        if self.lengths is not None and self.lengths != (s_q, s_k):
            return f"a block mask for (s_q, s_k) = {self.lengths} is for another shape than {(s_q, s_k)}"
        return self.mask.shape_error(sizes)

    def sparsity(self) -> float:
        """The share of tiles that are empty."""
        return float((self.states == EMPTY).float().mean())
