"""New keys and values into the pages of a cache: one program for each new row, with all its heads."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.records import plain_int


@triton.jit
def _places(x, outer, row, h, column):
    """Pointers [heads, columns] to one row of all heads of (outer, h, rows, d)."""
    base = outer.to(tl.int64) * plain_int(x.stride_b) + row.to(tl.int64) * plain_int(x.stride_s)
    return x.ptr + (base + h[:, None].to(tl.int64) * plain_int(x.stride_h)) * x.unit + column[None, :]


@triton.jit
def _copy(cache, new, page, row, batch, i, h, column, there):
    x = tl.load(_places(new, batch, i, h, column), mask=there)
    tl.store(_places(cache, page, row, h, column), x, mask=there)


@triton.jit(do_not_specialize=["h_k", "s", "positions"])
def append_kernel(
    k_new, v_new, k_cache, v_cache, starts, used, pages, cos, sin, h_k, s, positions,
    PAGE: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """starts: where each sequence of new rows begins, (sequences + 1,), or None: all have s. The rest has no page."""
    token = tl.program_id(0)
    count = plain_int(pages.sequences)
    if starts is None:
        b = token // s
        batch = b
        i = token % s
        first = token * 0
        named = token >= 0
    else:
        # [N]
        n = tl.arange(0, N)
        start = tl.minimum(tl.maximum(tl.load(starts + tl.minimum(n, count)), -1), 1 << 30).to(tl.int32)
        earlier = (n <= count) & (start <= token)
        b = tl.sum(earlier.to(tl.int32), 0) - 1
        batch = b * 0
        first = tl.sum(tl.where(n == b, start, 0), 0)
        i = token
        # Broken offsets name no sequence.
        named = (first >= 0) & (first <= token) & (token < tl.sum(tl.where(n == b + 1, start, 0), 0))
    there = named & (b >= 0) & (b < count)
    b = tl.minimum(tl.maximum(b, 0), count - 1)
    length = tl.load(used + b).to(tl.int64)
    there = there & (length >= 0) & (length + i - first < plain_int(pages.capacity))
    position = tl.where(there, length + i - first, 0).to(tl.int32)
    entry = pages.table + b.to(tl.int64) * plain_int(pages.stride) + position // PAGE
    page = tl.load(entry, mask=there, other=-1)
    there = there & (page >= 0) & (page < plain_int(pages.count))
    row = position % PAGE
    # [heads, columns]
    h = tl.arange(0, BLOCK_H)
    live = (h < tl.where(there, h_k, 0))[:, None]
    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_P)
        one = pair * 2 if INTERLEAVED else pair
        two = one + 1 if INTERLEAVED else one + PAIRS
        turning = live & (pair < PAIRS)[None, :]
        angle = tl.minimum(position, positions - 1).to(tl.int64) * PAIRS + pair
        c = tl.load(cos + angle, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
        t = tl.load(sin + angle, mask=pair < PAIRS, other=0.0).to(tl.float32)[None, :]
        x = tl.load(_places(k_new, batch, i, h, one), mask=turning, other=0.0).to(tl.float32)
        y = tl.load(_places(k_new, batch, i, h, two), mask=turning, other=0.0).to(tl.float32)
        dtype = k_cache.ptr.dtype.element_ty
        tl.store(_places(k_cache, page, row, h, one), (x * c - y * t).to(dtype), mask=turning)
        tl.store(_places(k_cache, page, row, h, two), (y * c + x * t).to(dtype), mask=turning)
    column = tl.arange(0, BLOCK_D)
    if 2 * PAIRS < D:
        _copy(k_cache, k_new, page, row, batch, i, h, column, live & ((column >= 2 * PAIRS) & (column < D))[None, :])
    column = tl.arange(0, BLOCK_DV)
    _copy(v_cache, v_new, page, row, batch, i, h, column, live & (column < D_V)[None, :])
