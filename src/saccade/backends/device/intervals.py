"""Intervals of keys that the user gives, one for each query row, as kernels read them."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.backends.device.records import FAR, FARTHEST, FLAGS, plain_int, runtime_int


class Bound(NamedTuple):
    """One end of each row's interval. Strides and lengths are `runtime_int`s; a stride of 0 shares a number."""

    numbers: Any
    """integers (b or 1, s_q or 1); (t_q,) if `end_to_end`"""
    stride_b: Any
    stride_row: Any
    length: Any
    """of the last dimension: tiles of rows reach further"""
    starts: Any
    """int (b + 1): where each sequence's rows begin, if `end_to_end`; else some other tensor"""
    end_to_end: Any
    """constexpr"""

    @staticmethod
    def of(x: Tensor, starts: Tensor | None) -> Bound:
        """Of a tensor of `saccade.interval`; packed rows begin at `starts`."""
        flat = x.dim() == 1
        stride_b, stride_row = (0, x.stride(0)) if flat else (x.stride(i) if x.shape[i] > 1 else 0 for i in (0, 1))
        at = x if starts is None else starts.contiguous()
        return Bound(x, *map(runtime_int, (stride_b, stride_row, x.shape[-1])), at, FLAGS[flat])


@triton.jit
def number_at(bound, b, q_idx, most):
    """The number of rows `q_idx` of sequence b, int32 from -FARTHEST to `most`."""
    row = q_idx
    if bound.end_to_end:
        row += tl.load(bound.starts + b).to(tl.int32)
    row = tl.maximum(tl.minimum(row, plain_int(bound.length) - 1), 0).to(tl.int64)
    offset = b * plain_int(bound.stride_b).to(tl.int64) + row * plain_int(bound.stride_row)
    return tl.minimum(tl.maximum(tl.load(bound.numbers + offset), -FARTHEST), most).to(tl.int32)


@triton.jit
def bound_of(bound, b, q_idx):
    """The bound of rows `q_idx` of sequence b."""
    return number_at(bound, b, q_idx, 2 * FARTHEST)


@triton.jit
def interval_keys(data, b, q_idx, off):
    start = bound_of(data[0], b, q_idx)
    stop = bound_of(data[1], b, q_idx)
    return start, stop, start, stop


@triton.jit
def interval_sees(data, b, h, q_idx, kv_idx, off):
    return (kv_idx >= bound_of(data[0], b, q_idx)) & (kv_idx < bound_of(data[1], b, q_idx))


@triton.jit
def stop_keys(data, b, q_idx, off):
    stop = bound_of(data[0], b, q_idx)
    start = stop * 0 - FARTHEST
    return start, stop, start, stop


@triton.jit
def stop_sees(data, b, h, q_idx, kv_idx, off):
    return (kv_idx >= -FARTHEST) & (kv_idx < bound_of(data[0], b, q_idx))


@triton.jit
def constant_keys(data, b, q_idx, off):
    lo = q_idx * 0 + (plain_int(data[0]) - FARTHEST)
    hi = q_idx * 0 + (plain_int(data[1]) - FARTHEST)
    return lo, hi, lo, hi


@triton.jit
def constant_rows(data, b, kv_idx, off):
    r = kv_idx + FARTHEST
    inside = (r >= plain_int(data[0])) & (r < plain_int(data[1]))
    hi = tl.where(inside, FAR, 0)
    return FAR - hi, hi, FAR - hi, hi


@triton.jit
def constant_sees(data, b, h, q_idx, kv_idx, off):
    r = kv_idx + FARTHEST
    return (r >= plain_int(data[0])) & (r < plain_int(data[1])) & (q_idx == q_idx)
