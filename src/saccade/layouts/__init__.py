"""Where the rows of q, k and v live: the Layout records."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.layouts.dense import ORDERS, Dense
from saccade.layouts.packed import Packed
from saccade.layouts.paged import Paged
from saccade.layouts.strides import empty_like_rows, with_rows

__all__ = [
    "ORDERS", "PLAIN", "Dense", "Layout", "Packed", "Paged", "empty_like_rows", "form", "from_records", "with_rows",
]  # fmt: skip

Layout = Dense | Packed | Paged

PLAIN = {order: Dense(order) for order in ORDERS}
"""The layouts without tensors, made once."""


def from_records(text: str, records: list[Tensor], t_q: int = 0, t_k: int = 0) -> Layout:
    """The inverse of `text` and `records`; takes what it needs from the front of `records`. A packed one is bounded by
    its tensors' rows."""
    if text in PLAIN:
        return PLAIN[text]
    order, *names = text.split(",")
    if order in ORDERS:
        return Dense(order, **{name: records.pop(0) for name in names})
    if order == Paged.kind:
        splits = [int(name.partition("=")[2]) for name in names if name.startswith("splits=")]
        found = [records.pop(0) for _ in range(3 if "cu_seqlens_q" in names else 2)]
        return Paged(*found, num_splits=splits[0] if splits else None)
    offsets = records.pop(0), records.pop(0)
    used = {name: records.pop(0) for name in names if name != "validate"}
    return Packed(*offsets, t_q, t_k, **used, validate="validate" in names)


def form(text: str) -> Layout:
    """A layout of this text's order, for its views alone."""
    order, *names = text.split(",")
    if order == Paged.kind:
        return _NO_QUERIES if "cu_seqlens_q" in names else _NO_PAGES
    return PLAIN[order] if order in ORDERS else _NO_SEQUENCES


_NO_SEQUENCES = Packed(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 0, 0)
_NO_PAGES = Paged(torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
_NO_QUERIES = Paged(_NO_PAGES.block_table, _NO_PAGES.seqused_k, torch.zeros(1, dtype=torch.int32))
