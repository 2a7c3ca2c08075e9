"""Sequences and positions as kernels read them: where rows of each sequence are, and where rows and keys stand."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch
from saccade.backends.device.records import (
    FAR,
    FARTHEST,
    FLAGS,
    Bound,
    constants,
    number_at,
    plain_int,
    runtime_int,
    sees,
)
from saccade.call import Call
from saccade.scores import LONGEST as _LONGEST

# Where query rows and keys stand, as kernels read it: masks, score functions and dropout take positions, while tiles
# are found by the numbers of rows and keys.

LONGEST = tl.constexpr(_LONGEST)
NUMBER, SEQUENCE, ROW, ALIGNED = constants(0, 1, 2, 3)
"""Forms of an offset: a number; one of each sequence; a position of each row; keys in use less query rows."""


class Offset(NamedTuple):
    """Where the rows of an operand stand."""

    form: Any
    """constexpr"""
    data: Any
    """the number plus FARTHEST, a `runtime_int`; a `Bound`; an `Aligned`"""

    @staticmethod
    def of(x: int | Tensor, per_row: bool, starts: Tensor | None) -> Offset:
        if not isinstance(x, Tensor):
            return Offset(NUMBER, runtime_int(x + FARTHEST.value))
        return Offset(ROW if per_row else SEQUENCE, Bound.of(x, starts))


class Aligned(NamedTuple):
    """What says how many keys and rows of a paged sequence are in use."""

    used: Any
    """int (b): keys"""
    starts: Any
    """int (b + 1): where its rows begin, if `end_to_end`; else some other tensor"""
    s_q: Any
    capacity: Any
    """keys that it has room for; both `runtime_int`s"""
    end_to_end: Any
    """constexpr"""


class DevicePositions(NamedTuple):
    """Row i of sequence b stands at `row_position(q, b, i)`, key j at `first_key(k, b) + j`."""

    q: Offset
    k: Offset


def device_args(call: Call) -> DevicePositions | None:
    """What functions of positions take for indices; None stands for the numbers of rows and keys."""
    positions, layout = call.positions, call.layout
    if positions is not None:
        q = Offset.of(positions.q, positions.per_row, layout.cu_seqlens_q)
        return DevicePositions(q, Offset.of(positions.k, False, None))
    if not layout.has_pages:
        return None
    used, starts = layout.seqused_k.contiguous(), layout.cu_seqlens_q
    numbers = call.q.shape[2], layout.capacity(call.k.shape[2])
    given = used if starts is None else starts.contiguous()
    aligned = Aligned(used, given, *map(runtime_int, numbers), FLAGS[starts is not None])
    return DevicePositions(Offset(ALIGNED, aligned), Offset.of(0, False, None))


def kind(call: Call) -> str:
    """What functions take for indices: `EmitOptions.indices`."""
    positions = call.positions
    if positions is None:
        return "positions" if call.layout.has_pages else "numbers"
    return "rows" if positions.per_row else "positions"


def reached(call: Call) -> bool:
    """Whether indices are the numbers of keys that exist, which a captured tensor that is read there is known to have:
    see `scores.short`."""
    return call.positions is None and call.layout.rectangular


@triton.jit
def _aligned(data, b):
    """Keys in use less query rows of sequence b."""
    keys = tl.minimum(tl.maximum(tl.load(data.used + b), 0), plain_int(data.capacity)).to(tl.int32)
    s_q = plain_int(data.s_q)
    if data.end_to_end:
        first = tl.minimum(tl.maximum(tl.load(data.starts + b), 0), s_q).to(tl.int32)
        stop = tl.minimum(tl.maximum(tl.load(data.starts + b + 1), 0), s_q).to(tl.int32)
        return keys - tl.maximum(stop - first, 0)
    else:
        return keys - s_q


@triton.jit
def row_position(q, b, q_idx):
    """Where rows q_idx of sequence b stand."""
    if q.form == NUMBER:
        return q_idx + (plain_int(q.data) - FARTHEST)
    elif q.form == SEQUENCE:
        return q_idx + number_at(q.data, b, 0, FARTHEST)
    elif q.form == ROW:
        return number_at(q.data, b, q_idx, FARTHEST)
    else:
        return q_idx + _aligned(q.data, b)


@triton.jit
def first_key(k, b):
    """Where key 0 of sequence b stands."""
    return row_position(k, b, 0)


@triton.jit
def function_positions(positions, b, q_idx, kv_idx):
    """What functions take for indices: positions of which they can take differences."""
    p = row_position(positions.q, b, q_idx)
    r = kv_idx + first_key(positions.k, b)
    return tl.minimum(tl.maximum(p, -LONGEST), LONGEST - 1), tl.minimum(tl.maximum(r, -LONGEST), LONGEST - 1)


# Masks. `data` holds a mask, whose functions take positions for indices, the positions, and whether the mask takes the
# numbers of rows all the same, as an interval does, whose bounds are of rows, wherever these stand.


@triton.jit
def placed_keys(data, b, q_idx, off):
    row = q_idx if data[2] else row_position(data[1].q, b, q_idx)
    lo, hi, core_lo, core_hi = data[0].keys_of(data[0].data, b, row, 0)
    first = first_key(data[1].k, b)
    return lo - first, hi - first, core_lo - first, core_hi - first


@triton.jit
def placed_rows(data, b, kv_idx, off):
    if data[2]:
        return data[0].rows_of(data[0].data, b, kv_idx + first_key(data[1].k, b), 0)
    elif data[1].q.form == ROW:  # `visits.py` finds the rows
        return kv_idx * 0, kv_idx * 0 + FAR, kv_idx * 0, kv_idx * 0
    else:
        lo, hi, core_lo, core_hi = data[0].rows_of(data[0].data, b, kv_idx + first_key(data[1].k, b), 0)
        first = row_position(data[1].q, b, 0)
        return lo - first, hi - first, core_lo - first, core_hi - first


@triton.jit
def function_sees(data, b, h, q_idx, kv_idx, off):
    p, r = function_positions(data[1], b, q_idx, kv_idx)
    return sees(data[0], b, h, p, r, 0)


# Where the rows of each sequence are, in every layout, and the order in which the tiles of packed ones are worked on.
#
# The host does not know the lengths of packed sequences. A grid has as many programs as there may be tiles, and a small
# kernel writes a table of the tiles that exist, the longest sequence first, so that no program ends late. Nothing
# waits for the host, and a CUDA graph may be replayed with other offsets.
#
# The rows after the last sequence are one more sequence, without rows in use: they get zeros like all such rows.


class SequenceSpans(NamedTuple):
    """Which rows of an operand belong to which sequence. Kernels take None where each batch row is one, in full."""

    used: Any
    """int (b): how many rows are in use"""
    starts: Any
    """int (b + 1): packed: where each sequence begins; (b) of ranges"""
    tiles: Any
    """int32 (1 + tiles, 2): packed: how many tiles there are, then each one's sequence and that one's first tile; of
    the operand whose tiles the programs are"""
    count: Any
    """packed or bounded: how many sequences; a runtime_int"""
    bounded: Any
    """constexpr: `used` has `count` numbers, and sequences from `count` on have no rows; not packed"""
    ranges: Any
    """constexpr: sequences may share rows: each has the `used` ones from `starts` on; packed"""
    ragged: Any
    """constexpr: `used` says something; else it is some other tensor, as records hold no None on Triton 3.6"""
    packed: Any
    """constexpr: `starts`, `tiles` and `count` do"""


@triton.jit
def extent(span, b, s):
    """Batch row, first row, how many rows there are, and how many of them are in use, of sequence b.

    s: rows of the operand. Offsets and lengths are clamped: whatever they hold, rows are inside of it.
    """
    if span is None:
        return b, 0, s, s
    elif not span.packed:
        if span.bounded:
            count = plain_int(span.count)
            used = tl.load(span.used + tl.minimum(b, count - 1)).to(tl.int32)
            return b, 0, s, tl.where(b < count, tl.minimum(tl.maximum(used, 0), s), 0)
        else:
            return b, 0, s, tl.minimum(tl.maximum(tl.load(span.used + b).to(tl.int32), 0), s)
    elif span.ranges:  # what no sequence reads is not one more
        count = plain_int(span.count)
        number = tl.minimum(b, count - 1)
        first = tl.minimum(tl.maximum(tl.load(span.starts + number), 0), s).to(tl.int32)
        used = tl.minimum(tl.maximum(tl.load(span.used + number), 0), s).to(tl.int32)
        rows = tl.where(b < count, tl.minimum(used, s - first), 0)
        return b * 0, first, rows, rows
    else:
        count = plain_int(span.count)
        first = tl.minimum(tl.maximum(tl.load(span.starts + tl.minimum(b, count)), 0), s).to(tl.int32)
        stop = tl.minimum(tl.maximum(tl.load(span.starts + tl.minimum(b + 1, count)), 0), s).to(tl.int32)
        there = tl.maximum(tl.where(b < count, stop, s) - first, 0)
        rows = tl.where(b < count, there, 0)
        if span.ragged:
            used = tl.load(span.used + tl.minimum(b, count - 1))
            rows = tl.minimum(tl.maximum(used, 0), rows).to(tl.int32)
        return b * 0, first, there, rows


@triton.jit
def numbered(span, b):
    """What masks and scores call sequence b. The rows after the last one see nothing, but need a valid number."""
    if span is None or not span.packed:
        return b
    else:
        return tl.minimum(b, plain_int(span.count) - 1)


@triton.constexpr_function
def is_packed(span):
    """constexpr: span.packed, whose name Triton 3.6 does not know here"""
    if span is None:
        return False
    packed = getattr([*span][-1], "value", [*span][-1])
    if not isinstance(packed, bool):  # a tensor would count as True
        raise TypeError("a span that was assigned to a name has lost its constexprs")
    return packed


@triton.jit
def placed(span, at, row):
    """Batch row and row of an operand, where `at` is the batch row, or, packed, the sequence's first row."""
    if is_packed(span):
        return at * 0, at + row
    else:
        return at, row


@triton.jit
def blocks_before(span, b, first, BLOCK: tl.constexpr):
    """A number for the first block of rows of sequence b in memory that has whole blocks for each; packed."""
    return first // BLOCK + b


@triton.jit
def sequence_at(span, number, s, BLOCK: tl.constexpr):
    """The sequence of which block `number` is, in memory that has whole blocks for each; packed. A block of
    no sequence comes out as one after the last block of some sequence."""
    high = plain_int(span.count)  # the rows after the last sequence
    low = high * 0
    while low < high:
        middle = (low + high + 1) // 2
        _, first, _, _ = extent(span, middle, s)
        before = blocks_before(span, middle, first, BLOCK) <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    return low


@triton.jit
def block_of_rows(span, bh, number, h_q, s, BLOCK: tl.constexpr):
    """Batch row, head, first row of the sequence, first row in it of block `number` of head bh, how many rows there
    are, and how many of them are in use."""
    if is_packed(span):
        b = sequence_at(span, number, s, BLOCK)
        batch, first, there, rows = extent(span, b, s)
        return batch, bh, first, (number - blocks_before(span, b, first, BLOCK)) * BLOCK, there, rows
    else:
        b, _, _, rows = extent(span, bh // h_q, s)
        return b, bh % h_q, 0, number * BLOCK, s, rows


@triton.jit
def tile_of(span, heads, s, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """This program's sequence, head, head in tensors (b, h, …), and first row; the last rows come first if LAST_FIRST.

    A program without a tile gets rows that are not there.
    """
    if span is None or not span.packed:
        return _dense_tile(heads, s, BLOCK, LAST_FIRST)
    else:
        return packed_tile(span, tl.program_id(0), heads, s, BLOCK, LAST_FIRST)


@triton.jit
def packed_tile(span, item, heads, s, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """The same of the program whose number is `item`; packed."""
    number = item // heads
    total = tl.load(span.tiles)
    entry = span.tiles + 2 + 2 * tl.minimum(number, total - 1)
    b = tl.load(entry)
    block = number - tl.load(entry + 1)
    if LAST_FIRST:
        _, _, there, _ = extent(span, b, s)
        block = tl.maximum(tl.cdiv(there, BLOCK) - 1 - block, 0)  # of broken offsets the one tile has no rows
    h = item % heads
    return b, h, h, tl.where(number < total, block * BLOCK, s)


@triton.jit
def table_index(span, item, heads, start, BLOCK: tl.constexpr):
    """Where the tile that `packed_tile` gave for `item` has its place in the table, the first rows of each sequence
    first; packed. Without a tile a program has a place of its own after all of them."""
    number = item // heads
    total = tl.load(span.tiles)
    first = tl.load(span.tiles + 3 + 2 * tl.minimum(number, total - 1))
    # Broken offsets may ask for more tiles than there is room for.
    return tl.where(number < total, tl.minimum(first + start // BLOCK, total - 1), number)


@triton.jit
def _dense_tile(heads, s, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    blocks = tl.cdiv(s, BLOCK)
    block = tl.program_id(0) % blocks
    start = (blocks - 1 - block) * BLOCK if LAST_FIRST else block * BLOCK
    bh = tl.program_id(0) // blocks
    return bh // heads, bh % heads, bh, start


@triton.jit
def _work(own, other, b, s, other_s, BLOCK: tl.constexpr):
    """Tiles of sequences b, and what each of them costs."""
    count = plain_int(own.count)
    _, _, there, _ = extent(own, b, s)
    _, _, _, cost = extent(other, b, other_s)
    return tl.where(b <= count, tl.cdiv(there, BLOCK), 0), tl.where(b < count, cost, -1)


@triton.jit(do_not_specialize=["s", "other_s", "slots"])
def order_kernel(tiles, own, other, s, other_s, slots, BLOCK: tl.constexpr, N: tl.constexpr):
    """Writes the table of `own` for N sequences, whose places the lengths of all others tell."""
    count = plain_int(own.count)
    # [N]
    i = tl.program_id(0) * N + tl.arange(0, N)
    blocks, cost = _work(own, other, i, s, other_s, BLOCK)
    first = tl.zeros([N], tl.int32)
    total = count * 0
    for start in range(0, count + 1, N):
        # [N]
        j = start + tl.arange(0, N)
        more, other_cost = _work(own, other, j, s, other_s, BLOCK)
        # [N, N]
        even = (other_cost[None, :] == cost[:, None]) & (j[None, :] < i[:, None])
        earlier = (other_cost[None, :] > cost[:, None]) | even
        first += tl.sum(tl.where(earlier, more[None, :], 0), 1)
        total += tl.sum(more, 0)
    for start in range(0, tl.max(blocks, 0), N):
        # [N, N]
        block = start + tl.arange(0, N)[None, :]
        offset = first[:, None] + block
        there = (block < blocks[:, None]) & (offset < slots)
        tl.store(tiles + 2 + 2 * offset, i[:, None] + block * 0, mask=there)
        tl.store(tiles + 3 + 2 * offset, first[:, None] + block * 0, mask=there)
    if tl.program_id(0) == 0:
        tl.store(tiles, tl.maximum(tl.minimum(total, slots), 1))
        if total == 0:  # broken offsets: one tile, of which no row is there
            tl.store(tiles + 2, count)
            tl.store(tiles + 3, 0)


N = 32
"""Sequences of one program of order_kernel."""


def spans(call: Call, tiles: Tensor | None = None) -> tuple[SequenceSpans | None, SequenceSpans | None]:
    """Of the queries and of the keys. With a table of `tiles` the keys know of the rows after the last sequence."""
    layout = call.layout
    if layout.cu_seqlens_q is None:  # the hot path of small calls
        return spans_of(None, layout.seqused_q), spans_of(None, layout.seqused_k)
    count = runtime_int(layout.sequences)
    queries = spans_of(layout.cu_seqlens_q, layout.seqused_q, tiles, count)
    starts = layout.cu_seqlens_k if layout.starts_k is None else layout.starts_k
    keys = spans_of(starts, layout.seqused_k, tiles, count, layout.starts_k is not None)
    if keys is not None and tiles is not None and not layout.ragged_keys:
        keys = keys._replace(count=count, bounded=FLAGS[True])
    return queries, keys


def spans_of(
    starts: Tensor | None, used: Tensor | None, tiles: Tensor | None = None, count: int = 0, ranges: bool = False
) -> SequenceSpans | None:
    if starts is None and used is None:
        return None
    # Records hold no None on Triton 3.6: another tensor stands in.
    packed, ragged = FLAGS[starts is not None], FLAGS[used is not None]
    starts = None if starts is None else starts.contiguous()
    used = starts if used is None else used.contiguous()
    if starts is None:
        return SequenceSpans(used, used, used, runtime_int(0), FLAGS[False], FLAGS[False], ragged, packed)
    tiles = starts if tiles is None else tiles
    return SequenceSpans(used, starts, tiles, count, FLAGS[False], FLAGS[ranges], ragged, packed)


def tiles_of(span: SequenceSpans | None) -> Tensor | None:
    """The table of packed sequences, if they are."""
    return span.tiles if span is not None and span.packed.value else None


def slots(call: Call, side: int, block: int) -> int:
    """How many tiles of `block` rows there may be, of queries (0) or keys (1)."""
    s, layout = (call.q, call.k)[side].shape[2], call.layout
    if side and layout.starts_k is not None:  # each sequence may have all keys; and one where there is none
        return layout.sequences * -(-s // block) + 1
    return layout.tiles(s, block)


def lengths(call: Call) -> tuple[int, int]:
    """How many rows and keys there are, of a batch row or of all sequences; in pages, what a sequence may have."""
    return call.q.shape[2], call.layout.capacity(call.k.shape[2])


def table(call: Call, launches: Launches, side: int, block: int) -> Tensor:
    """The tiles of queries (0) or keys (1), in the order in which programs take them."""
    tiles = torch.empty(1 + slots(call, side, block), 2, dtype=torch.int32, device=call.q.device)
    launch, arguments = order_launch(call, launches, tiles, side, block)
    launch(call.q.device.index, arguments)
    return tiles


def order_launch(call: Call, launches: Launches, tiles: Tensor, side: int, block: int) -> GivenLaunch:
    """The kernel that fills the table, and its arguments."""
    direction = -1 if side else 1
    own, other = spans(call, tiles)[::direction]
    assert own is not None
    grid = -(-len(own.starts) // N), 1, 1
    launch = cached_launch(launches, ("tiles", side, block), lambda: Launch(order_kernel, grid, (block, N)))
    return launch, (tiles, own, other, *lengths(call)[::direction], len(tiles) - 1)
