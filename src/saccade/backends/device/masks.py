"""Masks on the device: the same expression as `saccade.masks`, as a record of functions and their data.

Every mask has three functions. `keys_of` gives each query row its hull `[lo, hi)` and core `[core_lo, core_hi)` of
keys; `rows_of` gives each key the same of query rows; `sees` decides one tile elementwise, where the hull is not the
whole truth. Combinations call the functions of their parts, so a new leaf is three functions and a line in
`device_args`. A predicate is not an interval: its hull is everything, and block lists take the place of both
(`block_lists.py`).
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade import masks
from saccade.backends.device import key_lists, positions, records, scores
from saccade.backends.device.records import FAR, FARTHEST, FLAGS, constants, plain_int, runtime_int
from saccade.call import Call
from saccade.layouts import Layout
from saccade.scores import Traced
from saccade.scores.codegen import source


class DeviceMask(NamedTuple):
    keys_of: Any
    """(data, b, q_idx, off) -> lo, hi, core_lo, core_hi, each of q_idx's shape"""
    rows_of: Any
    """(data, b, kv_idx, off) -> lo, hi, core_lo, core_hi, each of kv_idx's shape"""
    sees: Any
    """(data, b, h, q_idx, kv_idx, off) -> bool, broadcast; None where the hull says it"""
    exact: Any
    """constexpr: the hull is the whole truth"""
    data: tuple
    block_sparse: Any = tl.constexpr(False)
    """constexpr: `block_lists` say which tiles to visit"""
    block_lists: Any = ()
    """see `saccade.backends.device.block_lists`"""
    has_lower_bound: Any = tl.constexpr(True)
    """constexpr: rows may not see the first keys, so that tiles before the core need the mask"""
    ordered: Any = tl.constexpr(True)
    """constexpr: later rows see neither earlier first keys nor earlier last ones"""
    bounded: Any = tl.constexpr(False)
    """constexpr: `data[1].lo` and `data[1].hi` hold each row's keys, which are the whole truth; see
    `saccade.backends.device.visits`"""
    all_tiles: Any = tl.constexpr(False)
    """constexpr: a predicate all of whose tiles are visited, without lists; for kernels that make such a difference"""


@triton.jit
def _all_of(data, b, idx, off):
    return idx * 0, idx * 0 + FAR, idx * 0, idx * 0 + FAR


@triton.jit
def _all_sees(data, b, h, q_idx, kv_idx, off):
    return (q_idx >= 0) & (kv_idx >= 0)


@triton.jit
def _open_of(data, b, idx, off):
    # Anything may be visible, and nothing is known to be.
    return idx * 0, idx * 0 + FAR, idx * 0, idx * 0


@triton.jit
def _not_sees(data, b, h, q_idx, kv_idx, off):
    return records.sees(data[0], b, h, q_idx, kv_idx, off) == 0


@triton.jit
def _window_keys(data, b, q_idx, off):
    lo = q_idx + off - plain_int(data[0])
    hi = q_idx + off + plain_int(data[1]) + 1
    return lo, hi, lo, hi


@triton.jit
def _window_rows(data, b, kv_idx, off):
    lo = kv_idx - off - plain_int(data[1])
    hi = kv_idx - off + plain_int(data[0]) + 1
    return lo, hi, lo, hi


@triton.jit
def _window_sees(data, b, h, q_idx, kv_idx, off):
    # Where a thread has many rows, it has no registers for the bounds of each.
    distance = kv_idx - q_idx - off
    return (distance >= -plain_int(data[0])) & (distance <= plain_int(data[1]))


@triton.jit
def _prefix_length(data, b):
    # One of each sequence, which int32 may not hold, or one of all.
    if data[1]:
        return tl.minimum(tl.maximum(tl.load(data[0] + b), -FARTHEST), 2 * FARTHEST).to(tl.int32)
    else:
        return plain_int(data[0])


@triton.jit
def _prefix_keys(data, b, q_idx, off):
    n = _prefix_length(data, b)
    hi = tl.maximum(q_idx + off + 1, n)
    lo = hi * 0 - FARTHEST
    return lo, hi, lo, hi


@triton.jit
def _prefix_rows(data, b, kv_idx, off):
    lo = tl.where(kv_idx < _prefix_length(data, b), -FARTHEST, kv_idx - off)  # rows may stand before position 0
    return lo, lo * 0 + FAR, lo, lo * 0 + FAR


@triton.jit
def _documents_of(data, b, idx, off):
    # Rows and keys are the same tokens. A document in pieces has no core.
    offset = _token(data, b, idx)
    lo = tl.load(data[1] + offset)
    hi = tl.load(data[2] + offset)
    return lo, hi, lo, tl.where(tl.load(data[3] + offset) != 0, hi, lo)


@triton.jit
def _documents_sees(data, b, h, q_idx, kv_idx, off):
    return tl.load(data[0] + _token(data, b, q_idx)) == tl.load(data[0] + _token(data, b, kv_idx))


@triton.jit
def _token(data, b, idx):
    # Tiles reach beyond the end; what is read there is not used.
    return b.to(tl.int64) * plain_int(data[4]) + tl.minimum(idx, plain_int(data[5]) - 1)


@triton.jit
def _and_keys(data, b, q_idx, off):
    lo, hi, core_lo, core_hi = data[0].keys_of(data[0].data, b, q_idx, off)
    lo2, hi2, core_lo2, core_hi2 = data[1].keys_of(data[1].data, b, q_idx, off)
    return _intersection(lo, hi, core_lo, core_hi, lo2, hi2, core_lo2, core_hi2)


@triton.jit
def _and_rows(data, b, kv_idx, off):
    lo, hi, core_lo, core_hi = data[0].rows_of(data[0].data, b, kv_idx, off)
    lo2, hi2, core_lo2, core_hi2 = data[1].rows_of(data[1].data, b, kv_idx, off)
    return _intersection(lo, hi, core_lo, core_hi, lo2, hi2, core_lo2, core_hi2)


@triton.jit
def _and_sees(data, b, h, q_idx, kv_idx, off):
    first = records.sees(data[0], b, h, q_idx, kv_idx, off)
    return first & records.sees(data[1], b, h, q_idx, kv_idx, off)


@triton.jit
def _or_keys(data, b, q_idx, off):
    lo, hi, core_lo, core_hi = data[0].keys_of(data[0].data, b, q_idx, off)
    lo2, hi2, core_lo2, core_hi2 = data[1].keys_of(data[1].data, b, q_idx, off)
    return _union(lo, hi, core_lo, core_hi, lo2, hi2, core_lo2, core_hi2)


@triton.jit
def _or_rows(data, b, kv_idx, off):
    lo, hi, core_lo, core_hi = data[0].rows_of(data[0].data, b, kv_idx, off)
    lo2, hi2, core_lo2, core_hi2 = data[1].rows_of(data[1].data, b, kv_idx, off)
    return _union(lo, hi, core_lo, core_hi, lo2, hi2, core_lo2, core_hi2)


@triton.jit
def _or_sees(data, b, h, q_idx, kv_idx, off):
    first = records.sees(data[0], b, h, q_idx, kv_idx, off)
    return first | records.sees(data[1], b, h, q_idx, kv_idx, off)


@triton.jit
def _intersection(lo, hi, core_lo, core_hi, lo2, hi2, core_lo2, core_hi2):
    core_lo, core_hi = tl.maximum(core_lo, core_lo2), tl.minimum(core_hi, core_hi2)
    return tl.maximum(lo, lo2), tl.minimum(hi, hi2), core_lo, core_hi


@triton.jit
def _union(lo, hi, core_lo, core_hi, lo2, hi2, core_lo2, core_hi2):
    # The hull of both, where an empty one does not count; of the cores the longer.
    first = hi > lo
    second = hi2 > lo2
    hull_lo = tl.minimum(tl.where(first, lo, FAR), tl.where(second, lo2, FAR))
    hull_hi = tl.maximum(tl.where(first, hi, 0), tl.where(second, hi2, 0))
    core_lo = tl.maximum(core_lo, 0)
    core_lo2 = tl.maximum(core_lo2, 0)
    longer = core_hi - core_lo >= core_hi2 - core_lo2
    return hull_lo, hull_hi, tl.where(longer, core_lo, core_lo2), tl.where(longer, core_hi, core_hi2)


_WINDOW = constants(_window_keys, _window_rows, _window_sees, True)
_PREFIX = constants(_prefix_keys, _prefix_rows, None, True)
_CONSTANT_INTERVAL = constants(records.constant_keys, records.constant_rows, None, True)
# Tensors lead from rows to keys alone: `visits.py` turns that round for kernels whose programs own keys.
_INTERVAL = constants(records.interval_keys, _open_of, None, True)
_DOCUMENTS = constants(_documents_of, _documents_of, _documents_sees, False)
_AND = {exact: constants(_and_keys, _and_rows, _and_sees, exact) for exact in (True, False)}
_OR = constants(_or_keys, _or_rows, _or_sees, False)
_LISTED = constants(_open_of, _open_of, key_lists.named, False)
_NOT = constants(_open_of, _open_of, _not_sees, False)
_PLACED = constants(positions.placed_keys, positions.placed_rows, None)
_FUNCTION_PLACED = constants(_open_of, _open_of, positions.function_sees)
_ALL = DeviceMask(*constants(_all_of, _all_of, _all_sees, True), (), has_lower_bound=FLAGS[False])


def device_args(call: Call) -> DeviceMask:
    """The device form of a Call's mask; None shows every key. Its constants, parts and all, follow from the mask's
    identity and `has_lower_bound`, which the Call's key holds."""
    mask = call.mask
    if mask is None:
        return _ALL
    return _device_args(mask, FLAGS[mask.has_lower_bound], call)._replace(ordered=FLAGS[not call.bounds_per_row])


def _device_args(mask: masks.Mask, has_lower_bound: Any, call: Call) -> DeviceMask:
    """The same, with the `has_lower_bound` of the whole mask, which its parts share."""
    plain = _leaf(mask, has_lower_bound, call)
    if plain is None:
        return _combined(mask, has_lower_bound, call)
    functions = isinstance(mask, masks.MaskMod)
    if call.positions is None and not (call.layout.has_pages and functions):
        return plain
    # They count from the first row and key.
    if isinstance(mask, masks.Documents | masks.TensorMask | masks.Selected):
        return plain
    shape, own_rows = _FUNCTION_PLACED if functions else _PLACED, FLAGS[isinstance(mask, masks.KeyInterval)]
    data = plain, positions.device_args(call), own_rows
    return DeviceMask(*shape, plain.exact, data, has_lower_bound=has_lower_bound)


def _leaf(mask: masks.Mask, has_lower_bound: Any, call: Call) -> DeviceMask | None:
    """A mask without parts, of the numbers of rows and keys; None for one that has parts."""
    match mask:
        case masks.Window():
            return DeviceMask(*_WINDOW, tuple(map(runtime_int, mask.bounds)), has_lower_bound=has_lower_bound)
        case masks.Prefix(n=n):
            data = (n.contiguous(), FLAGS[True]) if isinstance(n, Tensor) else (runtime_int(n), FLAGS[False])
            return DeviceMask(*_PREFIX, data, has_lower_bound=has_lower_bound)
        case masks.KeyInterval():
            return _interval_args(mask, has_lower_bound, call.layout)
        case masks.Documents():
            batches, s = mask.ids.shape
            stride = 0 if batches == 1 else s
            tensors = (x.contiguous() for x in (mask.ids, mask.first, mask.stop, mask.solid))
            data = (*tensors, runtime_int(stride), runtime_int(s))
            return DeviceMask(*_DOCUMENTS, data, has_lower_bound=has_lower_bound)
        case key_lists.Tabulated():
            return DeviceMask(*_LISTED, (key_lists.KeyTable.of(mask, call),), has_lower_bound=has_lower_bound)
        case masks.MaskMod(predicate=predicate) | masks.TensorMask(predicate=predicate):
            indices = positions.kind(call) if isinstance(mask, masks.MaskMod) else "numbers"
            keys_of, rows_of, sees, exact = _predicate(predicate, indices, positions.reached(call))
            return DeviceMask(keys_of, rows_of, sees, exact, scores.data(predicate), has_lower_bound=has_lower_bound)
    return None


def _combined(mask: masks.Mask, has_lower_bound: Any, call: Call) -> DeviceMask:
    match mask:
        case masks.Not():
            return DeviceMask(*_NOT, (_device_args(mask.part, has_lower_bound, call),), has_lower_bound=has_lower_bound)
        case masks.Blocked():
            return _device_args(mask.mask, has_lower_bound, call)
        case masks.And() | masks.Or():
            first, *rest = (_device_args(part, has_lower_bound, call) for part in mask.parts)
            for other in rest:
                exact = first.exact.value and other.exact.value
                functions = _AND[exact] if isinstance(mask, masks.And) else _OR
                first = DeviceMask(*functions, (first, other), has_lower_bound=has_lower_bound)
            return first
    raise TypeError(f"no GPU code for {mask!r}")


def _interval_args(mask: masks.KeyInterval, has_lower_bound: Any, layout: Layout) -> DeviceMask:
    start, stop, starts = mask.start, mask.stop, layout.cu_seqlens_q
    if not isinstance(start, Tensor) or not isinstance(stop, Tensor):
        bounds = (runtime_int(x + masks.FARTHEST) for x in (start, stop) if not isinstance(x, Tensor))
        return DeviceMask(*_CONSTANT_INTERVAL, tuple(bounds), has_lower_bound=has_lower_bound)
    tensors = (stop,) if mask.open_start else (start, stop)
    return DeviceMask(*_INTERVAL, tuple(records.Bound.of(x, starts) for x in tensors), has_lower_bound=has_lower_bound)


def _predicate(predicate: Traced, indices: str, reached: bool) -> tuple[Any, ...]:
    """The functions of a predicate, emitted once for each program."""
    key = "sees", scores.form(predicate, indices=indices, reached=reached)
    functions = predicate.program.emitted.get(key)
    if functions is None:
        sees = scores.jit(source.sees_source(predicate.program, key[1]))["sees"]
        functions = predicate.program.emitted[key] = constants(_open_of, _open_of, sees, False)
    return functions
