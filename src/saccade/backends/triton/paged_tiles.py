"""Tiles of keys and values in pages.

A tile's keys are [block_k] or, where each warp has its own, [slices, block_k / slices].
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.records import aggregate, plain_int
from saccade.backends.device.tiles import head, pointers

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
    by_slot: Any
    """constexpr: see `SplitArgs`"""


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
    if ((kv.size < AHEAD and kv.v is not None) or whole) and not kv.by_slot:
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
def _there(page, kv, start, BLOCK_K: tl.constexpr):
    """Which keys from `start` on there are: those in use, and of slots those that the cache has."""
    there = start + keys_of_tile(BLOCK_K, kv.slices) < kv.keys
    return there & (page == _known(page, kv.pages)) if kv.by_slot else there


@triton.jit
def load_rows(
    x, page, kv, start, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, FIRST: tl.constexpr = 0
):  # fmt: skip
    """Rows [start, start + BLOCK_K) of the caches k or v, and columns from FIRST on, [block_k, BLOCK_D] or [slices,
    block_k / slices, BLOCK_D]; zero from `keys` on and beyond column D."""
    there = tl.expand_dims(_there(page, kv, start, BLOCK_K), -1)
    page = _known(page, kv.pages)
    d = tl.arange(0, BLOCK_D)
    if kv.slices == 1 and _in_one_page(kv.size, BLOCK_K):
        offset = pointers(x, head(x, page.to(tl.int64), kv.h), start % kv.size, BLOCK_K, BLOCK_D)
    else:
        offset = tl.expand_dims(_rows(x, page, kv, start, BLOCK_K), -1) + d
    if D < FIRST + BLOCK_D:
        there = there & (d + FIRST < D)
    return tl.load(offset + FIRST, mask=there, other=0.0)


@triton.jit
def load_columns(x, page, kv, start, BLOCK_K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The same numbers as [slices, BLOCK_D, block_k / slices]. A tile that is turned after it was loaded is copied to
    shared memory 4 bytes at a time."""
    there = _there(page, kv, start, BLOCK_K)[:, None, :]
    page = _known(page, kv.pages)
    d = tl.arange(0, BLOCK_D)[:, None]
    offset = _rows(x, page, kv, start, BLOCK_K)[:, None, :] + d
    if D < BLOCK_D:
        there = there & (d < D)
    return tl.load(offset, mask=there, other=0.0)
