"""Tiles of q, k and v, and the ranges of tiles that a mask has programs visit."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.positions import extent
from saccade.backends.device.records import FAR, LOG2E, plain_int, sees

HIGHEST = tl.constexpr(3.4028234663852886e38)
"""Of float32."""


@triton.jit
def used_length(used, b, s):
    """How many of `s` rows batch row `b` uses."""
    _, _, _, rows = extent(used, b, s)
    return rows


@triton.jit
def head(x, b, h, first=0):
    """Pointers to rows `first` of heads h of batch row b; 64-bit, as tensors may hold more than 2^31 elements."""
    stride_b = plain_int(x.stride_b).to(tl.int64)
    stride_h = plain_int(x.stride_h).to(tl.int64)
    stride_s = plain_int(x.stride_s).to(tl.int64)
    return x.ptr + (b * stride_b + h * stride_h + stride_s * first) * x.unit


@triton.jit
def pointers(x, base, start, N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [N, BLOCK_D] to rows [start, start + N) of one head."""
    n = tl.arange(0, N)
    d = tl.arange(0, BLOCK_D)
    stride = plain_int(x.stride_s)
    if x.wide:
        stride = stride.to(tl.int64)
    # The start is a scalar added last, so that the rest is loop-invariant.
    return base + start * stride * x.unit + (n[:, None] * (stride * x.unit) + d[None, :])


@triton.jit
def load_tile(
    x, base, start, stop, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK: tl.constexpr, first_column=0
):
    """Rows [start, start + N) of one head, zero from `stop` on (if CHECK) and beyond column D. With D > BLOCK_D the
    tile has BLOCK_D of the columns, from the first one on, where `base` is."""
    # [N, BLOCK_D]
    offset = pointers(x, base, start, N, BLOCK_D)
    row = (start + tl.arange(0, N) < stop)[:, None]
    column = (first_column + tl.arange(0, BLOCK_D) < D)[None, :]
    if CHECK and D % BLOCK_D != 0:
        return tl.load(offset, mask=row & column, other=0.0)
    elif CHECK:
        return tl.load(offset, mask=row, other=0.0)
    elif D % BLOCK_D != 0:
        return tl.load(offset, mask=column, other=0.0)
    else:
        return tl.load(offset)


@triton.jit
def store_tile(x, base, start, stop, value, N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, first_column=0):
    """Writes rows [start, min(start + N, stop)) of one head, columns below D, as `load_tile` reads them."""
    row = (start + tl.arange(0, N) < stop)[:, None]
    column = (first_column + tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(pointers(x, base, start, N, BLOCK_D), value.to(x.ptr.dtype.element_ty), mask=row & column)


@triton.jit
def tile_range(lo, hi, core_lo, core_hi, live, length, BLOCK: tl.constexpr):
    """The tiles that a block of rows visits, from its rows' hulls and cores: starts, multiples of BLOCK.

    Returns first, core, core_end, end: [first, core) and [core_end, end) need the mask, [core, core_end) does not.
    `live` says which rows count; `length` is the number of keys.
    """
    lo = tl.maximum(lo, 0)
    hi = tl.minimum(hi, length)
    seeing = live & (hi > lo)
    first = tl.min(tl.where(seeing, lo, FAR)) // BLOCK * BLOCK
    end = tl.cdiv(tl.max(tl.where(seeing, hi, 0)), BLOCK) * BLOCK
    first = tl.minimum(first, end)
    core = tl.max(tl.where(live, tl.maximum(core_lo, 0), 0))
    core_end = tl.min(tl.where(live, tl.minimum(core_hi, length), FAR))
    # Whole tiles only; where there is none, everything is in the first part.
    core = tl.minimum(tl.maximum(tl.cdiv(core, BLOCK) * BLOCK, first), end)
    core_end = tl.minimum(core_end // BLOCK * BLOCK, end)
    nothing = core_end <= core
    return first, tl.where(nothing, end, core), tl.where(nothing, end, core_end), end


@triton.jit
def visible(mask, b, h, q_idx, kv_idx, rows, keys, off):
    """One tile of the mask: both rows and keys in use, and seeing one another. q_idx and kv_idx broadcast. Where the
    first dimension is one of rows, an exact mask leaves a comparison or two with what each of them computes once."""
    if mask.exact and q_idx.shape[0] > 1:
        lo, hi, _, _ = mask.keys_of(mask.data, b, q_idx, off)
        seen = (q_idx < rows) & (kv_idx < tl.minimum(hi, keys))
        return seen & (kv_idx >= lo) if mask.has_lower_bound else seen
    else:
        return (q_idx < rows) & (kv_idx < keys) & sees(mask, b, h, q_idx, kv_idx, off)


@triton.jit
def logits(qk, score, scale, b, h, q_idx, kv_idx):
    """Scores after the modification, in units of their own: natural ones, or of log2 where nothing modifies them."""
    if score.identity:
        return qk * (scale * LOG2E)
    else:
        return score.apply(score.data, qk * scale, b, h, q_idx, kv_idx)


@triton.jit
def power(x, score):
    """exp(x) of differences of scores, in their units.

    With a modification the difference comes before the factor: functions mask keys by -1e9, where a product is rounded
    to multiples of 128, and a multiply-add that subtracts the rounded maximum of all from it leaves up to 2^64.
    """
    if score.identity:
        return tl.exp2(x)
    else:
        return tl.exp2(x * LOG2E)


@triton.jit
def in_units(x, score):
    """A natural logarithm in the units of scores."""
    if score.identity:
        return x * LOG2E
    else:
        return x


@triton.jit
def sink_column(sink, h, score):
    """A head's sink in the units of scores."""
    return finite(in_units(tl.load(sink + h).to(tl.float32), score))


@triton.jit
def finite(x):
    """HIGHEST for +inf, which a sink may be, and the LSE with it: a difference of two would be NaN."""
    return tl.where(x == float("inf"), HIGHEST, x)


@triton.jit
def infinite(lse, top):
    """+inf for an LSE whose `top` is HIGHEST, the inverse of `finite`; what is NaN stays NaN."""
    return tl.where(top == HIGHEST, lse + float("inf"), lse)


@triton.jit
def log_sum(top, total, score, sink):
    """top + log(total), natural; top is in the units of scores, and the sink's, if there is one."""
    lse = (top + tl.log2(total)) / LOG2E if score.identity else top + tl.log2(total) / LOG2E
    return lse if sink is None else infinite(lse, top)


@triton.jit
def natural(x, score):
    """The inverse of `in_units`."""
    if score.identity:
        return x / LOG2E
    else:
        return x


@triton.jit
def largest(row_max, row_sum, live):
    """max_scores [block_q], -inf where a row sees nothing; from row_max, natural, which leaves NaN out, and row_sum,
    which does not. Neither holds the sink."""
    seen = live & (row_sum != 0)
    return tl.where(seen, tl.where((row_sum != row_sum) & (row_max < float("inf")), row_sum, row_max), float("-inf"))


@triton.jit
def store_largest(max_scores, offset, there, row_max, row_sum, score, live):
    """Writes max_scores, if they are asked for: the maxima of keys alone, before `add_sink`."""
    if max_scores is not None:
        tl.store(max_scores + offset, largest(natural(row_max, score), row_sum, live), mask=there)


@triton.jit
def add_sink(acc, row_max, row_sum, score, sink, h, carries):
    """acc [block_q, d_v], row_max and row_sum [block_q] with the sink, if there is one and this part `carries` it.

    It comes after all keys: beside a large sink, weights of keys would be too small for 8 bits."""
    if sink is not None:
        # [block_q]
        column = tl.where(carries, tl.zeros_like(row_max) + sink_column(sink, h, score), float("-inf"))
        new_max = tl.maximum(row_max, column)
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        alpha = power(row_max - shift, score)
        acc *= alpha[:, None]
        row_sum = row_sum * alpha + power(column - shift, score)
        row_max = new_max
    return acc, row_max, row_sum
