"""A mask with the states of its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from saccade.masks.base import Mask
from saccade.masks.interval import Extent, Interval

TILE = 64
"""Query rows and keys of a tile that has a state."""
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Blocked(Mask):
    """A mask with the states of its tiles, made beforehand for calls of one shape. Combined, it is a mask again."""

    MARK: ClassVar[str] = "@"
    listed: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]
    mask: Mask
    states: Tensor
    """uint8 (b or 1, h_q or 1, tiles of rows, tiles of keys): EMPTY, PARTIAL or FULL"""
    lengths: tuple[int, int] | None = None
    """s_q and s_k, where they are known: tiles alone do not say where the last ones end"""

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.kind

    @property
    def identity(self) -> str:
        return self.MARK + self.mask.identity

    @property
    def exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return False

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.indices

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.mask.tensors, self.states]

    def leaves(self) -> Any:
        return self.mask.leaves()

    def unblocked(self) -> Mask:
        return self.mask

    def bound(self) -> Mask:
        held = self.mask.bound()
        return self if held is self.mask else Blocked(held, self.states, self.lengths)

    def complaint(self, b: int, h: int, s_q: int, s_k: int) -> str | None:
        given, tiles = tuple(self.states.shape), (-(-s_q // TILE), -(-s_k // TILE))
        if given[0] not in (1, b) or given[1] not in (1, h) or given[2:] != tiles:
            return f"a block mask of {given} tiles is for another shape than (b, h_q, s_q, s_k) = {(b, h, s_q, s_k)}"
        if self.lengths not in (None, (s_q, s_k)):
            return f"a block mask for (s_q, s_k) = {self.lengths} is for another shape than {(s_q, s_k)}"
        return self.mask.complaint(b, h, s_q, s_k)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b, h, q_idx, kv_idx)

    def hull(self, extent: Extent) -> Interval:
        return self.mask.hull(extent)

    def core(self, extent: Extent) -> Interval:
        return self.mask.core(extent)

    def sparsity(self) -> float:
        """The share of tiles that are empty."""
        return float((self.states == EMPTY).float().mean())

    def __repr__(self) -> str:
        return repr(self.mask)
