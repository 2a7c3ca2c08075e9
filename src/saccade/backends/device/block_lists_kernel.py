"""Block lists on the device: the kernels that compute the states of a mask's tiles and that write the lists, and what
reads them."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from saccade.backends.device.positions import blocks_before, extent, is_packed, tile_of
from saccade.backends.device.records import aggregate, plain_int, sees
from saccade.backends.device.tiles import tile_range, used_length, visible
from saccade.masks import FULL, PARTIAL
from saccade.masks import TILE as MASK_TILE

TILE = tl.constexpr(MASK_TILE)
_PARTIAL, _FULL = tl.constexpr(PARTIAL), tl.constexpr(FULL)


@triton.jit
def block_list_number(lists, b, h, block):
    """Which of all lists is that of one block."""
    return b.to(tl.int64) * plain_int(lists.stride_b) + h * plain_int(lists.stride_h) + block


@triton.jit
def load_block_list(lists, number):
    """Where a list begins, how many of its tiles are partial, and how many there are."""
    counts = lists.count + 2 * number
    return lists.index + number * plain_int(lists.tiles), tl.load(counts), tl.load(counts + 1)


@triton.jit
def block_number(span, heads, start, BLOCK: tl.constexpr):
    """Which of a head's lists is that of this program's block: packed, by the table that it got it from. A program
    without a block has an empty one there."""
    if is_packed(span):
        return tl.program_id(0) // heads
    else:
        return start // BLOCK


@triton.jit
def block_list_range(mask, b, h, block, BLOCK: tl.constexpr):
    """The list of one block as `tile_range` tells of tiles: first, core, core_end, end, in places of the list times
    BLOCK, and where the list begins."""
    offset, some, tiles = load_block_list(mask.block_lists, block_list_number(mask.block_lists, b, h, block))
    return some * 0, some * 0 + some * BLOCK, tiles * BLOCK, tiles * BLOCK, offset


@triton.jit
def tile_start(mask, offset, start, BLOCK: tl.constexpr):
    """Where the tile begins that is visited at `start`: there, or where the list says."""
    if mask.block_sparse:
        return tl.load(offset + start // BLOCK) * BLOCK
    else:
        return start


@triton.jit(do_not_specialize=["heads", "s_q", "s_k", "n_q", "n_k"])
def tile_states_kernel(
    states, used_q, used_k, mask, lists, heads, s_q, s_k, n_q, n_k, AT_ONCE: tl.constexpr, SPAN: tl.constexpr
):
    """The states of SPAN tiles of keys, for one tile of query rows of one head."""
    spans = tl.cdiv(n_k, SPAN)
    span = tl.program_id(0) % spans
    block = tl.program_id(0) // spans % n_q
    bh = tl.program_id(0) // spans // n_q
    b = bh // heads
    h = bh % heads
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    row = states + (bh.to(tl.int64) * n_q + block) * n_k
    _write_states(row, mask, lists, b, h, block, span, rows, keys, n_k, AT_ONCE, SPAN)


@triton.jit(do_not_specialize=["heads", "s_q", "s_k", "n_q", "n_k"])
def packed_tile_states_kernel(
    states, used_q, used_k, mask, lists, heads, s_q, s_k, n_q, n_k, AT_ONCE: tl.constexpr, SPAN: tl.constexpr
):
    """The same of packed sequences, for one tile of the table of `used_q`."""
    b, h, _, start = tile_of(used_q, heads, s_q, TILE, False)
    _, first, _, rows = extent(used_q, b, s_q)
    _, _, _, keys = extent(used_k, b, s_k)
    span = tl.program_id(1)
    if (start < rows) & (span * SPAN * TILE < keys):  # no other is read
        block = start // TILE
        row = states + (h.to(tl.int64) * n_q + blocks_before(used_q, b, first, TILE) + block) * n_k
        _write_states(row, mask, lists, b, h, block, span, rows, keys, n_k, AT_ONCE, SPAN)


@triton.jit
def _write_states(row, mask, lists, b, h, block, span, rows, keys, n_k, AT_ONCE: tl.constexpr, SPAN: tl.constexpr):
    """SPAN states of one row of tiles, AT_ONCE of them at a time; `lists` are beside the mask, or None."""
    off = keys - rows
    # [TILE]
    q_idx = block * TILE + tl.arange(0, TILE)
    lo, hi, core_lo, core_hi = mask.keys_of(mask.data, b, q_idx, off)
    first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, q_idx < rows, keys, TILE)
    if block * TILE + TILE > rows:  # rows that are not in use: the last tile is never full
        core = end
        core_end = end
    for step in range(0, SPAN, AT_ONCE):
        tile = span * SPAN + step
        # [AT_ONCE]
        tiles = tile + tl.arange(0, AT_ONCE)
        start = tile * TILE
        stop = start + AT_ONCE * TILE
        state = tl.where((tiles * TILE >= core) & (tiles * TILE < core_end), _FULL, 0)
        if lists is not None:
            some, whole = _listed(lists, b, h, block, tile, rows, keys, off, AT_ONCE)
            inside = some & (tiles * TILE >= first) & (tiles * TILE < end)
            state = tl.where(inside, tl.where(whole & (state == _FULL), _FULL, _PARTIAL), 0)
        elif (start < end) & (stop > first) & ((start < core) | (stop > core_end)):
            # [TILE, AT_ONCE TILE]
            kv_idx = start + tl.arange(0, AT_ONCE * TILE)
            seen = visible(mask, b, h, q_idx[:, None], kv_idx[None, :], rows, keys, off)
            # [AT_ONCE]
            count = tl.sum(tl.reshape(tl.sum(seen.to(tl.int32), 0), [AT_ONCE, TILE]), 1)
            state = tl.where(count == TILE * TILE, _FULL, tl.where(count > 0, _PARTIAL, 0))
        tl.store(row + tiles, state.to(tl.uint8), mask=tiles < n_k)


@triton.jit
def _listed(lists, b, h, block, tile, rows, keys, off, AT_ONCE: tl.constexpr):
    """Which of AT_ONCE tiles of keys the lists of a tile of rows name, and which all of them name in full. Lists of
    TILE rows, or blocks of TILE keys, or more are the same all over a tile that they do not end in: those of its first
    and last ones say it."""
    # [ROWS]
    q_idx = block * TILE + tl.arange(0, lists.ROWS) * ((TILE - 1) // (lists.ROWS - 1))
    q_idx = tl.minimum(q_idx, tl.maximum(rows - 1, 0))
    # [AT_ONCE KEYS]
    n = tl.arange(0, AT_ONCE * lists.KEYS)
    kv_idx = (tile + n // lists.KEYS) * TILE + n % lists.KEYS * ((TILE - 1) // (lists.KEYS - 1))
    kv_idx = tl.minimum(kv_idx, tl.maximum(keys - 1, 0))
    seen = sees(lists.mask, b, h, q_idx[:, None], kv_idx[None, :], off)
    # [AT_ONCE]
    count = tl.sum(tl.reshape(tl.sum(seen.to(tl.int32), 0), [AT_ONCE, lists.KEYS]), 1)
    return count > 0, count == lists.ROWS * lists.KEYS


@aggregate
class StateGrid:
    """The states of one head's tiles, as the blocks that have lists see them."""

    states: Any
    n_outer: Any
    n_inner: Any
    """tiles of the mask along the blocks with lists, and along the tiles in those"""
    stride_outer: Any
    stride_inner: Any


@triton.jit
def _state_of(grid, outer, tiles, inners, length, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Which of a kernel's tiles are not empty, and which are full. A kernel's tile meets several of the mask, which
    count together; none is full that ends after `length`."""
    whole = tiles < inners  # the last tile of the mask may reach further than the last one of the kernel
    if length is not None:
        whole = whole & ((tiles + 1) * INNER <= length)
    some = tiles < 0
    for i in tl.static_range(max(OUTER // TILE, 1)):
        for j in tl.static_range(max(INNER // TILE, 1)):
            y = (outer * OUTER // TILE + i).to(tl.int64)
            x = (tiles * INNER // TILE + j).to(tl.int64)
            inside = x < tl.where(y < grid.n_outer, grid.n_inner, 0)
            state = tl.load(grid.states + y * grid.stride_outer + x * grid.stride_inner, mask=inside, other=0)
            whole = whole & (state == _FULL)
            some = some | (state != 0)
    return some & (tiles < inners), whole


@triton.jit(do_not_specialize=["outers", "inners", "n_outer", "n_inner", "stride_outer", "stride_inner"])
def block_list_kernel(
    states, index, count, outers, inners, n_outer, n_inner, stride_outer, stride_inner,
    OUTER: tl.constexpr, INNER: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One list: of the tiles of INNER, for one block of OUTER."""
    bh = (tl.program_id(0) // outers).to(tl.int64)
    outer = tl.program_id(0) % outers
    states += bh * n_outer * n_inner
    row = bh * outers + outer
    grid = StateGrid(states, n_outer, n_inner, stride_outer, stride_inner)
    _write_list(grid, index + row * inners, count + 2 * row, outer, inners, None, OUTER, INNER, CHUNK)


@triton.jit(do_not_specialize=["heads", "s", "other_s", "n_q", "n_k", "outers", "inners"])
def packed_block_list_kernel(
    states, index, count, own, other, heads, s, other_s, n_q, n_k, outers, inners,
    OUTER: tl.constexpr, INNER: tl.constexpr, CHUNK: tl.constexpr, BY_KEYS: tl.constexpr, LAST_FIRST: tl.constexpr,
):  # fmt: skip
    """The same of packed sequences, for one tile of the table of `own`. Full tiles are inside of the sequence, whatever
    offsets say that begin where others have not ended. Blocks without rows in use have empty lists."""
    b, h, _, start = tile_of(own, heads, s, OUTER, LAST_FIRST)
    _, first, _, length = extent(own, b, s)
    _, other_first, _, other_length = extent(other, b, other_s)
    row = h.to(tl.int64) * outers + block_number(own, heads, start, OUTER)
    if start >= length:
        tl.store(index + row * inners, 0)
    else:
        first_q = other_first if BY_KEYS else first
        states += (h.to(tl.int64) * n_q + blocks_before(own, b, first_q, TILE)) * n_k
        block = start // OUTER
        tiles = tl.cdiv(other_length, INNER)
        n_outer = tl.cdiv(length, TILE)
        n_inner = tl.cdiv(other_length, TILE)
        grid = StateGrid(states, n_outer, n_inner, 1 if BY_KEYS else n_k, n_k if BY_KEYS else 1)
        offset = index + row * inners
        _write_list(grid, offset, count + 2 * row, block, tiles, other_length, OUTER, INNER, CHUNK)


@triton.jit
def _write_list(
    grid, index, count, outer, inners, length, OUTER: tl.constexpr, INNER: tl.constexpr, CHUNK: tl.constexpr
):
    """The partial tiles of one block, then the full ones, and how many there are."""
    partial = 0
    for start in range(0, inners, CHUNK):
        # [CHUNK]
        tiles = start + tl.arange(0, CHUNK)
        some, whole = _state_of(grid, outer, tiles, inners, length, OUTER, INNER)
        partial += tl.sum((some & (whole == 0)).to(tl.int32))
    some_at = 0
    full_at = partial
    for start in range(0, inners, CHUNK):
        tiles = start + tl.arange(0, CHUNK)
        some, whole = _state_of(grid, outer, tiles, inners, length, OUTER, INNER)
        mixed = (some & (whole == 0)).to(tl.int32)
        full = (some & whole).to(tl.int32)
        offset = tl.where(full != 0, full_at + tl.cumsum(full, 0), some_at + tl.cumsum(mixed, 0)) - 1
        tl.store(index + offset, tiles, mask=(full | mixed) != 0)
        some_at += tl.sum(mixed)
        full_at += tl.sum(full)
    tl.store(index, 0, mask=full_at == 0)
    tl.store(count, partial)
    tl.store(count + 1, full_at)


@triton.jit(do_not_specialize=["inners", "blocks"])
def mark_kernel(ranks, index, count, inners, blocks, CHUNK: tl.constexpr):
    """Ones in ranks, int32 (lists, blocks), of zeros: where a list has a tile. One without a tile visits tile 0."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.maximum(tl.load(count + 2 * row + 1), 1)
    for start in range(0, total, CHUNK):
        # [CHUNK]
        offset = start + tl.arange(0, CHUNK)
        tile = tl.load(index + row * inners + offset, mask=offset < total, other=0)
        tl.store(ranks + row * blocks + tile, 1, mask=offset < total)


@triton.jit(do_not_specialize=["outers", "blocks"])
def ranks_kernel(ranks, table, outers, blocks, CHUNK: tl.constexpr):
    """ranks, of `mark_kernel`, as `block_lists.ranks` says, in offset: CHUNK blocks of one head."""
    # [CHUNK]
    offset = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    head = ranks + tl.program_id(0).to(tl.int64) * outers * blocks + offset
    later = offset * 0
    following = outers * 0 - 1  # where the next list's sequence begins in the table
    for i in range(outers):
        number = outers - 1 - i
        rank = later
        row = head + number.to(tl.int64) * blocks
        mark = tl.load(row, mask=offset < blocks, other=0)
        if table is not None:
            total = tl.load(table)
            first = tl.where(number < total, tl.load(table + 3 + 2 * tl.minimum(number, total - 1)), -1)
            later = tl.where(first == following, later, 0)
            rank = tl.where(number < total, later, number - total)
            following = first
        tl.store(row, rank, mask=offset < blocks)
        later += mark
