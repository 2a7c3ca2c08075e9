"""The parts of rows whose keys were split among programs, added up."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device import block_d
from saccade.backends.device.launch import Launch
from saccade.backends.device.tiles import finite, head, infinite
from saccade.call import Call

FEW_PARTS = 16
"""Parts that are added up at a time, where there are no more; else four times as many."""
SIZE = 1024
"""Elements of these for each warp at most."""
MANY_ROWS, TOGETHER = 2048, 8
"""Rows from which a program merges several, as programs of one row come one after the other; and how many."""


def merge_launch(call: Call, parts: int, most: int) -> Launch:
    """The launch of `merge_kernel` for `parts` parts; no call of the Call's key has more than `most`, a power of two
    above FEW_PARTS."""
    d_v, rows = call.v.shape[3], call.q.shape[:3].numel()
    many = parts > FEW_PARTS
    together = 1 if many or rows < MANY_ROWS else TOGETHER
    warps = 8 if many else 4
    chunk = min(4 * FEW_PARTS if many else FEW_PARTS, warps * SIZE // (block_d(d_v) * together))
    constants = d_v, block_d(d_v), most if many else FEW_PARTS, max(chunk, 1), together
    return Launch(merge_kernel, (-(-rows // together), 1, 1), constants, warps=warps, stages=1)


@triton.jit(do_not_specialize=["rows", "splits", "h_q", "s_q"])
def merge_kernel(
    parts, part_lse, part_max, out, lse, max_scores, end, rows, splits, h_q, s_q, D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`lse = log sum_i exp(lse_i)`, `out = sum_i exp(lse_i - lse) out_i` of ROWS rows' parts: `saccade.merge`; and the
    largest of their max_scores.

    parts: float32 (splits, b, s_q, h_q, d_v), not written where the part's LSE, (splits, b, s_q, h_q), is -inf. end:
    pointer to the number of rows whose out is written, the first ones, or None: all.
    """
    # [ROWS]
    offset = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    known = offset < rows
    # [ROWS, SPLITS]
    i = tl.arange(0, SPLITS)[None, :]
    there = known[:, None] & (i < splits)
    lses = finite(tl.load(part_lse + i * rows.to(tl.int64) + offset[:, None], mask=there, other=float("-inf")))
    top = tl.max(lses, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - top[:, None]), 1)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # [BLOCK_DV]
    column = tl.arange(0, BLOCK_DV)
    # What a thread adds up stays in its registers until the end.
    acc = tl.zeros([ROWS, CHUNK, BLOCK_DV], tl.float32)
    for at in range(0, splits, CHUNK):
        # [ROWS, CHUNK]
        number = at + tl.arange(0, CHUNK)[None, :]
        part = number * rows.to(tl.int64) + offset[:, None]
        found = tl.load(part_lse + part, mask=known[:, None] & (number < splits), other=float("-inf"))
        weight = tl.exp(finite(found) - top[:, None])
        # [ROWS, CHUNK, BLOCK_DV]
        mask = (weight != 0)[:, :, None] & (column < D_V)[None, None, :]
        values = tl.load(parts + part[:, :, None] * D_V + column[None, None, :], mask=mask, other=0.0)
        acc += values * weight[:, :, None]
    # [ROWS, BLOCK_DV]
    merged = tl.sum(acc, 1) / total[:, None]
    h = offset % h_q
    row = offset // h_q % s_q
    batch = offset // h_q // s_q
    row_offset = (batch * h_q + h) * s_q + row
    written = known if end is None else known & (row < tl.load(end))
    mask = written[:, None] & (column < D_V)[None, :]
    tl.store(head(out, batch, h, row)[:, None] + column[None, :], merged.to(out.ptr.dtype.element_ty), mask=mask)
    if lse is not None:
        tl.store(lse + row_offset, tl.where(empty, float("-inf"), infinite(top + tl.log(total), top)), mask=known)
    if max_scores is not None:
        tops = tl.load(part_max + i * rows.to(tl.int64) + offset[:, None], mask=there, other=float("-inf"))
        # tl.max leaves a NaN out.
        broken = tl.max((tops != tops).to(tl.int32), 1) > 0
        tl.store(max_scores + row_offset, tl.where(broken, float("nan"), tl.max(tops, 1)), mask=known)
