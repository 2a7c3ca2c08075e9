"""The forward's producer: one warp that loads the keys and values of work items, also from the pages of a cache."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

import math
from functools import lru_cache
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.device.positions import is_packed, placed
from saccade.backends.device.records import FLAGS, plain_int, runtime_int
from saccade.backends.hopper.forward.work_item import BATCH, LATE, block_list_of, load_item, tile_at
from saccade.backends.hopper.ptx import wait_for_copies
from saccade.backends.hopper.shim import tma_load, view
from saccade.backends.hopper.tiles import bytes_of, is_eight_bit, zero_tail
from saccade.call import Call
from saccade.layouts import Paged

# Tiles of keys from the pages of a cache: a bulk copy for each piece that lies in one page.
#
# A tile in shared memory is stripes of WIDTH columns, each with all of its rows one after the other, so that whole
# groups of 8 rows may come from anywhere.


class Parts(NamedTuple):
    """The results of parts of the keys, as arguments."""

    ptr: Any
    """float32 (splits, b, s_q, h_q, d_v)"""
    rows: Any
    """b s_q h_q, a runtime_int, as the next"""
    splits: Any
    columns: Any
    """constexpr: d_v"""

    @staticmethod
    def of(found: Tensor) -> "Parts":
        numbers = runtime_int(found.shape[1:4].numel()), runtime_int(found.shape[0])
        return Parts(found, *numbers, _constant(found.shape[4]))


class Pages(NamedTuple):
    """Which pages are whose; kernels take None where keys are not in pages."""

    table: Any
    """int (sequences, …)"""
    stride: Any
    """of a row of the table; a runtime_int, as the next"""
    count: Any
    """pages of the cache"""
    size: Any
    """constexpr: rows of a page"""
    parts: Any
    """Parts, or a stand-in"""
    split: Any
    """constexpr: keys are cut in parts"""


def device_args(call: Call, parts: Parts | None = None) -> Pages | None:
    """The device form of a layout's pages, if it has some."""
    layout = call.layout
    return page_args(layout.block_table, call.k, parts) if isinstance(layout, Paged) else None


def page_args(table: Tensor, cache: Tensor, parts: Parts | None = None) -> Pages:
    """The device form of a table (sequences, …) of the pages of a cache (pages, h, page_size, d)."""
    table = table if table.stride(1) == 1 else table.contiguous()
    stand_in = Parts(table, runtime_int(0), runtime_int(1), _constant(0))
    numbers = runtime_int(table.stride(0)), runtime_int(cache.shape[0]), _constant(cache.shape[2])
    return Pages(table, *numbers, parts or stand_in, FLAGS[parts is not None])


@lru_cache(maxsize=64)
def _constant(value: int) -> Any:
    return tl.constexpr(value)


def box_rows(page_size: int, block_k: int) -> int:
    """Rows of one bulk copy: as many as pages and tiles of keys can both be cut into."""
    return math.gcd(page_size, block_k)


rows_of_a_box: Any = gluon.constexpr_function(box_rows)


@gluon.constexpr_function
def is_split(pages):
    """constexpr: pages.split, whose name Triton 3.6 does not know here"""
    return pages is not None and bool(getattr([*pages][-1], "value", [*pages][-1]))


@gluon.jit
def splits_of(parts):
    """The number of parts of the keys."""
    if parts is None:
        return 1
    else:
        return plain_int(parts.splits)


@gluon.jit
def part_of(parts, part, lo, hi):
    """The tiles of a part of [lo, hi): as many as any other has, or one less. A part without a tile has the one after
    the last, of which no row sees a key."""
    splits = plain_int(parts.splits)
    first = lo + (hi - lo) * part // splits
    end = lo + (hi - lo) * (part + 1) // splits
    return gl.where(end > first, first, hi), gl.where(end > first, end, hi + 1)


@gluon.jit
def pages_of(pages, b, start, keys, BLOCK_K: gl.constexpr):
    """[32]: in which page each box of the tile of keys from `start` on is. From `keys` on in one that is not there, of
    which a bulk copy makes zeros."""
    if pages is None:
        return 0
    else:
        BOX: gl.constexpr = rows_of_a_box(pages.size, BLOCK_K)
        # [32]
        kv_idx = start + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])) * BOX
        row = pages.table + b.to(gl.int64) * plain_int(pages.stride)
        page = gl.load(row + kv_idx // pages.size, mask=kv_idx < keys, other=0)
        last = plain_int(pages.count) - 1
        page = gl.minimum(gl.maximum(page, 0), last).to(gl.int32)
        return gl.where(kv_idx < keys, page, last + 1)


@gluon.jit
def load_pages(desc, tiles, stage, page, h_k, start, SIZE: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
               barrier, FIRST=0):  # fmt: skip
    """Fills a stage of tiles [BLOCK_K, COLUMNS] with keys, or values, from `start` on, of pages [32], from column FIRST
    on, and counts them in at a barrier that expects all of them. desc: (pages, h_k, SIZE, d) in boxes."""
    BOX: gl.constexpr = desc.block_type.shape[2]
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = BLOCK_K // BOX
    STRIPES: gl.constexpr = COLUMNS // WIDTH
    ALL: gl.constexpr = tiles.shape[0] * tiles.shape[3] * tiles.shape[4] // (BOX * WIDTH)
    LAYOUT: gl.constexpr = desc.layout
    boxes = view(tiles, [ALL, 1, 1, BOX, WIDTH], LAYOUT)
    # [32]
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for i in range(BOXES):
        number = gl.max(gl.where(lane == i, page, 0), 0)
        row = (start + i * BOX) % SIZE
        for stripe in gl.static_range(STRIPES):
            box = boxes.index((stage * STRIPES + stripe) * BOXES + i)
            tma_load(desc, [number, h_k, row, FIRST + stripe * WIDTH], barrier, box)


# The forward's producer: one warp that keeps the pipeline full.


@gluon.jit
def load_queries(args, pipe, drawn, item):
    """Fills a slot with the query rows of all consumers."""
    CONSUMERS: gl.constexpr = pipe.shape.CONSUMERS
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    b = item.b
    if is_packed(args.used_q):  # rows count from the first of all
        b = b * 0
    slot = pipe.slots.claim(drawn)
    full = pipe.slots.full.index(slot)
    mbarrier.expect(full, CONSUMERS * CHUNKS * CHUNK * 64 * bytes_of(pipe.slots.tiles.dtype))
    for c in gl.static_range(CONSUMERS):
        for chunk in gl.static_range(CHUNKS):
            q = pipe.slots.tiles.index((slot * CONSUMERS + c) * pipe.slots.CHUNKS + chunk)
            row = item.row + c * pipe.shape.ROWS
            tma_load(args.q_desc, [b, item.h_k, item.in_group, row, chunk * CHUNK], full, q)


@gluon.jit
def load_captured(args, pipe, stage, item, start, full):
    """Fills a stage with what the score function captures for each consumer's rows and the keys from `start` on."""
    b = item.b if args.captured.per_batch_row else item.b * 0
    h = item.h_k * args.group + item.in_group if args.captured.per_head else item.h_k * 0
    for c in gl.static_range(pipe.shape.CONSUMERS):
        buffer = pipe.captured.index(stage * pipe.shape.CONSUMERS + c)
        tma_load(args.captured_desc, [b, h, item.row + c * 64, start], full, buffer)


@gluon.jit
def tiles_there(args, item, BLOCK_K: gl.constexpr):
    """How many tiles of a work item have keys that are there; they are the first, as the last keys are."""
    coming = gl.load(args.arrivals.coming + item.offset // args.h_k)
    return gl.maximum(item.hi - (coming + BLOCK_K - 1) // BLOCK_K, 0)


@gluon.jit
def wait_for_keys(arrivals, item):
    """Waits until all keys and values of a work item have come."""
    step = gl.load(arrivals.steps + item.offset)
    if step > 0:
        wait_for_copies(arrivals.done, step)


@gluon.jit
def load_keys(args, pipe, n, item, start):
    """Fills the stage of tile n with keys from `start` on."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    CHUNK: gl.constexpr = pipe.shape.D_CHUNK
    CHUNKS: gl.constexpr = pipe.shape.D_CHUNKS
    page = pages_of(args.pages, item.b, start, item.keys, BLOCK_K)
    b, row = placed(args.used_k, item.b, start)
    stage = pipe.keys.claim(n)
    BYTES: gl.constexpr = BLOCK_K * CHUNKS * CHUNK * bytes_of(pipe.keys.tiles.dtype)
    if pipe.captured is None:
        full = pipe.keys.announce(stage, BYTES)
    else:
        full = pipe.keys.announce(stage, BYTES + pipe.shape.CONSUMERS * 64 * BLOCK_K * 2)
        load_captured(args, pipe, stage, item, start, full)
    if args.pages is None:
        for chunk in gl.static_range(CHUNKS):
            k = pipe.keys.tiles.index(stage * CHUNKS + chunk)
            tma_load(args.k_desc, [b, item.h_k, row, chunk * CHUNK], full, k)
    else:
        SIZE: gl.constexpr = args.pages.size
        load_pages(args.k_desc, pipe.keys.tiles, stage, page, item.h_k, start, SIZE, CHUNKS * CHUNK, BLOCK_K, full)


@gluon.jit
def load_stage(args, pipe, tiles, stage, item, start, page, barrier):
    """Fills a stage of tiles with values from `start` on, and counts them in at `barrier`."""
    if is_eight_bit(pipe.values.tiles.dtype) and pipe.shape.TRANSPOSER_REGISTERS == 0:
        b = item.b
        if is_packed(args.used_k):
            b = b * 0
        tma_load(args.v_desc, [b, item.h_k, 0, item.offset + start], barrier, tiles.index(stage))
    elif args.pages is None:
        b, row = placed(args.used_k, item.b, start)
        tma_load(args.v_desc, [b, item.h_k, row, 0], barrier, tiles.index(stage))
    else:
        SIZE: gl.constexpr = args.pages.size
        BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
        BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
        load_pages(args.v_desc, tiles, stage, page, item.h_k, start, SIZE, BLOCK_DV, BLOCK_K, barrier)


@gluon.jit
def load_values(args, pipe, n, item, start, tails):
    """Fills the stage of tile n with values from `start` on, and with zeros after the last key. Returns the number of
    tails so far."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    page = pages_of(args.pages, item.b, start, item.keys, BLOCK_K)  # once more: what a loader holds, it spills
    if pipe.shape.TRANSPOSER_REGISTERS > 0:  # who makes the zeros
        stage = pipe.raw.claim(n)
        pipe.raw.put(pipe.raw.record_of(n), 0, gl.maximum(item.keys - start, 0))
        full = pipe.raw.full.index(stage)
        mbarrier.expect(full, BLOCK_K * BLOCK_DV)
        load_stage(args, pipe, pipe.raw.tiles, stage, item, start, page, full)
    else:
        tails = load_finished(args, pipe, n, item, start, page, tails)
    return tails


@gluon.jit
def load_finished(args, pipe, n, item, start, page, tails):
    """The same for values in the order that products take. It adds the zeros, which 8-bit values have already."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    tiles = pipe.values.tiles
    stage = pipe.values.claim(n)
    ENDS: gl.constexpr = args.used_k is not None and not is_eight_bit(tiles.dtype)
    if ENDS and start + BLOCK_K > item.keys:
        landing = pipe.values.landing()
        mbarrier.expect(landing, BLOCK_K * BLOCK_DV * 2)
        load_stage(args, pipe, tiles, stage, item, start, page, landing)
        mbarrier.wait(landing, tails & 1)
        v = tiles.index(stage).reshape([BLOCK_K, BLOCK_DV])
        zero_tail(v, item.keys - start, BLOCK_K, BLOCK_DV)
        pipe.values.fill(stage)
        tails += 1
    else:
        full = pipe.values.announce(stage, BLOCK_K * BLOCK_DV * bytes_of(tiles.dtype))
        load_stage(args, pipe, tiles, stage, item, start, page, full)
    return tails


@gluon.jit
def load(args, pipe):
    """The producer: loads the keys and values of one work item after the other into the rings. Where queries have one
    slot it loads them too, behind keys, which have a stage sooner, and before what consumers need later."""
    ONE_SLOT: gl.constexpr = pipe.slots.SLOTS == 1
    OWN_OUT: gl.constexpr = pipe.shape.OUT_COLUMNS > 0
    n = gl.to_tensor(0)
    tails = gl.to_tensor(0)
    done = gl.to_tensor(0)
    pipe.plans.wait(0)
    at = pipe.slots.record_of(0)
    b = pipe.slots.get(at, BATCH)
    while b >= 0:
        item = load_item(args, pipe, at)
        there = gl.to_tensor(0)
        if args.arrivals is not None:
            there = tiles_there(args, item, pipe.shape.BLOCK_K)
        block_list, _, _ = block_list_of(args, pipe, at, item.b, item.h_k * args.group + item.in_group, item.row)
        ahead = gl.maximum(item.hi - item.lo - 1 - LATE, 0)
        # A slot is free when out has left, or, where out has a place of its own, before the last values are read.
        queries = item.lo * 0 if OWN_OUT else gl.minimum(pipe.keys.STAGES, item.hi - item.lo) - 1
        if ONE_SLOT:  # whose record has to be free, too
            ahead = gl.maximum(ahead, queries)
        for j in range(item.hi - item.lo):
            start = tile_at(args.mask, block_list, item.hi, item.hi - 1 - j) * pipe.shape.BLOCK_K
            if args.arrivals is not None:  # noqa: SIM102 - known when this is compiled, and the next is not
                if j == there:
                    wait_for_keys(args.arrivals, item)
            load_keys(args, pipe, n, item, start)
            if ONE_SLOT:  # noqa: SIM102
                if j == queries:
                    load_queries(args, pipe, done, item)
            if j == ahead:
                pipe.plans.ask()
            tails = load_values(args, pipe, n, item, start, tails)
            n += 1
        done += 1
        pipe.plans.wait(done)
        at = pipe.slots.record_of(done)
        b = pipe.slots.get(at, BATCH)
    pipe.slots.fill(pipe.slots.claim(done))  # its record says that there is no more work
    if pipe.shape.TRANSPOSER_REGISTERS > 0:
        slot = pipe.raw.claim(n)
        pipe.raw.put(pipe.raw.record_of(n), 0, -1)
        mbarrier.arrive(pipe.raw.full.index(slot), count=1)
