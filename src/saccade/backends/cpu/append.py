"""New keys and values into the pages of a cache, in PyTorch operations."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.backends import Append, Rotary
from saccade.backends.cpu.quantize import quotient
from saccade.call.descale import BLOCK
from saccade.layouts import CacheSlots, Paged, empty_like_rows


class CacheRows(NamedTuple):
    """For every new row, (n,): its slot in the cache, or -1; its position; whether it belongs to a sequence, and to
    which."""

    slot: Tensor
    position: Tensor
    known: Tensor
    sequence: Tensor


def append(step: Append) -> Tensor | None:
    """Writes the rows that have a page or a slot, and omits the rest. Returns the rotated queries."""
    layout, (pages, size), q = step.layout, step.k_cache.shape[:2], step.q
    slots = rows_of(layout, step.k_new, pages, size)
    there = (slots.slot >= 0) & (slots.slot < pages * size)
    slot = slots.slot[there]
    sequence, position = slots.sequence[there], slots.position[there]
    for cache, new, factor in zip(step[:2], step[2:4], step.descale.each[1:], strict=True):
        rows = new.flatten(0, -3)[there]
        if step.quantizes:
            rows = rows.float()
        if step.rotary is not None and new is step.k_new:
            rows = rotated(rows, step.rotary, position)
        if step.quantizes:
            by_head = 1.0 if factor is None else _of_rows(factor, sequence, position)
            rows = quotient(rows, by_head, cache.dtype).to(cache.dtype)
        cache[slot // size, slot % size] = rows
    if q is None or step.rotary is None:
        return None
    made = empty_like_rows(q, q.shape[-1]).zero_()
    rows = rotated(q.flatten(0, -3)[slots.known], step.rotary, slots.position[slots.known])
    made[slots.known.view(q.shape[:-2])] = rows
    return made


def _of_rows(factor: Tensor, sequence: Tensor, position: Tensor) -> Tensor:
    """(n, h_k, 1): a factor (sequences, h_k, blocks) of the rows (n)."""
    return factor[sequence, :, (position // BLOCK).clamp(max=factor.shape[2] - 1)][..., None]


def rows_of(layout: Paged | CacheSlots, new: Tensor, pages: int, size: int) -> CacheRows:
    """Where new rows go. Nothing waits for the device."""
    return _by_slot(layout) if isinstance(layout, CacheSlots) else _by_length(layout, new, pages, size)


def _by_slot(layout: CacheSlots) -> CacheRows:
    slot = layout.slot_mapping.flatten().long()
    position = torch.zeros_like(slot) if layout.positions is None else layout.positions.flatten().long()
    return CacheRows(slot, position, torch.ones_like(slot, dtype=torch.bool), torch.zeros_like(slot))


def _by_length(layout: Paged, new: Tensor, pages: int, size: int) -> CacheRows:
    used = layout.seqused_k.long()
    offsets, device = layout.cu_seqlens_q, used.device
    if offsets is None:
        b = torch.arange(layout.sequences, device=device)[:, None].expand(new.shape[:2]).flatten()
        position = (used[:, None] + torch.arange(new.shape[1], device=device)).flatten()
    else:  # rows after the last sequence have its number plus one
        row = torch.arange(new.shape[0], device=device)
        b = torch.bucketize(row, offsets[1:], right=True)
        position = torch.cat([used, used.new_zeros(1)])[b] + row - offsets[b]
    known = b < layout.sequences
    inside = known & (position < layout.capacity(size))
    if not layout.block_table.numel():
        return CacheRows(torch.full_like(position, -1), position, known, b)
    at = torch.where(inside, b, 0), torch.where(inside, position, 0) // size
    page = layout.block_table[at].long()
    mapped = inside & (page >= 0) & (page < pages)
    return CacheRows(torch.where(mapped, page * size + position % size, -1), position, known, b)


def rotated(x: Tensor, rotary: Rotary, position: Tensor) -> Tensor:
    """x (n, h, d) with its pairs turned by the angles of the positions (n)."""
    position = position.clamp(max=rotary.cos.shape[0] - 1)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    cos, sin = (table[position][:, None].to(wide) for table in (rotary.cos, rotary.sin))
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs].to(wide), x[..., 2 * pairs :]
    x0, x1 = turned.unflatten(-1, (pairs, 2)).unbind(-1) if rotary.interleaved else turned.chunk(2, dim=-1)
    turns = x0 * cos - x1 * sin, x1 * cos + x0 * sin
    turned = torch.stack(turns, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(turns, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
