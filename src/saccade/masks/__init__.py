"""Who may attend to whom."""

from saccade.masks.expressions import (
    UNBOUNDED,
    And,
    Combined,
    Documents,
    Mask,
    Or,
    Prefix,
    Window,
    causal,
    documents,
    prefix,
    window,
)
from saccade.masks.given import TensorMask, as_mask, is_block_mask, remember
from saccade.masks.interval import Extent, Interval
from saccade.masks.predicates import EMPTY, FULL, PARTIAL, TILE, Blocked, MaskMod, Not, Written, mask_mod
from saccade.masks.text import KINDS, from_records, is_kind, of_batch_row, pin, programs

__all__ = [
    "EMPTY", "FULL", "KINDS", "PARTIAL", "TILE", "UNBOUNDED", "And", "Blocked", "Combined", "Documents", "Extent",
    "Interval", "Mask", "MaskMod", "Not", "Or", "Prefix", "TensorMask", "Window", "Written", "as_mask", "causal",
    "documents", "from_records", "is_block_mask", "is_kind",
    "mask_mod", "of_batch_row", "pin", "prefix", "programs", "remember", "window",
]  # fmt: skip
