"""Rows times the Hadamard matrix, on the tensor cores.

A tile's rows lie in CHUNKS of WIDTH columns. Its order keeps chunks that are added in one thread: of two neighbours
each has 8 rows in turn, as a thread has rows n and n + 8 of a product; pairs of them follow one another.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


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
