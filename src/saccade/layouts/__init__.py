"""Where the rows of q, k and v live."""

from saccade.layouts.base import LENGTHS, Layout, SequenceSlice, empty_bytes, empty_like_rows, ordered_like, with_rows
from saccade.layouts.dense import ORDERS, Dense, dense_of
from saccade.layouts.latent_cache import LatentCache
from saccade.layouts.packed import Packed, unwrap
from saccade.layouts.paged import CacheSlots, Paged
from saccade.layouts.rebuild import from_tensors, view_layout
from saccade.layouts.slots import SlotRows

__all__ = [
    "LENGTHS", "ORDERS", "CacheSlots", "Dense", "LatentCache", "Layout", "Packed", "Paged", "SequenceSlice", "SlotRows",
    "dense_of", "empty_bytes", "empty_like_rows", "from_tensors", "ordered_like", "unwrap", "view_layout", "with_rows",
]  # fmt: skip
