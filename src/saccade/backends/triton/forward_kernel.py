"""The portable forward kernel: one block of query rows streams over the keys that its mask leaves."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.descale import (
    factor_at,
    factor_of_block,
    product_scale,
    values,
    wide_queries,
    widened,
)
from saccade.backends.device.dropout import keep
from saccade.backends.device.q_block import (
    add_linear_bias,
    bias_at,
    biased_softmax,
    biases_of_keys,
    core_end,
    core_start,
    edge_length,
    edge_start,
    kv_head,
    kv_tiles,
    linear_scores,
    linear_terms,
    load_k,
    load_q,
    load_v,
    masked_scores,
    online_softmax,
    q_block,
    rescaled,
    softmax_of_products,
    store_q,
    table_stages,
)
from saccade.backends.device.records import LOG2E
from saccade.backends.device.tiles import add_sink, log_sum, store_largest

# The forward kernel: one block of query rows streams over the keys that its mask leaves, with the online softmax.

RAISED = tl.constexpr(256)
"""The factor of probabilities before rounding to 8 bits. It makes small ones normal numbers."""


@triton.jit
def _weighted(acc, p, alpha, v_tile, start, descale, block, shape, BYTES: tl.constexpr):
    """acc alpha + p v, of one tile of keys.

    Hopper adds products of bytes in too few bits for long rows. So each tile has sums of its own, which are added in
    float32; the factor keeps the compiler from making one sum of both.
    """
    alpha = alpha[:, None]
    if BYTES:
        # e4m3, whose precision is the higher one, with v of either type.
        part = tl.dot((p * RAISED).to(tl.float8e4nv), v_tile, out_dtype=tl.float32)
        h = block.args.h // shape.GROUP
        return acc * alpha + part * (factor_of_block(descale.v, block.args.b, h, start) * (1 / RAISED))
    elif descale is not None and descale.v.blocked:
        part = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=shape.PRECISION)
        return acc * alpha + part * factor_at(descale.v, block.args.b, block.args.h // shape.GROUP, start)
    else:
        return tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha, input_precision=shape.PRECISION)


@triton.jit
def _step(
    state, start, q_tile, kv, block, descale, shape,
    MASKED: tl.constexpr, BYTES: tl.constexpr, RISING: tl.constexpr, bias, terms,
):  # fmt: skip
    """One tile of keys. state: acc [block_q, d_v], row_max [block_q] in units of scores, row_sum [block_q], or as
    `added` says. bias: what a tile beyond the reach of the score's tables adds to all of its scores, or None; terms:
    `linear_terms`, or None."""
    acc, row_max, row_sum = state
    args = block.args
    q_idx = block.q_idx[:, None]
    # [block_k, d]
    k_tile = load_k(kv, start, shape, MASKED)
    if not BYTES:
        k_tile = widened(k_tile, q_tile.dtype)
    # [block_q, block_k]
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
    if descale is not None:
        qk *= factor_of_block(descale.k, args.b, args.h // shape.GROUP, start)
    kv_idx = start + tl.arange(0, shape.BLOCK_K)[None, :]
    if RISING and args.score.identity and descale is None and not MASKED:
        p, alpha, row_max, row_sum = softmax_of_products(qk, args.scale * LOG2E, row_max, row_sum)
    elif terms is not None:
        x, row_bias = linear_scores(qk, args, terms, block.q_idx, start, MASKED)
        p, alpha, row_max, row_sum = biased_softmax(x, row_bias, args, row_max, row_sum)
    elif bias is not None and RISING and descale is None:
        p, alpha, row_max, row_sum = biased_softmax(qk, bias, args, row_max, row_sum)
    elif bias is not None:
        p, alpha, row_max, row_sum = online_softmax(qk * args.scale + bias, row_max, row_sum, args.score)
    else:
        x = masked_scores(qk, args, q_idx, kv_idx, MASKED)
        p, alpha, row_max, row_sum = online_softmax(x, row_max, row_sum, args.score)
    if args.dropout is not None:
        p = tl.where(keep(args.dropout, p, args.b, args.h, q_idx, kv_idx), p, 0.0)
    # [block_k, d_v]
    v_tile = load_v(kv, start, shape, MASKED)
    if not BYTES:
        v_tile = widened(v_tile, q_tile.dtype)
    acc = _weighted(acc, p, alpha, v_tile, start, descale, block, shape, BYTES)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def forward_kernel(
    q, k, v, out, lse, max_scores, sink, descale, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape,
    BYTES: tl.constexpr, RISING: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T) v, lse and max_scores, (b, h_q, s_q) contiguous or None, for one q block of one head a
    program, and BLOCK_DV columns of out. descale: DeviceDescale of 8-bit k and v, or None. BYTES: products are those of
    8-bit q, k and v. RISING: as `launch.rising` says. LIMITED: a thread has
    `TileConfig.registers`."""
    block = q_block(used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape)
    tiles = kv_tiles(block, used_q, h_q, shape)
    h = block.args.h
    live = block.live
    # [block_q, d]
    q_tile = load_q(q, block, shape.D, shape.BLOCK_D, shape)
    if descale is not None:
        scale = product_scale(scale, descale, block.args.b, h // shape.GROUP, block.q_idx)
        if not BYTES:
            q_tile, scale = wide_queries(q_tile, scale)
        block = rescaled(block, scale)
    kv = kv_head(k, v, block, shape)
    acc = tl.zeros([shape.BLOCK_Q, shape.BLOCK_DV], tl.float32)
    row_max = tl.full([shape.BLOCK_Q], float("-inf"), tl.float32)
    # Of d = 64 they take registers of one more program, unless these are limited.
    columns: tl.constexpr = RISING and score.identity and descale is None and (LIMITED or shape.BLOCK_D > 64)
    row_sum = tl.zeros([shape.BLOCK_Q, 8] if columns else [shape.BLOCK_Q], tl.float32)
    state = acc, row_max, row_sum
    if score.linear and RISING and descale is None:
        terms = linear_terms(block.args, block.q_idx)
    else:
        terms = None
    for step in tl.range(
        0, edge_length(tiles), shape.BLOCK_K, num_stages=table_stages(tiles.near is not None, shape.BLOCK_D)
    ):
        start = edge_start(mask, tiles, step, shape.BLOCK_K)
        state = _step(state, start, q_tile, kv, block, descale, shape, True, BYTES, RISING, None, terms)
    biases = biases_of_keys(tiles, block.args, block.start, shape.BLOCK_K)
    for step in range(tiles.core, core_end(tiles), shape.BLOCK_K):
        start = core_start(mask, tiles, step, shape.BLOCK_K)
        bias = bias_at(tiles, biases, start) if tiles.near is not None else None
        state = _step(state, start, q_tile, kv, block, descale, shape, False, BYTES, RISING, bias, terms)
    acc, row_max, row_sum = state
    if columns:
        row_sum = tl.sum(row_sum, 1)
    if terms is not None:
        row_max, row_sum = add_linear_bias(row_max, row_sum, terms)

    stored = block.q_idx < block.there
    owned = stored  # once, where several programs have columns of the same rows
    if shape.D_V > shape.BLOCK_DV:
        owned = block.q_idx < tl.where(kv.column == 0, block.there, 0)
    store_largest(max_scores, block.offset, owned, row_max, row_sum, score, live)
    named = live & (row_sum != 0)  # rows that see a key; a NaN counts as one, and stays one
    acc, row_max, row_sum = add_sink(acc, row_max, row_sum, score, sink, h, True)
    seen = live & (row_sum != 0)
    acc = values(acc, descale, block.args.b, h // shape.GROUP)
    acc = tl.where(named[:, None], acc / tl.where(named, row_sum, 1.0)[:, None], 0.0)
    if dropout is not None:
        acc *= block.args.dropout.factor
    store_q(out, block, acc, shape.D_V, shape.BLOCK_DV, shape, kv.column)
    if lse is not None:
        row_lse = tl.where(seen, log_sum(row_max, tl.where(seen, row_sum, 1.0), score, sink), float("-inf"))
        tl.store(lse + block.offset, row_lse, mask=owned)
