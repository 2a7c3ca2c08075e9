"""New keys and values into the pages of a cache: one launch, which reads the lengths on the device."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from saccade.backends import Append
from saccade.backends.device.descale import DescaleArgs, FactorArgs
from saccade.backends.device.launch import Launch, on_device
from saccade.backends.device.records import TensorArgs, runtime_int
from saccade.backends.device.replay import new_launch_recorder as recorder
from saccade.backends.triton.append_kernel import Angles, AppendShape, append_kernel
from saccade.backends.triton.paged import many, page_table
from saccade.backends.triton.paged_tiles import PageTable
from saccade.backends.triton.quantize import TYPES, converts
from saccade.layouts import CacheSlots, Paged, empty_like_rows
from saccade.util.caches import BoundedCache

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
