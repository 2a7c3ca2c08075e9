"""Block sparsity: which tiles of a mask are empty, partial or full.

The states are uint8 (b or 1, h_q or 1, tiles of rows, tiles of keys); a tile has 64 rows and 64 keys. Nothing of the
size s_q s_k is ever in memory. Each backend derives what its own tiles need; `backends/device/block_lists.py` derives
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from saccade.backends.key_lists import lists_and_rest
from saccade.call import Call
from saccade.masks import EMPTY, FULL, PARTIAL, TILE, Blocked, Extent, Mask
from saccade.util.caches import BoundedCache, derived_from_values, versions

PAIRS_AT_ONCE = 1 << 22

_sources: BoundedCache[int, Hashable] = BoundedCache(1 << 16)
"""The contents of masks when their states were computed, by the storage of the states."""


def states_of(call: Call, compute: Callable[[Call], Tensor]) -> tuple[Tensor, bool]:
    """The tile states of a mask: its own if they still hold, cached ones, or new ones; and whether they outlive the
    call, so that what is made of them may be kept."""
    mask = call.mask
    assert mask is not None
    assert mask.block_sparse, mask
    if isinstance(mask, Blocked):
        source = _contents(mask.mask)
        known = mask.kept and source is not None
        if known and _sources.get(mask.states.untyped_storage()._cdata) == source:
            return mask.states, True
        mask = mask.mask  # it has changed since its states were computed
        call = call.replace(mask=mask)
    lengths = call.q.shape[2], call.k.shape[2]  # tiles alone do not say where the last ones end
    numbers = (mask.numbers, call.layout.text, *states_shape(call), *lengths)
    key = "states", mask.identity, numbers, str(call.q.device)
    if mask.bounds_per_row or call.positions is not None:
        return compute(call), False
    tensors = [*mask.tensors, *call.layout.tensors]
    return derived_from_values(key, tensors, lambda: compute(call)), not tensors


def with_states(mask: Mask, states: Tensor, lengths: tuple[int, int]) -> Blocked:
    """The mask with states that were computed of it as it is now."""
    bound = mask.bound()
    if (source := _contents(bound)) is not None:
        _sources.put(states.untyped_storage()._cdata, source, [states, *bound.tensors])
    return Blocked(mask, states, lengths)


def _contents(mask: Mask) -> Hashable | None:
    """All that the states of a mask depend on, besides the call's shape; None if a tensor's writes are not counted."""
    written = versions(mask.tensors)
    return None if written is None else (mask.identity, mask.numbers, written)


def states_shape(call: Call) -> tuple[int, int, int, int]:
    """b or 1, h_q or 1, tiles of rows and of keys.

    Packed sequences are one batch row, in which each has whole tiles of rows, of which the first one of sequence b is
    number `cu_seqlens_q[b] // TILE + b`, and keys count within it.
    """
    mask, q, k, layout = call.mask, call.q, call.k, call.layout
    assert mask is not None
    batches = q.shape[0] if "b" in mask.indices or layout.tensors else min(q.shape[0], 1)
    heads = q.shape[1] if "h" in mask.indices else min(q.shape[1], 1)
    return batches, heads, layout.tiles(q.shape[2], TILE), -(-k.shape[2] // TILE)


def compute_states(call: Call) -> Tensor:
    """The states by plain PyTorch operations, on any device, some rows at a time."""
    lists, rest = lists_and_rest(call.mask)
    if not lists or any(x.rows < TILE or x.keys < TILE for x in lists):
        return _computed(call)
    named = _tile_lists(call, lists)
    return named if rest is None else torch.minimum(named, _computed(call.replace(mask=rest)))


def _tile_lists(call: Call, lists: Sequence[Mask]) -> Tensor:
    """The states of lists of TILE rows and TILE keys or more, by a tile's corners: they are the same all over a tile
    that they do not end in. One that lists name is partial where it may not be in use as a whole."""
    extent, (b, h, rows, keys) = call.extent, states_shape(call)
    corners = torch.tensor([0, TILE - 1], device=call.q.device)
    q_idx, kv_idx = (torch.arange(n, device=call.q.device)[:, None] * TILE + corners for n in (rows, keys))
    batch, head = (torch.arange(n, device=call.q.device) for n in (b, h))
    at = batch[:, None, None, None], head[:, None, None], q_idx.clamp(max=extent.s_q - 1).flatten()[:, None]
    seen = (x.sees(extent, *at, kv_idx.clamp(max=extent.s_k - 1).flatten()) for x in lists)
    seen = reduce(and_, seen).expand(b, h, 2 * rows, 2 * keys).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    whole = (q_idx[:, 1:] < extent.rows[:, None, None]) & (kv_idx[:, 1] < extent.keys[:, None, None])
    named = torch.where(seen.all(3).all(-1) & whole, FULL, torch.where(seen.any(3).any(-1), PARTIAL, EMPTY))
    return named.to(torch.uint8)


def _computed(call: Call) -> Tensor:
    assert call.mask is not None
    extent, device = call.extent, call.q.device
    b, h, rows, keys = states_shape(call)
    states = torch.zeros(b, h, rows, keys, dtype=torch.uint8, device=device)
    hull = call.mask.hull(extent).clipped(extent)
    step = max(1, PAIRS_AT_ONCE // max(1, b * h * TILE * extent.s_k))
    for row in range(0, rows, step):
        q_idx = torch.arange(row * TILE, min((row + step) * TILE, extent.s_q), device=device)
        lo, hi = hull.lo[:, q_idx], hull.hi[:, q_idx]
        seeing = hi > lo
        if not bool(seeing.any()):
            continue
        first, stop = int(lo[seeing].min()) // TILE, -(-int(hi[seeing].max()) // TILE)
        kv_idx = torch.arange(first * TILE, min(stop * TILE, extent.s_k), device=device)
        seen = _seen(call.mask, extent, b, h, q_idx, kv_idx)
        # What the last tiles lack counts as masked.
        missing = (0, -len(kv_idx) % TILE, 0, -len(q_idx) % TILE)
        seen = torch.nn.functional.pad(seen, missing) if any(missing) else seen.contiguous()
        seen = seen.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
        # Bytes hold what a column of a tile adds up to, which is 6 times as fast as `any` and `all`.
        count = seen.view(torch.uint8).sum(3, dtype=torch.uint8).sum(-1)
        state = torch.where(count == TILE * TILE, FULL, torch.where(count > 0, PARTIAL, EMPTY))
        states[:, :, row : row + step, first:stop] = state
    return states


def _seen(mask: Mask, extent: Extent, b: int, h: int, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """(b, h, rows, keys) bool, False where rows or keys are not in use"""
    batch, head = (torch.arange(n, device=q_idx.device) for n in (b, h))
    seen = mask.sees(extent, batch[:, None, None, None], head[:, None, None], q_idx[:, None], kv_idx)
    rows, keys = (edge[..., None, None] for edge in (extent.rows, extent.keys))
    inside = (q_idx[:, None] < rows) & (kv_idx < keys)
    return (seen & inside).expand(b, h, len(q_idx), len(kv_idx))
