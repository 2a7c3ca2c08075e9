"""PyTorch's `scaled_dot_product_attention` of a Case: by its causal flag, or with the mask as a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from saccade.layouts import Dense, Layout, Packed
from saccade.masks import Extent, Mask
from saccade.testing.cases import Case, Inputs

LARGEST = 1 << 31
"""Elements of a mask that is made."""


def by_flag(case: Case) -> bool:
    """Whether it needs no mask tensor: its causal mask is aligned top-left."""
    full = case.used == "all" and case.order not in ("thd", "paged")
    return full and (case.mask == "none" or (case.mask == "causal" and case.s_q == case.s_k))


def sdpa(case: Case, inputs: Inputs) -> Callable[[], Tensor] | None:
    """The forward, with what it needs made beforehand; None where it has no such call."""
    if case.score != "none" or case.sink or case.order == "paged" or case.ranges:
        return None
    if by_flag(case):
        q, k, v = dense(inputs)
        causal, gqa = case.mask == "causal", case.h_q != case.h_k
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
    if case.b * case.s_q * case.s_k > LARGEST:
        return None
    mask, padded, _ = with_mask(inputs, case.b)
    q, k, v = dense(padded)
    return lambda: masked(q, k, v, mask)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """With a mask tensor fused kernels have no grouped heads: as model code does, keys and values are repeated."""
    if (group := q.shape[1] // max(1, k.shape[1])) > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def dense(inputs: Inputs) -> list[Tensor]:
    """q, k and v as (b, h, s, d), contiguous, with no NaN in the padding."""
    layout: Layout = inputs.keywords.get("layout", Dense())
    tensors = [layout.canonical(x) for x in (inputs.q, inputs.k, inputs.v)]
    return [(x.nan_to_num(0) if layout.tensors else x).contiguous() for x in tensors]


def with_mask(inputs: Inputs, b: int) -> tuple[Tensor, Inputs, Padding | None]:
    """The mask as a bool tensor, and the problem as a batch; of packed sequences also how they are padded."""
    padding = None
    if inputs.keywords.get("layout", Dense()).ragged_keys:
        padding = Padding.of(inputs)
        inputs = padding.inputs(inputs)
    mask = visible_mask(inputs, b)
    # Rows of padding see the keys in use: their results are ignored, and kernels need some.
    return mask if padding is None else mask | padding.unseen(), inputs, padding


def visible_mask(inputs: Inputs, b: int) -> Tensor:
    """(b or 1, 1, s_q, s_k) bool, True where a query of a batch may attend."""
    layout: Layout = inputs.keywords.get("layout", Dense())
    mask: Mask | None = inputs.keywords.get("mask")
    s_q, s_k = (layout.canonical(x).shape[2] for x in (inputs.q, inputs.k))
    extent = Extent.of(s_q, s_k, layout.seqused_q, layout.seqused_k, inputs.q.device)
    same = not layout.tensors and (mask is None or not mask.tensors)
    return visible_keys(mask, extent, 1 if same else b, extent.q_idx().T)[:, None]


def visible_keys(mask: Mask | None, extent: Extent, b: int, rows: Tensor) -> Tensor:
    """bool (b or 1, len(rows), s_k): which keys these rows see, (n, 1)."""
    keys = torch.arange(extent.s_k, device=rows.device)
    visible = (rows < extent.rows[..., None]) & (keys < extent.keys[..., None])
    if mask is None:
        return visible
    batch = torch.arange(b, device=rows.device)[:, None, None]
    return visible & mask.sees(extent, batch, batch * 0, rows, keys)


@dataclass(frozen=True)
class Padding:
    """Where each packed row is in a batch (b, h, s, d) whose rows are as long as the longest sequence."""

    q: PaddedSide
    k: PaddedSide

    @staticmethod
    def of(inputs: Inputs) -> Padding:
        layout = inputs.keywords["layout"]
        assert isinstance(layout, Packed)
        assert layout.cu_seqlens_k is not None
        q = PaddedSide.of(layout.cu_seqlens_q, layout.seqused_q, inputs.q.shape[0])
        return Padding(q, PaddedSide.of(layout.cu_seqlens_k, layout.seqused_k, inputs.k.shape[0]))

    def inputs(self, packed: Inputs) -> Inputs:
        """The same problem as a padded batch."""
        layout = Dense("bhsd", self.q.used, self.k.used)
        q, dout = self.q.padded(packed.q), self.q.padded(packed.dout)
        keywords = packed.keywords | {"layout": layout}
        return Inputs(q, self.k.padded(packed.k), self.k.padded(packed.v), dout, packed.dlse, keywords)

    def unseen(self) -> Tensor:
        """bool (b, 1, s_q, s_k): rows that are not in use, and keys that are."""
        return (~self.q.in_use[:, :, None] & self.k.in_use[:, None])[:, None]


@dataclass(frozen=True)
class PaddedSide:
    """The rows of queries, or of keys."""

    used: Tensor
    """(b): rows in use"""
    in_use: Tensor
    """bool (b, longest): which rows of the padded batch are"""
    source: Tensor
    """(n): the packed row of each row in use"""
    total: int
    """t of the packed tensor"""

    @staticmethod
    def of(offsets: Tensor, used: Tensor | None, total: int) -> PaddedSide:
        lengths = offsets.diff()
        used = (lengths if used is None else used).long()
        in_use = torch.arange(int(lengths.max()), device=used.device) < used[:, None]
        row, column = in_use.nonzero(as_tuple=True)
        return PaddedSide(used, in_use, offsets.long()[row] + column, total)

    def padded(self, x: Tensor) -> Tensor:
        """(b, h, s, d) of (t, h, d), with zeros in the padding."""
        padded = x.new_zeros(*self.in_use.shape, *x.shape[1:])
        padded[self.in_use] = x.detach()[self.source]
        return padded.transpose(1, 2)

    def packed(self, x: Tensor) -> Tensor:
        """(t, h, d) of (b, h, s, d)."""
        packed = x.new_zeros(self.total, x.shape[1], x.shape[3])
        packed[self.source] = x.transpose(1, 2)[self.in_use]
        return packed
