"""The parts of rows whose keys were split among programs, added up."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.tiles import head


@triton.jit(do_not_specialize=["rows", "splits", "h_q", "s_q"])
def merge_kernel(
    parts, part_lse, part_max, out, lse, max_scores, end, rows, splits, h_q, s_q, D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`lse = log sum_i exp(lse_i)`, `out = sum_i exp(lse_i - lse) out_i` of one row's parts: `saccade.merge`; and the
    largest of their max_scores.

    parts: float32 (splits, b, s_q, h_q, d_v), not written where the part's LSE, (splits, b, s_q, h_q), is -inf. end:
    pointer to the number of rows whose out is written, the first ones, or None: all.
    """
    place = tl.program_id(0).to(tl.int64)
    # [SPLITS]
    i = tl.arange(0, SPLITS)
    lses = tl.load(part_lse + i * rows.to(tl.int64) + place, mask=i < splits, other=float("-inf"))
    top = tl.max(lses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - top), 0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # [BLOCK_DV]
    column = tl.arange(0, BLOCK_DV)
    # What a thread adds up stays in its registers until the end.
    acc = tl.zeros([CHUNK, BLOCK_DV], tl.float32)
    for at in range(0, splits, CHUNK):
        # [CHUNK]
        number = at + tl.arange(0, CHUNK)
        part = number * rows.to(tl.int64) + place
        weight = tl.exp(tl.load(part_lse + part, mask=number < splits, other=float("-inf")) - top)
        there = (weight != 0)[:, None] & (column < D_V)[None, :]
        # [CHUNK, BLOCK_DV]
        acc += tl.load(parts + part[:, None] * D_V + column[None, :], mask=there, other=0.0) * weight[:, None]
    acc = tl.sum(acc, 0) / total
    h = place % h_q
    row = place // h_q % s_q
    batch = place // h_q // s_q
    row_place = (batch * h_q + h) * s_q + row
    columns = D_V if end is None else tl.where(row < tl.load(end), D_V, 0)
    tl.store(head(out, batch, h, row) + column, acc.to(out.ptr.dtype.element_ty), mask=column < columns)
    if lse is not None:
        tl.store(lse + row_place, tl.where(empty, float("-inf"), top + tl.log(total)))
    if max_scores is not None:
        tops = tl.load(part_max + i * rows.to(tl.int64) + place, mask=i < splits, other=float("-inf"))
        # tl.max leaves a NaN out.
        broken = tl.max((tops != tops).to(tl.int32), 0) > 0
        tl.store(max_scores + row_place, tl.where(broken, float("nan"), tl.max(tops, 0)))
