"""The blocks of keys that a program of the backward works on, one after the other, if it stays on its multiprocessor.

The producer draws them from a counter and writes down what each is; the other groups of warps read it. An item is drawn
when all that the one before needs is on its way, so nobody waits for the numbers.

Where dq is added to in order, an item waits for items before it. All of those have been drawn, by programs that run,
and a program works on its items in the order in which it drew them: the first item that is not done waits for nobody.
So the first items are drawn too, then, as a program that has not started may never start while others wait for it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.records import plain_int, runtime_int
from saccade.backends.device.sequences import blocks_before, extent, is_packed, numbered, packed_tile, place_of
from saccade.backends.device.tiles import tile_range, used_length
from saccade.backends.gluon.backward.kv_block import KVBlock, ListedKVBlock, PackedKVBlock, PackedListedKVBlock
from saccade.backends.gluon.ptx import count_up

# The numbers of an item, which are those of a KVBlock; batch row -1: no more work. From FIRST_ROW on packed sequences
# have theirs, and NUMBER is which list is the block's, or, packed, which of all blocks it is.
BATCH, KEY_HEAD, SHARE, START, ROWS, KEYS, FIRST, CORE, CORE_END, END = (gl.constexpr(i) for i in range(10))
FIRST_ROW, FIRST_KEY, FIRST_BLOCK, THERE, NUMBER = (gl.constexpr(i) for i in range(10, 15))
NUMBERS = gl.constexpr(15)


class TileSchedulerArgs(NamedTuple):
    """The order of blocks of keys in the backward; every field a `runtime_int`."""

    blocks: Any
    """blocks of keys of one head"""
    heads: Any
    """all shares of all batch rows"""
    section: Any
    """shares that are worked on together"""
    shares: Any
    """of a batch row: every key head as often as its group is divided"""
    divided: Any
    """into how many shares a group is divided"""

    @staticmethod
    def of(blocks: int, b: int, h_k: int, divided: int, section: int) -> tuple[Any, ...]:
        return TileSchedulerArgs(*map(runtime_int, (blocks, b * h_k * divided, section, h_k * divided, divided)))


@gluon.jit
def first_item(counter, QUEUED: gl.constexpr):
    """A program's first item: that of its own number, or, where items wait for others, the next that nobody has."""
    if QUEUED:
        return count_up(counter, "relaxed")
    else:
        return gl.program_id(0)


@gluon.jit
def next_item(counter, QUEUED: gl.constexpr):
    """A program's next item."""
    if QUEUED:
        return count_up(counter, "relaxed")
    else:
        return count_up(counter, "relaxed") + gl.num_programs(0)


@gluon.jit
def items_of(order, used_k):
    """How many items there are."""
    if is_packed(used_k):
        return gl.load(used_k.tiles) * plain_int(order.shares)
    else:
        return plain_int(order.blocks) * plain_int(order.heads)


@gluon.jit
def close(counter, slots, drawn):
    """Tells the other groups that there is no item `drawn`. The last program leaves the counters as it found them."""
    slots.put(slots.record_of(drawn), BATCH, -1)
    mbarrier.arrive(slots.full.index(slots.claim(drawn)), count=1)
    if count_up(counter + 1, "acq_rel") == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def put_block(slots, drawn, block, mask, used_k):
    """Writes down which block of keys item `drawn` is."""
    at = slots.record_of(drawn)
    slots.put(at, BATCH, block.b)
    slots.put(at, KEY_HEAD, block.h_k)
    slots.put(at, SHARE, block.share)
    slots.put(at, START, block.start)
    slots.put(at, ROWS, block.rows)
    slots.put(at, KEYS, block.keys)
    slots.put(at, FIRST, block.first)
    slots.put(at, CORE, block.core)
    slots.put(at, CORE_END, block.core_end)
    slots.put(at, END, block.end)
    if is_packed(used_k):
        slots.put(at, FIRST_ROW, block.first_row)
        slots.put(at, FIRST_KEY, block.first_key)
        slots.put(at, FIRST_BLOCK, block.first_block)
        slots.put(at, THERE, block.there)
    if mask.listed:
        slots.put(at, NUMBER, block.block_list_number.to(gl.int32))
    elif is_packed(used_k):
        slots.put(at, NUMBER, block.own_number)


@gluon.jit
def block_of(slots, at, mask, used_k):
    """The KVBlock whose numbers are in record `at`."""
    b = slots.get(at, BATCH)
    h_k = slots.get(at, KEY_HEAD)
    share = slots.get(at, SHARE)
    start = slots.get(at, START)
    rows = slots.get(at, ROWS)
    keys = slots.get(at, KEYS)
    first = slots.get(at, FIRST)
    core = slots.get(at, CORE)
    core_end = slots.get(at, CORE_END)
    end = slots.get(at, END)
    if is_packed(used_k):
        first_row = slots.get(at, FIRST_ROW)
        first_key = slots.get(at, FIRST_KEY)
        first_block = slots.get(at, FIRST_BLOCK)
        there = slots.get(at, THERE)
        number = slots.get(at, NUMBER)
        if mask.listed:
            listing, _, _ = load_block_list(mask.lists, number.to(gl.int64))
            return PackedListedKVBlock(
                b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block, there,
                listing, number,
            )  # fmt: skip
        else:
            return PackedKVBlock(
                b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block,
                number, there,
            )  # fmt: skip
    elif mask.listed:
        number = slots.get(at, NUMBER)
        listing, _, _ = load_block_list(mask.lists, number.to(gl.int64))
        return ListedKVBlock(b, h_k, share, start, rows, keys, first, core, core_end, end, listing, number)
    else:
        return KVBlock(b, h_k, share, start, rows, keys, first, core, core_end, end)


@gluon.jit
def find_kv_block(
    item, order, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    LAST_FIRST: gl.constexpr,
):  # fmt: skip
    """The KVBlock of work item `item`. In a section of heads the first keys come first, as a causal mask gives them
    most rows, or the last ones."""
    if is_packed(used_k):
        shares = plain_int(order.shares)
        seq, share, _, start = packed_tile(used_k, item, shares, s_k, BLOCK_K, LAST_FIRST)
        h_k = share // plain_int(order.divided)
        number = place_of(used_k, item, shares, start, BLOCK_K)
        return packed_kv_block(
            seq, h_k, share, start, number, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K
        )
    else:
        b, h_k, share, start = kv_place(item, order, BLOCK_K, LAST_FIRST)
        return kv_block_at(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)


@gluon.jit
def kv_place(item, order, BLOCK_K: gl.constexpr, LAST_FIRST: gl.constexpr):
    """Batch row, key head, share and first key of a work item."""
    blocks = plain_int(order.blocks)
    size = plain_int(order.section)
    number = item // (blocks * size)
    rest = item - number * (blocks * size)
    size = gl.minimum(size, plain_int(order.heads) - number * size)
    bh = number * plain_int(order.section) + rest % size
    b = bh // plain_int(order.shares)
    share = bh % plain_int(order.shares)
    i = rest // size
    if LAST_FIRST:
        i = blocks - 1 - i
    return b, share // plain_int(order.divided), share, i * BLOCK_K


@gluon.jit
def kv_block_at(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The KVBlock of these BLOCK_K keys."""
    if mask.listed:
        return listed_kv_block(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_K)
    else:
        return kv_block_of_interval(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)


@gluon.jit
def listed_kv_block(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_K: gl.constexpr):
    number = block_list_number(mask.lists, b, share, start // BLOCK_K)
    listing, edge, end = listed_blocks(mask, number)
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    return ListedKVBlock(b, h_k, share, start, rows, keys, end * 0, edge, end, end, listing, number)


@gluon.jit
def listed_blocks(mask, number):
    """Where a list of blocks of rows begins, how many need the mask, and how many there are."""
    listing, some, tiles = load_block_list(mask.lists, number)
    none = (tiles == 0).to(gl.int32)  # nobody sees these keys: one block, all hidden
    return listing, some + none, tiles + none


@gluon.jit
def kv_block_of_interval(
    b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr
):
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    first, core, core_end, end = row_blocks(mask, b, start, rows, keys, BLOCK_Q, BLOCK_K)
    return KVBlock(b, h_k, share, start, rows, keys, first, core, core_end, end)


@gluon.jit
def row_blocks(mask, b, start, rows, keys, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Which blocks of rows see some of these keys, [first, end), and which of them all, [core, core_end)."""
    # [BLOCK_K]
    kv_idx = start + gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, keys - rows)
    # Rows that are not in use need no mask: their start is -inf.
    whole = gl.cdiv(rows, BLOCK_Q) * BLOCK_Q
    core_hi = gl.where(core_hi >= rows, whole, core_hi)
    first, core, core_end, end = tile_range(lo, gl.minimum(hi, rows), core_lo, core_hi, kv_idx < keys, whole, BLOCK_Q)
    if start + BLOCK_K > keys:  # some keys are not in use, and nothing but the mask hides them
        core = end
        core_end = end
    if end <= first:  # nobody sees these keys: one block, all hidden, so that no loop has to think of none
        first = first * 0
        core = first + BLOCK_Q
        core_end = core
        end = core
    return first // BLOCK_Q, core // BLOCK_Q, core_end // BLOCK_Q, end // BLOCK_Q


@gluon.jit
def packed_kv_block(
    seq, h_k, share, start, number, mask, used_q, used_k, s_q, s_k, q_blocks,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The PackedKVBlock of the keys from `start` on of sequence `seq`, whose place in the table is `number`. Behind
    the last key, where programs without a tile have theirs, it is of no rows and no keys, and has the last block of
    rows of all, which is no sequence's."""
    _, first_row, _, rows = extent(used_q, seq, s_q)
    _, first_key, there, keys = extent(used_k, seq, s_k)
    first_block = blocks_before(used_q, seq, first_row, BLOCK_Q)
    if start >= s_k:
        rows = rows * 0
        keys = rows
        there = rows
        first_block = q_blocks - 1
    b = numbered(used_k, seq)
    if mask.listed:
        number = block_list_number(mask.lists, b, share, number)
        listing, edge, end = listed_blocks(mask, number)
        return PackedListedKVBlock(
            b, h_k, share, start, rows, keys, end * 0, edge, end, end, first_row, first_key, first_block, there,
            listing, number,
        )  # fmt: skip
    else:
        first, core, core_end, end = row_blocks(mask, b, start, rows, keys, BLOCK_Q, BLOCK_K)
        return PackedKVBlock(
            b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block, number,
            there,
        )  # fmt: skip
