"""Keys and values to all the places where they are needed."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def spread_rows_kernel(
    keys, values, targets, table, rows,
    HEADS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """`targets[i][table[i, row]] = keys[row], values[row]` for all i, for numbers that are not negative.

    keys, values: (rows, HEADS, D) and (rows, HEADS, D_V). targets: PLACES times (…, HEADS, D + D_V). table: int32
    (PLACES, rows).
    """
    if tl.program_id(2) == 0:
        _spread(keys, targets, table, rows, HEADS, D, 0, D + D_V, PLACES, BLOCK, ROWS)
    else:
        _spread(values, targets, table, rows, HEADS, D_V, D, D + D_V, PLACES, BLOCK, ROWS)


@triton.jit
def _spread(
    x, targets, table, rows,
    HEADS: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, PITCH: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The numbers of each head, D of them, to those from FIRST on of PITCH."""
    # [ROWS, 1]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    # [1, BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    target = column // D * PITCH + column % D + FIRST
    # [ROWS, BLOCK]; with a `where` in masks some Tritons move 16 bits at a time
    numbers = tl.load(x + row.to(tl.int64) * (HEADS * D) + column, mask=(row < rows) & (column < HEADS * D))
    for i in tl.static_range(PLACES):
        at = tl.load(table + i * rows + row, mask=row < rows, other=-1).to(tl.int64)
        tl.store(targets[i] + at * (HEADS * PITCH) + target, numbers, mask=(at >= 0) & (column < HEADS * D))
