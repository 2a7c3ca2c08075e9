"""The mean of each sequence's keys, in two steps: sums of some blocks of rows, and the mean of these."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.positions import blocks_before, extent, is_packed, sequence_at
from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import head, load_tile
from saccade.backends.triton.quantize_kernel import BLOCK, INFINITY, signs

PARTS = tl.constexpr(2)
"""Blocks of rows of one partial sum."""


@triton.jit
def _sums(x, base, start, used, shape, FINITE: tl.constexpr):
    """[BLOCK_D]: of all rows of a program, of the numbers that are FINITE or of all. Few at a time, and the next
    ones on their way."""
    BLOCK_D: tl.constexpr = shape.WIDTH * shape.CHUNKS
    total = tl.zeros([shape.ROWS, BLOCK_D], tl.float32)
    for i in tl.range(PARTS * (BLOCK // shape.ROWS), num_stages=shape.STAGES):
        rows = load_tile(x, base, start + i * shape.ROWS, used, shape.ROWS, shape.D, BLOCK_D, True).to(tl.float32)
        if FINITE:
            rows = tl.where(tl.abs(rows) < INFINITY, rows, 0.0)
        total += rows
    return tl.sum(total, 0)


@triton.jit
def mean_parts_kernel(x, parts, span, sizes, shape):
    """Sums of the rows of PARTS blocks, float32 (b tiles, h, d), where tiles are PARTS blocks."""
    s = plain_int(sizes.s)
    tiles = plain_int(sizes.tiles)
    groups = plain_int(sizes.heads)
    item = tl.program_id(0)
    number = item % tiles
    h = item // tiles % groups
    b = item // tiles // groups
    if is_packed(span):
        sequence = sequence_at(span, number, s, BLOCK * PARTS)
        batch, first, _, used = extent(span, sequence, s)
        block = number - blocks_before(span, sequence, first, BLOCK * PARTS)
    else:
        batch, first, _, used = extent(span, b, s)
        block = number
    base = head(x, batch, h, first)
    BLOCK_D: tl.constexpr = shape.WIDTH * shape.CHUNKS
    start = block * PARTS * BLOCK
    total = _sums(x, base, start, used, shape, False)
    if not (tl.sum(total * 0.0, 0) < INFINITY):  # some are infinite, or no number
        total = _sums(x, base, start, used, shape, True)
    d = tl.arange(0, BLOCK_D)
    offset = parts + ((b.to(tl.int64) * tiles + number) * groups + h) * shape.D + d
    tl.store(offset, total, mask=d < shape.D)


@triton.jit
def mean_kernel(parts, made, span, sizes, shape):
    """The mean of a sequence's rows, rotated if they are: float32 (sequences, h, d)."""
    s = plain_int(sizes.s)
    tiles = plain_int(sizes.tiles)
    heads = plain_int(sizes.heads)
    sequence = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    _, first, _, used = extent(span, sequence, s)
    offset = sequence.to(tl.int64) * tiles
    if is_packed(span):
        offset = blocks_before(span, sequence, first, BLOCK * PARTS).to(tl.int64)
    count = tl.cdiv(used, BLOCK * PARTS)
    BLOCK_D: tl.constexpr = shape.WIDTH * shape.CHUNKS
    total = tl.zeros([BLOCK_D], tl.float32)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, count, 32):
        # [32, BLOCK_D]
        n = start + tl.arange(0, 32)
        there = (n < count)[:, None] & (d < shape.D)[None, :]
        total += tl.sum(tl.load(parts + ((offset + n[:, None]) * heads + h) * shape.D + d[None, :], there, 0.0), 0)
    total = tl.div_rn(total, tl.maximum(used, 1).to(tl.float32) + tl.zeros_like(total))
    offset = made + tl.program_id(0).to(tl.int64) * shape.D
    if shape.MIXED == 1:
        tl.store(offset + d, total, mask=d < shape.D)
    else:
        for start in range(0, shape.D, 16):
            column = start + tl.arange(0, 16)
            # [BLOCK_D, 16]
            turned = tl.sum(total[:, None] * signs(d, column, shape.MIXED), 0) * shape.FACTOR
            tl.store(offset + column, turned, mask=column < shape.D)
