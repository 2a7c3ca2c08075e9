"""One q block of one head against tiles of keys: what the kernels share that own BLOCK_Q query rows."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from saccade.backends.device.block_lists_kernel import block_list_range, block_number, tile_start
from saccade.backends.device.dropout import keep, keep_unaligned, opened
from saccade.backends.device.positions import extent, numbered, tile_of
from saccade.backends.device.records import LOG2E, aggregate
from saccade.backends.device.tiles import head, load_tile, logits, power, store_tile, tile_range, visible


@triton.constexpr_function
def table_stages(reads, block_d):
    """Stages of loops that may read tables of distances, in few tiles; None: those of the launch. Tables pass shared
    memory too, and with three stages they take the place of another program, which costs the other loop 5 to 30 %
    (notes/scores.md)."""
    return 2 if reads and block_d <= 128 else None


@aggregate
class ScoreArgs:
    """What the scores of a tile depend on besides its product and its indices."""

    b: Any
    """the batch row or sequence, as masks and scores count them"""
    h: Any
    """query head, or one of each row"""
    rows: Any
    """rows and keys in use"""
    keys: Any
    off: Any
    """query offset: keys - rows"""
    scale: Any
    mask: Any
    score: Any
    dropout: Any
    """numbers in registers, or None"""


@aggregate
class QBlock:
    """Where a program's query rows are."""

    args: ScoreArgs
    batch: Any
    """batch row in tensors (b, h, s, d)"""
    start: Any
    """the block's first row in its sequence"""
    there: Any
    """how many rows the sequence has, in use or not"""
    first_q: Any
    """the sequence's first row and first key in tensors"""
    first_k: Any
    q_idx: Any
    """[block_q]"""
    live: Any
    """[block_q]: which rows are in use"""
    offset: Any
    """[block_q]: in tensors (b, h, s)"""


@aggregate
class KVHead:
    """One key head of a sequence."""

    k: Any
    v: Any
    """TensorArgs"""
    first_k: Any
    first_v: Any
    """pointers to the first row, of v from the first column on"""
    keys: Any
    """keys in use"""
    column: Any
    """the first of the columns of v that this program reads, and sums: see `value_column`"""


@aggregate
class TileRange:
    """Which tiles a block visits: see `tiles.tile_range`."""

    first: Any
    core: Any
    core_end: Any
    end: Any
    block_list: Any
    """pointer, or None: tiles are visited in their order"""
    near: Any
    near_end: Any
    """Tiles of the core that are in reach of the score's tables: they are visited with the edges, and what is left of
    the core adds one number to all scores of a tile. None where a score has no such tiles."""


@triton.jit
def q_block(used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape):
    """The q block of this program. The last rows of a causal mask have the most keys: they start first."""
    b, h, bh, start = tile_of(used_q, h_q, s_q, shape.BLOCK_Q, True)
    batch, first_q, there, rows = extent(used_q, b, s_q)
    _, first_k, _, keys = extent(used_k, b, s_k)
    b = numbered(used_q, b)
    off = keys - rows
    if dropout is not None:
        dropout = opened(dropout)
    # [block_q]
    q_idx = start + tl.arange(0, shape.BLOCK_Q)
    offset = bh.to(tl.int64) * s_q + first_q + q_idx
    args = ScoreArgs(b, h, rows, keys, off, scale, mask, score, dropout)
    return QBlock(args, batch, start, there, first_q, first_k, q_idx, q_idx < rows, offset)


@triton.jit
def rescaled(block, scale):
    """The same q block with another scale, a number or [block_q, 1]."""
    x = block.args
    args = ScoreArgs(x.b, x.h, x.rows, x.keys, x.off, scale, x.mask, x.score, x.dropout)
    return QBlock(
        args, block.batch, block.start, block.there, block.first_q, block.first_k, block.q_idx, block.live, block.offset
    )


@triton.jit
def kv_tiles(block, used_q, h_q, shape):
    """The tiles of keys that a q block visits."""
    args = block.args
    lo, hi, core_lo, core_hi = args.mask.keys_of(args.mask.data, args.b, block.q_idx, args.off)
    if args.mask.block_sparse:
        number = block_number(used_q, h_q, block.start, shape.BLOCK_Q)
        first, core, core_end, end, block_list = block_list_range(args.mask, args.b, args.h, number, shape.BLOCK_K)
        return TileRange(first, core, core_end, end, block_list, None, None)
    else:
        first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, block.live, args.keys, shape.BLOCK_K)
        if args.score.constant_beyond:
            near, near_end = keys_in_reach(args, block.start, shape.BLOCK_Q, shape.BLOCK_K)
            near, near_end = within(near, core, core_end), within(near_end, core, core_end)
            return TileRange(first, core, core_end, end, None, near, near_end)
        else:
            return TileRange(first, core, core_end, end, None, None, None)


@triton.jit
def within(x, first, end):
    """The closest number to x of [first, end]."""
    return tl.minimum(tl.maximum(x, first), end)


@triton.jit
def keys_in_reach(args, row, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Of tiles of KEYS keys those with a distance from rows [row, row + ROWS) inside the reach of the score's tables:
    where the first begins and the last ends."""
    low, high = args.score.reach(args.score.data, args.b, args.h)
    # Divisions round towards zero, and no tile begins below it.
    first = tl.maximum(low + row + 1, 0) // KEYS * KEYS
    return first, tl.cdiv(tl.maximum(high + row + ROWS - 1, 0), KEYS) * KEYS


@triton.jit
def rows_in_reach(args, key, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The same of tiles of ROWS rows, for keys [key, key + KEYS)."""
    low, high = args.score.reach(args.score.data, args.b, args.h)
    first = tl.maximum(key - high + 1, 0) // ROWS * ROWS
    return first, tl.cdiv(tl.maximum(key + KEYS - 1 - low, 0), ROWS) * ROWS


@triton.jit
def load_q(x, block, D: tl.constexpr, BLOCK_D: tl.constexpr, shape):
    """The block's rows of q, out or dout, [block_q, BLOCK_D]."""
    base = head(x, block.batch, block.args.h, block.first_q)
    return load_tile(x, base, block.start, block.args.rows, shape.BLOCK_Q, D, BLOCK_D, True)


@triton.jit
def store_q(x, block, value, D: tl.constexpr, BLOCK_D: tl.constexpr, shape, first_column=0):
    """Writes the block's rows, in use or not, of out or dq."""
    base = head(x, block.batch, block.args.h, block.first_q) + first_column
    store_tile(x, base, block.start, block.there, value, shape.BLOCK_Q, D, BLOCK_D, first_column)


@triton.jit
def value_column(shape):
    """The first column of v that this program sums: 0, or where the second axis of the grid says, if one tile does not
    hold them all."""
    if shape.D_V > shape.BLOCK_DV:
        return tl.program_id(1) * shape.BLOCK_DV
    else:
        return 0


@triton.jit
def kv_head(k, v, block, shape):
    """The key head of the block."""
    h = block.args.h // shape.GROUP
    first_k = head(k, block.batch, h, block.first_k)
    column = value_column(shape)
    return KVHead(k, v, first_k, head(v, block.batch, h, block.first_k) + column, block.args.keys, column)


@triton.jit
def load_k(kv, start, shape, CHECK: tl.constexpr):
    """Keys [start, start + BLOCK_K), [block_k, d]."""
    return load_tile(kv.k, kv.first_k, start, kv.keys, shape.BLOCK_K, shape.D, shape.BLOCK_D, CHECK)


@triton.jit
def load_v(kv, start, shape, CHECK: tl.constexpr):
    """Values [start, start + BLOCK_K), [block_k, d_v]."""
    return load_tile(kv.v, kv.first_v, start, kv.keys, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV, CHECK, kv.column)


@triton.jit
def edge_length(tiles):
    """The tiles before the core, after it, and in reach, times the tile's size."""
    length = tiles.core - tiles.first + tiles.end - tiles.core_end
    if tiles.near is not None:
        length += tiles.near_end - tiles.near
    return length


@triton.jit
def edge_start(mask, tiles, step, BLOCK: tl.constexpr):
    """Where the tile begins that is visited at `step`, of those."""
    before = tiles.core - tiles.first
    if tiles.near is not None:  # sums, as ptxas 12.8 serialises products behind nested selects (C7515)
        start = tiles.first + step + tl.where(step >= before, tiles.near - tiles.core, 0)
        reach = tiles.near_end - tiles.near
        start += tl.where(step >= before + reach, tiles.core_end - tiles.near_end, 0)
        return start
    else:
        start = tl.where(step < before, tiles.first + step, tiles.core_end + step - before)
        return tile_start(mask, tiles.block_list, start, BLOCK)


@triton.jit
def core_end(tiles):
    """The core's end, if it begins where it does and leaves out what is in reach."""
    end = tiles.core_end
    if tiles.near is not None:
        end -= tiles.near_end - tiles.near
    return end


@triton.jit
def core_start(mask, tiles, step, BLOCK: tl.constexpr):
    """Where the core's tile begins that is visited at `step`."""
    if tiles.near is not None:
        return tl.where(step < tiles.near, step, step + tiles.near_end - tiles.near)
    else:
        return tile_start(mask, tiles.block_list, step, BLOCK)


@triton.jit
def biases_of_keys(tiles, args, row, KEYS: tl.constexpr):
    """What is added to all scores of a tile of the core before those in reach, and of one after them, where
    `TileRange.near` is not None; zeros where it is."""
    if tiles.near is not None:
        last = tl.maximum(tiles.core_end - KEYS, 0)
        first = args.score.bias(args.score.data, args.b, args.h, row, tiles.core)
        return first, args.score.bias(args.score.data, args.b, args.h, row, last)
    else:
        return 0.0, 0.0


@triton.jit
def biases_of_rows(tiles, args, key, ROWS: tl.constexpr):
    """The same where tiles are of rows."""
    if tiles.near is not None:
        last = tl.maximum(tiles.core_end - ROWS, 0)
        first = args.score.bias(args.score.data, args.b, args.h, tiles.core, key)
        return first, args.score.bias(args.score.data, args.b, args.h, last, key)
    else:
        return 0.0, 0.0


@triton.jit
def bias_at(tiles, biases, start):
    """The bias of the core's tile that begins at `start`."""
    return tl.where(start < tiles.near, biases[0], biases[1])


@triton.jit
def linear_terms(args, q_idx):
    """Of a score that is linear in the key's index: each row's pitch, in units of the products, a key; what is added to
    all of its scores, natural, if keys are counted from one key; and that key: [block_q] each."""
    last = tl.maximum(args.keys - 1, 0)
    key = within(q_idx + args.off, 0, last)
    zero = q_idx.to(tl.float32) * 0
    pitch = zero + args.score.pitch(args.score.data, args.b, args.h, q_idx, key)
    bias = zero + args.score.bias(args.score.data, args.b, args.h, q_idx, key)
    # The sequence's key nearest to where the score is zero: large numbers that cancel would lose bits.
    root = key.to(tl.float32) - bias / pitch
    key = within(tl.where(root == root, root, 0.0), 0.0, last.to(tl.float32)).to(tl.int32)
    return pitch / args.scale, zero + args.score.bias(args.score.data, args.b, args.h, q_idx, key), key


@triton.jit
def linear_scores(qk, args, terms, q_idx, start, MASKED: tl.constexpr):
    """The scores of a tile of keys from `start` on, but for what is added to all of a row, as scale x + bias:
    x [block_q, block_k], one multiply-add for each, and bias [block_q]."""
    pitch, _, key = terms
    # [1, block_k], from the tile's middle, as what is added to the row rounds what it takes away again
    middle: tl.constexpr = qk.shape[1] // 2
    column = tl.arange(0, qk.shape[1])[None, :] - middle
    x = tl.fma(tl.broadcast_to(pitch[:, None], qk.shape), tl.broadcast_to(column.to(tl.float32), qk.shape), qk)
    if MASKED:
        kv_idx = start + middle + column
        seen = visible(args.mask, args.b, args.h, q_idx[:, None], kv_idx, args.rows, args.keys, args.off)
        x = tl.where(seen, x, float("-inf"))
    return x, pitch * args.scale * (start + middle - key).to(tl.float32)


@triton.jit
def add_linear_bias(row_max, row_sum, terms):
    """The state of rows with what is added to all of their scores: -inf masks a row, and what is NaN stays NaN."""
    bias = terms[1]
    row_sum = tl.where((bias == float("-inf")) | (row_sum == 0), 0.0, row_sum + bias * 0)
    return row_max + bias, row_sum


@triton.jit
def masked_scores(qk, args, q_idx, kv_idx, MASKED: tl.constexpr):
    """Scores in their units, -inf where they are masked. q_idx and kv_idx broadcast."""
    x = logits(qk, args.score, args.scale, args.b, args.h, q_idx, kv_idx)
    if MASKED:
        x = tl.where(
            visible(args.mask, args.b, args.h, q_idx, kv_idx, args.rows, args.keys, args.off), x, float("-inf")
        )
    return x


@triton.jit
def added(row_sum, alpha, p):
    """row_sum alpha + the sums of p over keys; a row_sum with as many dimensions as p is [block_q, 8], of each eighth
    column, so that threads add up theirs once, after the loop."""
    if len(row_sum.shape) == len(p.shape):
        return row_sum * alpha[:, None] + tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    else:
        return row_sum * alpha + tl.sum(p, 1)


@triton.jit
def online_softmax(x, row_max, row_sum, score):
    """p = exp(x - new_max) [block_q, block_k], or [slices, block_k, block_q], alpha = exp(row_max - new_max) [block_q],
    new_max and the new row_sum."""
    new_max = tl.maximum(row_max, tl.max(x, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row without a visible key yet: exp(-inf - 0) = 0
    p = power(x - tl.expand_dims(shift, 1), score)
    alpha = power(row_max - shift, score)
    return p, alpha, new_max, added(row_sum, alpha, p)


@triton.jit
def softmax_of_products(qk, factor, row_max, row_sum):
    """`online_softmax` of x = factor qk in units of log2, with a factor from 0 on: one multiply-add for each p.
    Products are [block_q, block_k], all of them visible."""
    x = qk
    if len(row_sum.shape) == 2:  # four chains of maxima of a thread, not one in which each waits for the one before
        x = tl.max(tl.reshape(x, [x.shape[0], x.shape[1] // 16, 16]), 1)
    new_max = tl.maximum(row_max, tl.max(x, 1) * factor)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(qk * factor - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    return p, alpha, new_max, added(row_sum, alpha, p)


@triton.jit
def biased_softmax(qk, bias, args, row_max, row_sum):
    """`online_softmax` of x = scale qk + bias, natural, with a scale from 0 on that is one number: one multiply-add
    for each p."""
    new_max = tl.maximum(row_max, tl.max(qk, 1) * args.scale + bias)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(qk * (args.scale * LOG2E) - ((shift - bias) * LOG2E)[:, None])
    alpha = tl.exp2((row_max - shift) * LOG2E)
    return p, alpha, new_max, row_sum * alpha + tl.sum(p, 1)


@triton.jit
def weight_gradient(
    qk, dp, row_lse, row_delta, args, q_idx, kv_idx, MASKED: tl.constexpr, ALIGNED: tl.constexpr = True, bias=None
):
    """p after dropout, but for its factor, and ds before the slope of the score function, of one tile. Rows and keys
    lie whichever way the operands broadcast. ALIGNED: both start at multiples of 16. bias: as `bias_of_tile` says."""
    if bias is not None:
        p = tl.exp2(qk * (args.scale * LOG2E) + (bias - row_lse) * LOG2E)
    else:
        p = power(masked_scores(qk, args, q_idx, kv_idx, MASKED) - row_lse, args.score)
    if args.dropout is None:
        return p, p * (dp - row_delta)
    else:
        if ALIGNED:
            live = keep(args.dropout, p, args.b, args.h, q_idx, kv_idx)
        else:
            live = keep_unaligned(args.dropout, p, args.b, args.h, q_idx, kv_idx)
        ds = p * (tl.where(live, dp, 0.0) * args.dropout.factor - row_delta)
        return tl.where(live, p, 0.0), ds
