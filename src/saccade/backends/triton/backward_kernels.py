"""The backward kernels: delta, then dK and dV a block of keys at a time, and dQ a block of rows at a time.

Nothing is added across programs, so the gradients are the same bits in every run.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.block_lists_kernel import block_list_range, block_number, tile_start
from saccade.backends.device.dropout import factor, keep, opened
from saccade.backends.device.sequences import extent, numbered, tile_of
from saccade.backends.device.tiles import (
    head,
    load_tile,
    logits,
    power,
    store_tile,
    tile_range,
    used_length,
    visible,
)


@triton.jit(do_not_specialize=["h_q", "s_q"])
def delta_kernel(
    dout,
    out,
    dlse,
    lse,
    delta,
    shift,
    used_q,
    h_q,
    s_q,
    unit,
    D_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """delta = rowsum(dout out) - dlse, and shift = lse unit, +inf where a row has no keys: exp(x - inf) = 0."""
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
    place = bh.to(tl.int64) * s_q + q_idx
    row = tl.sum(dout_tile * out_tile, 1)
    if dlse is not None:
        row -= tl.load(dlse + place, mask=q_idx < rows, other=0.0)
    row_lse = tl.load(lse + place, mask=q_idx < rows, other=float("-inf"))
    tl.store(delta + place, row, mask=q_idx < s_q)
    tl.store(shift + place, tl.where(row_lse == float("-inf"), float("inf"), row_lse * unit), mask=q_idx < s_q)


@triton.jit
def _score_gradient(
    qk, dp, row_lse, row_delta, b, h, q_idx, kv_idx, rows, keys, off, scale, mask, score, dropout, MASKED: tl.constexpr
):
    """p after dropout, but for its factor, and ds of one tile, by whichever orientation the operands broadcast in."""
    x = logits(qk, score, scale, b, h, q_idx, kv_idx)
    if MASKED:
        x = tl.where(visible(mask, b, h, q_idx, kv_idx, rows, keys, off), x, float("-inf"))
    p = power(x - row_lse, score)
    if dropout is None:
        ds = p * (dp - row_delta)
    else:
        kept = keep(dropout, p, b, h, q_idx, kv_idx)
        ds = p * (tl.where(kept, dp, 0.0) * factor(dropout) - row_delta)
        p = tl.where(kept, p, 0.0)
    if not score.steady:  # at scores that nobody sees it may be anything
        ds = tl.where(ds == 0, 0.0, ds * score.slope(score.data, qk * scale, b, h, q_idx, kv_idx))
    return p, ds


@triton.jit
def _dkdv_step(
    dk, dv, q, dout, k_tile, v_tile, q_head, dout_head, shift, delta, start, b, h, kv_idx, rows, keys, off, scale,
    mask, score, dropout, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of query rows, transposed: dk [block_k, d], dv [block_k, d_v]."""
    # [block_q, d], [block_q, d_v]
    q_tile = load_tile(q, q_head, start, rows, BLOCK_Q, D, BLOCK_D, MASKED)
    dout_tile = load_tile(dout, dout_head, start, rows, BLOCK_Q, D_V, BLOCK_DV, MASKED)
    # [block_q]
    q_idx = start + tl.arange(0, BLOCK_Q)
    if MASKED:
        row_lse = tl.load(shift + q_idx, mask=q_idx < rows, other=float("inf"))
        row_delta = tl.load(delta + q_idx, mask=q_idx < rows, other=0.0)
    else:
        row_lse = tl.load(shift + q_idx)
        row_delta = tl.load(delta + q_idx)
    # [block_k, block_q]
    qk = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    p, ds = _score_gradient(
        qk, dp, row_lse[None, :], row_delta[None, :], b, h, q_idx[None, :], kv_idx[:, None], rows, keys, off, scale,
        mask, score, dropout, MASKED,
    )  # fmt: skip
    dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def dkdv_kernel(
    q, k, v, dout, dk, dv, shift, delta, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk = scale ds^T q and dv = p^T dout for one block of keys of one key head, over all query heads of its group."""
    # The first keys of a causal mask have the most rows.
    b, head_k, _, start_k = tile_of(used_k, h_q // GROUP, s_k, BLOCK_K, False)
    batch, first_q, _, rows = extent(used_q, b, s_q)
    _, first_k, there, keys = extent(used_k, b, s_k)
    b = numbered(used_k, b)
    off = keys - rows
    if dropout is not None:
        dropout = opened(dropout)
    # [block_k]
    kv_idx = start_k + tl.arange(0, BLOCK_K)
    live = kv_idx < keys
    lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, off)
    first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, live, rows, BLOCK_Q)

    # [block_k, d], [block_k, d_v]
    k_tile = load_tile(k, head(k, batch, head_k, first_k), start_k, keys, BLOCK_K, D, BLOCK_D, True)
    v_tile = load_tile(v, head(v, batch, head_k, first_k), start_k, keys, BLOCK_K, D_V, BLOCK_DV, True)
    dk_sum = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)
    before = core - first
    for member in range(GROUP):
        h = head_k * GROUP + member
        q_head = head(q, batch, h, first_q)
        dout_head = head(dout, batch, h, first_q)
        row = (batch.to(tl.int64) * h_q + h) * s_q + first_q
        if mask.listed:  # heads may see other keys
            block = block_number(used_k, h_q // GROUP, start_k, BLOCK_K)
            first, core, core_end, end, listing = block_list_range(mask, b, h, block, BLOCK_Q)
            before = core - first
        else:
            listing = None
        for step in range(0, before + end - core_end, BLOCK_Q):
            start = tile_start(mask, listing, tl.where(step < before, first + step, core_end + step - before), BLOCK_Q)
            dk_sum, dv_sum = _dkdv_step(
                dk_sum, dv_sum, q, dout, k_tile, v_tile, q_head, dout_head, shift + row, delta + row, start, b, h,
                kv_idx, rows, keys, off, scale, mask, score, dropout, D, D_V, BLOCK_Q, BLOCK_D, BLOCK_DV, PRECISION,
                True,
            )  # fmt: skip
        for step in range(core, core_end, BLOCK_Q):
            start = tile_start(mask, listing, step, BLOCK_Q)
            dk_sum, dv_sum = _dkdv_step(
                dk_sum, dv_sum, q, dout, k_tile, v_tile, q_head, dout_head, shift + row, delta + row, start, b, h,
                kv_idx, rows, keys, off, scale, mask, score, dropout, D, D_V, BLOCK_Q, BLOCK_D, BLOCK_DV, PRECISION,
                False,
            )  # fmt: skip
    if dropout is not None:
        dv_sum *= factor(dropout)
    # Keys that are not in use get zeros.
    dk_sum = tl.where(live[:, None], dk_sum * scale, 0.0)
    dv_sum = tl.where(live[:, None], dv_sum, 0.0)
    store_tile(dk, head(dk, batch, head_k, first_k), start_k, there, dk_sum, BLOCK_K, D, BLOCK_D)
    store_tile(dv, head(dv, batch, head_k, first_k), start_k, there, dv_sum, BLOCK_K, D_V, BLOCK_DV)


@triton.jit
def _dq_step(
    dq, q_tile, dout_tile, k, v, k_head, v_head, row_lse, row_delta, start, b, h, q_idx, rows, keys, off, scale,
    mask, score, dropout, D: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys: dq [block_q, d]."""
    # [block_k, d], [block_k, d_v]
    k_tile = load_tile(k, k_head, start, keys, BLOCK_K, D, BLOCK_D, MASKED)
    v_tile = load_tile(v, v_head, start, keys, BLOCK_K, D_V, BLOCK_DV, MASKED)
    # [block_q, block_k]
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    kv_idx = start + tl.arange(0, BLOCK_K)
    _, ds = _score_gradient(
        qk, dp, row_lse[:, None], row_delta[:, None], b, h, q_idx[:, None], kv_idx[None, :], rows, keys, off, scale,
        mask, score, dropout, MASKED,
    )  # fmt: skip
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def dq_kernel(
    q, k, v, dout, dq, shift, delta, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq = scale ds k for one block of query rows of one head."""
    b, h, bh, start_q = tile_of(used_q, h_q, s_q, BLOCK_Q, True)
    batch, first_q, there, rows = extent(used_q, b, s_q)
    _, first_k, _, keys = extent(used_k, b, s_k)
    b = numbered(used_q, b)
    off = keys - rows
    if dropout is not None:
        dropout = opened(dropout)
    # [block_q]
    q_idx = start_q + tl.arange(0, BLOCK_Q)
    live = q_idx < rows
    lo, hi, core_lo, core_hi = mask.keys_of(mask.data, b, q_idx, off)
    if mask.listed:
        block = block_number(used_q, h_q, start_q, BLOCK_Q)
        first, core, core_end, end, listing = block_list_range(mask, b, h, block, BLOCK_K)
    else:
        first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, live, keys, BLOCK_K)
        listing = None

    # [block_q, d], [block_q, d_v]
    q_tile = load_tile(q, head(q, batch, h, first_q), start_q, rows, BLOCK_Q, D, BLOCK_D, True)
    dout_tile = load_tile(dout, head(dout, batch, h, first_q), start_q, rows, BLOCK_Q, D_V, BLOCK_DV, True)
    place = bh.to(tl.int64) * s_q + first_q + q_idx
    row_lse = tl.load(shift + place, mask=live, other=float("inf"))
    row_delta = tl.load(delta + place, mask=live, other=0.0)
    k_head = head(k, batch, h // GROUP, first_k)
    v_head = head(v, batch, h // GROUP, first_k)
    dq_sum = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    before = core - first
    for step in range(0, before + end - core_end, BLOCK_K):
        start = tile_start(mask, listing, tl.where(step < before, first + step, core_end + step - before), BLOCK_K)
        dq_sum = _dq_step(
            dq_sum, q_tile, dout_tile, k, v, k_head, v_head, row_lse, row_delta, start, b, h, q_idx, rows, keys, off,
            scale, mask, score, dropout, D, D_V, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, True,
        )  # fmt: skip
    for step in range(core, core_end, BLOCK_K):
        start = tile_start(mask, listing, step, BLOCK_K)
        dq_sum = _dq_step(
            dq_sum, q_tile, dout_tile, k, v, k_head, v_head, row_lse, row_delta, start, b, h, q_idx, rows, keys, off,
            scale, mask, score, dropout, D, D_V, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, False,
        )  # fmt: skip
    dq_sum = tl.where(live[:, None], dq_sum * scale, 0.0)
    store_tile(dq, head(dq, batch, h, first_q), start_q, there, dq_sum, BLOCK_Q, D, BLOCK_D)
