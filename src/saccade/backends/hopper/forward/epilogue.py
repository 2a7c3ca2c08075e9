"""How the forward's results leave: whole tiles in bulk, the last one of a packed sequence row by row, and zeros."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from saccade.backends.device.descale import factor_at
from saccade.backends.device.positions import is_packed
from saccade.backends.device.records import LOG2E, TensorArgs, plain_int, runtime_int
from saccade.backends.device.tiles import finite, head, infinite, largest, used_length
from saccade.backends.hopper.forward.scores import LOWEST_FINITE, in_group
from saccade.backends.hopper.forward.work_item import FIRST_ROW, PART, THERE
from saccade.backends.hopper.ptx import fast_log2
from saccade.backends.hopper.shim import thread_barrier, tma_store, view
from saccade.backends.hopper.tiles import bytes_of, is_eight_bit, product_layout, store_rows, store_sums

# Of 8-bit operands: 2^-EXTRA.
ONE_WEIGHT = gl.constexpr(1 / 256)


@gluon.jit
def store_results(args, pipe, rows, item, at, b, acc, row_max, row_sum):
    """Writes out, and lse and max_scores if they are asked for."""
    # Where they belong is read here, as registers are few before.
    if is_packed(args.used_q):
        b, first_row, row_count = b * 0, pipe.slots.get(at, FIRST_ROW), pipe.slots.get(at, THERE)
        stored = rows.rows if keeps_tail(args.out) else row_count
    else:
        first_row, row_count = 0, args.s_q
        stored = row_count
    there = rows.q_idx < row_count
    if pipe.shape.ROWS < 64:
        there = there & in_group(item, args.group, there, pipe.shape.ROWS)
    live = there & (rows.q_idx < rows.rows)
    part = None if args.parts is None else pipe.slots.get(at, PART)
    total = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    weight, lse, top_score = weights_of_rows(row_max, total, rows, args.sink, live, part)
    out = outputs(acc, weight, args, live)
    if args.parts is not None:
        offset = (b.to(gl.int64) * args.s_q + first_row + rows.q_idx) * (args.h_k * args.group) + rows.h
        offset += part.to(gl.int64) * plain_int(args.parts.rows)
        store_part(args, offset, there, out, lse, top_score)
    else:
        store_whole(args, pipe, rows, item, b, first_row, there, stored, out, lse, top_score)


@gluon.jit
def store_part(args, offset, there, out, lse, top_score):
    """Writes out [64, BLOCK_DV] of a part of the keys in float32, and its LSE and largest scores."""
    gl.store(args.lse + offset, lse, mask=there)
    if args.max_scores is not None:
        gl.store(args.max_scores + offset, top_score, mask=there)
    for i in gl.static_range(len(out)):
        store_columns(args.parts, offset, there, out[i], i * out[0].shape[1])


@gluon.jit
def store_columns(parts, offset, there, x, START: gl.constexpr):
    """Writes x [64, columns], out's columns from START on."""
    COLUMNS: gl.constexpr = parts.columns
    layout: gl.constexpr = x.type.layout
    # [64, 1], [1, columns]
    first = gl.convert_layout(offset, gl.SliceLayout(1, layout))[:, None] * COLUMNS
    column = START + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    mask = gl.convert_layout(there, gl.SliceLayout(1, layout))[:, None] & (column < COLUMNS)
    gl.store(parts.ptr + first + column, x, mask=mask)


@gluon.jit
def store_whole(args, pipe, rows, item, b, first_row, there, stored, out, lse, top_score):
    """Writes out, lse and max_scores of rows that have all of their keys."""
    corner = [b, item.h_k, item.in_group, item.row + first_row, 0]
    store_out(args, pipe, item.part, out, corner, stored - item.row)
    offset = (b.to(gl.int64) * (args.h_k * args.group) + rows.h) * args.s_q + first_row + rows.q_idx
    if args.lse is not None:
        gl.store(args.lse + offset, lse, mask=there)
    if args.max_scores is not None:
        gl.store(args.max_scores + offset, top_score, mask=there)


@gluon.constexpr_function
def keeps_tail(out):
    """constexpr: out.keeps_tail, whose name Triton 3.6 does not know here"""
    return out is not None and bool(getattr([*out][-1], "value", [*out][-1]))


@gluon.jit
def outputs(acc, weight, args, live):
    """out [64, BLOCK_DV], in as many parts as acc has."""
    out = ()
    for i in gl.static_range(len(acc)):
        out = out + (output(acc[i], weight, args, live),)  # noqa: RUF005 - Triton has no starred tuples
    return out


@gluon.jit
def output(part, weight, args, live):
    """A part of out, from one of acc."""
    layout: gl.constexpr = gl.SliceLayout(1, part.type.layout)
    if args.used_q is not None:  # of rows that are not in use it may be NaN
        part = gl.where(gl.convert_layout(live, layout)[:, None], part, 0.0)
    return part * gl.convert_layout(weight, layout)[:, None]


@gluon.jit
def weights_of_rows(row_max, total, rows, sink, live, part=None):
    """The factor by which acc becomes out, lse, and max_scores, [64] each, from sums [64]. The sink is one more column
    in the first part of the keys. It is not a score."""
    rule = rows.rule
    row_max = row_max * rule.natural
    if len(rows.factors) == 1:
        total = total * ONE_WEIGHT
    if rule.score.linear:  # -inf for all of a row masks it, and what is NaN stays NaN
        bias = rows.terms[2]
        total = gl.where(bias == float("-inf"), 0.0, total + bias * 0)
        row_max = gl.maximum(row_max + bias, LOWEST_FINITE)
    top_score = largest(row_max, total, live)
    share = total * 0 + 1
    named = live & (total != 0)  # rows that see a key; a NaN counts as one, and stays one
    if sink is not None:
        column = finite(gl.load(sink + rows.h, mask=live, other=0.0).to(gl.float32))
        if part is not None:
            column = gl.where(part == 0, column, float("-inf"))
        top = gl.maximum(row_max, column)
        share = gl.exp2((row_max - top) * LOG2E)
        total = total * share + gl.exp2((column - top) * LOG2E)
        row_max = top
    seen = live & (total != 0)
    lse = row_max + fast_log2(gl.where(seen, total, 1.0)) / LOG2E
    if sink is not None:
        lse = infinite(lse, row_max)
    lse = gl.where(seen, lse, float("-inf"))
    weight = gl.where(named, share / gl.where(named, total, 1.0), 0.0)
    if rule.dropout is not None:
        weight *= rule.dropout.factor
    if len(rows.factors) == 1:
        weight *= ONE_WEIGHT
        factors = rows.factors[0]
        if not factors.descale.v.blocked:
            weight *= factor_at(factors.descale.v, factors.b, factors.h_k, 0)
    return weight, lse, top_score


@gluon.jit
def store_bulk(out_desc, pipe, part, corner, OUTS: gl.constexpr):
    """Writes the tile of out that store_out has made, in bulk."""
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    ROWS: gl.constexpr = pipe.shape.ROWS
    ALL: gl.constexpr = pipe.slots.SLOTS * pipe.shape.CONSUMERS * OUTS
    LAYOUT: gl.constexpr = out_desc.layout
    DTYPE: gl.constexpr = out_desc.dtype
    fence_async_shared()
    tile = view(pipe.slots.tiles, [ALL, 1, 1, 64 // ROWS, ROWS, BLOCK_DV], LAYOUT, DTYPE).index(part * OUTS)
    tma_store(out_desc, corner, tile)


@gluon.jit
def store_out(args, pipe, part, x, corner, there):
    """Writes x [64, BLOCK_DV], of whose rows so many are `there`: after those of a packed sequence comes the next one,
    which a bulk copy would overwrite."""
    if pipe.out is None:
        store_from_slot(args, pipe, part, x, corner, there)
    else:
        store_by_columns(args, pipe, part, x, corner, there)


@gluon.jit
def store_by_columns(args, pipe, part, x, corner, there):
    """The same from out's own buffer, half of the columns at a time."""
    ROWS: gl.constexpr = pipe.shape.ROWS
    COLUMNS: gl.constexpr = pipe.shape.OUT_COLUMNS
    buffer = pipe.out.index(part % pipe.shape.CONSUMERS)
    tile = buffer.reshape([64, COLUMNS])
    halves = x
    if len(x) == 1:
        halves = halves_of_columns(x[0])
    for i in gl.static_range(2):
        claim_out()
        tile.slice(0, halves[i].shape[1], 1).store(halves[i].to(tile.dtype))
        if is_packed(args.used_q) and there < ROWS:
            h = corner[1] * args.group
            store_rows(tile, args.out, h + corner[2], corner[3], there, h + args.group, COLUMNS, ROWS, i * COLUMNS)
        else:
            fence_async_shared()
            tma_store(args.out_desc, [corner[0], corner[1], corner[2], corner[3], i * COLUMNS], buffer)


@gluon.jit
def claim_out():
    """Waits until what left from out's place last has been read."""
    tma.store_wait(0)
    thread_barrier()


@gluon.jit
def halves_of_columns(x):
    """x [64, N] as two products [64, N / 2]."""
    HALF: gl.constexpr = x.shape[1] // 2
    lower, upper = gl.split(x.reshape([64, 2, HALF]).permute((0, 2, 1)))
    layout: gl.constexpr = product_layout(HALF)
    lower = gl.convert_layout(lower, layout, assert_trivial=True)
    return lower, gl.convert_layout(upper, layout, assert_trivial=True)


@gluon.jit
def store_from_slot(args, pipe, part, x, corner, there):
    """The same from q's buffer."""
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    DTYPE: gl.constexpr = args.out_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_DV], DTYPE)
    # A consumer's part of a slot, where q was, as tiles of out. Every warp overwrites rows that it alone has read; with
    # bytes as q, others' too.
    SIZE: gl.constexpr = bytes_of(pipe.slots.tiles.dtype)
    OUTS: gl.constexpr = pipe.slots.CHUNKS * pipe.shape.D_CHUNK * SIZE // (BLOCK_DV * bytes_of(DTYPE))
    ALL: gl.constexpr = pipe.slots.SLOTS * pipe.shape.CONSUMERS * OUTS
    tile = view(pipe.slots.tiles, [ALL, 64, BLOCK_DV], LAYOUT, DTYPE).index(part * OUTS)
    if is_eight_bit(pipe.slots.tiles.dtype):
        thread_barrier()
    store_sums(tile, x)
    if not is_packed(args.used_q):
        store_bulk(args.out_desc, pipe, part, corner, OUTS)
    else:
        if there >= pipe.shape.ROWS:
            store_bulk(args.out_desc, pipe, part, corner, OUTS)
        else:
            h = corner[1] * args.group
            store_rows(tile, args.out, h + corner[2], corner[3], there, h + args.group, BLOCK_DV, pipe.shape.ROWS)


class UnseeingRowsArgs(NamedTuple):
    """out (b, h, s, d), for rows that see no key: the fields of TensorArgs that `head` needs, and how wide it is."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    unit: Any
    columns: Any
    """a multiple of 8, a `runtime_int`"""

    @staticmethod
    def of(out: Tensor) -> UnseeingRowsArgs:
        x = TensorArgs.of(out)
        return UnseeingRowsArgs(x.ptr, x.stride_b, x.stride_h, x.stride_s, x.unit, runtime_int(out.shape[3]))


@gluon.constexpr_function
def passes_unseeing(out, packed):
    """constexpr: out is UnseeingRowsArgs: the scheduler writes the results of work items that see no key"""
    return out is not None and not packed


@gluon.jit
def rows_of_item(shape, item, i):
    """The heads in their group, and the rows, that are the i-th of all of a work item's."""
    return item.in_group + i % 64 // shape.ROWS, item.row + i // 64 * shape.ROWS + i % shape.ROWS


@gluon.jit
def store_unseeing(args, shape, item):
    """Writes the results of a LoadItem whose rows see no key. One warp calls it."""
    ALL: gl.constexpr = 64 * shape.CONSUMERS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first_h = item.h_k * args.group
    if args.lse is not None or args.max_scores is not None:
        used = used_length(args.used_q, item.b, args.s_q)
        for start in range(0, ALL, 64):
            # [64]
            h, row = rows_of_item(shape, item, start + gl.arange(0, 64, layout))
            there = (h < args.group) & (row < args.s_q)
            offset = (item.b.to(gl.int64) * (args.h_k * args.group) + first_h + h) * args.s_q + row
            nothing = gl.full([64], float("-inf"), gl.float32, layout)
            if args.max_scores is not None:
                gl.store(args.max_scores + offset, nothing, mask=there)
            if args.lse is not None:
                if args.sink is not None:
                    column = gl.load(args.sink + first_h + h, mask=there, other=0.0).to(gl.float32)
                    gl.store(args.lse + offset, gl.where(row < used, column, nothing), mask=there)
                else:
                    gl.store(args.lse + offset, nothing, mask=there)
    x = args.out
    columns = plain_int(x.columns)
    WIDTH: gl.constexpr = min(64, shape.BLOCK_DV)
    LANES: gl.constexpr = WIDTH // 8
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
    zeros = gl.zeros([16, WIDTH], x.ptr.dtype.element_ty, wide)
    for start in range(0, ALL, 16):
        # [16]
        h, row = rows_of_item(shape, item, start + gl.arange(0, 16, gl.SliceLayout(1, wide)))
        there = (h < args.group) & (row < args.s_q)
        pointers = head(x, item.b, first_h + h, row)
        for first in gl.static_range(0, shape.BLOCK_DV, WIDTH):
            # [WIDTH]: eight columns at a time are there or not
            column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, wide))
            mask = there[:, None] & (column // 8 * 8 < columns)[None, :]
            gl.store(pointers[:, None] + column[None, :], zeros, mask=mask)
