"""Work items: their order, and the numbers by which the producer describes one to the consumers."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.positions import extent, is_packed
from saccade.backends.hopper.ptx import counted
from saccade.backends.hopper.shim import Value, aggregate

# The order of work items: no multiprocessor is to end late, and keys and values are to stay in the L2 cache.

L2_BYTES = 36 << 20
"""K and V of the heads that are worked on at one time: of what the L2 cache of an H200 holds a little more than half
(notes/gluon.md)."""

SHORT_BLOCKS = 8
"""Blocks of rows of a head that has few (notes/gluon.md)."""

FEW = tl.constexpr(4)
"""Rounds, in each of which a program has one item, that have a fixed order."""
LATE = tl.constexpr(4)
"""Tiles of keys before the last of an item, at which the next item is drawn in more rounds (notes/gluon.md)."""


@aggregate
class TileScheduler:
    """How work items are numbered: blocks of rows of every pack of heads that share a tile."""

    blocks: gl.tensor
    """of rows of each head, or pack"""
    heads: gl.tensor
    """packs of heads in all"""
    section: gl.tensor
    """packs whose blocks take turns; of packed sequences how many keys fit the L2 cache together, or, where keys come
    while the kernel runs, how many blocks of rows there are for a first item of all programs"""
    h_k: gl.tensor
    packs: gl.tensor
    """of each key head"""

    @gluon.jit
    def locate(self, item, ROWS: gl.constexpr, PACK: gl.constexpr):
        """Batch row, key head, first head in its group and first row of an item.

        Within a section of heads the last rows come first: under a causal mask they take longest.
        """
        number = item // (self.blocks * self.section)
        rest = item - number * (self.blocks * self.section)
        size = gl.minimum(self.section, self.heads - number * self.section)
        head = number * self.section + rest % size
        row = (self.blocks - 1 - rest // size) * ROWS
        return head // (self.h_k * self.packs), head // self.packs % self.h_k, head % self.packs * PACK, row


@gluon.jit
def sorted_number(pending, items, drawn):
    """The pending of a program's item `drawn`, which may not be there, of items that see fewer and fewer keys.

    Many go to who asks first, by the `pending` that `begin_count` returned. Few would all be asked for before any is
    done; they go round back and forth: who has the longest of a round has the shortest of the next.
    """
    programs = gl.num_programs(0)
    item = counted(pending) + programs
    if items <= FEW * programs:
        program = gl.program_id(0)
        item = drawn * programs + gl.where(drawn % 2 == 0, program, programs - 1 - program)
    return item


@triton.jit
def packed_list(scheduler, item, span_q, row, there, ROWS: tl.constexpr):
    """Which of a head's block lists is that of an item: they lie in the order of the table, in which the last rows of
    each sequence come first."""
    first = tl.load(span_q.tiles + 3 + 2 * (item // scheduler.heads))
    number = first + tl.maximum((there + ROWS - 1) // ROWS, 1) - 1 - row // ROWS
    return tl.minimum(number, tl.load(span_q.tiles) - 1)  # broken offsets may ask for more than there is room for


@triton.jit
def locate_packed(
    scheduler, item, span_q, s_q, span_k, s_k, ROWS: tl.constexpr, PACK: tl.constexpr, BY_BLOCKS: tl.constexpr
):  # fmt: skip
    """The same as TileScheduler.locate, for packed sequences: one after the other in the order of their table, each
    with sections of its own. BY_BLOCKS: these have so many blocks, not keys."""
    entry = span_q.tiles + 2 + 2 * (item // scheduler.heads)
    b = tl.load(entry)
    rest = item - tl.load(entry + 1) * scheduler.heads
    _, _, there, _ = extent(span_q, b, s_q)
    _, _, _, keys = extent(span_k, b, s_k)
    blocks = tl.maximum((there + ROWS - 1) // ROWS, 1)
    length = blocks if BY_BLOCKS else tl.maximum(keys, 1)
    section = tl.maximum(scheduler.section // length, 1) * scheduler.packs
    section = tl.minimum(section, scheduler.heads)
    number = rest // (blocks * section)
    rest -= number * (blocks * section)
    size = tl.minimum(section, scheduler.heads - number * section)
    head = number * section + rest % size
    row = (blocks - 1 - rest // size) * ROWS
    return b, head // scheduler.packs, head % scheduler.packs * PACK, row


def section_size(heads: int, packs: int, kv_bytes: int, blocks: int, processors: int) -> int:
    """Heads whose keys and values fit L2 together, in sections of equal size; those that share keys count once. Of
    short rows, of so many blocks, fewer: long and short items take turns, so that memory is always busy."""
    key_heads, most = heads // packs, max(1, L2_BYTES // max(kv_bytes, 1))
    if blocks <= SHORT_BLOCKS:
        most = min(most, max(1, processors // 4 // packs))
    sections = -(-key_heads // most)
    return -(-key_heads // sections) * packs


# Work items: the numbers by which the producer tells the consumers what to do, and how a consumer reads them.


# Batch row (-1: no more work), key head, first head of its group, first row, the tiles of keys [LO, HI) that are
# loaded, and four numbers for each consumer from CONSUMER on.
BATCH, KEY_HEAD, IN_GROUP, ROW, LO, HI, CONSUMER = (gl.constexpr(i) for i in range(7))
# Packed sequences, whose lengths are not where the batch row says, also have the first row, how many rows there are,
# how many of them are in use, and how many keys.
FIRST_ROW, THERE, USED, KEYS = (gl.constexpr(18 + i) for i in range(4))
# With block lists they also have which of a head's lists is the item's; where keys are cut, which part it has.
BLOCK, PART = gl.constexpr(22), gl.constexpr(23)


@gluon.constexpr_function
def numbers_of_item(packed, block_sparse, split):
    """How many numbers a work item has."""
    if split:
        return 24
    if not packed:
        return 18
    return 23 if block_sparse else 22


@aggregate
class WorkItem:
    """A consumer's part of a work item. Its rows see the tiles of keys [first, end) of those that are loaded, [lo, hi),
    and need the mask in [first, core) and [core_end, end)."""

    part: gl.tensor
    """which of all consumers' parts of slots has its q"""
    h_k: gl.tensor
    in_group: gl.tensor
    row: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    first: gl.tensor
    core: gl.tensor
    core_end: gl.tensor
    end: gl.tensor
    block_list: Value


@gluon.jit
def put_tiles(slots, at, c, first, core, core_end, end):
    """Writes consumer c's numbers."""
    slots.put(at, CONSUMER + 4 * c, first)
    slots.put(at, CONSUMER + 4 * c + 1, core)
    slots.put(at, CONSUMER + 4 * c + 2, core_end)
    slots.put(at, CONSUMER + 4 * c + 3, end)


@gluon.jit
def work_item(c: gl.constexpr, args, pipe, slot, at, b):
    """Consumer c's WorkItem, from record `at`."""
    in_group = pipe.slots.get(at, IN_GROUP)
    h_k = pipe.slots.get(at, KEY_HEAD)
    lo = pipe.slots.get(at, LO)
    hi = pipe.slots.get(at, HI)
    first = pipe.slots.get(at, CONSUMER + 4 * c)
    core = pipe.slots.get(at, CONSUMER + 4 * c + 1)
    core_end = pipe.slots.get(at, CONSUMER + 4 * c + 2)
    end = pipe.slots.get(at, CONSUMER + 4 * c + 3)
    if args.parts is not None:
        first = gl.maximum(first, lo)
        end = gl.minimum(end, hi)
        core = gl.minimum(gl.maximum(core, first), end)
        core_end = gl.minimum(gl.maximum(core_end, first), end)
    if end <= first:  # all tiles are masked: takes the last one that is loaded
        first, core, core_end, end = hi - 1, hi, hi, hi
    if not args.mask.has_lower_bound:  # one run of tiles with the mask, from core on, and one without
        core = gl.where(core < core_end, core_end, first)
        core_end = core
    row = pipe.slots.get(at, ROW) + c * pipe.shape.ROWS
    block_list, _, _ = block_list_of(args, pipe, at, b, h_k * args.group + in_group, row)
    part = slot * pipe.shape.CONSUMERS + c
    return WorkItem(part, h_k, in_group, row, lo, hi, first, core, core_end, end, block_list)


@gluon.jit
def block_list_of(args, pipe, at, b, h, row):
    """Where the block list of the work item that holds `row` of query head h begins, how many of its tiles are partial,
    and how many there are. Items with lists have one head. Packed, record `at` knows which list it is."""
    if args.mask.block_sparse:
        block = row // (pipe.shape.ROWS * pipe.shape.CONSUMERS)
        if is_packed(args.used_q):
            block = pipe.slots.get(at, BLOCK)
        return load_block_list(args.mask.block_lists, block_list_number(args.mask.block_lists, b, h, block))
    else:
        return 0, 0, 0


@gluon.jit
def tile_at(mask, block_list, hi, index):
    """The tile of keys at an index of [lo, hi): itself, or what the block list has there, counted from its end."""
    if mask.block_sparse:
        return gl.load(block_list + (hi - 1 - index))
    else:
        return index
