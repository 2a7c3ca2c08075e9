"""The backward kernels: delta, then dK and dV a kv block at a time, and dQ a q block at a time.

Sums of both dK and dV do not fit the registers where a head dim is above 256: there each has a launch of its own of one
kernel, which computes the gradients whose tensors it is given.

Nothing is added across programs, so the gradients are the same bits in every run.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from saccade.backends.device.block_lists_kernel import block_list_range, block_number
from saccade.backends.device.dropout import opened
from saccade.backends.device.positions import extent, numbered, tile_of
from saccade.backends.device.q_block import (
    ScoreArgs,
    TileRange,
    bias_at,
    biases_of_keys,
    biases_of_rows,
    core_end,
    core_start,
    edge_length,
    edge_start,
    kv_head,
    kv_tiles,
    load_k,
    load_q,
    load_v,
    q_block,
    rows_in_reach,
    store_q,
    table_stages,
    value_column,
    weight_gradient,
    within,
)
from saccade.backends.device.records import FAR, aggregate, plain_int
from saccade.backends.device.tiles import head, load_tile, store_tile, tile_range, used_length


@aggregate
class HeadGradients:
    """The query rows of one head, as the dk/dv kernel reads them."""

    q: Any
    dout: Any
    """TensorArgs"""
    first_q: Any
    first_dout: Any
    terms: Any
    """pointers to the first row, of dout from the first column on"""
    column: Any
    """the first of the columns of dout that this program reads: see `value_column`"""


@triton.jit(do_not_specialize=["h_q", "s_q"])
def delta_kernel(
    dout, out, dlse, lse, terms, used_q, h_q, s_q, unit,
    D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """terms (b, h_q, s_q, 2): shift = lse unit, +inf where a row has no keys: exp(x - inf) = 0; and delta =
    rowsum(dout out) - dlse."""
    blocks = tl.cdiv(s_q, BLOCK_Q)
    start = tl.program_id(0) % blocks * BLOCK_Q
    bh = tl.program_id(0) // blocks
    b = bh // h_q
    h = bh % h_q
    rows = used_length(used_q, b, s_q)
    # [block_q, d_v]
    dout_tile = load_tile(dout, head(dout, b, h), start, rows, BLOCK_Q, D_V, BLOCK_DV, True).to(tl.float32)
    out_tile = load_tile(out, head(out, b, h), start, rows, BLOCK_Q, D_V, BLOCK_DV, True).to(tl.float32)
    # [block_q]
    q_idx = start + tl.arange(0, BLOCK_Q)
    offset = bh.to(tl.int64) * s_q + q_idx
    row = tl.sum(dout_tile * out_tile, 1)
    row_lse = tl.load(lse + offset, mask=q_idx < rows, other=float("-inf"))
    # Beside a sink of NaN a row with keys has NaN in out.
    none = (row_lse == float("-inf")) | ((row_lse != row_lse) & (row == row))
    if dlse is not None:
        row -= tl.load(dlse + offset, mask=q_idx < rows, other=0.0)
    pair = tl.join(tl.where(none, float("inf"), row_lse * unit), row)
    tl.store(terms + offset[:, None] * 2 + tl.arange(0, 2)[None, :], pair, mask=(q_idx < s_q)[:, None])


@triton.constexpr_function
def doublings(rows: Any, warps: Any) -> Any:
    """How often `load_terms` doubles the two numbers of each row until every thread has one."""
    return max((32 * warps // rows).bit_length() - 2, 0)


@triton.jit
def read_terms(terms, row, there):
    """shift and delta of `delta_kernel` for rows [block_q], +inf and 0 for those that are not `there`."""
    shift = tl.load(terms + row * 2, mask=there, other=float("inf"))
    return shift, tl.load(terms + row * 2 + 1, mask=there, other=0.0)


@triton.jit
def load_terms(terms, row, there, shape):
    """The same in a loop, but zeros for those that are not `there`; None: all are.

    Of fewer numbers than it has threads Triton makes loads of every thread for all that it uses, four bytes each
    (notes/triton.md). So both come in one load, which repeats them."""
    more: tl.constexpr = doublings(row.shape[0], shape.WARPS)
    # [block_q, 2 << more]
    pointer = terms + row[:, None] * 2 + (tl.arange(0, 2 << more) >> more)[None, :]
    both = tl.load(pointer) if there is None else tl.load(pointer, mask=there[:, None], other=0.0)
    both = tl.reshape(both, [row.shape[0], 2] + [2] * more)
    for _ in tl.static_range(more):
        both, _ = tl.split(both)
    return tl.split(both)


@triton.jit
def apply_slope(ds, qk, args, q_idx, kv_idx):
    """ds after the slope of the score function. The operands broadcast in either orientation."""
    if not args.score.unit_slope:  # at masked scores the slope may be anything
        slope = args.score.slope(args.score.data, qk * args.scale, args.b, args.h, q_idx, kv_idx)
        ds = tl.where(ds == 0, 0.0, ds * slope)
    return ds


@triton.jit
def key_sums(wanted, shape, BLOCK_D: tl.constexpr):
    """Zeros [block_k, BLOCK_D] for dk or dv, or one where that is not wanted: None."""
    if wanted is None:
        return tl.zeros([1, 1], tl.float32)
    else:
        return tl.zeros([shape.BLOCK_K, BLOCK_D], tl.float32)


@triton.jit
def dkdv_step(
    dk, dv, start, k_tile, v_tile, kv_idx, rows, args, shape, MASKED: tl.constexpr, ALIGNED: tl.constexpr = True,
    bias=None,
):  # fmt: skip
    """One tile of query rows, transposed: dk [block_k, d], dv [block_k, d_v], or as `key_sums` says. v_tile: None where
    dk is not wanted. ALIGNED and bias: as `weight_gradient` says."""
    # [block_q, d], [block_q, d_v]
    q_tile = load_tile(rows.q, rows.first_q, start, args.rows, shape.BLOCK_Q, shape.D, shape.BLOCK_D, MASKED)
    dout_tile = load_tile(
        rows.dout, rows.first_dout, start, args.rows, shape.BLOCK_Q, shape.D_V, shape.BLOCK_DV, MASKED, rows.column
    )
    # [block_q]
    q_idx = start + tl.arange(0, shape.BLOCK_Q)
    row_lse, row_delta = load_terms(rows.terms, q_idx, q_idx < args.rows if MASKED else None, shape)
    tiles = q_tile, dout_tile, row_lse, row_delta
    return dkdv_of_rows(dk, dv, tiles, k_tile, v_tile, q_idx, kv_idx, args, shape, MASKED, ALIGNED, bias)


@triton.jit
def dkdv_of_rows(
    dk, dv, rows, k_tile, v_tile, q_idx, kv_idx, args, shape, MASKED: tl.constexpr, ALIGNED: tl.constexpr = True,
    bias=None,
):  # fmt: skip
    """The same of rows in registers: q [block_q, d], dout [block_q, d_v], shift and delta [block_q]."""
    q_tile, dout_tile, row_lse, row_delta = rows
    # [block_k, block_q]
    qk = tl.dot(k_tile, tl.trans(q_tile), input_precision=shape.PRECISION)
    if v_tile is None:
        dp = tl.zeros_like(qk)
    else:
        dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=shape.PRECISION)
    p, ds = weight_gradient(
        qk, dp, row_lse[None, :], row_delta[None, :], args, q_idx[None, :], kv_idx[:, None], MASKED, ALIGNED, bias
    )
    if dv.shape[0] > 1:
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision=shape.PRECISION)
    if v_tile is not None:
        ds = apply_slope(ds, qk, args, q_idx[None, :], kv_idx[:, None])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=shape.PRECISION)
    return dk, dv


@triton.jit
def store_dk(dk, base, start, there, live, value, shape):
    """Writes the rows of dk that are `there`, zeros where they are not live."""
    value = tl.where(live[:, None], value, 0.0)
    store_tile(dk, base, start, there, value, shape.BLOCK_K, shape.D, shape.BLOCK_D)


@triton.jit
def store_dv(dv, base, start, there, live, value, dropout, shape, column):
    """The same for dv, from a first column on, after dropout's division."""
    if dropout is not None:
        value *= dropout.factor
    value = tl.where(live[:, None], value, 0.0)
    store_tile(dv, base, start, there, value, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV, column)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def dkdv_kernel(q, k, v, dout, dk, dv, terms, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape):
    """dk = scale ds^T q and dv = p^T dout for one kv block of one key head, over all query heads of its group; of dk or
    dv None, only the other."""
    # The first keys of a causal mask have the most rows.
    b, head_k, _, start_k = tile_of(used_k, h_q // shape.GROUP, s_k, shape.BLOCK_K, False)
    batch, first_q, _, rows = extent(used_q, b, s_q)
    _, first_k, there, keys = extent(used_k, b, s_k)
    b = numbered(used_k, b)
    off = keys - rows
    if dropout is not None:
        dropout = opened(dropout)
    # [block_k]
    kv_idx = start_k + tl.arange(0, shape.BLOCK_K)
    live = kv_idx < keys
    lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, off)
    first, core, stop, end = tile_range(lo, hi, core_lo, core_hi, live, rows, shape.BLOCK_Q)

    # [block_k, d], [block_k, d_v]
    k_head = head(k, batch, head_k, first_k)
    k_tile = load_tile(k, k_head, start_k, keys, shape.BLOCK_K, shape.D, shape.BLOCK_D, True)
    if dk is None:
        v_tile = None
    else:
        v_head = head(v, batch, head_k, first_k)
        v_tile = load_tile(v, v_head, start_k, keys, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV, True)
    column = value_column(shape)
    dk_sum = key_sums(dk, shape, shape.BLOCK_D)
    dv_sum = key_sums(dv, shape, shape.BLOCK_DV)
    for i in range(shape.GROUP):
        h = head_k * shape.GROUP + i
        row = (batch.to(tl.int64) * h_q + h) * s_q + first_q
        q_head = head(q, batch, h, first_q)
        dout_head = head(dout, batch, h, first_q) + column
        gradients = HeadGradients(q, dout, q_head, dout_head, terms + row * 2, column)
        args = ScoreArgs(b, h, rows, keys, off, scale, mask, score, dropout)
        if mask.block_sparse:  # the block lists of heads may differ
            number = block_number(used_k, h_q // shape.GROUP, start_k, shape.BLOCK_K)
            first, core, stop, end, block_list = block_list_range(mask, b, h, number, shape.BLOCK_Q)
        else:
            block_list = None
        if score.constant_beyond and not mask.block_sparse:
            near, near_end = rows_in_reach(args, start_k, shape.BLOCK_Q, shape.BLOCK_K)
            near, near_end = within(near, core, stop), within(near_end, core, stop)
            tiles = TileRange(first, core, stop, end, block_list, near, near_end)
        else:
            tiles = TileRange(first, core, stop, end, block_list, None, None)
        biases = biases_of_rows(tiles, args, start_k, shape.BLOCK_Q)
        for step in tl.range(
            0, edge_length(tiles), shape.BLOCK_Q, num_stages=table_stages(tiles.near is not None, shape.BLOCK_D)
        ):
            start = edge_start(mask, tiles, step, shape.BLOCK_Q)
            dk_sum, dv_sum = dkdv_step(dk_sum, dv_sum, start, k_tile, v_tile, kv_idx, gradients, args, shape, True)
        for step in range(core, core_end(tiles), shape.BLOCK_Q):
            start = core_start(mask, tiles, step, shape.BLOCK_Q)
            bias = bias_at(tiles, biases, start) if tiles.near is not None else None
            dk_sum, dv_sum = dkdv_step(
                dk_sum, dv_sum, start, k_tile, v_tile, kv_idx, gradients, args, shape, False, bias=bias
            )
    # Keys that are not in use get zeros.
    if dk is not None:
        store_dk(dk, head(dk, batch, head_k, first_k), start_k, there, live, dk_sum * scale, shape)
    if dv is not None:
        store_dv(dv, head(dv, batch, head_k, first_k) + column, start_k, there, live, dv_sum, dropout, shape, column)


@triton.jit
def _dq_step(
    sums, start, q_tile, dout_tile, row_lse, row_delta, kv, block, shape,
    MASKED: tl.constexpr, BIASES: tl.constexpr, bias,
):  # fmt: skip
    """One tile of keys: dq [block_q, d]; and if BIASES the sums of each row's ds in tiles behind which, and before
    which, the tables of the score do not reach, [block_q] each."""
    dq, behind, before = sums
    # [block_k, d], [block_k, d_v]
    k_tile = load_k(kv, start, shape, MASKED)
    v_tile = load_v(kv, start, shape, MASKED)
    # [block_q, block_k]
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=shape.PRECISION)
    kv_idx = start + tl.arange(0, shape.BLOCK_K)
    args, q_idx = block.args, block.q_idx[:, None]
    lse, delta = row_lse[:, None], row_delta[:, None]
    _, ds = weight_gradient(qk, dp, lse, delta, args, q_idx, kv_idx[None, :], MASKED, bias=bias)
    ds = apply_slope(ds, qk, args, q_idx, kv_idx[None, :])
    if BIASES:
        low, high = args.score.reach(args.score.data, args.b, args.h)
        total = tl.sum(ds, 1)
        behind += tl.where(start + shape.BLOCK_K - 1 - block.start <= low, total, 0.0)
        before += tl.where(start - block.start - shape.BLOCK_Q + 1 >= high, total, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=shape.PRECISION), behind, before


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def dq_kernel(
    q, k, v, dout, dq, terms, bias_sums, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape
):  # fmt: skip
    """dq = scale ds k for one q block of one head; and bias_sums (b, h_q, q blocks, 2, BLOCK_Q): each row's sums of ds
    in tiles behind and before which the tables of the score do not reach, or None."""
    block = q_block(used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape)
    tiles = kv_tiles(block, used_q, h_q, shape)
    # [block_q, d], [block_q, d_v]
    q_tile = load_q(q, block, shape.D, shape.BLOCK_D, shape)
    dout_tile = load_q(dout, block, shape.D_V, shape.BLOCK_DV, shape)
    row_lse, row_delta = read_terms(terms, block.offset, block.live)
    kv = kv_head(k, v, block, shape)
    biases = biases_of_keys(tiles, block.args, block.start, shape.BLOCK_K)
    dq_sum = tl.zeros([shape.BLOCK_Q, shape.BLOCK_D], tl.float32)
    behind = tl.zeros([shape.BLOCK_Q], tl.float32)
    sums = dq_sum, behind, behind
    for step in tl.range(
        0, edge_length(tiles), shape.BLOCK_K, num_stages=table_stages(tiles.near is not None, shape.BLOCK_D)
    ):
        start = edge_start(mask, tiles, step, shape.BLOCK_K)
        sums = _dq_step(
            sums, start, q_tile, dout_tile, row_lse, row_delta, kv, block, shape, True, bias_sums is not None, None
        )
    for step in range(tiles.core, core_end(tiles), shape.BLOCK_K):
        start = core_start(mask, tiles, step, shape.BLOCK_K)
        bias = bias_at(tiles, biases, start) if tiles.near is not None else None
        sums = _dq_step(
            sums, start, q_tile, dout_tile, row_lse, row_delta, kv, block, shape, False, bias_sums is not None, bias
        )
    dq_sum, behind, before = sums
    if bias_sums is not None:
        number = (block.args.b * h_q + block.args.h).to(tl.int64) * tl.cdiv(s_q, shape.BLOCK_Q)
        offset = (number + block.start // shape.BLOCK_Q) * (2 * shape.BLOCK_Q) + tl.arange(0, shape.BLOCK_Q)
        tl.store(bias_sums + offset, behind)
        tl.store(bias_sums + offset + shape.BLOCK_Q, before)
    dq_sum = tl.where(block.live[:, None], dq_sum * scale, 0.0)
    store_q(dq, block, dq_sum, shape.D, shape.BLOCK_D, shape)


# dK and dV where sequences may share keys: a program owns a block of all keys, and sums over all that read it.
#
# It takes the sequences in their order, so the sums are the same bits in every run, and no memory holds what one
# sequence adds: its size would depend on how far ranges overlap, which only the device knows. There are as many
# programs as for one sequence of all keys.


CHUNK = tl.constexpr(128)
"""Sequences that a program looks at at once."""


@triton.jit
def next_reader(used_k, after, chunk, start, s_k, BLOCK_K: tl.constexpr):
    """The first sequence of a chunk, after sequence `after`, that reads one of the keys from row `start` on; or FAR."""
    # [CHUNK]
    b = chunk + tl.arange(0, CHUNK)
    _, first, _, keys = extent(used_k, b, s_k)
    reads = (b > after) & (keys > 0) & (first < start + BLOCK_K) & (first + keys > start)
    return tl.min(tl.where(reads, b, FAR))


@triton.jit
def kept(live, sums, before):
    """Sums of keys that are live, and those from before of others."""
    if sums.shape[0] > 1:
        return tl.where(live[:, None], sums, before)
    else:  # not wanted
        return sums


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def ranges_dkdv_kernel(q, k, v, dout, dk, dv, terms, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape):
    """dk = scale ds^T q and dv = p^T dout for BLOCK_K rows of one key head, over all sequences and query heads that
    read them; of dk or dv None, only the other."""
    blocks = tl.cdiv(s_k, shape.BLOCK_K)
    start_k = tl.program_id(0) % blocks * shape.BLOCK_K
    head_k = tl.program_id(0) // blocks
    if dropout is not None:
        dropout = opened(dropout)
    # [block_k, d], [block_k, d_v]
    k_tile = load_tile(k, head(k, head_k * 0, head_k), start_k, s_k, shape.BLOCK_K, shape.D, shape.BLOCK_D, True)
    if dk is None:
        v_tile = None
    else:
        v_tile = load_tile(v, head(v, head_k * 0, head_k), start_k, s_k, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV, True)
    column = value_column(shape)
    dk_sum = key_sums(dk, shape, shape.BLOCK_D)
    dv_sum = key_sums(dv, shape, shape.BLOCK_DV)
    # [block_k]
    row_k = start_k + tl.arange(0, shape.BLOCK_K)
    read = row_k < 0
    for chunk in range(0, plain_int(used_k.count), CHUNK):
        b = next_reader(used_k, chunk - 1, chunk, start_k, s_k, shape.BLOCK_K)
        while b < FAR:
            batch, first_q, _, rows = extent(used_q, b, s_q)
            _, first_k, _, keys = extent(used_k, b, s_k)
            off = keys - rows
            # [block_k]
            kv_idx = row_k - first_k
            live = (kv_idx >= 0) & (kv_idx < keys)
            kv_idx = tl.where(kv_idx < 0, keys, kv_idx)  # masked, and where score functions may read
            read = read | live
            lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, off)
            first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, live, rows, shape.BLOCK_Q)
            if tl.min(live.to(tl.int32)) == 0:  # only the mask knows where the range ends
                core = end
                core_end = end
            tiles = TileRange(first, core, core_end, end, None, None, None)
            dk_before, dv_before = dk_sum, dv_sum
            for i in range(shape.GROUP):
                h = head_k * shape.GROUP + i
                row = (batch.to(tl.int64) * h_q + h) * s_q + first_q
                q_head = head(q, batch, h, first_q)
                dout_head = head(dout, batch, h, first_q) + column
                gradients = HeadGradients(q, dout, q_head, dout_head, terms + row * 2, column)
                args = ScoreArgs(b, h, rows, keys, off, scale, mask, score, dropout)
                for step in range(0, edge_length(tiles), shape.BLOCK_Q):
                    start = edge_start(mask, tiles, step, shape.BLOCK_Q)
                    dk_sum, dv_sum = dkdv_step(
                        dk_sum, dv_sum, start, k_tile, v_tile, kv_idx, gradients, args, shape, True, False
                    )
                for start in range(core, core_end, shape.BLOCK_Q):
                    dk_sum, dv_sum = dkdv_step(
                        dk_sum, dv_sum, start, k_tile, v_tile, kv_idx, gradients, args, shape, False, False
                    )
            # Keys beside the range are other sequences': what NaN in this one's rows made of them does not count.
            dk_sum = kept(live, dk_sum, dk_before)
            dv_sum = kept(live, dv_sum, dv_before)
            b = next_reader(used_k, b, chunk, start_k, s_k, shape.BLOCK_K)
    # Keys that no sequence reads get zeros.
    if dk is not None:
        store_dk(dk, head(dk, head_k * 0, head_k), start_k, s_k, read, dk_sum * scale, shape)
    if dv is not None:
        dv_head = head(dv, head_k * 0, head_k) + column
        store_dv(dv, dv_head, start_k, s_k, read, dv_sum, dropout, shape, column)
