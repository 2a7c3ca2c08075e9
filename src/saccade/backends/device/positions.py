"""Where query rows and keys stand, as kernels read it: masks, score functions and dropout take positions, while tiles
are found by the numbers of rows and keys."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.backends.device.intervals import Bound, number_at
from saccade.backends.device.records import FAR, FARTHEST, FLAGS, constants, plain_int, runtime_int
from saccade.call import Call
from saccade.scores import LONGEST as _LONGEST

LONGEST = tl.constexpr(_LONGEST)
NUMBER, SEQUENCE, ROW, ALIGNED = constants(0, 1, 2, 3)
"""Forms of an offset: a number; one of each sequence; a position of each row; keys in use less query rows."""


class Offset(NamedTuple):
    """Where the rows of an operand stand."""

    form: Any
    """constexpr"""
    data: Any
    """the number plus FARTHEST, a `runtime_int`; a `Bound`; an `Aligned`"""

    @staticmethod
    def of(x: int | Tensor, by_row: bool, starts: Tensor | None) -> Offset:
        if not isinstance(x, Tensor):
            return Offset(NUMBER, runtime_int(x + FARTHEST.value))
        return Offset(ROW if by_row else SEQUENCE, Bound.of(x, starts))


class Aligned(NamedTuple):
    """What says how many keys and rows of a paged sequence are in use."""

    used: Any
    """int (b): keys"""
    starts: Any
    """int (b + 1): where its rows begin, if `end_to_end`; else some other tensor"""
    s_q: Any
    capacity: Any
    """keys that it has room for; both `runtime_int`s"""
    end_to_end: Any
    """constexpr"""


class DevicePositions(NamedTuple):
    """Row i of sequence b stands at `row_position(q, b, i)`, key j at `first_key(k, b) + j`."""

    q: Offset
    k: Offset


def record(call: Call) -> DevicePositions | None:
    """What functions of positions take for indices; None stands for the numbers of rows and keys."""
    positions, layout = call.positions, call.layout
    if positions is not None:
        q = Offset.of(positions.q, positions.by_row, layout.cu_seqlens_q)
        return DevicePositions(q, Offset.of(positions.k, False, None))
    if not layout.has_pages:
        return None
    used, starts = layout.seqused_k.contiguous(), layout.cu_seqlens_q
    numbers = call.q.shape[2], layout.capacity(call.k.shape[2])
    given = used if starts is None else starts.contiguous()
    aligned = Aligned(used, given, *map(runtime_int, numbers), FLAGS[starts is not None])
    return DevicePositions(Offset(ALIGNED, aligned), Offset.of(0, False, None))


def kind(call: Call) -> str:
    """What functions take for indices: `EmitOptions.indices`."""
    positions = call.positions
    if positions is None:
        return "positions" if call.layout.has_pages else "numbers"
    return "rows" if positions.by_row else "positions"


def reached(call: Call) -> bool:
    """Whether indices are the numbers of keys that exist, which a captured tensor that is read there is known to have:
    see `capture_checks.short`."""
    return call.positions is None and call.layout.rectangular


@triton.jit
def _aligned(data, b):
    """Keys in use less query rows of sequence b."""
    keys = tl.minimum(tl.maximum(tl.load(data.used + b), 0), plain_int(data.capacity)).to(tl.int32)
    s_q = plain_int(data.s_q)
    if data.end_to_end:
        first = tl.minimum(tl.maximum(tl.load(data.starts + b), 0), s_q).to(tl.int32)
        stop = tl.minimum(tl.maximum(tl.load(data.starts + b + 1), 0), s_q).to(tl.int32)
        return keys - tl.maximum(stop - first, 0)
    else:
        return keys - s_q


@triton.jit
def row_position(q, b, q_idx):
    """Where rows q_idx of sequence b stand."""
    if q.form == NUMBER:
        return q_idx + (plain_int(q.data) - FARTHEST)
    elif q.form == SEQUENCE:
        return q_idx + number_at(q.data, b, 0, FARTHEST)
    elif q.form == ROW:
        return number_at(q.data, b, q_idx, FARTHEST)
    else:
        return q_idx + _aligned(q.data, b)


@triton.jit
def first_key(k, b):
    """Where key 0 of sequence b stands."""
    return row_position(k, b, 0)


@triton.jit
def function_positions(positions, b, q_idx, kv_idx):
    """What functions take for indices: positions of which they can take differences."""
    p = row_position(positions.q, b, q_idx)
    r = kv_idx + first_key(positions.k, b)
    return tl.minimum(tl.maximum(p, -LONGEST), LONGEST - 1), tl.minimum(tl.maximum(r, -LONGEST), LONGEST - 1)


# Masks. `data` holds a mask, whose functions take positions for indices, and the positions.


@triton.jit
def placed_keys(data, b, q_idx, off):
    lo, hi, core_lo, core_hi = data[0].keys_of(data[0].data, b, row_position(data[1].q, b, q_idx), 0)
    first = first_key(data[1].k, b)
    return lo - first, hi - first, core_lo - first, core_hi - first


@triton.jit
def placed_rows(data, b, kv_idx, off):
    if data[1].q.form == ROW:  # `visits.py` finds the rows
        return kv_idx * 0, kv_idx * 0 + FAR, kv_idx * 0, kv_idx * 0
    else:
        lo, hi, core_lo, core_hi = data[0].rows_of(data[0].data, b, kv_idx + first_key(data[1].k, b), 0)
        first = row_position(data[1].q, b, 0)
        return lo - first, hi - first, core_lo - first, core_hi - first


@triton.jit
def placed_sees(data, b, h, q_idx, kv_idx, off):
    p = row_position(data[1].q, b, q_idx)
    return data[0].sees(data[0].data, b, h, p, kv_idx + first_key(data[1].k, b), 0)


@triton.jit
def function_sees(data, b, h, q_idx, kv_idx, off):
    p, r = function_positions(data[1], b, q_idx, kv_idx)
    return data[0].sees(data[0].data, b, h, p, r, 0)


# The same of intervals, whose bounds are of rows, wherever these stand.


@triton.jit
def shifted_keys(data, b, q_idx, off):
    lo, hi, core_lo, core_hi = data[0].keys_of(data[0].data, b, q_idx, 0)
    first = first_key(data[1].k, b)
    return lo - first, hi - first, core_lo - first, core_hi - first


@triton.jit
def shifted_rows(data, b, kv_idx, off):
    return data[0].rows_of(data[0].data, b, kv_idx + first_key(data[1].k, b), 0)


@triton.jit
def shifted_sees(data, b, h, q_idx, kv_idx, off):
    return data[0].sees(data[0].data, b, h, q_idx, kv_idx + first_key(data[1].k, b), 0)
