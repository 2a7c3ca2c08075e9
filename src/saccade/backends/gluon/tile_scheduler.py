"""The order of work: no multiprocessor is to end late, and keys and values are to stay in the L2 cache."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.sequences import extent
from saccade.backends.gluon.shim import aggregate

# The numbers of a work item: batch row (-1: no more work), key head, first head of its group, first row, the tiles of
# keys [LO, HI) that are loaded, and for each consumer from CONSUMER on the tiles [first, core) and [core_end, end) that
# need the mask and [core, core_end) that do not.
BATCH, KEY_HEAD, IN_GROUP, ROW, LO, HI, CONSUMER = (gl.constexpr(i) for i in range(7))
FIRST, CORE, CORE_END, END = (gl.constexpr(i) for i in range(4))
# And of packed sequences, whose lengths are not where the batch row says: the first row, how many rows there are, how
# many of them are in use, and how many keys.
FIRST_ROW, THERE, USED, KEYS = (gl.constexpr(18 + i) for i in range(4))
# And of those with lists of tiles: which of a head's lists is the item's.
BLOCK = gl.constexpr(22)


@gluon.constexpr_function
def numbers_of_item(packed, listed):
    """How many numbers a work item has."""
    if not packed:
        return 18
    return 23 if listed else 22


L2_BYTES = 32 << 20
"""K and V of the heads that are worked on at one time: half of what the L2 cache of an H200 holds."""


def work(blocks: int, b: int, h_k: int, packs: int, section: int) -> tuple[int, ...]:
    """The numbers of a Work: `blocks` blocks of rows of every head, or pack of `packs` for each key head."""
    heads = b * h_k * packs
    return blocks * heads, blocks, heads, section, h_k, packs


@aggregate
class Work:
    """How many items of work there are, and how they are numbered."""

    items: gl.tensor
    blocks: gl.tensor
    heads: gl.tensor
    section: gl.tensor
    h_k: gl.tensor
    packs: gl.tensor

    @gluon.constexpr_function
    def __init__(self, items, blocks, heads, section, h_k, packs):
        self.items = items
        self.blocks = blocks
        self.heads = heads
        self.section = section
        self.h_k = h_k
        self.packs = packs

    @gluon.jit
    def place(self, item, ROWS: gl.constexpr, PACK: gl.constexpr):
        """Batch row, key head, first head in its group and first row of an item.

        Within a section of heads the last rows come first: under a causal mask they take longest.
        """
        number = item // (self.blocks * self.section)
        rest = item - number * (self.blocks * self.section)
        size = gl.minimum(self.section, self.heads - number * self.section)
        head = number * self.section + rest % size
        row = (self.blocks - 1 - rest // size) * ROWS
        return head // (self.h_k * self.packs), head // self.packs % self.h_k, head % self.packs * PACK, row


@triton.jit
def packed_list(work, item, span_q, row, there, ROWS: tl.constexpr):
    """Which of a head's lists is that of an item: they lie in the order of the table, in which the last rows of each
    sequence come first."""
    first = tl.load(span_q.tiles + 3 + 2 * (item // work.heads))
    place = first + tl.maximum((there + ROWS - 1) // ROWS, 1) - 1 - row // ROWS
    return tl.minimum(place, tl.load(span_q.tiles) - 1)  # broken offsets may ask for more than there is room for


@triton.jit
def packed_place(work, item, span_q, s_q, span_k, s_k, ROWS: tl.constexpr, PACK: tl.constexpr):
    """The same as Work.place, of packed sequences: one after the other in the order of their table, each with sections
    of its own. work.section is here how many keys fit the L2 cache together."""
    entry = span_q.tiles + 2 + 2 * (item // work.heads)
    b = tl.load(entry)
    rest = item - tl.load(entry + 1) * work.heads
    _, _, there, _ = extent(span_q, b, s_q)
    _, _, _, keys = extent(span_k, b, s_k)
    blocks = tl.maximum((there + ROWS - 1) // ROWS, 1)
    section = tl.minimum(tl.maximum(work.section // tl.maximum(keys, 1), 1) * work.packs, work.heads)
    number = rest // (blocks * section)
    rest -= number * (blocks * section)
    size = tl.minimum(section, work.heads - number * section)
    head = number * section + rest % size
    row = (blocks - 1 - rest // size) * ROWS
    return b, head // work.packs, head % work.packs * PACK, row


def section(heads: int, packs: int, kv_bytes: int) -> int:
    """Heads whose keys and values fit L2 together; those that share keys count once."""
    return min(heads, max(1, L2_BYTES // max(kv_bytes, 1)) * packs)
