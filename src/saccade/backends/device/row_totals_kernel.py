"""What exp(score - lse) adds up to, in rows whose LSE is so large that log(total) has no place beside it in float32."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.block_lists_kernel import block_list_range, block_number, tile_start
from saccade.backends.device.sequences import extent, numbered, tile_of
from saccade.backends.device.tiles import (
    head,
    in_units,
    load_tile,
    logits,
    power,
    store_tile,
    tile_range,
    visible,
)

LARGE = tl.constexpr(512.0)
"""Of an LSE: up to here p is off by 2^-15 at most."""


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def row_totals_kernel(
    q, k, dout, weighted, lse, dlse, weighted_dlse, sink, used_q, used_k, mask, score, h_q, s_q, s_k, scale,
    GROUP: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """weighted = dout / total and weighted_dlse = dlse / total, total = sum exp(score - lse), for one block of query
    rows of one head; 1 where the LSE is not LARGE. Blocks without such a row read neither q nor k."""
    b, h, bh, start_q = tile_of(used_q, h_q, s_q, BLOCK_Q, True)
    batch, first_q, there, rows = extent(used_q, b, s_q)
    _, first_k, _, keys = extent(used_k, b, s_k)
    b = numbered(used_q, b)
    off = keys - rows
    # [block_q]
    q_idx = start_q + tl.arange(0, BLOCK_Q)
    live = q_idx < rows
    place = bh.to(tl.int64) * s_q + first_q + q_idx
    row_lse = tl.load(lse + place, mask=live, other=0.0)
    large = (tl.abs(row_lse) > LARGE) & (tl.abs(row_lse) < float("inf"))
    needed = tl.max(large.to(tl.int32), 0)

    lo, hi, core_lo, core_hi = mask.keys_of(mask.data, b, q_idx, off)
    if mask.listed:
        block = block_number(used_q, h_q, start_q, BLOCK_Q)
        first, _, _, end, listing = block_list_range(mask, b, h, block, BLOCK_K)
    else:
        first, _, _, end = tile_range(lo, hi, core_lo, core_hi, live, keys, BLOCK_K)
        listing = None
    end = tl.where(needed > 0, end, first)
    shift = in_units(row_lse, score)[:, None]
    # [block_q, d]
    q_tile = load_tile(q, head(q, batch, h, first_q), start_q, rows * needed, BLOCK_Q, D, BLOCK_D, True)
    k_head = head(k, batch, h // GROUP, first_k)
    # [block_q]
    total = tl.zeros([BLOCK_Q], tl.float32)
    for step in range(first, end, BLOCK_K):
        start = tile_start(mask, listing, step, BLOCK_K)
        # [block_k, d]
        k_tile = load_tile(k, k_head, start, keys, BLOCK_K, D, BLOCK_D, True)
        # [block_q, block_k]
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        kv_idx = start + tl.arange(0, BLOCK_K)[None, :]
        x = logits(qk, score, scale, b, h, q_idx[:, None], kv_idx)
        x = tl.where(visible(mask, b, h, q_idx[:, None], kv_idx, rows, keys, off), x, float("-inf"))
        total += tl.sum(power(x - shift, score), 1)
    if sink is not None:
        total += power(in_units(tl.load(sink + h).to(tl.float32), score) - in_units(row_lse, score), score)
    share = tl.where(large & (total > 0), 1.0 / tl.where(total > 0, total, 1.0), 1.0)

    # [block_q, d_v]
    tile = load_tile(dout, head(dout, batch, h, first_q), start_q, rows, BLOCK_Q, D_V, BLOCK_DV, True)
    tile = tile.to(tl.float32) * share[:, None]
    store_tile(weighted, head(weighted, batch, h, first_q), start_q, there, tile, BLOCK_Q, D_V, BLOCK_DV)
    if dlse is not None:
        row = tl.load(dlse + place, mask=live, other=0.0)
        tl.store(weighted_dlse + place, row * share, mask=q_idx < there)
