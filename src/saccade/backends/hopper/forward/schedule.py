"""The forward's scheduler: one warp that draws work items, says what they are, and loads their query rows."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.positions import blocks_before, extent, is_packed, numbered
from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import tile_range
from saccade.backends.hopper.forward.epilogue import passes_unseeing, store_unseeing
from saccade.backends.hopper.forward.load import load_queries, part_of, splits_of
from saccade.backends.hopper.forward.transpose import SEQUENCE_BLOCK
from saccade.backends.hopper.forward.work_item import (
    BATCH,
    BLOCK,
    FIRST_ROW,
    HI,
    IN_GROUP,
    KEY_HEAD,
    KEYS,
    LO,
    OFFSET,
    ORIGIN,
    PART,
    ROW,
    THERE,
    USED,
    LoadItem,
    block_list_of,
    locate_packed,
    packed_list,
    put_tiles,
)
from saccade.backends.hopper.ptx import count_up
from saccade.backends.hopper.tiles import is_eight_bit, log2


@gluon.jit
def plan_list(pipe, at, partial, tiles):
    """The same as `plan_tiles` for a block list. LO and HI are indices that count from the list's end. So its partial
    tiles, which come first in the list, are behind the core."""
    for c in gl.static_range(pipe.shape.CONSUMERS):
        put_tiles(pipe.slots, at, c, 0, 0, tiles - partial, tiles)
    hi = gl.maximum(tiles, 1)
    return hi * 0, hi


@gluon.jit
def tiles_of_rows(mask, b, row, rows, keys, ROWS: gl.constexpr, BLOCK_K: gl.constexpr):
    """The same as `tile_range`, in tiles, for ROWS rows from `row` on. If the bounds are the whole mask and never fall
    from one row to the next, the first row and the last one in use have the extreme ones."""
    if mask.exact and mask.ordered:
        SHIFT: gl.constexpr = log2(BLOCK_K)
        last = gl.minimum(row + ROWS, rows) - 1
        first_lo, first_hi, _, _ = mask.keys_of(mask.data, b, row, keys - rows)
        last_lo, last_hi, _, _ = mask.keys_of(mask.data, b, last, keys - rows)
        last_hi = gl.where(last >= row, gl.minimum(last_hi, keys), 0)
        end = (gl.maximum(last_hi, 0) + BLOCK_K - 1) >> SHIFT
        first = gl.minimum(gl.maximum(first_lo, 0) >> SHIFT, end)
        core = gl.minimum(gl.maximum((gl.maximum(last_lo, 0) + BLOCK_K - 1) >> SHIFT, first), end)
        core_end = gl.minimum(gl.minimum(first_hi, keys) >> SHIFT, end)
        nothing = core_end <= core
        return first, gl.where(nothing, end, core), gl.where(nothing, end, core_end), end
    else:
        # [64]
        q_idx = row + gl.arange(0, 64, gl.BlockedLayout([2], [32], [1], [0])) % ROWS
        lo, hi, core_lo, core_hi = mask.keys_of(mask.data, b, q_idx, keys - rows)
        first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, q_idx < rows, keys, BLOCK_K)
        return first // BLOCK_K, core // BLOCK_K, core_end // BLOCK_K, end // BLOCK_K


@gluon.jit
def plan_tiles(args, pipe, at, b, row, rows, keys, part):
    """Writes which tiles of keys each consumer takes. Returns LO and HI."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    ROWS: gl.constexpr = pipe.shape.ROWS
    lo = gl.to_tensor(1 << 30)
    hi = gl.to_tensor(0)
    for c in gl.static_range(pipe.shape.CONSUMERS):
        first, core, core_end, end = tiles_of_rows(args.mask, b, row + c * ROWS, rows, keys, ROWS, BLOCK_K)
        if end > first:
            lo = gl.minimum(lo, first)
        hi = gl.maximum(hi, end)
        put_tiles(pipe.slots, at, c, first, core, core_end, end)
    # Every consumer has a tile, even if its rows see nothing there, so that no loop may be empty. If the scheduler
    # passes over items that see nothing, some consumer's rows see a key, and there is a tile without this.
    LEAST: gl.constexpr = 0 if passes_unseeing(args.out, is_packed(args.used_q)) else 1
    hi = gl.maximum(hi, LEAST)
    lo = gl.minimum(lo, hi - LEAST)
    if args.parts is not None:
        lo, hi = part_of(args.parts, part, lo, hi)
    return lo, hi


@gluon.jit
def open_item(args, pipe, inverse, number, drawn):
    """Writes the numbers of a work item. Returns its LoadItem."""
    ROWS: gl.constexpr = pipe.shape.ROWS * pipe.shape.CONSUMERS
    PACK: gl.constexpr = 64 // pipe.shape.ROWS
    at = pipe.slots.record_of(drawn)
    part = number * 0
    if args.parts is not None:
        part = number % plain_int(args.parts.splits)
        number = number // plain_int(args.parts.splits)
        pipe.slots.put(at, PART, part)
    if is_packed(args.used_q):
        b, h_k, in_group, row = locate_packed(
            args.scheduler, number, args.used_q, args.s_q, args.used_k, args.s_k, ROWS, PACK, args.arrivals is not None
        )
    else:
        b, h_k, in_group, row = args.scheduler.locate(inverse, number, ROWS, PACK)
    _, first_row, there, rows = extent(args.used_q, b, args.s_q)
    _, first_key, _, keys = extent(args.used_k, b, args.s_k)
    pipe.slots.put(at, BATCH, b)
    pipe.slots.put(at, KEY_HEAD, h_k)
    pipe.slots.put(at, IN_GROUP, in_group)
    pipe.slots.put(at, ROW, row)
    if args.mask.block_sparse:
        if is_packed(args.used_q):
            pipe.slots.put(at, BLOCK, packed_list(args.scheduler, number, args.used_q, row, there, ROWS))
        _, partial, tiles = block_list_of(args, pipe, at, b, h_k * args.group + in_group, row)
        lo, hi = plan_list(pipe, at, partial, tiles)
    else:
        lo, hi = plan_tiles(args, pipe, at, numbered(args.used_q, b), row, rows, keys, part)
    pipe.slots.put(at, LO, lo)
    pipe.slots.put(at, HI, hi)
    pipe.slots.put(at, KEYS, keys)
    if is_packed(args.used_q):
        pipe.slots.put(at, FIRST_ROW, first_row)
        pipe.slots.put(at, THERE, there)
        pipe.slots.put(at, USED, rows)
    offset = gl.to_tensor(0)  # of one type in every loop
    if is_packed(args.used_k):
        if is_eight_bit(pipe.values.tiles.dtype) and pipe.shape.TRANSPOSER_REGISTERS == 0:
            offset = blocks_before(args.used_k, b, first_key, SEQUENCE_BLOCK) * SEQUENCE_BLOCK
        if args.arrivals is not None:
            offset = b * args.h_k + h_k
        b = first_key
    pipe.slots.put(at, ORIGIN, b)
    pipe.slots.put(at, OFFSET, offset)
    return LoadItem(b, h_k, in_group, row + first_row, keys, lo, hi, offset)


@gluon.jit
def announce(args, pipe, drawn, item):
    """Tells the producer of an item. Loads its queries if they have two slots; with one slot the producer does."""
    pipe.plans.tell(drawn)
    if pipe.slots.SLOTS > 1:
        load_queries(args, pipe, drawn, item)


@gluon.jit
def open_next(args, pipe, inverse, number, items, drawn):
    """Opens the program's item `drawn`: number `number`, or if that sees no key, one that is drawn in its place. Writes
    the results of items that see no key. Returns whether there is an item."""
    more = number < items
    if passes_unseeing(args.out, is_packed(args.used_q)):
        passing = more
        while passing:
            item = open_item(args, pipe, inverse, number, drawn)
            passing = item.hi == item.lo
            if passing:
                store_unseeing(args, pipe.shape, item)
                number = count_up(args.counter, "relaxed") + gl.num_programs(0)
                more = number < items
                passing = more
            else:
                announce(args, pipe, drawn, item)
    else:
        if more:
            item = open_item(args, pipe, inverse, number, drawn)
            announce(args, pipe, drawn, item)
    return more


@gluon.jit
def schedule(args, pipe):
    """The scheduler: opens one work item after the other, each when the producer asks for it."""
    counter = args.counter
    drawn = gl.to_tensor(0)
    number = gl.program_id(0)
    if is_packed(args.used_q):  # there may be fewer items than programs: these repeat the last one
        items = gl.load(args.used_q.tiles) * args.scheduler.heads * splits_of(args.parts)
        number = gl.minimum(number, items - 1)
        inverse = ()
    else:
        items = args.scheduler.blocks * args.scheduler.heads * splits_of(args.parts)
        inverse = args.scheduler.inverse()
    more = open_next(args, pipe, inverse, number, items, drawn)
    while more:
        pipe.plans.wait_for_request()
        drawn += 1
        number = count_up(counter, "relaxed") + gl.num_programs(0)
        more = open_next(args, pipe, inverse, number, items, drawn)
    pipe.slots.put(pipe.slots.record_of(drawn), BATCH, -1)
    pipe.plans.tell(drawn)
    # The last program leaves the counters as it found them.
    if count_up(counter + 1, "acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)
