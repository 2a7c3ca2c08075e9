"""Sums over ranks of what each has returned, row by row."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def rank_sums_kernel(parts, table, sums, rows, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """`sums[row] = sum_i parts[i][table[i, row]]` in order, in float32 at least, for numbers that are not negative.

    parts: PLACES times (…, WIDTH). table: int32 (PLACES, rows). sums: (rows, WIDTH).
    """
    row = tl.program_id(0)
    # [BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.float64 if sums.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([BLOCK], wide)
    for i in tl.static_range(PLACES):
        at = tl.load(table + i * rows + row).to(tl.int64)
        there = column < tl.where(at >= 0, WIDTH, 0)
        total += tl.load(parts[i] + at * WIDTH + column, mask=there, other=0.0).to(wide)
    place = sums + row.to(tl.int64) * WIDTH + column
    tl.store(place, total.to(sums.dtype.element_ty), mask=column < WIDTH)
