"""Which sequence, and how much of it, a program over pages works on."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.positions import extent
from saccade.backends.device.records import plain_int


@triton.jit
def sequence_of(span, tile, s_q, count, shape, N: tl.constexpr):
    """The sequence of a tile of flat rows, `count` after the last one, and the tile's first flat row."""
    if span is None:
        blocks = tl.cdiv(s_q * shape.GROUP, shape.BLOCK_Q)
        number = tile // blocks
        first = number * blocks
    else:
        # [N]
        i = tl.arange(0, N)
        start = tl.minimum(tl.maximum(tl.load(span.starts + tl.minimum(i, count)), 0), s_q).to(tl.int32)
        begin = start * shape.GROUP // shape.BLOCK_Q + i  # room for a sequence's tiles wherever it begins
        earlier = (i <= count) & (begin <= tile)
        number = tl.maximum(tl.sum(earlier.to(tl.int32), 0) - 1, 0)
        first = tl.max(tl.where(earlier, begin, 0), 0)
    return number, (tile - first) * shape.BLOCK_Q


@triton.jit
def share(mask, used_q, used_k, heads, s_q, pages, split, shape, N: tl.constexpr, LEAST: tl.constexpr):
    """Tiles of keys for each program, if those of all sequences are shared out evenly."""
    count = plain_int(pages.sequences)
    # [N]
    i = tl.arange(0, N)
    b = tl.minimum(i, count - 1)
    _, _, _, keys = extent(used_k, b, plain_int(pages.capacity))
    _, _, _, rows = extent(used_q, b, s_q)
    rows = rows + b * 0
    if mask.ordered:
        lo, _, _, _ = mask.keys_of(mask.data, b, b * 0, keys - rows)
        _, hi, _, _ = mask.keys_of(mask.data, b, tl.maximum(rows - 1, 0), keys - rows)
        tiles = tl.cdiv(tl.maximum(tl.minimum(hi, keys) - tl.maximum(lo, 0), 0), shape.BLOCK_K)
    else:
        tiles = tl.cdiv(keys, shape.BLOCK_K)
    total = tl.sum(tl.where(i < count, tiles * tl.cdiv(rows * shape.GROUP, shape.BLOCK_Q), 0), 0)
    return tl.maximum(tl.cdiv(total * heads, plain_int(split.slots)), LEAST)


@triton.jit
def by_length(rank, used_k, pages, N: tl.constexpr, BITS: tl.constexpr):
    """The sequence of which `rank` others have more keys: the longest start first. Lengths have up to BITS bits.

    It has neither a loop nor a branch: see the top of `paged_kernel.py`.
    """
    count = plain_int(pages.sequences)
    # [N]
    i = tl.arange(0, N)
    _, _, _, keys = extent(used_k, tl.minimum(i, count - 1), plain_int(pages.capacity))
    keys = tl.where(i < count, keys + i * 0, -1)
    # The least length of which at most `rank` sequences have more.
    least = rank * 0
    most = tl.max(keys, 0)
    for bit in tl.static_range(BITS):  # noqa: B007 - `_` is a tensor here
        middle = (least + most) // 2
        enough = tl.sum((keys > middle).to(tl.int32), 0) <= rank
        most = tl.where(enough, middle, most)
        least = tl.where(enough, least, tl.minimum(middle + 1, most))
    before = tl.sum((keys > least).to(tl.int32), 0)
    equal = (keys == least).to(tl.int32)
    return tl.sum(tl.where((equal == 1) & (tl.cumsum(equal, 0) == rank - before + 1), i, 0), 0)
