"""The order of work items: no multiprocessor is to end late, and keys and values are to stay in the L2 cache."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.sequences import extent
from saccade.backends.hopper.ptx import counted
from saccade.backends.hopper.shim import aggregate

L2_BYTES = 36 << 20
"""K and V of the heads that are worked on at one time: of what the L2 cache of an H200 holds a little more than half
(notes/gluon.md)."""

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


@gluon.jit
def sorted_item(number, items, drawn):
    """The number of a program's item `drawn`, which may not be there, of items that see fewer and fewer keys.

    Many go to who asks first, by the `number` that `begin_count` returned. Few would all be asked for before any is
    done; they go round back and forth: who has the longest of a round has the shortest of the next.
    """
    programs = gl.num_programs(0)
    item = counted(number) + programs
    if items <= FEW * programs:
        place = gl.program_id(0)
        item = drawn * programs + gl.where(drawn % 2 == 0, place, programs - 1 - place)
    return item


@triton.jit
def packed_list(scheduler, item, span_q, row, there, ROWS: tl.constexpr):
    """Which of a head's block lists is that of an item: they lie in the order of the table, in which the last rows of
    each sequence come first."""
    first = tl.load(span_q.tiles + 3 + 2 * (item // scheduler.heads))
    place = first + tl.maximum((there + ROWS - 1) // ROWS, 1) - 1 - row // ROWS
    return tl.minimum(place, tl.load(span_q.tiles) - 1)  # broken offsets may ask for more than there is room for


@triton.jit
def packed_place(
    scheduler, item, span_q, s_q, span_k, s_k, ROWS: tl.constexpr, PACK: tl.constexpr, BY_BLOCKS: tl.constexpr
):  # fmt: skip
    """The same as TileScheduler.place, of packed sequences: one after the other in the order of their table, each with
    sections of its own. BY_BLOCKS: these have so many blocks, not keys."""
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


def section_size(heads: int, packs: int, kv_bytes: int) -> int:
    """Heads whose keys and values fit L2 together; those that share keys count once."""
    return min(heads, max(1, L2_BYTES // max(kv_bytes, 1)) * packs)
