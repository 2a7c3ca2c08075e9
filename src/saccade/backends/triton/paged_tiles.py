"""Few rows against 8-bit pages: each warp has keys of its own.

A tile is [slices, keys, rows]: a warp has a slice of the keys, with a maximum and sums of its own, and nothing moves
from warp to warp before all keys have been seen. Keys come before rows, because a product on a tensor core takes 16 of
what comes first and 8 of what comes second: rows are few.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.descale import bytes_of, factor_at, factor_of_block, in_words, widened
from saccade.backends.device.q_block import masked_scores, online_softmax
from saccade.backends.device.records import aggregate, plain_int
from saccade.backends.device.tiles import head, pointers, power


@triton.jit
def turned(x):
    """A number for each row, [block_q, 1], or for all, as [1, block_q] or [1, 1]."""
    return tl.trans(x + tl.zeros([1, 1], tl.float32))


@triton.jit
def sliced(x, SLICES: tl.constexpr):
    """[block_q, d] for each slice, [slices, d, block_q]."""
    x = tl.trans(x)
    return tl.broadcast_to(x[None, :, :], [SLICES, x.shape[0], x.shape[1]])


@triton.jit
def nothing_yet(shape, WORD: tl.constexpr, SLICES: tl.constexpr):
    """Before the first key: sums, as many [slices, d_v / WORD, block_q] as a word has bytes, largest scores and sums of
    weights [slices, block_q]."""
    row_max = tl.full([SLICES, shape.BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([SLICES, shape.BLOCK_Q], tl.float32)
    zeros = tl.zeros([SLICES, shape.BLOCK_DV // WORD, shape.BLOCK_Q], tl.float32)
    if WORD == 1:
        return (zeros,), row_max, row_sum
    elif WORD == 2:
        return (zeros, zeros), row_max, row_sum
    else:
        return (zeros, zeros, zeros, zeros), row_max, row_sum


@triton.jit
def _weighted(acc, v_tile, p, alpha, start, kv, args):
    """acc alpha + v p, [slices, d_v / WORD, block_q], of v_tile [slices, d_v / WORD, keys]."""
    if kv.descale.v.blocked:
        return acc * alpha + tl.dot(v_tile, p) * factor_at(kv.descale.v, args.b, kv.h, start)
    else:
        return tl.dot(v_tile, p, acc * alpha)


@triton.jit
def _all_weighted(acc, page, p, alpha, start, kv, args, shape):
    """`_weighted` of each byte of the words in which v is read.

    Products take keys side by side. Bytes would be read one by one from shared memory; words are read as they lie, and
    the same byte of two of them is a pair of keys.
    """
    words = load_columns(
        in_words(kv.v, kv.word), page, kv, start, shape.BLOCK_K, shape.D_V // kv.word, shape.BLOCK_DV // kv.word
    )
    dtype: tl.constexpr = kv.v.ptr.dtype.element_ty
    if kv.word == 1:
        return (_weighted(acc[0], widened(words, tl.float16), p, alpha, start, kv, args),)
    else:
        sums = ()
        for i in tl.static_range(0, kv.word, 2):
            x, y = bytes_of(words, i, dtype, kv.converts)
            x = _weighted(acc[i], x, p, alpha, start, kv, args)
            y = _weighted(acc[i + 1], y, p, alpha, start, kv, args)
            sums = sums + (x, y)  # noqa: RUF005 - Triton's
        return sums


@triton.jit
def slices_step(acc, row_max, row_sum, page, start, q_tile, kv, q_idx, args, shape, MASKED: tl.constexpr):
    """One tile of keys, in `page`: what `paged_kernel._step` does. q_tile [slices, d, block_q], q_idx [1, block_q]."""
    following = pages_of(kv, start + shape.BLOCK_K, shape.BLOCK_K)
    # [slices, keys, d]
    k_tile = load_rows(kv.k, page, kv, start, shape.BLOCK_K, shape.D, shape.BLOCK_D)
    # [slices, keys, block_q]
    qk = tl.dot(widened(k_tile, tl.float16), q_tile) * factor_of_block(kv.descale.k, args.b, kv.h, start)
    kv_idx = (start + keys_of_tile(shape.BLOCK_K, kv.slices))[:, :, None]
    x = masked_scores(qk, args, q_idx, kv_idx, MASKED)
    p, alpha, row_max, row_sum = online_softmax(x, row_max, row_sum, args.score)
    acc = _all_weighted(acc, page, p.to(tl.float16), alpha[:, None, :], start, kv, args, shape)
    return acc, row_max, row_sum, following


@triton.constexpr_function
def _halvings(n):
    return n.bit_length() - 1


@triton.jit
def _sum(x):
    """[m, n], the sum over slices of [m, n, slices]. tl.sum would move one number at a time between warps."""
    m: tl.constexpr = x.shape[0]
    n: tl.constexpr = x.shape[1]
    slices: tl.constexpr = x.shape[2]
    for i in tl.static_range(_halvings(slices)):
        x, y = tl.split(tl.reshape(x, [m, n, slices >> (i + 1), 2]))
        x += y
    return tl.reshape(x, [m, n])


@triton.jit
def _whole(acc, WORD: tl.constexpr):
    """Sums [block_q, d_v, slices] of all bytes of words."""
    if WORD == 1:
        return tl.permute(acc[0], [2, 1, 0])
    elif WORD == 2:
        x = tl.permute(tl.join(acc[0], acc[1]), [2, 1, 3, 0])
        return tl.reshape(x, [x.shape[0], x.shape[1] * 2, x.shape[3]])
    else:
        x = tl.join(tl.join(acc[0], acc[2]), tl.join(acc[1], acc[3]))
        x = tl.permute(x, [2, 1, 3, 4, 0])
        return tl.reshape(x, [x.shape[0], x.shape[1] * 4, x.shape[4]])


@triton.jit
def of_all_slices(acc, row_max, row_sum, score, WORD: tl.constexpr, SLICES: tl.constexpr):
    """The sums [block_q, d_v], the largest scores and the sums of weights [block_q]; what they are where there are no
    slices."""
    if SLICES == 1:
        return acc, row_max, row_sum
    else:
        top = tl.max(row_max, 0)
        # [slices, block_q]
        factor = power(row_max - tl.where(top == float("-inf"), 0.0, top)[None, :], score)
        row_sum = tl.sum(row_sum * factor, 0)
        return _sum(_whole(acc, WORD) * tl.trans(factor)[:, None, :]), top, row_sum


# Tiles of keys and values in pages.
#
# A tile's keys are [block_k] or, where each warp has its own, [slices, block_k / slices].


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


@aggregate
class PagedHead:
    """One key head of a sequence in pages."""

    k: Any
    v: Any
    """TensorArgs of the caches; v is None where it is the first columns of k"""
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
    converts: Any
    """constexpr: see `SplitArgs`"""
    size: Any
    """constexpr: keys of a page"""
    slices: Any


@triton.jit
def _known(page, pages):
    """A page of the cache: the nearest, if there is no such page."""
    return tl.minimum(tl.maximum(page, 0), plain_int(pages.count) - 1)


@triton.constexpr_function
def _in_one_page(PAGE, KEYS):
    """Whether so many keys, the first of which is a multiple of them, lie in one page."""
    return PAGE % KEYS == 0


@triton.jit
def keys_of_tile(BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """Numbers of keys in a tile: [block_k] or [slices, block_k / slices]."""
    if SLICES == 1:
        return tl.arange(0, BLOCK_K)
    else:
        length: tl.constexpr = BLOCK_K // SLICES
        return tl.arange(0, SLICES)[:, None] * length + tl.arange(0, length)[None, :]


@triton.jit
def _first_keys(BLOCK_K: tl.constexpr, SLICES: tl.constexpr):
    """The number of the first key of a tile or, [slices, 1], of its slices."""
    if SLICES == 1:
        return 0
    else:
        return (tl.arange(0, SLICES) * (BLOCK_K // SLICES))[:, None]


@triton.jit
def pages_of(kv, start, BLOCK_K: tl.constexpr):
    """The pages of keys [start, start + BLOCK_K): one of all, [slices, 1], or one for each key; 0 from `keys` on. Not
    `_known` yet if they are to be fetched a step ahead: Triton does so with what comes from a load, and with nothing
    else. Where that pays and where it costs was measured (notes/triton.md): always where v is part of k.
    """
    whole: tl.constexpr = _in_one_page(kv.size, BLOCK_K // kv.slices)
    kv_idx = start + (_first_keys(BLOCK_K, kv.slices) if whole else keys_of_tile(BLOCK_K, kv.slices))
    page = tl.load(kv.table + kv_idx // kv.size, mask=kv_idx < kv.keys, other=0)
    if (kv.size < AHEAD and kv.v is not None) or whole:
        page = _known(page, kv.pages)
    return page


@triton.jit
def _rows(x, page, kv, start, BLOCK_K: tl.constexpr):
    """Pointers to rows [start, start + BLOCK_K) of one head of the caches k or v."""
    if _in_one_page(kv.size, BLOCK_K // kv.slices):
        first = (start + _first_keys(BLOCK_K, kv.slices)) % kv.size
        stride = plain_int(x.stride_s)
        if x.wide:
            stride = stride.to(tl.int64)
        return head(x, page.to(tl.int64), kv.h, first) + tl.arange(0, BLOCK_K // kv.slices) * (stride * x.unit)
    else:
        number = (start + keys_of_tile(BLOCK_K, kv.slices)) % kv.size
        row = page.to(tl.int64) * plain_int(x.stride_b) + number * plain_int(x.stride_s).to(tl.int64)
        return x.ptr + kv.h * plain_int(x.stride_h).to(tl.int64) * x.unit + row * x.unit


@triton.jit
def load_rows(
    x, page, kv, start, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr = 0
):  # fmt: skip
    """Rows [start, start + BLOCK_K) of the caches k or v, and columns from FIRST on, [block_k, BLOCK_D] or [slices,
    block_k / slices, BLOCK_D]; zero from `keys` on and beyond column D."""
    there = tl.expand_dims(start + keys_of_tile(BLOCK_K, kv.slices) < kv.keys, -1)
    page = _known(page, kv.pages)
    d = tl.arange(0, BLOCK_D)
    if kv.slices == 1 and _in_one_page(kv.size, BLOCK_K):
        at = pointers(x, head(x, page.to(tl.int64), kv.h), start % kv.size, BLOCK_K, BLOCK_D)
    else:
        at = tl.expand_dims(_rows(x, page, kv, start, BLOCK_K), -1) + d
    if D < FIRST + BLOCK_D:
        there = there & (d + FIRST < D)
    return tl.load(at + FIRST, mask=there, other=0.0)


@triton.jit
def load_columns(x, page, kv, start, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The same numbers as [slices, BLOCK_D, block_k / slices]. A tile that is turned after it was loaded is copied to
    shared memory 4 bytes at a time."""
    there = (start + keys_of_tile(BLOCK_K, kv.slices) < kv.keys)[:, None, :]
    page = _known(page, kv.pages)
    d = tl.arange(0, BLOCK_D)[:, None]
    at = _rows(x, page, kv, start, BLOCK_K)[:, None, :] + d
    if D < BLOCK_D:
        there = there & (d < D)
    return tl.load(at, mask=there, other=0.0)
