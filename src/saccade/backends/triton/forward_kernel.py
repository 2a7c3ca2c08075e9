"""The forward kernel: one block of query rows streams over the keys that its mask leaves, with the online softmax."""

# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.block_lists_kernel import block_list_range, block_number, tile_start
from saccade.backends.device.dropout import factor, keep, opened
from saccade.backends.device.sequences import extent, numbered, tile_of
from saccade.backends.device.tiles import (
    head,
    in_units,
    load_tile,
    log_sum,
    logits,
    power,
    store_largest,
    store_tile,
    tile_range,
    visible,
)


@triton.jit
def _step(
    acc, row_max, row_sum, q, k, v, k_head, v_head, start, b, h, q_idx, rows, keys, off, scale, mask, score, dropout,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys. acc [block_q, d_v], row_max [block_q] in units of scores, row_sum [block_q]."""
    # [block_k, d]
    k_tile = load_tile(k, k_head, start, keys, BLOCK_K, D, BLOCK_D, MASKED)
    # [block_q, block_k]
    qk = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    kv_idx = start + tl.arange(0, BLOCK_K)[None, :]
    x = logits(qk, score, scale, b, h, q_idx[:, None], kv_idx)
    if MASKED:
        x = tl.where(visible(mask, b, h, q_idx[:, None], kv_idx, rows, keys, off), x, float("-inf"))
    # [block_q]
    new_max = tl.maximum(row_max, tl.max(x, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row that has seen nothing yet: exp(-inf - 0) = 0
    p = power(x - shift[:, None], score)
    alpha = power(row_max - shift, score)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if dropout is not None:
        p = tl.where(keep(dropout, p, b, h, q_idx[:, None], kv_idx), p, 0.0)
    # [block_k, d_v]
    v_tile = load_tile(v, v_head, start, keys, BLOCK_K, D_V, BLOCK_DV, MASKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def forward_kernel(
    q, k, v, out, lse, max_scores, sink, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T) v, lse and max_scores, (b, h_q, s_q) contiguous or None, for one block of rows of one head a
    program."""
    # The last rows of a causal mask have the most keys: they start first.
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

    # [block_q, d]
    q_tile = load_tile(q, head(q, batch, h, first_q), start_q, rows, BLOCK_Q, D, BLOCK_D, True)
    k_head = head(k, batch, h // GROUP, first_k)
    v_head = head(v, batch, h // GROUP, first_k)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    if sink is None or max_scores is not None:
        row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_Q], tl.float32)
    else:  # one more column, seen before all others
        row_max = tl.zeros([BLOCK_Q], tl.float32) + in_units(tl.load(sink + h).to(tl.float32), score)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)

    # Tiles on the mask's edge, those before the core and those behind it, in one loop.
    before = core - first
    for step in range(0, before + end - core_end, BLOCK_K):
        start = tile_start(mask, listing, tl.where(step < before, first + step, core_end + step - before), BLOCK_K)
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q_tile, k, v, k_head, v_head, start, b, h, q_idx, rows, keys, off, scale, mask,
            score, dropout, D, D_V, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, True,
        )  # fmt: skip
    for step in range(core, core_end, BLOCK_K):
        start = tile_start(mask, listing, step, BLOCK_K)
        acc, row_max, row_sum = _step(
            acc, row_max, row_sum, q_tile, k, v, k_head, v_head, start, b, h, q_idx, rows, keys, off, scale, mask,
            score, dropout, D, D_V, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, False,
        )  # fmt: skip

    place = bh.to(tl.int64) * s_q + first_q + q_idx
    acc, row_max, row_sum = store_largest(
        max_scores, place, q_idx < there, acc, row_max, row_sum, score, live, sink, h, True
    )
    seen = live & (row_sum != 0)  # a NaN counts as seen, and stays one
    acc = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    if dropout is not None:
        acc *= factor(dropout)
    store_tile(out, head(out, batch, h, first_q), start_q, there, acc, BLOCK_Q, D_V, BLOCK_DV)
    if lse is not None:
        row_lse = tl.where(seen, log_sum(row_max, tl.where(seen, row_sum, 1.0), score), float("-inf"))
        tl.store(lse + place, row_lse, mask=q_idx < there)
