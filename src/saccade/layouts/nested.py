"""Nested (jagged) tensors, which carry their own offsets, as packed sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.layouts.base import Layout
from saccade.layouts.offsets import has_values
from saccade.layouts.packed import Packed

_RAGGED = {"bhsd": 2, "bshd": 1}
"""The dimension that has the sequences."""


@dataclass(frozen=True, eq=False)
class Nested(Packed):
    """Packed sequences whose result becomes a nested tensor."""

    nested_order: str = "bhsd"

    def wrap_out(self, out: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(out, self.cu_seqlens_q)
        return nested if self.nested_order == "bshd" else nested.transpose(1, 2)

    def out_error(self, out: Any) -> str | None:
        return f"out must be a tensor, and q must not be nested, got out {type(out).__name__}"


def unwrap(q: Any, k: Any, v: Any, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """The values of nested q, k and v as (t, h, d) tensors, and their layout.

    Raises:
        ValueError: operands that are not all nested, not jagged, with holes, of different offsets, or in another order
            than the layout's.
    """
    ragged_dim = _RAGGED.get(layout.order)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_nested or x.layout != torch.jagged:
            raise ValueError(f"q, k and v must all be nested tensors of layout torch.jagged, or none; {name} is not")
        if x.dim() != 4 or x._ragged_idx != ragged_dim or x.lengths() is not None or layout.tensors:
            raise ValueError(
                "nested tensors must be (b, h, s, d) with layout=Dense('bhsd'), or (b, s, h, d) with Dense('bshd'), "
                "jagged in s, without holes, used lengths or offsets that are tensors; "
                f"{name} has {x.dim()} dimensions, "
                f"jagged in dimension {x._ragged_idx}, layout {layout!r}"
            )
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("nested k and v must have the same offsets")
    q_rows, k_rows, v_rows = (x.values() if ragged_dim == 1 else x.values().transpose(0, 1) for x in (q, k, v))
    bounds = _longest(q, q_rows), _longest(k, k_rows)
    places = {"q_offset": layout.q_offset, "k_offset": layout.k_offset}
    return q_rows, k_rows, v_rows, Nested(q.offsets(), k.offsets(), *bounds, nested_order=layout.order, **places)


def _longest(x: Any, rows: Tensor) -> int:
    """The longest sequence, where the host knows it: torch keeps that of tensors that are made from several. Else a
    bound."""
    if torch.compiler.is_compiling():
        return rows.shape[0]
    if x.offsets().device.type == "cpu" and has_values(x.offsets()):
        return int(x.offsets().diff().max()) if len(x.offsets()) > 1 else 0
    return rows.shape[0] if x._maybe_max_seqlen is None else x._maybe_max_seqlen
