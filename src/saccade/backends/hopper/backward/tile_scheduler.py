"""Which kv block a program of the backward works on next.

A program that stays on its multiprocessor has a producer that draws work items from a counter and writes down what kv
block each is; the other groups of warps read it. An item is drawn when all that the one before needs is on its way, so
no warp waits for the numbers.

Where dq is added to in order, an item waits for items before it. All of those have been drawn, by programs that run,
and a program works on its items in the order in which it drew them: the first item that is not done waits for none.
So the first items are drawn too, then, as a program that has not started may never start while others wait for it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.device.block_lists_kernel import load_block_list
from saccade.backends.device.positions import extent, is_packed, table_index
from saccade.backends.device.records import plain_int, runtime_int
from saccade.backends.hopper.backward.kv_block import KVBlock, PackedPlace
from saccade.backends.hopper.ptx import count_up

NUMBERS = gl.constexpr(15)
"""of the record of an item: those of a KVBlock. Batch row -1: no more work."""
BATCH = gl.constexpr(0)


class TileSchedulerArgs(NamedTuple):
    """The order of kv blocks; every field a `runtime_int`."""

    heads: Any
    """all shares of all batch rows"""
    section: Any
    """Shares that are worked on together; packed, as many key heads as have so many rows, and all their shares."""
    shares: Any
    """of a batch row: every key head as often as its group is divided"""
    divided: Any
    """into how many shares a group is divided"""
    early: Any
    """kv blocks of one head that sections work on; the later ones come last, those of all heads together"""

    @staticmethod
    def of(b: int, h_k: int, divided: int, section: int, early: int) -> TileSchedulerArgs:
        numbers = b * h_k * divided, section, h_k * divided, divided, early
        return TileSchedulerArgs(*map(runtime_int, numbers))


@gluon.jit
def count_items(kv_blocks, scheduler):
    """How many items there are."""
    if is_packed(kv_blocks.span_k):
        return gl.load(kv_blocks.span_k.tiles) * plain_int(scheduler.shares)
    else:
        return gl.cdiv(kv_blocks.s_k, kv_blocks.BLOCK_K) * plain_int(scheduler.heads)


@gluon.jit
def first_item(counter, ORDERED: gl.constexpr):
    """A program's first item: that of its own number, or, where items wait for others, the next of all."""
    if ORDERED:
        return count_up(counter, "relaxed")
    else:
        return gl.program_id(0)


@gluon.jit
def next_item(counter, ORDERED: gl.constexpr):
    """A program's next item."""
    if ORDERED:
        return count_up(counter, "relaxed")
    else:
        return count_up(counter, "relaxed") + gl.num_programs(0)


@gluon.jit
def close(counter, slots, drawn):
    """Tells the other groups that there is no item `drawn`. The last program sets the counters back to zero."""
    slots.put(slots.record_of(drawn), BATCH, -1)
    mbarrier.arrive(slots.full.index(slots.claim(drawn)), count=1)
    if count_up(counter + 1, "acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def find_kv_block(kv_blocks, item, scheduler, LAST_FIRST: gl.constexpr):
    """The KVBlock of work item `item`. In a section of heads the first keys come first, as a causal mask gives them
    most rows, or the last ones. Blocks from `early` on belong to no section."""
    shares = plain_int(scheduler.shares)
    if is_packed(kv_blocks.span_k):
        b, share, start = _locate_packed(kv_blocks, item, scheduler, LAST_FIRST)
        number = table_index(kv_blocks.span_k, item, shares, start, kv_blocks.BLOCK_K)
    else:
        blocks = gl.cdiv(kv_blocks.s_k, kv_blocks.BLOCK_K)
        heads = plain_int(scheduler.heads)
        early = plain_int(scheduler.early)
        late = item >= early * heads
        rest = gl.where(late, item - early * heads, item)
        largest = gl.where(late, heads, plain_int(scheduler.section))
        items = gl.where(late, blocks - early, early) * largest
        section = rest // items
        rest -= section * items
        size = gl.minimum(largest, heads - section * largest)
        bh = section * largest + rest % size
        b = bh // shares
        share = bh % shares
        i = rest // size + gl.where(late, early, 0)
        if LAST_FIRST:
            i = blocks - 1 - i
        start = i * kv_blocks.BLOCK_K
        number = None
    return kv_blocks.at(b, share // plain_int(scheduler.divided), share, start, number)


@gluon.jit
def _locate_packed(kv_blocks, item, scheduler, LAST_FIRST: gl.constexpr):
    """Sequence, share and first key of work item `item`: the table of tiles tells the sequence, whose items are cut
    into sections of heads. After the last tile keys begin at the end."""
    shares = plain_int(scheduler.shares)
    tiles = kv_blocks.span_k.tiles
    total = gl.load(tiles)
    entry = tiles + 2 + 2 * gl.minimum(item // shares, total - 1)
    b = gl.load(entry)
    _, _, there, _ = extent(kv_blocks.span_k, b, kv_blocks.s_k)
    _, _, rows, _ = extent(kv_blocks.span_q, b, kv_blocks.s_q)
    blocks = gl.maximum(gl.cdiv(there, kv_blocks.BLOCK_K), 1)  # of broken offsets the one tile has no rows
    key_heads = gl.maximum(plain_int(scheduler.section) // gl.maximum(rows, 1), 1)
    size = gl.minimum(key_heads, shares) * plain_int(scheduler.divided)
    size = gl.minimum(size, shares)
    rest = item - gl.load(entry + 1) * shares
    section = gl.minimum(rest // (blocks * size), (shares - 1) // size)
    rest -= section * (blocks * size)
    size_here = gl.minimum(size, shares - section * size)
    i = gl.minimum(rest // size_here, blocks - 1)
    share = section * size + rest % size_here
    if LAST_FIRST:
        i = blocks - 1 - i
    return b, share, gl.where(item < total * shares, i * kv_blocks.BLOCK_K, kv_blocks.s_k)


@gluon.jit
def write_record(slots, drawn, block):
    """Writes down which kv block item `drawn` is."""
    at = slots.record_of(drawn)
    numbers = (
        block.b, block.h_k, block.share, block.start, block.rows, block.keys,
        block.first, block.core, block.core_end, block.end,
    )  # fmt: skip
    for i in gl.static_range(10):
        slots.put(at, i, numbers[i])
    if block.packed is not None:
        slots.put(at, 10, block.packed.first_row)
        slots.put(at, 11, block.packed.first_key)
        slots.put(at, 12, block.packed.first_block)
        slots.put(at, 13, block.packed.there)
    if block.own_number is not None:
        slots.put(at, 14, block.own_number.to(gl.int32))


@gluon.jit
def read_record(slots, item, kv_blocks):
    """The KVBlock of an item, which is not before it has been waited for."""
    at = slots.record_of(item)
    numbers = ()
    for i in gl.static_range(15):
        numbers = numbers + (slots.get(at, i),)  # noqa: RUF005 - Triton has no starred tuples
    packed = None
    own_number = None
    block_list = None
    if is_packed(kv_blocks.span_k):
        packed = PackedPlace(numbers[10], numbers[11], numbers[12], numbers[13])
        own_number = numbers[14]
    if kv_blocks.mask.block_sparse:
        own_number = numbers[14]
        block_list, _, _ = load_block_list(kv_blocks.mask.block_lists, own_number.to(gl.int64))
    return KVBlock(
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5], numbers[6], numbers[7], numbers[8],
        numbers[9], packed, block_list, own_number, kv_blocks.OWN_EDGES, kv_blocks.score is not None,
    )  # fmt: skip


@gluon.jit
def has_work(slots, item):
    """Whether there is an item, after a wait for it."""
    return slots.get(slots.record_of(item), BATCH) >= 0
