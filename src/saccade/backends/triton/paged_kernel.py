"""Which sequence, and how much of it, a program over pages works on."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.descale import factor_at, factor_of_block, queries, values, widened
from saccade.backends.device.positions import extent
from saccade.backends.device.q_block import ScoreArgs, masked_scores, online_softmax
from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import add_sink, head, log_sum, store_largest, tile_range
from saccade.backends.triton.paged_tiles import (
    PagedHead,
    load_rows,
    nothing_yet,
    of_all_slices,
    pages_of,
    sliced,
    slices_step,
    turned,
)


@triton.jit
def sequence_of(span, tile, s_q, count, shape, N: tl.constexpr):
    """The sequence of a tile of flat rows, `count` after the last one, and the tile's first flat row."""
    if span is None:
        blocks = tl.cdiv(s_q * shape.GROUP, shape.BLOCK_Q)
        number = tile // blocks
        first = number * blocks
    else:
        # [N]
        i = tl.arange(0, N)
        start = tl.minimum(tl.maximum(tl.load(span.starts + tl.minimum(i, count)), 0), s_q).to(tl.int32)
        begin = start * shape.GROUP // shape.BLOCK_Q + i  # room for a sequence's tiles wherever it begins
        earlier = (i <= count) & (begin <= tile)
        number = tl.maximum(tl.sum(earlier.to(tl.int32), 0) - 1, 0)
        first = tl.max(tl.where(earlier, begin, 0), 0)
    return number, (tile - first) * shape.BLOCK_Q


@triton.jit
def share(mask, used_q, used_k, heads, s_q, pages, split, shape, N: tl.constexpr, LEAST: tl.constexpr):
    """Tiles of keys for each program, if those of all sequences are shared out evenly."""
    count = plain_int(pages.sequences)
    # [N]
    i = tl.arange(0, N)
    b = tl.minimum(i, count - 1)
    _, _, _, keys = extent(used_k, b, plain_int(pages.capacity))
    _, _, _, rows = extent(used_q, b, s_q)
    rows = rows + b * 0
    if mask.ordered:
        lo, _, _, _ = mask.keys_of(mask.data, b, b * 0, keys - rows)
        _, hi, _, _ = mask.keys_of(mask.data, b, tl.maximum(rows - 1, 0), keys - rows)
        tiles = tl.cdiv(tl.maximum(tl.minimum(hi, keys) - tl.maximum(lo, 0), 0), shape.BLOCK_K)
    else:
        tiles = tl.cdiv(keys, shape.BLOCK_K)
    total = tl.sum(tl.where(i < count, tiles * tl.cdiv(rows * shape.GROUP, shape.BLOCK_Q), 0), 0)
    return tl.maximum(tl.cdiv(total * heads, plain_int(split.slots)), LEAST)


@triton.jit
def by_length(rank, used_k, pages, N: tl.constexpr, BITS: tl.constexpr):
    """The sequence of which `rank` others have more keys: the longest start first. Lengths have up to BITS bits.

    It has neither a loop nor a branch: see the top of `paged_kernel.py`.
    """
    count = plain_int(pages.sequences)
    # [N]
    i = tl.arange(0, N)
    _, _, _, keys = extent(used_k, tl.minimum(i, count - 1), plain_int(pages.capacity))
    keys = tl.where(i < count, keys + i * 0, -1)
    # The least length of which at most `rank` sequences have more.
    least = rank * 0
    most = tl.max(keys, 0)
    for bit in tl.static_range(BITS):  # noqa: B007 - `_` is a tensor here
        middle = (least + most) // 2
        enough = tl.sum((keys > middle).to(tl.int32), 0) <= rank
        most = tl.where(enough, middle, most)
        least = tl.where(enough, least, tl.minimum(middle + 1, most))
    before = tl.sum((keys > least).to(tl.int32), 0)
    equal = (keys == least).to(tl.int32)
    return tl.sum(tl.where((equal == 1) & (tl.cumsum(equal, 0) == rank - before + 1), i, 0), 0)


# Paged caches: the forward over pages, with the keys of a sequence split into parts where that fills the GPU.
#
# The query rows of all heads that share keys are rows of one tile: row `i` of member `m` is flat row `i * GROUP + m`.
# Tiles of keys are visited from the first to the last, so that a row's sums have the same order in every call. What a
# program has to know of all sequences it reads at once, N of them: after a loop or a branch Triton 3.9 forgets which
# addresses are aligned, and fetches nothing ahead.
#
# Few rows against 8-bit pages have tiles of another form: `paged_tiles.py`.


class SplitArgs(NamedTuple):
    """How the work is split among programs; numbers are `runtime_int`s."""

    tiles: Any
    """tiles of query rows, of all sequences"""
    splits: Any
    """programs for the keys of one tile and head"""
    rows: Any
    """b h_q s_q: rows of q, of all heads"""
    slots: Any
    """programs that the GPU runs at a time"""
    keeps_tail: Any
    """constexpr: rows of out after the last sequence stay as they are"""
    fair: Any
    """constexpr: a short sequence has fewer parts than there are"""
    word: Any
    """constexpr: bytes of 8-bit values that are read at once"""
    converts: Any
    """constexpr: the GPU has an instruction that converts 8-bit numbers"""
    slices: Any
    """constexpr: of a tile's keys, each a warp's own, or 1"""


@triton.jit
def _rows(x, SLICES: tl.constexpr):
    """[block_q] as it broadcasts to tiles: [block_q, 1], or [1, block_q] where tiles have slices."""
    return x[:, None] if SLICES == 1 else x[None, :]


@triton.jit
def _nothing_yet(split, shape):
    """Sums [block_q, d_v], largest scores and sums of weights [block_q] before the first key."""
    if split.slices > 1:
        return nothing_yet(shape, split.word, split.slices)
    else:
        row_max = tl.full([shape.BLOCK_Q], float("-inf"), tl.float32)
        row_sum = tl.zeros([shape.BLOCK_Q], tl.float32)
        return tl.zeros([shape.BLOCK_Q, shape.BLOCK_DV], tl.float32), row_max, row_sum


@triton.jit
def _weighted(acc, p, alpha, v_tile, start, kv, args, shape):
    """acc alpha + p v, of one tile of keys."""
    p = p.to(v_tile.dtype)
    if kv.descale is not None and kv.descale.v.blocked:
        part = tl.dot(p, v_tile, input_precision=shape.PRECISION)
        return acc * alpha[:, None] + part * factor_at(kv.descale.v, args.b, kv.h, start)
    else:
        return tl.dot(p, v_tile, acc * alpha[:, None], input_precision=shape.PRECISION)


@triton.jit
def _step(acc, row_max, row_sum, page, start, q_tiles, kv, q_idx, args, shape, MASKED: tl.constexpr):
    """One tile of keys, in `page`. acc [block_q, d_v], row_max [block_q] in units of scores, row_sum [block_q], and the
    pages of the next tile, which are read so early that its keys can be fetched ahead."""
    q_tile, q_rest = q_tiles
    if kv.slices > 1:
        return slices_step(acc, row_max, row_sum, page, start, q_tile, kv, q_idx, args, shape, MASKED)
    else:
        following = pages_of(kv, start + shape.BLOCK_K, shape.BLOCK_K)
        # [block_k, d]
        k_tile = load_rows(kv.k, page, kv, start, shape.BLOCK_K, shape.D, shape.BLOCK_D)
        # [block_q, block_k]
        qk = tl.dot(q_tile, tl.trans(widened(k_tile, q_tile.dtype)), input_precision=shape.PRECISION)
        if shape.REST > 0:
            # [block_k, rest]
            k_rest = load_rows(kv.k, page, kv, start, shape.BLOCK_K, shape.D, shape.REST, shape.BLOCK_D)
            qk = tl.dot(q_rest, tl.trans(k_rest), qk, input_precision=shape.PRECISION)
        if kv.descale is not None:
            qk *= factor_of_block(kv.descale.k, args.b, kv.h, start)
        x = masked_scores(qk, args, q_idx, start + tl.arange(0, shape.BLOCK_K)[None, :], MASKED)
        p, alpha, row_max, row_sum = online_softmax(x, row_max, row_sum, args.score)
        # [block_k, d_v]
        v_tile = k_tile if kv.v is None else load_rows(kv.v, page, kv, start, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV)
        v_tile = widened(v_tile, q_tile.dtype)
        acc = _weighted(acc, p, alpha, v_tile, start, kv, args, shape)
        return acc, row_max, row_sum, following


@triton.jit
def _query_tiles(offset, live, shape):
    """Rows of q at `offset` [block_q, 1], and their columns after the first BLOCK_D, or the same again."""
    columns = tl.arange(0, shape.BLOCK_D)[None, :]
    q_tile = tl.load(offset + columns, mask=live & (columns < shape.D), other=0.0)
    if shape.REST > 0:
        columns = shape.BLOCK_D + tl.arange(0, shape.REST)[None, :]
        return q_tile, tl.load(offset + columns, mask=live & (columns < shape.D), other=0.0)
    else:
        return q_tile, q_tile  # a tuple from a function holds no None on Triton 3.6


@triton.jit
def _store_nothing(x, offset, there):
    """-inf [block_q] for rows without a visible key in this part, if x is asked for."""
    if x is not None:
        tl.store(x + offset, tl.full(offset.shape, float("-inf"), tl.float32), mask=there)


@triton.jit
def _written(split, q_idx, live, there):
    """[block_q]: which rows of out are written."""
    if split.keeps_tail:
        return live
    return q_idx < there


@triton.jit(do_not_specialize=["h_q", "s_q"])
def paged_kernel(
    q, k, v, out, lse, max_scores, sink, used_q, used_k, pages, split, mask, score, descale, h_q, s_q, scale, shape,
    PAGE: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr, EDGES: tl.constexpr,
    N: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """One tile of flat query rows against one part of its keys, for one key head.

    out: TensorArgs, lse and max_scores (b, h_q, s_q) or None; SPLIT: float32 (splits, b, s_q, h_q, d_v) and (splits, b,
    s_q, h_q), each part's own softmax. EDGES: tiles inside of the mask's core are plain ones.
    BITS: of lengths, by which sequences are put in order, or 0.
    """
    heads = h_q // shape.GROUP
    head_k = tl.program_id(0) % heads
    tile = tl.program_id(0) // heads % plain_int(split.tiles)
    part = tl.program_id(0) // heads // plain_int(split.tiles)
    count = plain_int(pages.sequences)
    number, start_q = sequence_of(used_q, tile, s_q, count, shape, N)
    if BITS > 0:
        number = by_length(number, used_k, pages, N, BITS)
    batch, first_q, there, rows = extent(used_q, number, s_q)
    b = tl.minimum(number, count - 1)
    _, _, _, keys = extent(used_k, b, plain_int(pages.capacity))
    off = keys - rows
    # [block_q]
    flat = start_q + tl.arange(0, shape.BLOCK_Q)
    q_idx = flat // shape.GROUP
    h = head_k * shape.GROUP + flat % shape.GROUP
    live = q_idx < rows
    lo, hi, core_lo, core_hi = mask.keys_of(mask.data, b, q_idx, off)
    first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, live, keys, shape.BLOCK_K)
    if SPLIT:
        parts = plain_int(split.splits)
        offset = part.to(tl.int64) * plain_int(split.rows) + (batch * s_q + first_q + q_idx) * h_q + h
        if split.fair:
            portion = share(mask, used_q, used_k, heads, s_q, pages, split, shape, N, LEAST)
            parts = tl.minimum(parts, tl.maximum(tl.cdiv((end - first) // shape.BLOCK_K, portion), 1))
        if part >= parts:
            _store_nothing(lse, offset, q_idx < there)
            _store_nothing(max_scores, offset, q_idx < there)
            return
        tiles = (end - first) // shape.BLOCK_K
        end = first + (part + 1) * tiles // parts * shape.BLOCK_K
        first += part * tiles // parts * shape.BLOCK_K
    else:
        offset = (batch.to(tl.int64) * h_q + h) * s_q + first_q + q_idx

    # [block_q, d]
    q_tile, q_rest = _query_tiles(head(q, batch, h, first_q + q_idx)[:, None], live[:, None], shape)
    table = pages.table + b.to(tl.int64) * plain_int(pages.stride)
    kv = PagedHead(k, v, table, pages, head_k, keys, descale, split.word, split.converts, PAGE, split.slices)
    q_tile, scale = queries(q_tile, scale, descale, b, head_k, q_idx)
    if split.slices > 1:
        q_tile, scale = sliced(q_tile, split.slices), turned(scale)
    acc, row_max, row_sum = _nothing_yet(split, shape)
    args = ScoreArgs(b, _rows(h, split.slices), rows, keys, off, scale, mask, score, None)
    row_idx, q_tiles = _rows(q_idx, split.slices), (q_tile, q_rest)

    page = pages_of(kv, first, shape.BLOCK_K)
    if EDGES:
        core = tl.minimum(tl.maximum(core, first), end)
        core_end = tl.minimum(tl.maximum(core_end, core), end)
        for start in range(first, core, shape.BLOCK_K):
            acc, row_max, row_sum, page = _step(
                acc, row_max, row_sum, page, start, q_tiles, kv, row_idx, args, shape, True
            )
        for start in range(core, core_end, shape.BLOCK_K):
            acc, row_max, row_sum, page = _step(
                acc, row_max, row_sum, page, start, q_tiles, kv, row_idx, args, shape, False
            )
        first = core_end
    for start in range(first, end, shape.BLOCK_K):
        acc, row_max, row_sum, page = _step(acc, row_max, row_sum, page, start, q_tiles, kv, row_idx, args, shape, True)

    acc, row_max, row_sum = of_all_slices(acc, row_max, row_sum, score, split.word, split.slices)
    store_largest(max_scores, offset, q_idx < there, row_max, row_sum, score, live)
    named = live & (row_sum != 0)  # rows that see a key; a NaN counts as one, and stays one
    acc, row_max, row_sum = add_sink(acc, row_max, row_sum, score, sink, h, part == 0)
    seen = live & (row_sum != 0)
    acc = values(acc, descale, b, head_k)
    acc = tl.where(named[:, None], acc / tl.where(named, row_sum, 1.0)[:, None], 0.0)
    columns = tl.arange(0, shape.BLOCK_DV)[None, :]
    stored = _written(split, q_idx, live, there)[:, None] & (columns < shape.D_V)
    if SPLIT:
        tl.store(out + offset[:, None] * shape.D_V + columns, acc, mask=stored)
    else:
        out_pointers = head(out, batch, h, first_q + q_idx)[:, None] + columns
        tl.store(out_pointers, acc.to(out.ptr.dtype.element_ty), mask=stored)
    if lse is not None:
        row_lse = tl.where(seen, log_sum(row_max, tl.where(seen, row_sum, 1.0), score, sink), float("-inf"))
        tl.store(lse + offset, row_lse, mask=q_idx < there)
