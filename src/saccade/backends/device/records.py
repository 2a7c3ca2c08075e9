"""Types of device code: named tuples that kernels take, and aggregates that kernels build."""

# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language import core

from saccade.call import aligned
from saccade.masks import FARTHEST as _FARTHEST
from saccade.util.memory_layout import ALIGNMENT

# Aggregates: values that kernels build on the device.


def _aggregate(fields: Any) -> Any:
    names = tuple(fields.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else core.constexpr(value))

    __init__.__triton_builtin__ = True  # what Triton's hash of a kernel's source passes over
    fields.__init__ = __init__
    fields.__annotations__ = dict.fromkeys(names, object)
    return core._aggregate(fields)


# A class of annotated fields becomes a type of device code, whose constructor takes one argument for each field:
# tensors, constexprs, records, aggregates, or None. Unlike a NamedTuple it may be assigned to a variable: Triton would
# make tensors of a NamedTuple's constexprs. Triton 3.6 generates no `__init__`, and does not know `Any`.
aggregate: Any = dataclass if knobs.runtime.interpret else _aggregate


# Named tuples that kernels take instead of long argument lists; Triton passes each as one value.


LOG2E = tl.constexpr(1.4426950408889634)
# Stands for "no bound" among rows and keys: a sum of two stays inside int32.
FAR = tl.constexpr(1 << 30)
FARTHEST = tl.constexpr(_FARTHEST)


class TensorArgs(NamedTuple):
    """A (b, h, s, d) tensor whose last dimension is contiguous. Strides are `runtime_int`s, in `unit`s of elements."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    unit: Any
    """constexpr: elements in 16 bytes where every row starts at a multiple of 16 bytes, else 1. Triton itself
    sees multiples of 16 elements only, and moves all else element by element."""
    wide: Any
    """constexpr: one head spans 2^31 elements or more, so that offsets in it need 64 bits"""

    @staticmethod
    def of(x: Tensor) -> TensorArgs:
        stride_b, stride_h, stride_s, _ = x.stride()
        unit = ALIGNMENT // x.element_size() if aligned(x) else 1
        strides = runtime_int(stride_b // unit), runtime_int(stride_h // unit), runtime_int(stride_s // unit)
        return TensorArgs(x, *strides, UNITS[unit], WIDE if x.shape[2] * stride_s >= NARROW_LIMIT else NARROW)


# A tile may reach 256 rows beyond the end, in addresses that are masked.
NARROW_LIMIT = (1 << 31) - (1 << 24)
FLAGS = {flag: tl.constexpr(flag) for flag in (False, True)}
NARROW, WIDE = FLAGS[False], FLAGS[True]
UNITS = {unit: tl.constexpr(unit) for unit in (1, 2, 4, 8, 16)}


def constants(*values: Any) -> tuple[Any, ...]:
    """Functions and flags as constexprs; None stays."""
    return tuple(None if x is None else tl.constexpr(x) for x in values)


def runtime_int(value: int) -> int:
    """An integer from 0 on in a form that Triton never specialises: Triton compiles anew for 1 and for multiples of 16,
    and this form is odd and at least 3. `plain_int` undoes it. (`do_not_specialize` does not reach inside records.)"""
    return 2 * value + 3


def runtime_bytes(x: Any) -> int:
    """What an argument takes of a kernel's memory for arguments, at most; a constexpr takes none."""
    if isinstance(x, tuple):
        return sum(map(runtime_bytes, x))
    if isinstance(x, (int, float)):
        return 8 if abs(x) >= 1 << 31 and isinstance(x, int) else 4
    return 8 if isinstance(x, Tensor) else 0


def far_parts(value: int) -> tuple[int, int]:
    """Any integer of 64 bits in a form that Triton never specialises, and always takes for 64 bits: its halves, from 0
    on, with one more bit above 32. `far_int` undoes it."""
    low, high = value & 0xFFFFFFFF, (value >> 32) + (1 << 31)
    return runtime_int(low + _ABOVE.value), runtime_int(high + _ABOVE.value)


_ABOVE = tl.constexpr(1 << 40)


class PackedRowsArgs(NamedTuple):
    """A tensor of packed rows (1, h, t, d) and how wide it is, for stores that end in the middle of a tile."""

    ptr: Any
    stride_h: Any
    """in elements, as all that follows: `runtime_int`s"""
    stride_s: Any
    columns: Any
    keeps_tail: Any
    """constexpr: rows after the last sequence stay as they are"""

    @staticmethod
    def of(x: Tensor, keeps_tail: bool = False) -> PackedRowsArgs:
        stride_h, stride_s, columns = map(runtime_int, (x.stride(1), x.stride(2), x.shape[3]))
        return PackedRowsArgs(x, stride_h, stride_s, columns, FLAGS[keeps_tail])


@triton.jit
def plain_int(value):
    return (value - 3) >> 1


@triton.jit
def far_int(parts):
    return ((plain_int(parts[1]) - _ABOVE - (1 << 31)) << 32) + (plain_int(parts[0]) - _ABOVE)


# Intervals of keys that the user gives, one for each query row, as kernels read them.


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
    if len(data) == 2:
        start = bound_of(data[0], b, q_idx)
        stop = bound_of(data[1], b, q_idx)
    else:  # stops alone
        stop = bound_of(data[0], b, q_idx)
        start = stop * 0 - FARTHEST
    return start, stop, start, stop


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
def sees(mask, b, h, q_idx, kv_idx, off):
    """Which rows see which keys, in use or not, by a part of a mask or all of it. q_idx and kv_idx broadcast."""
    if mask.sees is None:
        lo, hi, _, _ = mask.keys_of(mask.data, b, q_idx, off)
        return (kv_idx >= lo) & (kv_idx < hi)
    else:
        return mask.sees(mask.data, b, h, q_idx, kv_idx, off)
