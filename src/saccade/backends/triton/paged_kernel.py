"""Paged caches: the forward over pages, with the keys of a sequence split into parts where that fills the GPU.

The query rows of all heads that share keys are rows of one tile: row `i` of member `m` is flat row `i * GROUP + m`.
Tiles of keys are visited from the first to the last, so that a row's sums have the same order in every call. What a
program has to know of all sequences it reads at once, N of them: after a loop or a branch Triton 3.9 forgets which
addresses are aligned, and fetches nothing ahead.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.aggregate import aggregate
from saccade.backends.device.descale import factor_at
from saccade.backends.device.eight_bits import (
    byte_of,
    factor_of_block,
    in_words,
    queries,
    values,
    widened,
)
from saccade.backends.device.q_block import ScoreArgs, masked_scores, online_softmax
from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import extent
from saccade.backends.device.tiles import head, in_units, log_sum, places, store_largest, tile_range
from saccade.backends.triton.paged_schedule import by_length, sequence_of, share

AHEAD = tl.constexpr(16)
"""Rows of a page from which the numbers of the pages of a tile, if it has several, are fetched ahead."""


class PageTable(NamedTuple):
    """Which pages belong to which sequence; numbers are `runtime_int`s."""

    table: Any
    """int (sequences, …)"""
    stride: Any
    """of a row of the table"""
    sequences: Any
    capacity: Any
    """keys that a sequence has room for"""
    count: Any
    """pages of the cache"""


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


@aggregate
class PagedHead:
    """One key head of a sequence in pages."""

    k: Any
    v: Any
    """TensorArgs of the caches"""
    table: Any
    """pointer to the sequence's row of the page table"""
    pages: Any
    """PageTable"""
    h: Any
    keys: Any
    """keys in use"""
    descale: Any
    """DeviceDescale of 8-bit keys, or None"""
    word: Any
    """constexpr: see `SplitArgs`"""


@triton.jit
def _known(page, pages):
    """A page of the cache: the nearest, if there is no such page."""
    return tl.minimum(tl.maximum(page, 0), plain_int(pages.count) - 1)


@triton.constexpr_function
def _in_one_page(PAGE, BLOCK_K):
    """Whether the keys of a tile lie in one page."""
    return PAGE % BLOCK_K == 0


@triton.jit
def _pages_of(kv, start, PAGE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The pages of keys [start, start + BLOCK_K): one of all, or [BLOCK_K]; 0 from `keys` on. Not `_known` yet if they
    are to be fetched a step ahead: Triton does so with what comes from a load, and with nothing else. Where that pays
    and where it costs was measured (docs/findings/triton.md).
    """
    # [1] or [BLOCK_K]
    kv_idx = start if _in_one_page(PAGE, BLOCK_K) else start + tl.arange(0, BLOCK_K)
    page = tl.load(kv.table + kv_idx // PAGE, mask=kv_idx < kv.keys, other=0)
    if PAGE < AHEAD or _in_one_page(PAGE, BLOCK_K):
        page = _known(page, kv.pages)
    return page


@triton.jit
def _load(x, page, kv, start, PAGE: tl.constexpr, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [start, start + BLOCK_K) of the caches k or v, [BLOCK_K, BLOCK_D]; zero from `keys` on and beyond column
    D."""
    page = _known(page, kv.pages)
    # [BLOCK_K]
    kv_idx = start + tl.arange(0, BLOCK_K)
    if _in_one_page(PAGE, BLOCK_K):
        # [BLOCK_K, BLOCK_D]
        place = places(x, head(x, page.to(tl.int64), kv.h), start % PAGE, BLOCK_K, BLOCK_D)
    else:
        row = page.to(tl.int64) * plain_int(x.stride_b) + (kv_idx % PAGE) * plain_int(x.stride_s).to(tl.int64)
        base = x.ptr + kv.h * plain_int(x.stride_h).to(tl.int64) * x.unit
        place = base + (row * x.unit)[:, None] + tl.arange(0, BLOCK_D)[None, :]
    there = (kv_idx < kv.keys)[:, None]
    if D < BLOCK_D:
        there = there & (tl.arange(0, BLOCK_D) < D)[None, :]
    return tl.load(place, mask=there, other=0.0)


@triton.jit
def _no_sums(shape, WORD: tl.constexpr):
    """Zeros [block_q, d_v] or, where values are read in words of several, as many [block_q, d_v / WORD]: element i of
    each is that of byte i of a word."""
    zeros = tl.zeros([shape.BLOCK_Q, shape.BLOCK_DV // WORD], tl.float32)
    if WORD == 1:
        return zeros
    elif WORD == 2:
        return zeros, zeros
    else:
        return zeros, zeros, zeros, zeros


@triton.jit
def _whole(acc, shape, WORD: tl.constexpr):
    """The sums [block_q, d_v] of all bytes."""
    if WORD == 1:
        return acc
    elif WORD == 2:
        return tl.reshape(tl.join(acc[0], acc[1]), [shape.BLOCK_Q, shape.BLOCK_DV])
    else:
        pairs = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
        return tl.reshape(pairs, [shape.BLOCK_Q, shape.BLOCK_DV])


@triton.jit
def _added(acc, alpha, p, v_tile, start, kv, args, shape):
    """acc alpha + p v"""
    if kv.descale is not None and kv.descale.v.blocked:
        part = tl.dot(p, v_tile, input_precision=shape.PRECISION)
        return acc * alpha + part * factor_at(kv.descale.v, args.b, kv.h, start)
    else:
        return tl.dot(p, v_tile, acc * alpha, input_precision=shape.PRECISION)


@triton.jit
def _weighted(
    acc, p, alpha, page, start, kv, dtype: tl.constexpr, args, shape, PAGE: tl.constexpr
):  # fmt: skip
    """acc alpha + p v, of one tile of keys; products take `dtype`.

    What products on 16 rows take of v are keys side by side. Bytes would be read one by one from shared memory. Words
    are read as they lie, and the same byte of two of them is a pair of keys.
    """
    alpha = alpha[:, None]
    # [block_k, d_v]
    if kv.word == 1:
        v_tile = widened(_load(kv.v, page, kv, start, PAGE, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV), dtype)
        return _added(acc, alpha, p.to(v_tile.dtype), v_tile, start, kv, args, shape)
    else:
        v = in_words(kv.v, kv.word)
        # [block_k, d_v / WORD]
        words = _load(v, page, kv, start, PAGE, shape.BLOCK_K, shape.D_V // kv.word, shape.BLOCK_DV // kv.word)
        p = p.to(dtype)
        sums = ()
        for i in tl.static_range(kv.word):
            v_tile = widened(byte_of(words, i, kv.v.ptr.dtype.element_ty), dtype)
            sums = sums + (_added(acc[i], alpha, p, v_tile, start, kv, args, shape),)  # noqa: RUF005 - Triton's
        return sums


@triton.jit
def _step(
    acc, row_max, row_sum, page, start, q_tile, kv, q_idx, args, shape, PAGE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """One tile of keys, in `page`. acc [block_q, d_v] (see `_no_sums`), row_max [block_q] in units of scores, row_sum
    [block_q], and the pages of the next tile, which are read so early that its keys can be fetched ahead."""
    following = _pages_of(kv, start + shape.BLOCK_K, PAGE, shape.BLOCK_K)
    # [block_k, d]
    k_tile = _load(kv.k, page, kv, start, PAGE, shape.BLOCK_K, shape.D, shape.BLOCK_D)
    # [block_q, block_k]
    qk = tl.dot(q_tile, tl.trans(widened(k_tile, q_tile.dtype)), input_precision=shape.PRECISION)
    if kv.descale is not None:
        qk *= factor_of_block(kv.descale.k, args.b, kv.h, start)
    x = masked_scores(qk, args, q_idx, start + tl.arange(0, shape.BLOCK_K)[None, :], MASKED)
    p, alpha, row_max, row_sum = online_softmax(x, row_max, row_sum, args.score)
    acc = _weighted(acc, p, alpha, page, start, kv, q_tile.dtype, args, shape, PAGE)
    return acc, row_max, row_sum, following


@triton.jit
def _store_nothing(x, place, there):
    """-inf [block_q] for rows without a visible key in this part, if x is asked for."""
    if x is not None:
        tl.store(x + place, tl.full(place.shape, float("-inf"), tl.float32), mask=there)


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
    s_q, h_q), each part's own softmax. EDGES: tiles inside of the mask's core are plain ones; for tiles of many rows.
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
        place = part.to(tl.int64) * plain_int(split.rows) + (batch * s_q + first_q + q_idx) * h_q + h
        if split.fair:
            portion = share(mask, used_q, used_k, heads, s_q, pages, split, shape, N, LEAST)
            parts = tl.minimum(parts, tl.maximum(tl.cdiv((end - first) // shape.BLOCK_K, portion), 1))
        if part >= parts:
            _store_nothing(lse, place, q_idx < there)
            _store_nothing(max_scores, place, q_idx < there)
            return
        tiles = (end - first) // shape.BLOCK_K
        end = first + (part + 1) * tiles // parts * shape.BLOCK_K
        first += part * tiles // parts * shape.BLOCK_K
    else:
        place = (batch.to(tl.int64) * h_q + h) * s_q + first_q + q_idx

    # [block_q, d]
    columns = tl.arange(0, shape.BLOCK_D)[None, :]
    q_place = head(q, batch, h, first_q + q_idx)[:, None] + columns
    q_tile = tl.load(q_place, mask=live[:, None] & (columns < shape.D), other=0.0)
    table = pages.table + b.to(tl.int64) * plain_int(pages.stride)
    kv = PagedHead(k, v, table, pages, head_k, keys, descale, split.word)
    q_tile, scale = queries(q_tile, scale, descale, b, head_k, q_idx)
    args = ScoreArgs(b, h[:, None], rows, keys, off, scale, mask, score, None)
    acc = _no_sums(shape, split.word)
    row_max = tl.full([shape.BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([shape.BLOCK_Q], tl.float32)
    if sink is not None and max_scores is None:  # one more column, before all others, in the first part alone
        row_max = in_units(tl.load(sink + h).to(tl.float32), score)
        row_max = tl.where(part == 0, row_max, float("-inf"))
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)

    page = _pages_of(kv, first, PAGE, shape.BLOCK_K)
    if EDGES:
        core = tl.minimum(tl.maximum(core, first), end)
        core_end = tl.minimum(tl.maximum(core_end, core), end)
        for start in range(first, core, shape.BLOCK_K):
            acc, row_max, row_sum, page = _step(
                acc, row_max, row_sum, page, start, q_tile, kv, q_idx[:, None], args, shape, PAGE, True
            )
        for start in range(core, core_end, shape.BLOCK_K):
            acc, row_max, row_sum, page = _step(
                acc, row_max, row_sum, page, start, q_tile, kv, q_idx[:, None], args, shape, PAGE, False
            )
        first = core_end
    for start in range(first, end, shape.BLOCK_K):
        acc, row_max, row_sum, page = _step(
            acc, row_max, row_sum, page, start, q_tile, kv, q_idx[:, None], args, shape, PAGE, True
        )

    acc = _whole(acc, shape, split.word)
    acc, row_max, row_sum = store_largest(
        max_scores, place, q_idx < there, acc, row_max, row_sum, score, live, sink, h, part == 0
    )
    seen = live & (row_sum != 0)  # a NaN counts as seen, and stays one
    acc = values(acc, descale, b, head_k)
    acc = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    columns = tl.arange(0, shape.BLOCK_DV)[None, :]
    stored = _written(split, q_idx, live, there)[:, None] & (columns < shape.D_V)
    if SPLIT:
        tl.store(out + place[:, None] * shape.D_V + columns, acc, mask=stored)
    else:
        out_place = head(out, batch, h, first_q + q_idx)[:, None] + columns
        tl.store(out_place, acc.to(out.ptr.dtype.element_ty), mask=stored)
    if lse is not None:
        row_lse = tl.where(seen, log_sum(row_max, tl.where(seen, row_sum, 1.0), score), float("-inf"))
        tl.store(lse + place, row_lse, mask=q_idx < there)


@triton.jit(do_not_specialize=["rows", "splits", "h_q", "s_q"])
def merge_kernel(
    parts, part_lse, part_max, out, lse, max_scores, end, rows, splits, h_q, s_q, D_V: tl.constexpr,
    BLOCK_DV: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`lse = log sum_i exp(lse_i)`, `out = sum_i exp(lse_i - lse) out_i` of one row's parts: `saccade.merge`; and the
    largest of their max_scores.

    parts: float32 (splits, b, s_q, h_q, d_v), not written where the part's LSE, (splits, b, s_q, h_q), is -inf. end:
    pointer to the number of rows whose out is written, the first ones, or None: all.
    """
    place = tl.program_id(0).to(tl.int64)
    # [SPLITS]
    i = tl.arange(0, SPLITS)
    lses = tl.load(part_lse + i * rows.to(tl.int64) + place, mask=i < splits, other=float("-inf"))
    top = tl.max(lses, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp(lses - top), 0)
    empty = total == 0
    total = tl.where(empty, 1.0, total)
    # [BLOCK_DV]
    column = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for at in range(0, splits, CHUNK):
        # [CHUNK]
        number = at + tl.arange(0, CHUNK)
        part = number * rows.to(tl.int64) + place
        weight = tl.exp(tl.load(part_lse + part, mask=number < splits, other=float("-inf")) - top) / total
        there = (weight != 0)[:, None] & (column < D_V)[None, :]
        acc += tl.sum(
            tl.load(parts + part[:, None] * D_V + column[None, :], mask=there, other=0.0) * weight[:, None], 0
        )
    h = place % h_q
    row = place // h_q % s_q
    batch = place // h_q // s_q
    row_place = (batch * h_q + h) * s_q + row
    columns = D_V if end is None else tl.where(row < tl.load(end), D_V, 0)
    tl.store(head(out, batch, h, row) + column, acc.to(out.ptr.dtype.element_ty), mask=column < columns)
    if lse is not None:
        tl.store(lse + row_place, tl.where(empty, float("-inf"), top + tl.log(total)))
    if max_scores is not None:
        tops = tl.load(part_max + i * rows.to(tl.int64) + place, mask=i < splits, other=float("-inf"))
        # tl.max leaves a NaN out.
        broken = tl.max((tops != tops).to(tl.int32), 0) > 0
        tl.store(max_scores + row_place, tl.where(broken, float("nan"), tl.max(tops, 0)))
