"""The parts of rows whose keys were split among programs, added up."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from saccade.backends import Launches, Saved
from saccade.backends.device import block_d
from saccade.backends.device.arguments import precision, tile_arguments
from saccade.backends.device.block_lists_kernel import tile_start
from saccade.backends.device.gradients import aligned_rows, recompute_blocks, recompute_launch, specialised
from saccade.backends.device.launch import Launch, cached_launch, on_device
from saccade.backends.device.q_block import kv_tiles, load_q, masked_scores, q_block, store_q
from saccade.backends.device.records import TensorArgs
from saccade.backends.device.tiles import finite, head, in_units, infinite, load_tile, power
from saccade.call import Call
from saccade.layouts import empty_like_rows
from saccade.scores import Traced

FEW_PARTS = 16
"""Parts that are added up at a time, where there are no more; else four times as many."""
SIZE = 1024
"""Elements of these for each warp at most."""
MANY_ROWS, TOGETHER = 2048, 8
"""Rows from which a program merges several, as programs of one row come one after the other; and how many."""


def merge_launch(call: Call, parts: int, most: int) -> Launch:
    """The launch of `merge_kernel`. Calls of one key have `most` parts at most, a power of two above FEW_PARTS."""
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
    # Parts whose LSE is NaN alone: what they hold is NaN, or zero where no part has a key and the sink is NaN.
    alone = (total != total) & (tl.max(tl.where(lses == lses, lses, float("-inf")), 1) == float("-inf"))
    divisor = tl.where(empty | alone, 1.0, total)
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
        weight = tl.where(tl.expand_dims(alone, 1) & (found != found), 1.0, weight)
        # [ROWS, CHUNK, BLOCK_DV]
        mask = (weight != 0)[:, :, None] & (column < D_V)[None, None, :]
        values = tl.load(parts + part[:, :, None] * D_V + column[None, None, :], mask=mask, other=0.0)
        acc += values * weight[:, :, None]
    # [ROWS, BLOCK_DV]
    merged = tl.sum(acc, 1) / divisor[:, None]
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


# Row totals of exp(score - lse) for rows whose LSE is too large to hold log(total).


# What exp(score - lse) adds up to, in rows whose LSE is so large that log(total) has no place beside it in float32.

LARGE = tl.constexpr(512.0)
"""Of an LSE: up to here p is off by 2^-15 at most."""


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def row_totals_kernel(
    q, k, dout, weighted, lse, dlse, weighted_dlse, sink, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale,
    shape,
):  # fmt: skip
    """weighted = dout / total and weighted_dlse = dlse / total, total = sum exp(score - lse), for one q block of one
    head; 1 where the LSE is not LARGE. Blocks without such a row read neither q nor k."""
    # Totals are those of the weights before dropout.
    block = q_block(used_q, used_k, mask, score, None, h_q, s_q, s_k, scale, shape)
    args = block.args
    # [block_q]
    row_lse = tl.load(lse + block.offset, mask=block.live, other=0.0)
    large = (tl.abs(row_lse) > LARGE) & (tl.abs(row_lse) < float("inf"))
    needed = tl.max(large.to(tl.int32), 0)

    tiles = kv_tiles(block, used_q, h_q, shape)
    end = tl.where(needed > 0, tiles.end, tiles.first)
    shift = in_units(row_lse, score)
    # [block_q, d]
    q_head = head(q, block.batch, args.h, block.first_q)
    rows = args.rows * needed
    q_tile = load_tile(q, q_head, block.start, rows, shape.BLOCK_Q, shape.D, shape.BLOCK_D, True)
    k_head = head(k, block.batch, args.h // shape.GROUP, block.first_k)
    # [block_q]
    total = tl.zeros([shape.BLOCK_Q], tl.float32)
    for step in range(tiles.first, end, shape.BLOCK_K):
        start = tile_start(mask, tiles.block_list, step, shape.BLOCK_K)
        # [block_k, d]
        k_tile = load_tile(k, k_head, start, args.keys, shape.BLOCK_K, shape.D, shape.BLOCK_D, True)
        # [block_q, block_k]
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
        x = masked_scores(qk, args, block.q_idx[:, None], start + tl.arange(0, shape.BLOCK_K)[None, :], True)
        total += tl.sum(power(x - shift[:, None], score), 1)
    if sink is not None:
        total += power(in_units(tl.load(sink + args.h).to(tl.float32), score) - shift, score)
    share = tl.where(large & (total > 0), 1.0 / tl.where(total > 0, total, 1.0), 1.0)

    # [block_q, d_v]
    tile = load_q(dout, block, shape.D_V, shape.BLOCK_DV, shape).to(tl.float32) * share[:, None]
    store_q(weighted, block, tile, shape.D_V, shape.BLOCK_DV, shape)
    if dlse is not None:
        row = tl.load(dlse + block.offset, mask=block.live, other=0.0)
        tl.store(weighted_dlse + block.offset, row * share, mask=block.q_idx < block.there)


# Gradients of rows whose scores are so large that log(total) is lost in their LSE, for backends that have kernels.
#
# Where all that a row sees scores -1e9, its weights are 1 / n, and its LSE is -1e9 too: exp(score - lse) is 1.
# Gradients are linear in a row's p, dout and dlse together, so what p lacks is a factor of dout and dlse, and no kernel
# of a backward has to know.


def divide_gradients(call: Call, launches: Launches, saved: Saved, fast: bool = False) -> Saved:
    """dout and dlse divided by what the probabilities of their row add up to. Scores that no function changes, or that
    a softcap bounds, are not so large. `fast` is as `scores.device_args` says."""
    if not isinstance(call.score, Traced) or call.scoreless:
        return saved
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    divided = replace(
        saved,
        dout=empty_like_rows(saved.dout, saved.dout.shape[3]),
        dlse=None if dlse is None else torch.empty_like(dlse),
    )
    with on_device(call.q):
        operands = tensors(call, launches, replace(saved, dlse=dlse), divided)
        _, _, dout, weighted, *rows = operands[:6]
        key = "totals", fast, precision(), *specialised((dout, weighted), rows)
        launch = cached_launch(launches, key, lambda: recompute_launch(row_totals_kernel, call))
        arguments = tile_arguments(call, launches, recompute_blocks(call), fast=fast, reads=False)
        launch(call.q.device.index, (*operands, *arguments))
    return divided


def tensors(call: Call, launches: Launches, saved: Saved, divided: Saved) -> tuple[Any, ...]:
    """What the kernel takes before the common arguments."""
    operands = (aligned_rows(launches, x) for x in (call.q, call.k, saved.dout))
    sink = None if call.sink is None else call.sink.contiguous()
    return *operands, TensorArgs.of(divided.dout), saved.lse.contiguous(), saved.dlse, divided.dlse, sink
