"""Which query may attend to which key."""

from saccade.masks.base import FARTHEST, UNBOUNDED, Extent, Interval, Mask, Positions
from saccade.masks.builtin import Documents, Prefix, Window, causal, documents, prefix, window
from saccade.masks.combine import (
    KINDS,
    And,
    Combined,
    Not,
    Or,
    from_tensors,
    is_kind,
    of_batch_row,
    of_leaves,
    of_one_sequence,
    of_rows,
    padded,
    pin,
    program_names,
    programs,
)
from saccade.masks.interval import KeyInterval, interval
from saccade.masks.predicates import (
    EMPTY,
    FULL,
    PARTIAL,
    TILE,
    Blocked,
    MaskMod,
    TensorMask,
    Written,
    as_mask,
    is_block_mask,
    mask_mod,
)
from saccade.masks.selected import ListedSlots, Selected, selected, selected_blocks

__all__ = [
    "EMPTY", "FARTHEST", "FULL", "KINDS", "PARTIAL", "TILE", "UNBOUNDED", "And", "Blocked", "Combined", "Documents",
    "Extent", "Interval", "KeyInterval", "ListedSlots", "Mask", "MaskMod", "Not", "Or", "Positions", "Prefix",
    "Selected", "TensorMask", "Window", "Written", "as_mask", "causal", "documents", "from_tensors", "interval",
    "is_block_mask", "is_kind", "mask_mod", "of_batch_row", "of_leaves", "of_one_sequence", "of_rows", "padded", "pin",
    "prefix", "program_names", "programs", "selected", "selected_blocks", "window",
]  # fmt: skip
