"""The mean of each sequence's keys, in two steps: sums of some blocks of rows, and the mean of these."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.positions import blocks_before, extent, is_packed, sequence_at
from saccade.backends.device.records import aggregate, plain_int
from saccade.backends.device.tiles import head, load_tile
from saccade.call.descale import BLOCK as _BLOCK

PARTS = tl.constexpr(2)
"""Blocks of rows of one partial sum."""


@triton.jit
def _sums(x, base, start, used, shape, FINITE: tl.constexpr):
    """[BLOCK_D]: sums of all rows of a program, of the FINITE numbers or of all, few at a time."""
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


# The quantizing kernel: 8-bit numbers and their factors, and rows times the Hadamard matrix.


# Rows times the Hadamard matrix, on the tensor cores.
#
# A tile's rows lie in CHUNKS of WIDTH columns. Its order keeps chunks that are added in one thread: of two neighbours
# each has 8 rows in turn, as a thread has rows n and n + 8 of a product; pairs of them follow one another.


@triton.jit
def row_of(shape):
    """[N]: which of the program's rows it is."""
    n = tl.arange(0, shape.ROWS * shape.CHUNKS)
    if shape.CHUNKS == 1:
        return n
    else:
        return n // 16 * 8 % shape.ROWS + n % 8


@triton.jit
def column_of(shape):
    """[N, WIDTH], or [1, WIDTH] of one chunk."""
    w = tl.arange(0, shape.WIDTH)[None, :]
    if shape.CHUNKS == 1:
        return w
    else:
        n = tl.arange(0, shape.ROWS * shape.CHUNKS)
        chunk = n // (2 * shape.ROWS) * 2 + n // 8 % 2
        return (chunk * shape.WIDTH)[:, None] + w


@triton.jit
def of_rows(x, shape):
    """[ROWS]: the sums of what [N] chunks of rows have."""
    if shape.CHUNKS == 1:
        return x
    else:
        x = tl.reshape(x, [shape.CHUNKS // 2, shape.ROWS // 8, 2, 8])
        return tl.reshape(tl.sum(tl.sum(x, 2), 0), [shape.ROWS])


@triton.jit
def signs(row, column, MIXED: tl.constexpr):
    """[rows, columns] of the block-diagonal Hadamard matrix, not normalised: (-1)^(ones in row & column)."""
    ones = row[:, None] & column[None, :] & (MIXED - 1)
    ones ^= ones >> 4
    ones ^= ones >> 2
    ones ^= ones >> 1
    # Numbers up to 255 have their upper four bits in the lower ones by now.
    same = row[:, None] // MIXED == column[None, :] // MIXED
    return tl.where(same, 1.0 - 2.0 * (ones & 1).to(tl.float32), 0.0)


@triton.jit
def _product(x, made, shape):
    """float32 [N, WIDTH]: made, and each chunk times a Hadamard matrix of its own, unnormalised. Numbers and signs are
    exact in 16 bits, so that only sums round; float32 is the sum of two numbers that TF32 holds, to 2^-22."""
    w = tl.arange(0, shape.WIDTH)
    # [WIDTH, WIDTH]
    matrix = signs(w, w, shape.MIXED)
    if x.dtype == tl.float32:
        large = (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        made = tl.dot(x - large, matrix, made, input_precision="tf32")
        made = tl.dot(large, matrix, made, input_precision="tf32")
    else:
        made = tl.dot(x, matrix.to(x.dtype), made)
    return made


@triton.jit
def _butterflies(x, shape, HALF: tl.constexpr):
    """[N, WIDTH]: of HALF chunks and the next HALF, the sum and the difference: H of twice as many is (H H; H -H)."""
    if HALF == 1:
        x = tl.reshape(x, [shape.CHUNKS // 2, shape.ROWS // 8, 2, 8, shape.WIDTH])
        one, two = tl.split(tl.permute(x, (0, 1, 3, 4, 2)))
        x = tl.permute(tl.join(one + two, one - two), (0, 1, 4, 2, 3))
    else:
        x = tl.reshape(x, [shape.CHUNKS // (2 * HALF), 2, HALF * shape.ROWS, shape.WIDTH])
        one, two = tl.split(tl.permute(x, (0, 2, 3, 1)))
        x = tl.permute(tl.join(one + two, one - two), (0, 3, 1, 2))
    return tl.reshape(x, [shape.CHUNKS * shape.ROWS, shape.WIDTH])


@triton.jit
def rotated(x, shape):
    """float32 [N, WIDTH]: rows times the Hadamard matrix. Of a row with NaN or infinities all are NaN or infinite."""
    made = tl.zeros(x.shape, tl.float32)
    if shape.CHUNKS > shape.MEETING:  # chunks do not meet, but what is no number is all of its row
        none = of_rows(tl.sum(x.to(tl.float32) * 0.0, 1), shape)
        none = tl.reshape(none, [1, shape.ROWS // 8, 1, 8])
        none = tl.broadcast_to(none, [shape.CHUNKS // 2, shape.ROWS // 8, 2, 8])
        made += tl.reshape(none, [shape.CHUNKS * shape.ROWS])[:, None]
    made = _product(x, made, shape)
    for level in tl.static_range(shape.LEVELS):
        made = _butterflies(made, shape, 2**level)
    return made * shape.FACTOR


# 8-bit numbers and their factors: a program has some rows of one head, and reads them once.
#
# Where programs wait for nobody, one may have several tiles of rows: the next ones are then on their way to shared
# memory.


BLOCK = tl.constexpr(_BLOCK)
SMALLEST = tl.constexpr(2.0**-126)
"""The least factor: the smallest normal number."""
INFINITY = tl.constexpr(float("inf"))
MISSING = tl.constexpr(0x7FFFFFFF)
"""More than the bits of any maximum."""
E4M3, E5M2 = tl.constexpr(0), tl.constexpr(1)
TENSOR, HEAD, BY_BLOCK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


class QuantizeShape(NamedTuple):
    """The constexprs of a kernel. A program has a tile of ROWS rows of one head, [N, WIDTH]: its
    CHUNKS of WIDTH columns are one below the other, N = CHUNKS ROWS, in the order of `row_of` and `column_of`."""

    D: Any
    WIDTH: Any
    """columns that a product with the Hadamard matrix takes at once; without a rotation all of them"""
    CHUNKS: Any
    MIXED: Any
    """elements that the matrix mixes; 1 is no rotation"""
    LEVELS: Any
    """how often chunks are added and subtracted after the products, which is where they meet"""
    MEETING: Any
    """how many of them meet"""
    FACTOR: Any
    """1 / sqrt(MIXED)"""
    ROWS: Any
    """rows of one program, at most BLOCK"""
    GROUP: Any
    """heads that share a factor"""
    PER: Any
    TYPE: Any
    HARDWARE: Any
    """whether the device converts to these bytes"""
    SUBTRACTS: Any
    KEYS_FIRST: Any
    SEEN: Any
    """a power of two, from four for each thread on: what a program looks at to see the maxima of others"""
    POLLS: Any
    """how often it looks before it finds them itself"""
    STAGES: Any
    """1, or of programs that have several tiles, how many of them are loaded or worked on at a time"""


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
    """The rows, and the head, of a program."""

    batch: Any
    h: Any
    key_head: Any
    sequence: Any
    number: Any
    """of the block, in its sequence"""
    start: Any
    """the program's first row, in the sequence"""
    tile: Any
    """the block's number among those of all batch rows"""
    member: Any
    """the program's number among those whose rows share a factor by blocks"""
    first: Any
    """the sequence's first row"""
    stop: Any
    """in the sequence, of the rows that are there"""
    used: Any
    """the same of those in use"""
    known: Any
    """whether it is a sequence's, not what follows the last one"""


@triton.jit
def _tiles(span, sizes, shape):
    """How many tiles there may be, of all heads."""
    count = plain_int(sizes.heads) * plain_int(sizes.tiles) * (BLOCK // shape.ROWS)
    return count if is_packed(span) else count * plain_int(sizes.sequences)


@triton.jit
def _block_at(item, count, span, sizes, shape, LAST_FIRST: tl.constexpr):
    """The place of one of `count` tiles."""
    s = plain_int(sizes.s)
    tiles = plain_int(sizes.tiles)
    key_heads = plain_int(sizes.heads) // shape.GROUP
    # Programs whose rows share a factor follow one another, so that they run at one time.
    parts: tl.constexpr = BLOCK // shape.ROWS
    member = item % (shape.GROUP * parts)
    tile = item // (shape.GROUP * parts)
    if LAST_FIRST:
        tile = count // (shape.GROUP * parts) - 1 - tile
    number = tile % tiles
    key_head = tile // tiles % key_heads
    b = tile // tiles // key_heads
    if is_packed(span):
        sequence = sequence_at(span, number, s, BLOCK)
        batch, first, there, used = extent(span, sequence, s)
        number = number - blocks_before(span, sequence, first, BLOCK)
    else:
        sequence = b
        batch, first, there, used = extent(span, b, s)
    known = sequence < plain_int(sizes.sequences)
    h = key_head * shape.GROUP + member // parts
    start = number * BLOCK + member % parts * shape.ROWS
    return RowBlock(batch, h, key_head, sequence, number, start, tile, member, first, there, used, known)


@triton.jit
def _member(at, member, shape):
    """The place of another program, whose rows share a factor with this one's."""
    parts: tl.constexpr = BLOCK // shape.ROWS
    h = at.key_head * shape.GROUP + member // parts
    start = at.number * BLOCK + member % parts * shape.ROWS
    return RowBlock(
        at.batch, h, at.key_head, at.sequence, at.number, start, at.tile, member, at.first, at.stop, at.used, at.known
    )


@triton.jit
def _of_head(mean, at, sizes, shape):
    """[N, WIDTH], or [1, WIDTH] of one chunk: the mean of the sequence's keys."""
    heads = plain_int(sizes.heads) // shape.GROUP
    sequence = tl.minimum(at.sequence, plain_int(sizes.sequences) - 1)
    mean += (sequence.to(tl.int64) * heads + at.key_head) * shape.D
    w = tl.arange(0, shape.WIDTH)
    if shape.CHUNKS == 1:
        return tl.load(mean + w, mask=w < shape.D, other=0.0)[None, :]
    else:
        # [CHUNKS / 2, 1, 2, 1, WIDTH]
        chunk = tl.arange(0, shape.CHUNKS // 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
        d = chunk[:, None, :, None, None] * shape.WIDTH + w[None, None, None, None, :]
        of_chunks = tl.load(mean + d, mask=d < shape.D, other=0.0)
        whole = tl.broadcast_to(of_chunks, [shape.CHUNKS // 2, shape.ROWS // 8, 2, 8, shape.WIDTH])
        return tl.reshape(whole, [shape.CHUNKS * shape.ROWS, shape.WIDTH])


@triton.jit
def _loaded(x, at, h, shape):
    """[N, WIDTH]: the program's rows in head h, zero where they are not in use."""
    stride = plain_int(x.stride_s)
    if x.wide:
        stride = stride.to(tl.int64)
    row = row_of(shape)
    column = column_of(shape)
    offset = head(x, at.batch, h, at.first) + at.start * stride * x.unit
    offset = offset + ((row * (stride * x.unit))[:, None] + column)
    there = (at.start + row < at.used)[:, None]
    if shape.D < shape.WIDTH * shape.CHUNKS:
        there = there & (column < shape.D)
    return tl.load(offset, mask=there, other=0.0)


@triton.jit
def _values(x, mean, at, h, sizes, shape):
    """float32 [N, WIDTH]: rows in head h, rotated, less the mean if it is subtracted; zero if not in use."""
    loaded = _loaded(x, at, h, shape)
    made = loaded.to(tl.float32) if shape.MIXED == 1 else rotated(loaded, shape)
    if shape.SUBTRACTS:
        made = tl.where((at.start + row_of(shape) < at.used)[:, None], made - _of_head(mean, at, sizes, shape), 0.0)
    return made


@triton.jit
def _largest(x):
    """The largest absolute value of the numbers in a tile."""
    size = tl.abs(x)
    return tl.max(tl.max(tl.where(size < INFINITY, size, 0.0), 1), 0)


@triton.jit
def _largest_of_kept(x):
    """The same for a tile in registers. Few tiles hold infinities, and comparisons would cost all of them."""
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    if not (largest < INFINITY):
        largest = _largest(x)
    return largest


@triton.jit
def _of_all(largest, maxima, at, shape):
    """The largest of the maxima of the programs whose rows share a factor, and whether one of them came too late: each
    writes its own, plus one in its last place, over a zero, and looks for the others', so that no number is read twice.
    """
    members: tl.constexpr = shape.GROUP * (BLOCK // shape.ROWS)
    maxima += at.tile.to(tl.int64) * members
    tl.atomic_xchg(maxima + at.member, largest.to(tl.int32, bitcast=True) + 1, sem="relaxed")
    # As many as there are threads, so that all of a program see one result.
    i = tl.arange(0, shape.SEEN)
    top = at.member * 0 + MISSING
    polls = 0
    if shape.POLLS > 0:  # Triton 3.6 fails at a loop of no turns
        while (top == MISSING) & (polls < shape.POLLS):
            found = tl.load(maxima + i, mask=i < members, other=1, volatile=True)
            top = tl.max(tl.where(found == 0, MISSING, found), 0)
            polls += 1
    return (top - 1).to(tl.float32, bitcast=True), top == MISSING


@triton.jit
def _factor(largest, shape):
    top = 448.0 if shape.TYPE == E4M3 else 57344.0
    factor = tl.maximum(tl.div_rn(largest, top), SMALLEST)
    return tl.where(largest > 0, factor, 1.0)


@triton.jit
def _quotient(x, factor):
    """x / factor, rounded once; NaN of infinities. The reciprocal is rounded, so one correction suffices (Markstein,
    IA-64 and Elementary Functions, 2000)."""
    # One number each, not a tile: they take few registers.
    one = tl.full([1, 1], 1.0, tl.float32)
    inverse = tl.broadcast_to(tl.div_rn(one, one * factor), x.shape)
    negative = tl.broadcast_to(one * -factor, x.shape)
    found = x * inverse
    return tl.fma(tl.fma(found, negative, x), inverse, found)


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
def _store(out, at, x, shape):
    """The program's rows, as far as they are there."""
    row = row_of(shape)
    column = column_of(shape)
    # [N, WIDTH]
    code = encoded(x, shape)
    there = (at.start + row < at.stop)[:, None]
    stride = plain_int(out.stride_s)
    if shape.KEYS_FIRST:
        # out is (b, h, d, s).
        offset = head(out, at.batch, at.h) + at.first + at.start
        offset = offset + (column.to(tl.int64) * stride * out.unit + row[:, None])
        d = column < shape.D
        if at.start + shape.ROWS <= at.stop:  # without a mask for rows, neighbours are written at once
            tl.store(offset, code, mask=d)
        else:
            tl.store(offset, code, mask=there & d)
    else:
        if out.wide:
            stride = stride.to(tl.int64)
        offset = head(out, at.batch, at.h, at.first) + at.start * stride * out.unit
        offset = offset + ((row * (stride * out.unit))[:, None] + column)
        if shape.D < shape.WIDTH * shape.CHUNKS:
            there = there & (column < shape.D)
        tl.store(offset, code, mask=there)


@triton.jit
def _store_shift(shift, x, mean, at, sizes, shape):
    """q . mean, of each row, float32 (b, h, s)."""
    total = of_rows(tl.sum(x * _of_head(mean, at, sizes, shape), 1), shape)
    row = at.start + tl.arange(0, shape.ROWS)
    s = plain_int(sizes.s)
    offset = shift + (at.batch.to(tl.int64) * plain_int(sizes.heads) + at.h) * s + at.first + row
    tl.store(offset, tl.where(row < at.used, total, 0.0), mask=row < at.stop)


@triton.jit
def _entry(at, sizes, shape):
    """The index of the factor of a head, or of everything."""
    if shape.PER == TENSOR:
        return at.number.to(tl.int64) * 0
    return at.sequence.to(tl.int64) * (plain_int(sizes.heads) // shape.GROUP) + at.key_head


@triton.jit
def largest_kernel(x, mean, found, span, sizes, shape):
    """The largest absolute values by sequence and key head, or of all, as the bits of float32, which are ordered as
    integers; found holds zeros."""
    at = _block_at(tl.program_id(0), tl.num_programs(0), span, sizes, shape, False)
    largest = _largest(_values(x, mean, at, at.h, sizes, shape))
    offset = found + _entry(at, sizes, shape)
    tl.atomic_max(offset, largest.to(tl.int32, bitcast=True), mask=at.known & (largest > 0), sem="relaxed")


@triton.jit
def _quantized(at, x, out, mean, found, descale, shift, sizes, shape):
    """One tile."""
    values = _values(x, mean, at, at.h, sizes, shape)
    if shape.PER == BY_BLOCK:
        largest = _largest_of_kept(values)
        if found is not None:
            largest, missing = _of_all(largest, found, at, shape)
            if missing:  # others may not have begun: what they would find
                largest = 0.0
                for i in tl.range(shape.GROUP * (BLOCK // shape.ROWS), num_stages=1):
                    other = _member(at, at.member * 0 + i, shape)
                    largest = tl.maximum(largest, _largest(_values(x, mean, other, other.h, sizes, shape)))
                values = _values(x, mean, at, at.h, sizes, shape)
        blocks = plain_int(sizes.blocks)
        offset = _entry(at, sizes, shape) * blocks + at.number
        mine = at.known & (at.number < blocks)
    else:
        largest = tl.load(found + _entry(at, sizes, shape), mask=at.known, other=0).to(tl.float32, bitcast=True)
        offset = _entry(at, sizes, shape)
        mine = at.known & (at.number == 0)
    factor = _factor(largest, shape)
    tl.store(descale + offset, factor, mask=mine & (at.member == 0))
    if shape.PER == BY_BLOCK:  # of a sequence that is longer than it may be, bytes without a factor
        factor = tl.where(mine | (not at.known), factor, float("nan"))
    if shift is not None:
        _store_shift(shift, values, mean, at, sizes, shape)
    _store(out, at, _quotient(values, factor), shape)


@triton.jit
def quantize_kernel(x, out, mean, found, descale, shift, span, sizes, shape):
    """x: TensorArgs (b, h, s, d); out: the same of bytes. mean: float32 (sequences, h_k, d), or None. found: what
    `largest_kernel` found; by blocks int32 zeros, one for each program, or None where each has a factor of its own.
    descale: float32. shift: float32 (b, h, s), or None."""
    # What `largest_kernel` read last is still in the cache.
    last_first: tl.constexpr = shape.PER != BY_BLOCK
    if shape.STAGES == 1:
        at = _block_at(tl.program_id(0), tl.num_programs(0), span, sizes, shape, last_first)
        _quantized(at, x, out, mean, found, descale, shift, sizes, shape)
    else:
        count = _tiles(span, sizes, shape)
        step = tl.num_programs(0)
        for turn in tl.range(0, tl.cdiv(count - tl.program_id(0), step), num_stages=shape.STAGES):
            at = _block_at(tl.program_id(0) + turn * step, count, span, sizes, shape, last_first)
            _quantized(at, x, out, mean, found, descale, shift, sizes, shape)
