"""The forward's producer: one warp that draws work and keeps the pipeline full."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.device.block_lists_kernel import load_block_list
from saccade.backends.device.sequences import extent, is_packed, numbered, placed
from saccade.backends.device.tiles import tile_range
from saccade.backends.gluon.forward.block_list import list_of_item, listed_tile, work_list
from saccade.backends.gluon.forward.paged_tma import load_boxes, pages_of
from saccade.backends.gluon.ptx import count_up
from saccade.backends.gluon.shim import tma_load
from saccade.backends.gluon.tile_scheduler import (
    BATCH,
    BLOCK,
    CONSUMER,
    CORE,
    CORE_END,
    END,
    FIRST,
    FIRST_ROW,
    HI,
    IN_GROUP,
    KEY_HEAD,
    KEYS,
    LO,
    ROW,
    THERE,
    USED,
    packed_list,
    packed_place,
)
from saccade.backends.gluon.tiles import zero_tail


@gluon.jit
def plan_list(pipe, at, some, tiles):
    """The same as `plan_tiles` of a list: LO to HI are places in it, counted from its end, so that the partial tiles,
    which come first, are behind the core."""
    for c in gl.static_range(pipe.shape.CONSUMERS):
        pipe.slots.put(at, CONSUMER + 4 * c + FIRST, 0)
        pipe.slots.put(at, CONSUMER + 4 * c + CORE, 0)
        pipe.slots.put(at, CONSUMER + 4 * c + CORE_END, tiles - some)
        pipe.slots.put(at, CONSUMER + 4 * c + END, tiles)
    hi = gl.maximum(tiles, 1)
    pipe.slots.put(at, LO, 0)
    pipe.slots.put(at, HI, hi)
    return hi * 0, hi, hi * 0


@gluon.jit
def plan_tiles(pipe, at, mask, b, row, rows, keys):
    """Writes which tiles of keys a work item loads and what each consumer does with them. Returns LO, HI, and how many
    of the tiles a consumer may have to skip before the first that it sees."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    ROWS: gl.constexpr = pipe.shape.ROWS
    layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lo = gl.to_tensor(1 << 30)
    hi = gl.to_tensor(0)
    least = gl.to_tensor(1 << 30)
    off = keys - rows
    for c in gl.static_range(pipe.shape.CONSUMERS):
        # [64]
        q_idx = row + c * ROWS + gl.arange(0, 64, layout) % ROWS
        keys_lo, keys_hi, core_lo, core_hi = mask.keys_of(mask.data, b, q_idx, off)
        first, core, core_end, end = tile_range(keys_lo, keys_hi, core_lo, core_hi, q_idx < rows, keys, BLOCK_K)
        if end > first:
            lo = gl.minimum(lo, first)
            least = gl.minimum(least, end)
        hi = gl.maximum(hi, end)
        pipe.slots.put(at, CONSUMER + 4 * c + FIRST, first // BLOCK_K)
        pipe.slots.put(at, CONSUMER + 4 * c + CORE, core // BLOCK_K)
        pipe.slots.put(at, CONSUMER + 4 * c + CORE_END, core_end // BLOCK_K)
        pipe.slots.put(at, CONSUMER + 4 * c + END, end // BLOCK_K)
    # Every consumer has a tile, be it one in which its rows see nothing: no loop has to think of empty ones.
    hi = gl.maximum(hi // BLOCK_K, 1)
    lo = gl.minimum(lo // BLOCK_K, hi - 1)
    pipe.slots.put(at, LO, lo)
    pipe.slots.put(at, HI, hi)
    return lo, hi, gl.maximum(hi - least // BLOCK_K, 0)


@gluon.jit
def open_item(item, drawn, pipe, work, used_q, used_k, mask, s_q, s_k):
    """Writes the numbers of a work item. Returns those by which it is loaded: batch row (packed: first key; of pages:
    sequence), …"""
    ROWS: gl.constexpr = pipe.shape.ROWS
    if is_packed(used_q):
        b, h_k, in_group, row = packed_place(
            work, item, used_q, s_q, used_k, s_k, ROWS * pipe.shape.CONSUMERS, 64 // ROWS
        )
    else:
        b, h_k, in_group, row = work.place(item, ROWS * pipe.shape.CONSUMERS, 64 // ROWS)
    _, first_row, there, rows = extent(used_q, b, s_q)
    _, first_key, _, keys = extent(used_k, b, s_k)
    at = pipe.slots.record_of(drawn)
    pipe.slots.put(at, BATCH, b)
    pipe.slots.put(at, KEY_HEAD, h_k)
    pipe.slots.put(at, IN_GROUP, in_group)
    pipe.slots.put(at, ROW, row)
    if mask.listed:
        if is_packed(used_q):
            pipe.slots.put(at, BLOCK, packed_list(work, item, used_q, row, there, ROWS * pipe.shape.CONSUMERS))
        _, some, tiles = load_block_list(
            mask.lists, list_of_item(mask, pipe, at, b, h_k * work.packs + in_group, row, used_q)
        )
        lo, hi, skipped = plan_list(pipe, at, some, tiles)
    else:
        lo, hi, skipped = plan_tiles(pipe, at, mask, numbered(used_q, b), row, rows, keys)
    if is_packed(used_q):
        pipe.slots.put(at, FIRST_ROW, first_row)
        pipe.slots.put(at, THERE, there)
        pipe.slots.put(at, USED, rows)
        pipe.slots.put(at, KEYS, keys)
        if is_packed(used_k):
            b = first_key
    return b, h_k, in_group, row + first_row, keys, lo, hi, skipped


@gluon.jit
def load_queries(q_desc, pipe, drawn, b, h_k, in_group, row, used_q):
    """Fills a slot with the query rows of all consumers."""
    CONSUMERS: gl.constexpr = pipe.shape.CONSUMERS
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    if is_packed(used_q):  # rows count from the first of all
        b = b * 0
    slot = pipe.slots.claim(drawn)
    full = pipe.slots.full.index(slot)
    mbarrier.expect(full, CONSUMERS * CHUNKS * CHUNK * 64 * 2)
    for c in gl.static_range(CONSUMERS):
        for chunk in gl.static_range(CHUNKS):
            tile = pipe.slots.tiles.index((slot * CONSUMERS + c) * pipe.slots.CHUNKS + chunk)
            tma_load(q_desc, [b, h_k, in_group, row + c * pipe.shape.ROWS, chunk * CHUNK], full, tile)


@gluon.jit
def load_keys(k_desc, pipe, n, b, h_k, start, keys, used_k, pages):
    """Fills the stage of tile n with keys from `start` on."""
    page = pages_of(pages, b, start, keys, pipe.shape.BLOCK_K)
    b, row = placed(used_k, b, start)
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    stage = pipe.keys.claim(n)
    full = pipe.keys.announce(stage, pipe.shape.BLOCK_K * CHUNKS * CHUNK * 2)
    if pages is None:
        for chunk in gl.static_range(CHUNKS):
            tma_load(k_desc, [b, h_k, row, chunk * CHUNK], full, pipe.keys.tiles.index(stage * CHUNKS + chunk))
    else:
        tiles = pipe.keys.tiles
        load_boxes(k_desc, tiles, stage, page, h_k, start, pages.size, CHUNKS * CHUNK, pipe.shape.BLOCK_K, full)


@gluon.jit
def fetch(v_desc, pipe, stage, tile, b, row, h_k, start, pages, page, barrier):
    """Fills the `tile` of a stage with values from `start` on, which is `row` of v, and counts them in at `barrier`."""
    if pages is None:
        tma_load(v_desc, [b, h_k, row, 0], barrier, tile)
    else:
        tiles = pipe.values.tiles
        load_boxes(v_desc, tiles, stage, page, h_k, start, pages.size, pipe.shape.BLOCK_DV, pipe.shape.BLOCK_K, barrier)


@gluon.jit
def load_values(v_desc, pipe, n, b, h_k, start, keys, tails, used_k, pages):
    """Fills the stage of tile n with values from `start` on, zeros behind `keys`. Returns the tails so far."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    page = pages_of(pages, b, start, keys, BLOCK_K)  # once more: what a loader holds, it spills
    stage = pipe.values.claim(n)
    tile = pipe.values.tiles.index(stage)
    b, row = placed(used_k, b, start)
    if used_k is not None and start + BLOCK_K > keys:
        landing = pipe.values.landing()
        mbarrier.expect(landing, BLOCK_K * BLOCK_DV * 2)
        fetch(v_desc, pipe, stage, tile, b, row, h_k, start, pages, page, landing)
        mbarrier.wait(landing, tails & 1)
        zero_tail(tile.reshape([BLOCK_K, BLOCK_DV]), keys - start, BLOCK_K, BLOCK_DV)
        pipe.values.fill(stage)
        tails += 1
    else:
        full = pipe.values.announce(stage, BLOCK_K * BLOCK_DV * 2)
        fetch(v_desc, pipe, stage, tile, b, row, h_k, start, pages, page, full)
    return tails


@gluon.jit
def load(q_desc, k_desc, v_desc, counter, pipe, work, used_q, used_k, pages, mask, s_q, s_k):
    """The producer: draws work, loads its query rows into a slot and its keys and values into the rings.

    With two slots an item's queries come before its keys, while those of the item before are in use. With one, they
    follow its first keys, which have stages sooner than the queries have a slot.
    """
    EARLY: gl.constexpr = pipe.slots.SLOTS > 1
    n = gl.to_tensor(0)
    tails = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    items = work.items
    item = gl.program_id(0)
    if is_packed(used_q):  # as many as there are; who finds none repeats the last one
        items = gl.load(used_q.tiles) * work.heads
        item = gl.minimum(item, items - 1)
    b, h_k, in_group, row, keys, lo, hi, skipped = open_item(item, 0, pipe, work, used_q, used_k, mask, s_q, s_k)
    if EARLY:
        load_queries(q_desc, pipe, 0, b, h_k, in_group, row, used_q)
    more = gl.to_tensor(True)
    while more:
        begun = gl.minimum(pipe.keys.STAGES, hi - lo) - 1
        # With a slot free for it the next item is drawn soon, but not before every consumer has a tile that it sees: it
        # leaves the slot after that one. Else it is drawn late, so that the longest item goes to who is done first.
        ahead = gl.maximum(begun, skipped) if EARLY else hi - lo - 1
        next_b, next_h, next_keys, next_lo, next_hi = b, h_k, keys, lo, hi
        if mask.listed:
            at = pipe.slots.record_of(drawn)
            listing = work_list(mask, pipe, at, b, h_k * work.packs + in_group, row, used_q)
        else:
            listing = None
        for j in range(hi - lo):
            start = listed_tile(mask, listing, hi, hi - 1 - j) * pipe.shape.BLOCK_K
            load_keys(k_desc, pipe, n, b, h_k, start, keys, used_k, pages)
            tails = load_values(v_desc, pipe, n, b, h_k, start, keys, tails, used_k, pages)
            n += 1
            if not EARLY and j == begun:
                load_queries(q_desc, pipe, drawn, b, h_k, in_group, row, used_q)
            if j == ahead:
                drawn += 1
                item = count_up(counter, "relaxed") + gl.num_programs(0)
                more = item < items
                if more:
                    next_b, next_h, in_group, row, next_keys, next_lo, next_hi, skipped = open_item(
                        item, drawn, pipe, work, used_q, used_k, mask, s_q, s_k
                    )
                    if EARLY:
                        load_queries(q_desc, pipe, drawn, next_b, next_h, in_group, row, used_q)
        b, h_k, keys, lo, hi = next_b, next_h, next_keys, next_lo, next_hi
    pipe.slots.put(pipe.slots.record_of(drawn), BATCH, -1)
    mbarrier.arrive(pipe.slots.full.index(pipe.slots.claim(drawn)), count=1)
    # The last program leaves the counters as it found them.
    if count_up(counter + 1, "acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
