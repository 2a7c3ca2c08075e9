"""Rows to all the places where they are needed."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def spread_rows_kernel(
    x, targets, table, rows, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """`targets[i][table[i, row]] = x[row]` for all i, for numbers that are not negative.

    x: (rows, WIDTH). targets: PLACES times (…, WIDTH). table: int32 (PLACES, rows).
    """
    # [ROWS, 1]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    # [1, BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    # [ROWS, BLOCK]; a `where` in a mask moves 16 bits at a time
    values = tl.load(x + row.to(tl.int64) * WIDTH + column, mask=column < tl.where(row < rows, WIDTH, 0))
    for i in tl.static_range(PLACES):
        at = tl.load(table + i * rows + row, mask=row < rows, other=-1).to(tl.int64)
        tl.store(targets[i] + at * WIDTH + column, values, mask=column < tl.where(at >= 0, WIDTH, 0))
