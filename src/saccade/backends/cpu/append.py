"""New keys and values into the pages of a cache, in PyTorch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.backends import Append, Rotary
from saccade.layouts import Paged


def append(step: Append) -> None:
    """Writes the rows that have a page, and omits the rest."""
    layout, (pages, size) = step.layout, step.k_cache.shape[:2]
    b, position = _places(layout, step.k_new)
    inside = (b < layout.sequences) & (position < layout.capacity(size))
    b, position = b[inside], position[inside]
    page = layout.block_table[b, position // size].long()
    mapped = (page >= 0) & (page < pages)
    page, row = page[mapped], position[mapped] % size
    for cache, new in ((step.k_cache, step.k_new), (step.v_cache, step.v_new)):
        rows = new.flatten(0, -3)[inside][mapped]
        if step.rotary is not None and new is step.k_new:
            rows = rotated(rows, step.rotary, position[mapped])
        cache[page, row] = rows


def _places(layout: Paged, new: Tensor) -> tuple[Tensor, Tensor]:
    """Sequence and position of every new row. Rows after the last sequence have its number plus one."""
    used = layout.seqused_k.long()
    offsets = layout.cu_seqlens_q
    if offsets is None:
        b = torch.arange(layout.sequences)[:, None].expand(new.shape[:2])
        return b.flatten(), (used[:, None] + torch.arange(new.shape[1])).flatten()
    row = torch.arange(new.shape[0])
    b = torch.bucketize(row, offsets[1:], right=True)
    ends = torch.cat([used, used.new_zeros(1)])
    return b, ends[b] + row - offsets[b]


def rotated(x: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """x (n, h, d) with its pairs turned by the angles of the positions (n)."""
    position = position.clamp(max=rotary.cos.shape[0] - 1)
    cos, sin = (table[position][:, None].float() for table in (rotary.cos, rotary.sin))
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].float(), x[..., 2 * pairs :]
    x0, x1 = turned.unflatten(-1, (pairs, 2)).unbind(-1) if rotary.interleaved else turned.chunk(2, dim=-1)
    turns = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    turned = torch.stack(turns, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(turns, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
