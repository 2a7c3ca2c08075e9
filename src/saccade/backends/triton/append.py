"""New keys and values into the pages of a cache: a program for each new row, with all its heads."""

# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from saccade.backends import Append
from saccade.backends.device.descale import DescaleArgs, FactorArgs, factor_at
from saccade.backends.device.launch import Launch, on_device
from saccade.backends.device.records import TensorArgs, aggregate, plain_int, runtime_int
from saccade.backends.device.replay import new_launch_recorder as recorder
from saccade.backends.triton.paged import many, page_table
from saccade.backends.triton.paged_tiles import PageTable
from saccade.backends.triton.quantize import TYPES, converts
from saccade.backends.triton.quantize_kernel import INFINITY, encoded
from saccade.layouts import CacheSlots, Paged, empty_like_rows
from saccade.util.caches import BoundedCache


class AppendShape(NamedTuple):
    """The sizes of a program's tiles; all are constexpr."""

    PAGE: Any
    """rows of a page"""
    D: Any
    D_V: Any
    PAIRS: Any
    """elements that are rotated, in pairs"""
    INTERLEAVED: Any
    BLOCK_H: Any
    BLOCK_HQ: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_P: Any
    N: Any
    """sequences that a program reads at once"""
    TYPE: Any
    """of 8-bit numbers that wider rows become, else None"""
    HARDWARE: Any
    """whether the device converts to them"""


class Angles(NamedTuple):
    """cos and sin of each position; a kernel takes None where nothing is rotated."""

    cos: Any
    """(positions, pairs)"""
    sin: Any
    positions: Any
    """a `runtime_int`"""


@aggregate
class NewRow:
    """One new row, and where it goes."""

    batch: Any
    i: Any
    """in tensors (b, h, s, d)"""
    sequence: Any
    """which of the layout's"""
    page: Any
    row: Any
    position: Any
    known: Any
    """whether it is a sequence's, so that it has a position"""
    there: Any
    """whether it is written"""


@triton.jit
def _by_slot(token, s, slots, positions, pages, shape):
    """The row of which the slot says where it goes."""
    slot = tl.load(slots + token).to(tl.int64)
    there = (slot >= 0) & (slot < plain_int(pages.count).to(tl.int64) * shape.PAGE)
    slot = tl.where(there, slot, 0)
    position = token * 0
    if positions is not None:
        position = tl.load(positions + token)
    page = slot // shape.PAGE
    return NewRow(token // s, token % s, token * 0, page, slot % shape.PAGE, position, token >= 0, there)


@triton.jit
def _by_length(token, s, starts, used, pages, shape):
    """The row that follows those that its sequence has."""
    count = plain_int(pages.sequences)
    if starts is None:
        b = token // s
        batch = b
        i = token % s
        first = token * 0
        named = token >= 0
    else:
        # [N]
        n = tl.arange(0, shape.N)
        start = tl.minimum(tl.maximum(tl.load(starts + tl.minimum(n, count)), -1), 1 << 30).to(tl.int32)
        earlier = (n <= count) & (start <= token)
        b = tl.sum(earlier.to(tl.int32), 0) - 1
        batch = b * 0
        first = tl.sum(tl.where(n == b, start, 0), 0)
        i = token
        # Broken offsets name no sequence.
        named = (first >= 0) & (first <= token) & (token < tl.sum(tl.where(n == b + 1, start, 0), 0))
    known = named & (b >= 0) & (b < count)
    b = tl.minimum(tl.maximum(b, 0), count - 1)
    length = tl.load(used + b).to(tl.int64)
    known = known & (length >= 0)
    there = known & (length + i - first < plain_int(pages.capacity))
    position = tl.where(there, length + i - first, 0).to(tl.int32)
    entry = pages.table + b.to(tl.int64) * plain_int(pages.stride) + position // shape.PAGE
    page = tl.load(entry, mask=there, other=-1)
    there = there & (page >= 0) & (page < plain_int(pages.count))
    return NewRow(batch, i, b, page, position % shape.PAGE, tl.where(known, length + i - first, 0), known, there)


@triton.jit
def _pointers(x, outer, row, h, column):
    """Pointers [heads, columns] to one row of all heads of (outer, h, rows, d)."""
    base = outer.to(tl.int64) * plain_int(x.stride_b) + row.to(tl.int64) * plain_int(x.stride_s)
    return x.ptr + (base + h[:, None].to(tl.int64) * plain_int(x.stride_h)) * x.unit + column[None, :]


@triton.jit
def _factors(factor, at, h, h_k):
    """float32 [heads, 1]: what a row's bytes are to be multiplied by."""
    found = factor_at(factor, at.sequence, tl.minimum(h, h_k - 1), at.position)
    return (tl.zeros_like(h).to(tl.float32) + found)[:, None]


@triton.jit
def _bytes(x, factor, shape):
    """x / factor as 8 bits; NaN of infinities. Factors may be any numbers, so the device divides."""
    # Adding 0 makes 0 of -0.
    x = x.to(tl.float32) + 0.0
    found = tl.div_rn(x, factor + tl.zeros_like(x))
    return encoded(tl.where(tl.abs(x) < INFINITY, found, float("nan")), shape)


@triton.jit
def _copy(made, new, page, row, at, h, column, there, factor, shape):
    """Columns of a row, as they are or as 8 bits; zero if the row is not known."""
    x = tl.load(_pointers(new, at.batch, at.i, h, column), mask=there)
    if factor is not None:
        x = _bytes(x, factor, shape)
    else:
        x = tl.where(at.known, x, 0.0)
    tl.store(_pointers(made, page, row, h, column), x, mask=there)


@triton.jit
def _turn(made, new, page, row, at, h, live, angles, factor, shape):
    """A row of all heads [heads, d], its first pairs by the angles of its position; zero if it is not known."""
    if shape.PAIRS > 0:
        WIDE: tl.constexpr = tl.float64 if new.ptr.dtype.element_ty == tl.float64 else tl.float32
        # [BLOCK_P]
        pair = tl.arange(0, shape.BLOCK_P)
        one = pair * 2 if shape.INTERLEAVED else pair
        two = one + 1 if shape.INTERLEAVED else one + shape.PAIRS
        inside = (pair < shape.PAIRS)[None, :]
        position = tl.minimum(tl.maximum(at.position, 0), plain_int(angles.positions) - 1)
        angle = position.to(tl.int64) * shape.PAIRS + pair
        # [1, BLOCK_P]
        c = tl.load(angles.cos + angle, mask=pair < shape.PAIRS, other=0.0).to(WIDE)[None, :]
        t = tl.load(angles.sin + angle, mask=pair < shape.PAIRS, other=0.0).to(WIDE)[None, :]
        # [heads, BLOCK_P]
        turning = live & inside
        x = tl.load(_pointers(new, at.batch, at.i, h, one), mask=turning, other=0.0).to(WIDE)
        y = tl.load(_pointers(new, at.batch, at.i, h, two), mask=turning, other=0.0).to(WIDE)
        first = tl.where(at.known, x * c - y * t, 0.0)
        second = tl.where(at.known, y * c + x * t, 0.0)
        if factor is not None:
            first = _bytes(first, factor, shape)
            second = _bytes(second, factor, shape)
        dtype = made.ptr.dtype.element_ty
        tl.store(_pointers(made, page, row, h, one), first.to(dtype), mask=turning)
        tl.store(_pointers(made, page, row, h, two), second.to(dtype), mask=turning)
    column = tl.arange(0, shape.BLOCK_D)
    if 2 * shape.PAIRS < shape.D:
        rest = live & ((column >= 2 * shape.PAIRS) & (column < shape.D))[None, :]
        _copy(made, new, page, row, at, h, column, rest, factor, shape)


@triton.jit(do_not_specialize=["h_k", "h_q", "s"])
def append_kernel(
    k_new, v_new, k_cache, v_cache, q, q_out, starts, used, slots, positions, pages, angles, descale, h_k, h_q, s,
    shape,
):  # fmt: skip
    """TensorArgs (b, h, s, d), caches (pages, h_k, page_size, d); q and q_out: or None. Rows go where `slots` says, one
    for each, whose positions are `positions`, or None; or, if slots is None, after the `used` ones of their sequences.
    starts: where each sequence of new rows begins, (sequences + 1,), or None: all have s. The rest has no page.
    descale: what 8-bit caches, uint8 here, stand for, or None where rows are written as they are."""
    token = tl.program_id(0)
    if slots is None:
        at = _by_length(token, s, starts, used, pages, shape)
    else:
        at = _by_slot(token, s, slots, positions, pages, shape)
    # [heads]
    h = tl.arange(0, shape.BLOCK_H)
    live = (h < tl.where(at.there, h_k, 0))[:, None]
    column = tl.arange(0, shape.BLOCK_DV)
    columns = live & (column < shape.D_V)[None, :]
    if descale is None:
        _turn(k_cache, k_new, at.page, at.row, at, h, live, angles, None, shape)
        _copy(v_cache, v_new, at.page, at.row, at, h, column, columns, None, shape)
    else:
        _turn(k_cache, k_new, at.page, at.row, at, h, live, angles, _factors(descale.k, at, h, h_k), shape)
        _copy(v_cache, v_new, at.page, at.row, at, h, column, columns, _factors(descale.v, at, h, h_k), shape)
    if q is not None:
        h = tl.arange(0, shape.BLOCK_HQ)
        _turn(q_out, q, at.batch, at.i, at, h, (h < h_q)[:, None], angles, None, shape)


__all__ = ["append", "recorder"]


def append(call: Append) -> Tensor | None:
    """Writes the rows that have a page or a slot; others are omitted. Returns the rotated queries."""
    layout, new, q = call.layout, call.k_new, call.q
    rotated = None if q is None else empty_like_rows(q, q.shape[-1])
    if not new.shape[:-2].numel():
        return rotated
    if isinstance(layout, Paged) and not layout.sequences:
        return None if rotated is None else rotated.zero_()
    *cos_sin, interleaved = (None,) if call.rotary is None else call.rotary
    tensors = *call[:4], *([] if q is None else [q]), *layout.tensors, *cos_sin, *call.descale.tensors
    words = layout.text, interleaved, call.descale.names
    key = tuple((x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors), words
    with on_device(new):
        _launches.get_or_make(key, lambda: prepare(call))(new.device.index, arguments(call, rotated))
    return rotated


_launches: BoundedCache[Any, Launch] = BoundedCache(1024)


def arguments(call: Append, rotated: Tensor | None) -> tuple[Any, ...]:
    layout, new, q, view = call.layout, call.k_new, call.q, call.layout.canonical
    caches, descale = call[:2], None
    if call.quantizes:
        caches = [x.view(torch.uint8) for x in caches]
        descale = DescaleArgs(*(FactorArgs.of(x, new) for x in call.descale.each))
    rows = (TensorArgs.of(view(x)) for x in (new, call.v_new, *caches))
    queries = (None if x is None else TensorArgs.of(view(x)) for x in (q, rotated))
    angles = None
    if call.rotary is not None:
        angles = Angles(call.rotary.cos, call.rotary.sin, runtime_int(call.rotary.cos.shape[0]))
    heads = new.shape[-2], 0 if q is None else q.shape[-2]
    return *rows, *queries, *_slots(layout, view(call.k_cache)), angles, descale, *heads, new.shape[-3]


def _slots(layout: Paged | CacheSlots, cache: Tensor) -> tuple[Any, ...]:
    """The arguments that say where rows go: starts, used, slots, positions, pages."""
    if isinstance(layout, Paged):
        starts = None if layout.cu_seqlens_q is None else layout.cu_seqlens_q.contiguous()
        return starts, layout.seqused_k.contiguous(), None, None, page_table(layout, cache)
    slots, positions = layout.slot_mapping.contiguous(), layout.positions
    # There is no table: records hold no None on Triton 3.6.
    pages = PageTable(slots, *map(runtime_int, (0, 0, 0, cache.shape[0])))
    return None, None, slots, None if positions is None else positions.contiguous(), pages


def prepare(call: Append) -> Launch:
    """The launch, one program for each new row."""
    h_k, d, d_v = *call.k_new.shape[-2:], call.v_new.shape[-1]
    h_q = 1 if call.q is None else call.q.shape[-2]
    pairs, interleaved = (0, False) if call.rotary is None else (call.rotary.cos.shape[1], call.rotary.interleaved)
    blocks = (next_power_of_2(max(n, 1)) for n in (h_k, h_q, d, d_v, pairs))
    sequences = many(call.layout) if isinstance(call.layout, Paged) else 1
    kind = TYPES[call.k_cache.dtype].value if call.quantizes else None
    sizes = call.k_cache.shape[1], d, d_v, pairs, interleaved, *blocks, sequences
    shape = AppendShape(*map(tl.constexpr, (*sizes, kind, converts(call.k_cache.device))))
    # A rotated key is rounded as on a CPU, so that its bytes are the same.
    return Launch(append_kernel, (call.k_new.shape[:-2].numel(), 1, 1), (shape,), fuses=not call.quantizes)
