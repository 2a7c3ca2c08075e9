"""Which query rows a tile of keys has to visit, where a mask says only which keys a row sees.

Intervals that tensors hold lead from rows to keys alone. Two small kernels invert them in each call: the first finds
the hull and the core of each tile of query rows, the second, for each tile of keys, the tiles of rows whose hulls
meet it and a run of those whose cores hold it. Nothing waits for the host, and a CUDA graph may
be replayed with other values.

The first kernel also writes down the keys of each row, in whole blocks of rows. Where the hull of a mask is the whole
truth, a kernel compares with these two numbers, whatever the mask is made of.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches
from saccade.backends.device import positions
from saccade.backends.device.launch import Launch, cached_launch
from saccade.backends.device.masks import DeviceMask
from saccade.backends.device.positions import blocks_before, extent, is_packed, numbered, tile_of
from saccade.backends.device.records import FAR, FLAGS, plain_int, runtime_int, sees
from saccade.call import Call
from saccade.masks import TILE as MASK_TILE

TILE = tl.constexpr(MASK_TILE)
CHUNK = 128
"""Tiles of rows that `visits_kernel` looks at at once."""


class Visits(NamedTuple):
    """What each tile of keys has to visit."""

    table: Any
    """int32 (b or 1, tiles of keys, 4); packed (1, tiles of keys of all sequences, 4): rows [first, end), which may see
    one of the keys, and [core, core_end), which see all of them"""
    stride_b: Any
    """in entries, a `runtime_int`, as the next"""
    tiles: Any
    keys_at: Any
    """int (b + 1): where each packed sequence's keys begin; else some other tensor"""
    packed: Any
    """constexpr"""
    lo: Any
    """int32 (b or 1, rows in whole blocks, for each packed sequence too, and a block more): each row's first key"""
    hi: Any
    """the same of the key after its last one"""


@triton.jit
def _keys_of(data, b, q_idx, off):
    return data[0].keys_of(data[0].data, b, q_idx, off)


@triton.jit
def _rows_of(data, b, kv_idx, off):
    tile = kv_idx // TILE
    if data[1].packed:
        tile += blocks_before(None, b, tl.load(data[1].keys_at + b).to(tl.int32), TILE)
    tile = tl.maximum(tl.minimum(tile, plain_int(data[1].tiles) - 1), 0)
    entry = data[1].table + 4 * (b * plain_int(data[1].stride_b) + tile)
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)


@triton.jit
def _sees(data, b, h, q_idx, kv_idx, off):
    return sees(data[0], b, h, q_idx, kv_idx, off)


@triton.jit(do_not_specialize=["s_q", "s_k", "n_q", "blocks"])
def hulls_kernel(hulls, row_lo, row_hi, mask, used_q, used_k, s_q, s_k, n_q, blocks, BLOCK_Q: tl.constexpr):
    """The hull and the core of one tile of query rows: of hulls the least start and the greatest stop, of cores the
    greatest start and the least stop. And the keys of each of its rows."""
    seq, _, _, start = tile_of(used_q, 1, s_q, TILE, False)
    _, first_row, _, rows = extent(used_q, seq, s_q)
    _, _, _, keys = extent(used_k, seq, s_k)
    # [TILE]
    q_idx = start + tl.arange(0, TILE)
    lo, hi, core_lo, core_hi = mask.keys_of(mask.data, numbered(used_q, seq), q_idx, keys - rows)
    lo = tl.maximum(lo, 0)
    hi = tl.minimum(hi, keys)
    live = q_idx < rows
    seeing = live & (hi > lo)
    whole = seeing & (core_hi > core_lo)
    if start < s_q:  # else the program has no tile
        if is_packed(used_q):
            tile = blocks_before(used_q, seq, first_row, TILE) + start // TILE
            block = blocks_before(used_q, seq, first_row, BLOCK_Q)
        else:
            tile = seq * n_q + start // TILE
            block = seq * blocks
        offset = block.to(tl.int64) * BLOCK_Q + q_idx
        own = q_idx < tl.cdiv(rows, BLOCK_Q) * BLOCK_Q  # a tile may reach beyond its sequence's smaller blocks
        tl.store(row_lo + offset, tl.where(seeing, lo, 0), mask=own)
        tl.store(row_hi + offset, tl.where(seeing, hi, 0), mask=own)
        entry = hulls + 4 * tile.to(tl.int64)
        tl.store(entry, tl.min(tl.where(seeing, lo, FAR)))
        tl.store(entry + 1, tl.max(tl.where(seeing, hi, 0)))
        tl.store(entry + 2, tl.max(tl.where(live, tl.where(whole, core_lo, FAR), 0)))
        tl.store(entry + 3, tl.min(tl.where(live, core_hi, FAR)))


@triton.jit(do_not_specialize=["s_q", "s_k", "n_q", "n_k"])
def visits_kernel(table, hulls, used_q, used_k, s_q, s_k, n_q, n_k, CHUNK: tl.constexpr):
    """The entry of one tile of keys."""
    seq, _, _, start = tile_of(used_k, 1, s_k, TILE, False)
    _, first_row, _, rows = extent(used_q, seq, s_q)
    _, first_key, _, keys = extent(used_k, seq, s_k)
    stop = tl.minimum(start + TILE, keys)
    if is_packed(used_k):
        base = blocks_before(used_q, seq, first_row, TILE)
        tile = blocks_before(used_k, seq, first_key, TILE) + start // TILE
    else:
        base = seq * n_q
        tile = seq * n_k + start // TILE
    count = tl.where(start < keys, tl.cdiv(rows, TILE), 0)
    first = count * 0 + FAR
    end = count * 0
    core = count * 0 + FAR
    core_end = count
    for i in range(0, count, CHUNK):
        # [CHUNK]
        meets, holds, row = _tiles_of_rows(hulls, base, i, count, start, stop, CHUNK)
        first = tl.minimum(first, tl.min(tl.where(meets, row, FAR)))
        end = tl.maximum(end, tl.max(tl.where(meets, row + 1, 0)))
        core = tl.minimum(core, tl.min(tl.where(holds, row, FAR)))
        core_end = tl.minimum(core_end, tl.min(tl.where((row >= core) & (row < count) & (holds == 0), row, FAR)))
    if start < s_k:  # else the program has no tile
        entry = table + 4 * tile.to(tl.int64)
        tl.store(entry, tl.minimum(first, end) * TILE)
        tl.store(entry + 1, end * TILE)
        tl.store(entry + 2, tl.minimum(core, core_end) * TILE)
        tl.store(entry + 3, core_end * TILE)


@triton.jit
def _tiles_of_rows(hulls, base, i, count, start, stop, CHUNK: tl.constexpr):
    """Of tiles of rows from `i` on: whether a row may see a key, whether all rows see all keys, and their numbers."""
    # [CHUNK]
    row = i + tl.arange(0, CHUNK)
    inside = row < count
    entry = hulls + 4 * (base + row).to(tl.int64)
    lo = tl.load(entry, mask=inside, other=FAR)
    hi = tl.load(entry + 1, mask=inside, other=0)
    core_lo = tl.load(entry + 2, mask=inside, other=FAR)
    core_hi = tl.load(entry + 3, mask=inside, other=0)
    return inside & (lo < stop) & (hi > start), inside & (core_lo <= start) & (core_hi >= stop), row


def visited(call: Call, launches: Launches, mask: DeviceMask, block_q: int) -> DeviceMask:
    """The mask with a table of visits, for kernels whose programs own keys and take `block_q` rows at a time. The table
    knows whole tiles of rows, so tiles of scores outside the core ask which pairs are visible."""
    s_q, s_k = call.q.shape[2], call.k.shape[2]
    spans = row_spans = key_spans = positions.spans(call)
    packed = spans[1] is not None and spans[1].packed.value
    if packed:
        b, n_q, n_k = 1, *(positions.slots(call, side, MASK_TILE) for side in (0, 1))
        blocks = positions.slots(call, 0, block_q) + 1
        row_spans, key_spans = (
            positions.spans(call, positions.table(call, launches, side, MASK_TILE)) for side in (0, 1)
        )
    else:
        b, n_q, n_k, blocks = (
            call.q.shape[0],
            *(-(-s // n) for s, n in ((s_q, MASK_TILE), (s_k, MASK_TILE), (s_q, block_q))),
        )
    device, q_rows = call.q.device, (b * blocks + 1) * block_q
    hulls, table = (torch.empty(b, max(n, 1), 4, dtype=torch.int32, device=device) for n in (n_q, n_k))
    lo, hi = torch.empty(2, q_rows, dtype=torch.int32, device=device)
    if b * n_q:
        key = "hulls", block_q
        launch = cached_launch(launches, key, lambda: Launch(hulls_kernel, (b * n_q, 1, 1), (block_q,), warps=1))
        launch(device.index, (hulls, lo, hi, mask, *row_spans, s_q, s_k, n_q, blocks))
    if b * n_k:
        launch = cached_launch(launches, "visits", lambda: Launch(visits_kernel, (b * n_k, 1, 1), (CHUNK,), warps=1))
        launch(device.index, (table, hulls, *key_spans, s_q, s_k, n_q, n_k))
    keys_at: Tensor = spans[1].starts if packed else table  # pyright: ignore[reportOptionalMemberAccess]
    return _with_table(mask, table, keys_at, packed, lo, hi)


def _with_table(mask: DeviceMask, table: Tensor, keys_at: Tensor, packed: bool, lo: Tensor, hi: Tensor) -> DeviceMask:
    b, n_k, _ = table.shape
    made = Visits(table, runtime_int(n_k if b > 1 else 0), runtime_int(n_k), keys_at, FLAGS[packed], lo, hi)
    return DeviceMask(*_FUNCTIONS, FLAGS[False], (mask, made), has_lower_bound=mask.has_lower_bound, bounded=mask.exact)


_FUNCTIONS = tl.constexpr(_keys_of), tl.constexpr(_rows_of), tl.constexpr(_sees)
