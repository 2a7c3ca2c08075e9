"""The blocks of keys that a program of the backward works on, one after the other, if it stays on its multiprocessor.

The producer draws them from a counter and writes down what each is; the other groups of warps read it. An item is drawn
when all that the one before needs is on its way, so nobody waits for the numbers.

Where dq is added to in order, an item waits for items before it. All of those have been drawn, by programs that run,
and a program works on its items in the order in which it drew them: the first item that is not done waits for nobody.
So the first items are drawn too, then, as a program that has not started may never start while others wait for it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.device.block_lists_kernel import load_block_list
from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import is_packed
from saccade.backends.gluon.key_block import KeyBlock, ListedKeyBlock, PackedKeyBlock, PackedListedKeyBlock
from saccade.backends.gluon.ptx import count_up

# The numbers of an item, which are those of a KeyBlock; batch row -1: no more work. From FIRST_ROW on packed sequences
# have theirs, and NUMBER is which list is the block's, or, packed, which of all blocks it is.
BATCH, KEY_HEAD, SHARE, START, ROWS, KEYS, FIRST, CORE, CORE_END, END = (gl.constexpr(i) for i in range(10))
FIRST_ROW, FIRST_KEY, FIRST_BLOCK, THERE, NUMBER = (gl.constexpr(i) for i in range(10, 15))
NUMBERS = gl.constexpr(15)


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
    """The KeyBlock whose numbers are in record `at`."""
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
            return PackedListedKeyBlock(
                b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block, there,
                listing, number,
            )  # fmt: skip
        else:
            return PackedKeyBlock(
                b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block,
                number, there,
            )  # fmt: skip
    elif mask.listed:
        number = slots.get(at, NUMBER)
        listing, _, _ = load_block_list(mask.lists, number.to(gl.int64))
        return ListedKeyBlock(b, h_k, share, start, rows, keys, first, core, core_end, end, listing, number)
    else:
        return KeyBlock(b, h_k, share, start, rows, keys, first, core, core_end, end)
