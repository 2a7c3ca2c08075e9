"""How the forward's results leave: whole tiles in bulk, the last one of a packed sequence row by row."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from saccade.backends.device.records import LOG2E
from saccade.backends.device.sequences import is_packed
from saccade.backends.device.tiles import largest
from saccade.backends.gluon.forward.scores import LOWEST_VAST
from saccade.backends.gluon.forward.work_tile import FIRST_ROW, THERE
from saccade.backends.gluon.ptx import fast_log2
from saccade.backends.gluon.shim import tma_store, view
from saccade.backends.gluon.tiles import store_rows


@gluon.jit
def store_results(args, pipe, rows, item, at, b, acc, row_max, row_sum):
    """Writes out, and lse and max_scores if they are asked for."""
    # Where they belong is read here, as registers are few before.
    if is_packed(args.used_q):
        b, first_row, row_count = b * 0, pipe.slots.get(at, FIRST_ROW), pipe.slots.get(at, THERE)
    else:
        first_row, row_count = 0, args.s_q
    there = (rows.q_idx < row_count) & (rows.h < item.h_k * args.group + args.group)
    out, lse, top_score = normalize(acc, row_max, row_sum, rows, args, there & (rows.q_idx < rows.rows))
    corner = [b, item.h_k, item.in_group, item.row + first_row, 0]
    stored = rows.rows if keeps_tail(args.out) else row_count
    store_out(args, pipe, item.part, out, corner, stored - item.row)
    if args.lse is not None:
        place = (b.to(gl.int64) * (args.h_k * args.group) + rows.h) * args.s_q + first_row + rows.q_idx
        gl.store(args.lse + place, lse, mask=there)
    if args.max_scores is not None:
        place = (b.to(gl.int64) * (args.h_k * args.group) + rows.h) * args.s_q + first_row + rows.q_idx
        gl.store(args.max_scores + place, top_score, mask=there)


@gluon.constexpr_function
def keeps_tail(out):
    """constexpr: out.keeps_tail, whose name Triton 3.6 does not know here"""
    return out is not None and bool(getattr([*out][-1], "value", [*out][-1]))


@gluon.jit
def normalize(acc, row_max, row_sum, rows, args, live):
    """out [64, BLOCK_DV], lse and max_scores [64] from the sums. The sink is one more column, and no score."""
    rule = rows.rule
    row_max = row_max * rule.natural
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    if rule.score.linear:  # -inf for all of a row masks it, and what is NaN stays NaN
        level = rows.terms[2]
        total = gl.where(level == float("-inf"), 0.0, total + level * 0)
        row_max = gl.maximum(row_max + level, LOWEST_VAST)
    top_score = largest(row_max, total, live)
    share = total * 0 + 1
    if args.sink is not None:
        column = gl.load(args.sink + rows.h, mask=live, other=0.0).to(gl.float32)
        top = gl.maximum(row_max, column)
        share = gl.exp2((row_max - top) * LOG2E)
        total = total * share + gl.exp2((column - top) * LOG2E)
        row_max = top
    seen = live & (total != 0)  # a NaN counts as seen, and stays one
    lse = gl.where(seen, row_max + fast_log2(gl.where(seen, total, 1.0)) / LOG2E, float("-inf"))
    layout: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    weight = gl.convert_layout(gl.where(seen, share / gl.where(seen, total, 1.0), 0.0), layout)
    if rule.dropout is not None:
        weight *= rule.dropout.factor
    if args.used_q is not None:  # of rows that are not in use acc may be NaN
        acc = gl.where(gl.convert_layout(live, layout)[:, None], acc, 0.0)
    return acc * weight[:, None], lse, top_score


@gluon.jit
def store_bulk(out_desc, pipe, part, corner, OUTS: gl.constexpr):
    """Writes the tile of out that store_out has made, in bulk."""
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    ROWS: gl.constexpr = pipe.shape.ROWS
    ALL: gl.constexpr = pipe.slots.SLOTS * pipe.shape.CONSUMERS * OUTS
    LAYOUT: gl.constexpr = out_desc.layout
    fence_async_shared()
    tile = view(pipe.slots.tiles, [ALL, 1, 1, 64 // ROWS, ROWS, BLOCK_DV], LAYOUT).index(part * OUTS)
    tma_store(out_desc, corner, tile)


@gluon.jit
def store_out(args, pipe, part, x, corner, there):
    """Writes x [64, BLOCK_DV], of whose rows so many are `there`: after those of a packed sequence comes the next one,
    which a bulk copy would overwrite."""
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_DV], args.out_desc.dtype)
    # A consumer's part of a slot, where q was, as tiles of out. Every warp overwrites rows that it alone has read.
    OUTS: gl.constexpr = pipe.slots.CHUNKS * pipe.shape.D_CHUNK // BLOCK_DV
    ALL: gl.constexpr = pipe.slots.SLOTS * pipe.shape.CONSUMERS * OUTS
    tile = view(pipe.slots.tiles, [ALL, 64, BLOCK_DV], LAYOUT).index(part * OUTS)
    tile.store(x.to(args.out_desc.dtype))
    if args.out is None:
        store_bulk(args.out_desc, pipe, part, corner, OUTS)
    else:
        if there >= pipe.shape.ROWS:
            store_bulk(args.out_desc, pipe, part, corner, OUTS)
        else:
            h = corner[1] * args.group
            store_rows(tile, args.out, h + corner[2], corner[3], there, h + args.group, BLOCK_DV, pipe.shape.ROWS)
