"""Work items: their order, and the numbers by which the scheduler describes one to the other warps."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import math

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.positions import extent, is_packed
from saccade.backends.hopper.shim import Value, aggregate

# The order of work items: no multiprocessor is to end late, and keys and values are to stay in the L2 cache.

L2_BYTES = 36 << 20
"""K and V of the heads that are worked on at one time: of what the L2 cache of an H200 holds a little more than half
(notes/gluon.md)."""

SHORT_BLOCKS = 8
"""Blocks of rows of a head that has few (notes/gluon.md)."""

EVEN_ROUNDS = 24
"""Rounds of programs after which all multiprocessors end at nearly the same time, whatever the order of blocks."""

FEW_ROUNDS = 3
"""Rounds in a section of the forward after which multiprocessors end at different times (notes/gluon.md)."""

LATE = tl.constexpr(1)
"""Tiles of an item that follow the one that the producer loads when it asks for the next item (notes/gluon.md)."""


@gluon.jit
def reciprocal(d):
    """What `divide` multiplies by."""
    return gl.to_tensor(d * 0 - 1).to(gl.uint32, bitcast=True) // d.to(gl.uint32, bitcast=True)


@gluon.jit
def divide(n, d, inverse):
    """n // d and n % d of numbers that are not negative, by `inverse`, the reciprocal of d: a division takes ten times
    as long, and a work item has several in a row."""
    # The product is the quotient, or one less: inverse 2^-32 is less than 1 / d by less than 2^-32.
    q = gl.umulhi(n.to(gl.uint32, bitcast=True), inverse).to(gl.int32, bitcast=True)
    rest = n - q * d
    more = rest >= d
    return gl.where(more, q + 1, q), gl.where(more, rest - d, rest)


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
    early: gl.tensor
    """blocks of rows of each head that sections work on; the first rows come last, those of all heads together"""
    h_k: gl.tensor
    packs: gl.tensor
    """of each key head"""

    @gluon.jit
    def inverse(self):
        """The reciprocals of what `locate` divides by."""
        return reciprocal(self.early * self.section), reciprocal(self.h_k * self.packs), reciprocal(self.packs)

    @gluon.jit
    def locate(self, inverse, item, ROWS: gl.constexpr, PACK: gl.constexpr):
        """Batch row, key head, first head in its group and first row of an item.

        Within a section of heads the last rows come first: under a causal mask they take longest.
        """
        before = self.early * self.heads
        late = item >= before
        number, rest = divide(item, self.early * self.section, inverse[0])
        number = gl.where(late, 0, number)
        rest = gl.where(late, item - before, rest)
        size = gl.where(late, self.heads, gl.minimum(self.section, self.heads - number * self.section))
        block = (rest.to(gl.uint32, bitcast=True) // size.to(gl.uint32, bitcast=True)).to(gl.int32, bitcast=True)
        b, head = divide(number * self.section + rest - block * size, self.h_k * self.packs, inverse[1])
        block += gl.where(late, self.early, 0)
        h_k, pack = divide(head, self.packs, inverse[2])
        return b, h_k, pack * PACK, (self.blocks - 1 - block) * ROWS


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


def late_blocks(blocks: int, rounds: float) -> int:
    """How many blocks of each head come last, those of all heads together, under a causal mask: the shortest ones, half
    of a round's work, to fill what longer ones leave of the last rounds. None of many rounds, which end evenly."""
    return int(blocks * min(0.5, math.sqrt(0.5 / rounds))) if rounds <= EVEN_ROUNDS else 0


def late_rows(blocks: int, heads: int, section: int, processors: int) -> int:
    """The same in the forward, where sections of few rounds would end unevenly."""
    few = section * blocks < FEW_ROUNDS * processors and blocks > SHORT_BLOCKS
    return late_blocks(blocks, blocks * heads / processors) if few and section < heads else 0


# Work items: the numbers by which the scheduler tells producer and consumers what to do, and how these read them.


# Batch row (-1: no more work), key head, first head of its group, first row, the tiles of keys [LO, HI) that are
# loaded, how many keys there are; for the producer the fields `b` and `offset` of a LoadItem; and four numbers for each
# consumer from CONSUMER on.
BATCH, KEY_HEAD, IN_GROUP, ROW, LO, HI, KEYS, ORIGIN, OFFSET, CONSUMER = (gl.constexpr(i) for i in range(10))
# Packed sequences, whose lengths are not where the batch row says, also have the first row, how many rows there are,
# and how many of them are in use.
FIRST_ROW, THERE, USED = (gl.constexpr(21 + i) for i in range(3))
# With block lists they also have which of a head's lists is the item's; where keys are cut, which part it has.
BLOCK, PART = gl.constexpr(24), gl.constexpr(25)
NUMBERS = gl.constexpr(32)
"""of a record, of which not all are in use"""


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


@aggregate
class LoadItem:
    """A work item as it is loaded."""

    b: gl.tensor
    """batch row; packed: first key; of pages: sequence"""
    h_k: gl.tensor
    in_group: gl.tensor
    row: gl.tensor
    keys: gl.tensor
    lo: gl.tensor
    hi: gl.tensor
    offset: Value
    """packed, of 8 bits: where the sequence's first value is in what `transpose` made; where keys come while the kernel
    runs: which of `ArrivalArgs.steps` brings the item's"""


@gluon.jit
def load_item(args, pipe, at):
    """The LoadItem of record `at`."""
    slots = pipe.slots
    row = slots.get(at, ROW)
    if is_packed(args.used_q):
        row += slots.get(at, FIRST_ROW)
    return LoadItem(
        slots.get(at, ORIGIN), slots.get(at, KEY_HEAD), slots.get(at, IN_GROUP), row, slots.get(at, KEYS),
        slots.get(at, LO), slots.get(at, HI), slots.get(at, OFFSET),
    )  # fmt: skip


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
