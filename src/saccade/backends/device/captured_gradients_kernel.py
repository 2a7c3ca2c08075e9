"""The gradients of captured tensors: p and ds once more, tile by tile, scattered to where the score function read."""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.block_lists_kernel import block_list_range, block_number, tile_start
from saccade.backends.device.dropout import factor, keep, opened
from saccade.backends.device.sequences import extent, numbered, tile_of
from saccade.backends.device.tiles import head, in_units, load_tile, logits, power, tile_range, visible


@triton.jit
def in_any_order(total, place, value):
    """Adds float32."""
    tl.atomic_add(total + place, value, mask=value != 0, sem="relaxed")


@triton.jit
def largest(top, place, value):
    """The largest size of all values, as the bits of a float32: of those, NaN is the largest."""
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    if len(bits.shape) > 0:
        bits = tl.max(bits)
    tl.atomic_max(top, bits, sem="relaxed")


@triton.jit
def as_integers(total, place, value):
    """Adds multiples of 1 / unit, int64, of which every order gives the same sum. total: sums and unit."""
    whole = tl.floor(value * tl.load(total[1]) + 0.5)
    tl.atomic_add(total[0] + place, whole.to(tl.int64), mask=whole != 0, sem="relaxed")


@triton.jit
def _step(
    q_tile, dout_tile, k, v, k_head, v_head, row_lse, row_delta, start, b, h, q_idx, rows, keys, off, scale, mask,
    score, dropout, sums, ADD: tl.constexpr, SCATTER: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys."""
    # [block_k, d], [block_k, d_v]
    k_tile = load_tile(k, k_head, start, keys, BLOCK_K, D, BLOCK_D, MASKED)
    v_tile = load_tile(v, v_head, start, keys, BLOCK_K, D_V, BLOCK_DV, MASKED)
    # [block_q, block_k]
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    kv_idx = start + tl.arange(0, BLOCK_K)[None, :]
    x = logits(qk, score, scale, b, h, q_idx[:, None], kv_idx)
    if MASKED:
        x = tl.where(visible(mask, b, h, q_idx[:, None], kv_idx, rows, keys, off), x, float("-inf"))
    p = power(x - row_lse[:, None], score)
    if dropout is not None:
        dp = tl.where(keep(dropout, p, b, h, q_idx[:, None], kv_idx), dp, 0.0) * factor(dropout)
    ds = p * (dp - row_delta[:, None])
    SCATTER(ADD, sums, score.data, ds, qk * scale, b, h, q_idx[:, None], kv_idx)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def captured_gradients_kernel(
    q, k, v, dout, out, lse, dlse, used_q, used_k, mask, score, dropout, sums, h_q, s_q, s_k, scale,
    ADD: tl.constexpr, SCATTER: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`ADD(sum, place, ds · d modified / d tensor)` of every tensor, for one block of query rows of one head."""
    b, h, bh, start_q = tile_of(used_q, h_q, s_q, BLOCK_Q, True)
    batch, first_q, _, rows = extent(used_q, b, s_q)
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
    out_tile = load_tile(out, head(out, batch, h, first_q), start_q, rows, BLOCK_Q, D_V, BLOCK_DV, True)
    # [block_q]
    place = bh.to(tl.int64) * s_q + first_q + q_idx
    row_lse = tl.load(lse + place, mask=live, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), in_units(row_lse, score))  # exp(x - inf) = 0
    row_delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + place, mask=live, other=0.0)
    k_head = head(k, batch, h // GROUP, first_k)
    v_head = head(v, batch, h // GROUP, first_k)
    before = core - first
    for step in range(0, before + end - core_end, BLOCK_K):
        start = tile_start(mask, listing, tl.where(step < before, first + step, core_end + step - before), BLOCK_K)
        _step(
            q_tile, dout_tile, k, v, k_head, v_head, row_lse, row_delta, start, b, h, q_idx, rows, keys, off, scale,
            mask, score, dropout, sums, ADD, SCATTER, D, D_V, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, True,
        )  # fmt: skip
    for step in range(core, core_end, BLOCK_K):
        start = tile_start(mask, listing, step, BLOCK_K)
        _step(
            q_tile, dout_tile, k, v, k_head, v_head, row_lse, row_delta, start, b, h, q_idx, rows, keys, off, scale,
            mask, score, dropout, sums, ADD, SCATTER, D, D_V, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, False,
        )  # fmt: skip
