"""8-bit numbers and their factors: one program for each 128 rows of a head, or of all heads that share a key head."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.aggregate import aggregate
from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import blocks_before, extent, is_packed, sequence_at
from saccade.backends.device.tiles import head, load_tile, places
from saccade.descale import BLOCK as _BLOCK

BLOCK = tl.constexpr(_BLOCK)
SMALLEST = tl.constexpr(2.0**-126)
"""The least factor: the smallest normal number."""
INFINITY = tl.constexpr(float("inf"))
PARTS = tl.constexpr(2)
"""Blocks of rows of one partial sum of the mean."""
E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1)
TENSOR, HEAD, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class QuantizeShape(NamedTuple):
    """What a kernel is compiled for; all are constexpr."""

    D: Any
    BLOCK_D: Any
    CHUNK: Any
    """columns that a product with the Hadamard matrix takes at once"""
    MIXED: Any
    """elements that the matrix mixes; 1 is no rotation"""
    FACTOR: Any
    """1 / sqrt(MIXED)"""
    HEADS: Any
    """heads of one program"""
    ROWS: Any
    """rows that it converts at once"""
    GROUP: Any
    """heads that share a factor"""
    PER: Any
    TYPE: Any
    HARDWARE: Any
    """whether the device converts to these bytes"""
    SUBTRACTS: Any
    KEYS_FIRST: Any


class QuantizeSizes(NamedTuple):
    """`runtime_int`s."""

    s: Any
    heads: Any
    """of x"""
    tiles: Any
    """blocks of rows of a batch row, or of all sequences"""
    sequences: Any
    blocks: Any
    """of a sequence, in `descale` by blocks"""


@aggregate
class RowBlock:
    """The block of rows, and the heads, of a program."""

    batch: Any
    h: Any
    """the first head"""
    key_head: Any
    sequence: Any
    number: Any
    """of the block, in its sequence"""
    first: Any
    """the sequence's first row"""
    stop: Any
    """in the sequence, of the block's rows that are there"""
    used: Any
    """the same of those in use"""
    known: Any
    """whether it is a sequence's, not what follows the last one"""


@triton.jit
def _block_at(span, sizes, shape):
    s = plain_int(sizes.s)
    tiles = plain_int(sizes.tiles)
    groups = plain_int(sizes.heads) // shape.HEADS
    item = tl.program_id(0)
    number = item % tiles
    h = item // tiles % groups * shape.HEADS
    b = item // tiles // groups
    if is_packed(span):
        sequence = sequence_at(span, number, s, BLOCK)
        batch, first, there, used = extent(span, sequence, s)
        number = number - blocks_before(span, sequence, first, BLOCK)
    else:
        sequence = b
        batch, first, there, used = extent(span, b, s)
    known = sequence < plain_int(sizes.sequences)
    return RowBlock(batch, h, h // shape.GROUP, sequence, number, first, there, used, known)


@triton.jit
def _signs(row, column, MIXED: tl.constexpr):
    """[rows, columns] of the block-diagonal Hadamard matrix, not normalised: (-1)^(ones in row & column)."""
    ones = row[:, None] & column[None, :] & (MIXED - 1)
    ones ^= ones >> 4
    ones ^= ones >> 2
    ones ^= ones >> 1
    # Numbers up to 255 have their upper four bits in the lower ones by now.
    same = row[:, None] // MIXED == column[None, :] // MIXED
    return tl.where(same, 1.0 - 2.0 * (ones & 1).to(tl.float32), 0.0)


@triton.jit
def _of_head(mean, at, sizes, shape):
    """[BLOCK_D]: the mean of the sequence's keys."""
    d = tl.arange(0, shape.BLOCK_D)
    heads = plain_int(sizes.heads) // shape.GROUP
    sequence = tl.minimum(at.sequence, plain_int(sizes.sequences) - 1)
    return tl.load(mean + (sequence.to(tl.int64) * heads + at.key_head) * shape.D + d, mask=d < shape.D, other=0.0)


@triton.jit
def _values(x, mean, at, h, start, sizes, shape, N: tl.constexpr):
    """float32 [N, BLOCK_D]: rows [start, start + N) of the sequence in head h, rotated, zero where they are not in use;
    less the mean if that is subtracted."""
    base = head(x, at.batch, h, at.first)
    if shape.MIXED == 1:
        made = load_tile(x, base, start, at.used, N, shape.D, shape.BLOCK_D, True).to(tl.float32)
    else:
        made = tl.zeros([N, shape.BLOCK_D], tl.float32)
        column = tl.arange(0, shape.BLOCK_D)
        row = (start + tl.arange(0, N) < at.used)[:, None]
        for chunk in tl.range(0, shape.D, shape.CHUNK, num_stages=1):
            inner = chunk + tl.arange(0, shape.CHUNK)
            # [N, CHUNK]
            place = places(x, base + chunk, start, N, shape.CHUNK)
            part = tl.load(place, mask=row & (inner < shape.D)[None, :], other=0.0)
            # [CHUNK, BLOCK_D]; both are exact in every dtype, so that only sums round.
            signs = _signs(inner, column, shape.MIXED).to(part.dtype)
            made = tl.dot(part, signs, made, input_precision="ieee")
        made *= shape.FACTOR
    if shape.SUBTRACTS:
        made -= _of_head(mean, at, sizes, shape)[None, :]
    return made


@triton.jit
def _sizes(x, at, shape):
    """The absolute values of the numbers in rows in use, else zero."""
    size = tl.abs(x)
    size = tl.where(size < INFINITY, size, 0.0)
    if shape.SUBTRACTS:  # other rows are zero only before
        row = at.number * BLOCK + tl.arange(0, BLOCK)
        size = tl.where((row < at.used)[:, None], size, 0.0)
    return size


@triton.jit
def _largest(x, mean, at, sizes, shape):
    """The largest absolute value in the program's heads. They are read again afterwards: their numbers would fill the
    registers, and a block of one head still is in the first cache then."""
    start = at.number * BLOCK
    # [BLOCK]; rows are joined last, for which warps wait for one another.
    largest = tl.zeros([BLOCK], tl.float32)
    for i in range(shape.HEADS):
        values = _values(x, mean, at, at.h + i, start, sizes, shape, BLOCK)
        largest = tl.maximum(largest, tl.max(_sizes(values, at, shape), 1))
    return tl.max(largest, 0)


@triton.jit
def _factor(largest, shape):
    top = 448.0 if shape.TYPE == E4M3 else 57344.0
    factor = tl.maximum(tl.div_rn(largest, top), SMALLEST)
    return tl.where(largest > 0, factor, 1.0)


@triton.jit
def _quotient(x, factor):
    """x / factor, rounded once; NaN of infinities. The reciprocal is rounded, so one correction suffices (Markstein,
    IA-64 and Elementary Functions, 2000)."""
    factor = factor + tl.zeros_like(x)
    inverse = tl.div_rn(1.0, factor)
    found = x * inverse
    return tl.fma(tl.fma(-found, factor, x), inverse, found)


@triton.jit
def encoded(x, shape):
    """uint8: float32 as 8 bits, to nearest, ties to even, the largest number for what is beyond it; NaN is 0x7f."""
    if shape.HARDWARE and shape.TYPE == E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    if shape.HARDWARE:
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    mantissa: tl.constexpr = 3 if shape.TYPE == E4M3 else 2
    bias: tl.constexpr = 7 if shape.TYPE == E4M3 else 15
    top: tl.constexpr = 0x7E if shape.TYPE == E4M3 else 0x7B
    drop: tl.constexpr = 23 - mantissa
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # Exponent and mantissa side by side: a carry of the one is one more of the other.
    normal = (size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1) >> drop) - ((127 - bias) << mantissa)
    # Below the least normal number a code is a multiple of the least number: adding 2^23 rounds to one.
    small = tl.abs(x) * (2.0 ** (bias - 1 + mantissa)) + 8388608.0
    small = small.to(tl.int32, bitcast=True) - 0x4B000000
    code = tl.where(tl.abs(x) < 2.0 ** (1 - bias), small, tl.minimum(normal, top)) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)


@triton.jit
def _store(out, at, h, start, x, shape):
    """Rows from `start` on, as far as they are there; zero in those that are not in use."""
    row = start + tl.arange(0, shape.ROWS)
    # [ROWS, BLOCK_D]
    code = tl.where((row < at.used)[:, None], encoded(x, shape), 0).to(tl.uint8)
    d = tl.arange(0, shape.BLOCK_D)
    there = (row < at.stop)[:, None] & (d < shape.D)[None, :]
    if shape.KEYS_FIRST:
        # out is (b, h, d, s).
        place = head(out, at.batch, h) + at.first + row[:, None]
        place += d[None, :].to(tl.int64) * plain_int(out.stride_s) * out.unit
    else:
        stride = plain_int(out.stride_s)
        if out.wide:
            stride = stride.to(tl.int64)
        place = head(out, at.batch, h, at.first) + (row[:, None] * (stride * out.unit) + d[None, :])
    tl.store(place, code, mask=there)


@triton.jit
def _store_shift(shift, x, mean, scale, at, h, start, sizes, shape):
    """scale q . mean, of each row, float32 (b, h, s)."""
    total = tl.sum(x * _of_head(mean, at, sizes, shape)[None, :], 1) * scale
    row = start + tl.arange(0, shape.ROWS)
    s = plain_int(sizes.s)
    place = shift + (at.batch.to(tl.int64) * plain_int(sizes.heads) + h) * s + at.first + row
    tl.store(place, tl.where(row < at.used, total, 0.0), mask=row < at.stop)


@triton.jit
def _entry(at, sizes, shape):
    """Where the factor of a head, or of everything, is."""
    if shape.PER == TENSOR:
        return at.number.to(tl.int64) * 0
    return at.sequence.to(tl.int64) * (plain_int(sizes.heads) // shape.GROUP) + at.key_head


@triton.jit
def largest_kernel(x, mean, found, span, sizes, shape):
    """The largest absolute values by sequence and key head, or of all, as the bits of float32, which are ordered as
    integers; found holds zeros."""
    at = _block_at(span, sizes, shape)
    largest = _largest(x, mean, at, sizes, shape)
    place = found + _entry(at, sizes, shape)
    tl.atomic_max(place, largest.to(tl.int32, bitcast=True), mask=at.known & (largest > 0), sem="relaxed")


@triton.jit
def quantize_kernel(x, out, mean, found, descale, shift, span, sizes, scale, shape):
    """x: TensorArgs (b, h, s, d); out: the same of bytes. mean: float32 (sequences, h_k, d), or None. found: what
    `largest_kernel` found, or None by blocks. descale: float32. shift: float32 (b, h, s), or None."""
    at = _block_at(span, sizes, shape)
    if shape.PER == BY_BLOCK:
        largest = _largest(x, mean, at, sizes, shape)
        blocks = plain_int(sizes.blocks)
        place = _entry(at, sizes, shape) * blocks + at.number
        mine = at.known & (at.number < blocks)
    else:
        largest = tl.load(found + _entry(at, sizes, shape), mask=at.known, other=0).to(tl.float32, bitcast=True)
        place = _entry(at, sizes, shape)
        mine = at.known & (at.number == 0) & (at.h % shape.GROUP == 0)
    factor = _factor(largest, shape)
    tl.store(descale + place, factor, mask=mine)
    if shape.PER == BY_BLOCK:  # of a sequence that is longer than it may be, bytes without a factor
        factor = tl.where(mine | (not at.known), factor, float("nan"))
    for h in range(at.h, at.h + shape.HEADS):
        for start in range(at.number * BLOCK, at.number * BLOCK + BLOCK, shape.ROWS):
            values = _values(x, mean, at, h, start, sizes, shape, shape.ROWS)
            if shift is not None:
                _store_shift(shift, values, mean, scale, at, h, start, sizes, shape)
            _store(out, at, h, start, _quotient(values, factor), shape)


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
    total = tl.zeros([shape.BLOCK_D], tl.float32)
    for i in range(PARTS):
        rows = load_tile(x, base, (block * PARTS + i) * BLOCK, used, BLOCK, shape.D, shape.BLOCK_D, True)
        rows = rows.to(tl.float32)
        total += tl.sum(tl.where(tl.abs(rows) < INFINITY, rows, 0.0), 0)
    d = tl.arange(0, shape.BLOCK_D)
    place = parts + ((b.to(tl.int64) * tiles + number) * groups + h) * shape.D + d
    tl.store(place, total, mask=d < shape.D)


@triton.jit
def mean_kernel(parts, made, span, sizes, shape):
    """The mean of a sequence's rows, rotated if they are: float32 (sequences, h, d)."""
    s = plain_int(sizes.s)
    tiles = plain_int(sizes.tiles)
    heads = plain_int(sizes.heads)
    sequence = tl.program_id(0) // heads
    h = tl.program_id(0) % heads
    _, first, _, used = extent(span, sequence, s)
    place = sequence.to(tl.int64) * tiles
    if is_packed(span):
        place = blocks_before(span, sequence, first, BLOCK * PARTS).to(tl.int64)
    count = tl.cdiv(used, BLOCK * PARTS)
    total = tl.zeros([shape.BLOCK_D], tl.float32)
    d = tl.arange(0, shape.BLOCK_D)
    for start in range(0, count, 32):
        # [32, BLOCK_D]
        n = start + tl.arange(0, 32)
        there = (n < count)[:, None] & (d < shape.D)[None, :]
        total += tl.sum(tl.load(parts + ((place + n[:, None]) * heads + h) * shape.D + d[None, :], there, 0.0), 0)
    total = tl.div_rn(total, tl.maximum(used, 1).to(tl.float32) + tl.zeros_like(total))
    place = made + tl.program_id(0).to(tl.int64) * shape.D
    if shape.MIXED == 1:
        tl.store(place + d, total, mask=d < shape.D)
    else:
        for start in range(0, shape.D, 16):
            column = start + tl.arange(0, 16)
            # [BLOCK_D, 16]
            turned = tl.sum(total[:, None] * _signs(d, column, shape.MIXED), 0) * shape.FACTOR
            tl.store(place + column, turned, mask=column < shape.D)
