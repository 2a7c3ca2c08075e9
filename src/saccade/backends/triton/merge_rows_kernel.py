"""Attention over further keys, merged into the rows of a result."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "all_rows"])
def merge_rows_kernel(
    out, lse, part, part_lse, late, rows, all_rows, out_row, out_head, part_row, part_head, D_V: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """`lse = log(exp(lse_0) + exp(lse_1))`, `out = exp(lse_0 - lse) out_0 + exp(lse_1 - lse) out_1`, in place, for the
    rows `late[i]` of the first and `i` of the second.

    out: (all_rows, heads, D_V) and part: (rows, heads, D_V), by strides of rows and heads. lse: (heads, all_rows).
    part_lse: (heads, rows). late: int32 (rows,).
    """
    h = tl.program_id(1).to(tl.int64)
    # [ROWS]
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = i < rows
    row = tl.load(late + i, mask=there, other=0).to(tl.int64)
    place = lse + h * all_rows + row
    first = tl.load(place, mask=there, other=0.0)
    second = tl.load(part_lse + h * rows + i, mask=there, other=0.0)
    top = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    top = tl.where(top == float("-inf"), 0.0, top)  # no row is without keys: as everywhere
    a, b = tl.exp(first - top), tl.exp(second - top)
    total = a + b
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    tl.debug_barrier()  # several warps have read the same numbers
    tl.store(place, tl.where(empty, float("-inf"), top + tl.log(total)), mask=there)
    # [ROWS, BLOCK_DV]
    column = tl.arange(0, BLOCK_DV)[None, :]
    inside = there[:, None] & (column < D_V)
    mine = out + row[:, None] * out_row + h * out_head + column
    theirs = part + i[:, None].to(tl.int64) * part_row + h * part_head + column
    x = tl.load(mine, mask=inside, other=0.0).to(lse.dtype.element_ty)
    y = tl.load(theirs, mask=inside, other=0.0).to(lse.dtype.element_ty)
    both = x * (a / total)[:, None] + y * (b / total)[:, None]
    tl.store(mine, both.to(out.dtype.element_ty), mask=inside)
