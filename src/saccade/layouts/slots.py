"""Slots: the rows of a cache by number, for new keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.layouts.offsets import described, shortened
from saccade.layouts.validate import cache_error, head_error


@dataclass(frozen=True, eq=False)
class CacheSlots:
    """Where new rows are written: slot `n` is row `n % page_size` of page `n // page_size`; -1 is nowhere.

    Raises:
        ValueError: tensors that are not integer ones, or not of one shape.
    """

    slot_mapping: Tensor
    """(t,), or (b, s): int32 or int64"""
    positions: Tensor | None = None
    """of the rows in their sequences, by which keys are rotated; of the same shape"""

    def __post_init__(self) -> None:
        for name, x in (("slot_mapping", self.slot_mapping), ("positions", self.positions)):
            if x is None and name == "positions":
                continue
            if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} must be an int32 or int64 tensor of shape (t,) or (b, s), got {described(x)}")
        if self.positions is not None and self.positions.shape != self.slot_mapping.shape:
            shapes = tuple(self.positions.shape), tuple(self.slot_mapping.shape)
            raise ValueError(f"positions must have the shape of slot_mapping, got {shapes[0]} and {shapes[1]}")

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.slot_mapping, self.positions) if x is not None]

    text = "slots"
    """In the place of a layout's text."""

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of rows (b, s, h, d) or (t, h, d), or of a cache."""
        return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)

    def shape_error(self, new: torch.Size, k: torch.Size, v: torch.Size, name: str) -> str | None:
        """What is wrong with the shapes of new rows and of the caches."""
        if len(new) not in (3, 4) or not len(k) == len(v) == 4:
            return (
                f"with slot_mapping {name} must be (t, h, d) or (b, s, h, d), and the caches (pages, page_size, h, d)"
            )
        if new[:-2] != self.slot_mapping.shape:
            shape = tuple(self.slot_mapping.shape)
            return f"slot_mapping must have one number for each new row, {tuple(new[:-2])}, got {shape}"
        return cache_error(k, v) or head_error(new, k, v, -2)

    def check_slots(self, pages: int, page_size: int) -> None:
        """Reads the slots and positions.

        Raises:
            ValueError: slots that the caches do not have, or negative positions.
        """
        slots = self.slot_mapping
        if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < pages * page_size:
            raise ValueError(
                f"slots must be in [0, {pages * page_size}), the rows of {pages} pages of {page_size}, or -1 for a row "
                f"that is not written, got {shortened(slots.flatten().tolist())}"
            )
        if self.positions is not None and self.positions.numel() and int(self.positions.min()) < 0:
            raise ValueError(f"positions must be from 0 on, got {shortened(self.positions.flatten().tolist())}")
