"""New keys and values into the pages of a cache, in PyTorch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.backends import Append, Rotary
from saccade.layouts import CacheSlots, Paged, empty_like_rows


class Places(NamedTuple):
    """Of every new row, (n,): its slot in the cache, or -1; its position; and whether it is a sequence's."""

    slot: Tensor
    position: Tensor
    known: Tensor


def append(step: Append) -> Tensor | None:
    """Writes the rows that have a page or a slot, and omits the rest. Returns the rotated queries."""
    layout, (pages, size), q = step.layout, step.k_cache.shape[:2], step.q
    places = _by_slot(layout) if isinstance(layout, CacheSlots) else _by_length(layout, step.k_new, pages, size)
    there = (places.slot >= 0) & (places.slot < pages * size)
    slot = places.slot[there]
    for cache, new in ((step.k_cache, step.k_new), (step.v_cache, step.v_new)):
        rows = new.flatten(0, -3)[there]
        if step.rotary is not None and new is step.k_new:
            rows = rotated(rows, step.rotary, places.position[there])
        cache[slot // size, slot % size] = rows
    if q is None or step.rotary is None:
        return None
    made = empty_like_rows(q, q.shape[-1]).zero_()
    rows = rotated(q.flatten(0, -3)[places.known], step.rotary, places.position[places.known])
    made[places.known.view(q.shape[:-2])] = rows
    return made


def _by_slot(layout: CacheSlots) -> Places:
    slot = layout.slot_mapping.flatten().long()
    position = torch.zeros_like(slot) if layout.positions is None else layout.positions.flatten().long()
    return Places(slot, position, torch.ones_like(slot, dtype=torch.bool))


def _by_length(layout: Paged, new: Tensor, pages: int, size: int) -> Places:
    used = layout.seqused_k.long()
    offsets = layout.cu_seqlens_q
    if offsets is None:
        b = torch.arange(layout.sequences)[:, None].expand(new.shape[:2]).flatten()
        position = (used[:, None] + torch.arange(new.shape[1])).flatten()
    else:  # rows after the last sequence have its number plus one
        row = torch.arange(new.shape[0])
        b = torch.bucketize(row, offsets[1:], right=True)
        position = torch.cat([used, used.new_zeros(1)])[b] + row - offsets[b]
    known = b < layout.sequences
    inside = known & (position < layout.capacity(size))
    page = torch.full_like(position, -1)
    page[inside] = layout.block_table[b[inside], position[inside] // size].long()
    mapped = (page >= 0) & (page < pages)
    return Places(torch.where(mapped, page * size + position % size, -1), position, known)


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
