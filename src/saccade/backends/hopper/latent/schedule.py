"""Which keys of which sequence a program of the latent kernel takes, from lengths that only the device knows.

The tiles of keys of all sequences, one sequence after the other, are a row that is cut in lines of equal length. Each
line is worked on by one program for each tile of query rows, so that programs side by side read the same keys. A part
is what a line and a sequence have in common: line l and sequence b have part l + b, as from one part to the next either
the line or the sequence changes.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import extent
from saccade.backends.device.tiles import finite, infinite


class Schedule(NamedTuple):
    """Where each sequence's tiles of keys are in the row of all."""

    starts: Any
    """int32 (sequences + 1): how many tiles there are before each sequence"""
    firsts: Any
    """int32 (sequences): the number of its first tile"""
    sequences: Any
    """runtime_ints, as the next"""
    lines: Any


LEAST_TILES = tl.constexpr(2)
"""Tiles of a line at least: fewer are not worth a merge."""
AT_ONCE = tl.constexpr(1024)
"""Sequences that the schedule's one program looks at together."""


@triton.jit
def length_of_line(schedule):
    """Tiles of each line but the last ones."""
    total = tl.load(schedule.starts + plain_int(schedule.sequences))
    return tl.maximum(tl.cdiv(total, plain_int(schedule.lines)), LEAST_TILES)


@triton.jit(do_not_specialize=["s_q", "s_k"])
def schedule_kernel(schedule, used_q, used_k, mask, s_q, s_k, BLOCK_K: tl.constexpr):
    """Writes the schedule: of each sequence the tiles that some row sees, by the bounds of its first and last row."""
    count = plain_int(schedule.sequences)
    total = count * 0
    for at in range(0, count, AT_ONCE):
        # [AT_ONCE]
        i = at + tl.arange(0, AT_ONCE)
        b = tl.minimum(i, count - 1)
        _, _, _, rows = extent(used_q, b, s_q)
        _, _, _, keys = extent(used_k, b, s_k)
        rows = rows + b * 0
        keys = keys + b * 0
        if mask.ordered:
            lo, _, _, _ = mask.keys_of(mask.data, b, b * 0, keys - rows)
            _, hi, _, _ = mask.keys_of(mask.data, b, tl.maximum(rows - 1, 0), keys - rows)
            lo = tl.maximum(lo, 0)
            hi = tl.minimum(hi, keys)
        else:
            lo = keys * 0
            hi = keys
        first = lo // BLOCK_K
        tiles = tl.where((i < count) & (hi > lo) & (rows > 0), tl.cdiv(hi, BLOCK_K) - first, 0)
        ends = total + tl.cumsum(tiles, 0)
        tl.store(schedule.firsts + i, first, mask=i < count)
        tl.store(schedule.starts + 1 + i, ends, mask=i < count)
        total += tl.sum(tiles, 0)
    tl.store(schedule.starts, 0)


@triton.jit(do_not_specialize=["h_q", "s_q"])
def merge_kernel(
    parts, part_lse, out, lse, sink, schedule, h_q, s_q, GROUP: tl.constexpr, ROWS: tl.constexpr, D_V: tl.constexpr,
    SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`lse = log(exp(sink) + sum_i exp(lse_i))`, `out = sum_i exp(lse_i - lse) out_i` of one row's parts, unless it has
    one, whose results are in out and lse already.

    parts: float32 (parts, tiles of rows, 64, d_v), not written where part_lse is -inf; SPLITS: lines, at least.
    """
    PACK: tl.constexpr = 64 // ROWS
    PACKS: tl.constexpr = (GROUP + PACK - 1) // PACK
    place = tl.program_id(0).to(tl.int64)
    row = (place % s_q).to(tl.int32)
    h = (place // s_q % h_q).to(tl.int32)
    b = (place // s_q // h_q).to(tl.int32)
    blocks = tl.cdiv(s_q, ROWS)
    member = h % GROUP
    tile = (h // GROUP * PACKS + member // PACK) * blocks + row // ROWS
    tiles = h_q // GROUP * PACKS * blocks
    within = member % PACK * ROWS + row % ROWS

    length = length_of_line(schedule)
    start = tl.load(schedule.starts + b)
    end = tl.load(schedule.starts + b + 1)
    first = start // length
    count = tl.where(end > start, (end - 1) // length - first + 1, 0)
    if count == 1:
        return
    # [SPLITS]
    i = tl.arange(0, SPLITS)
    row_of_parts = ((first + b).to(tl.int64) * tiles + tile) * 64 + within
    stride = tiles.to(tl.int64) * 64
    lses = tl.load(part_lse + row_of_parts + i * stride, mask=i < count, other=float("-inf"))
    top = tl.max(lses, 0)
    column = tl.full([], float("-inf"), tl.float32) if sink is None else finite(tl.load(sink + h).to(tl.float32))
    top = tl.maximum(top, column)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - top), 0) + tl.exp(column - top)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # [D_V]
    column_v = tl.arange(0, D_V)
    acc = tl.zeros([D_V], tl.float32)
    for at in range(0, count, CHUNK):
        # [CHUNK]
        number = at + tl.arange(0, CHUNK)
        place_of_part = row_of_parts + number * stride
        weight = tl.exp(tl.load(part_lse + place_of_part, mask=number < count, other=float("-inf")) - top) / total
        there = (weight != 0)[:, None]
        values = tl.load(parts + place_of_part[:, None] * D_V + column_v[None, :], mask=there, other=0.0)
        acc += tl.sum(values * weight[:, None], 0)
    base = out.ptr + (
        b.to(tl.int64) * plain_int(out.stride_b) + h.to(tl.int64) * plain_int(out.stride_h)
        + row.to(tl.int64) * plain_int(out.stride_s)
    ) * out.unit  # fmt: skip
    tl.store(base + column_v, acc.to(out.ptr.dtype.element_ty))
    if lse is not None:
        tl.store(lse + place, tl.where(empty, float("-inf"), infinite(top + tl.log(total), top)))
