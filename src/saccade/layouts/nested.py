"""Nested (jagged) tensors, which carry their own offsets, as packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.layouts.dense import Dense
from saccade.layouts.packed import Packed
from saccade.layouts.paged import Paged

_RAGGED = {"bhsd": 2, "bshd": 1}
"""Which dimension has the sequences."""


def values(q: Any, k: Any, v: Any, layout: Dense | Packed | Paged) -> tuple[Tensor, Tensor, Tensor, Packed]:
    """The values of nested q, k and v as (t, h, d) tensors, and where the sequences are.

    Raises:
        ValueError: not all nested, not jagged, with holes, of different offsets, or in another order than the layout's.
    """
    wanted = _RAGGED.get(layout.order)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_nested or x.layout != torch.jagged:
            raise ValueError(f"q, k and v must all be nested tensors of layout torch.jagged, or none; {name} is not")
        ragged: int = x._ragged_idx
        if x.dim() != 4 or ragged != wanted or x.lengths() is not None or layout.records:
            raise ValueError(
                "nested tensors are (b, h, s, d) with layout=Dense('bhsd'), or (b, s, h, d) with Dense('bshd'), jagged "
                f"in s, without holes or used lengths; {name} has {x.dim()} dimensions, jagged in dimension {ragged}, "
                f"layout {layout!r}"
            )
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("nested k and v must have the same offsets")
    q_rows, k_rows, v_rows = (x.values() if wanted == 1 else x.values().transpose(0, 1) for x in (q, k, v))
    return q_rows, k_rows, v_rows, Packed(q.offsets(), k.offsets(), q_rows.shape[0], k_rows.shape[0])


def nested(out: Tensor, layout: Packed, order: str) -> Tensor:
    """(t, h, d) as a nested tensor in this order."""
    made = torch.nested.nested_tensor_from_jagged(out, layout.cu_seqlens_q)
    return made if order == "bshd" else made.transpose(1, 2)
