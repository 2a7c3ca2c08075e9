"""New keys and values into the pages of a cache: one launch, which reads the lengths on the device."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from triton import next_power_of_2

from saccade.backends import Append, Rotary
from saccade.backends.device.launch import Launch, on_device
from saccade.backends.device.records import TensorArgs
from saccade.backends.triton.append_kernel import append_kernel
from saccade.backends.triton.paged import many, page_table
from saccade.bounded_cache import BoundedCache
from saccade.layouts import Paged


def append(call: Append) -> None:
    """Writes the rows that have a page; others are omitted."""
    layout, new = call.layout, call.k_new
    if not new.shape[:-1].numel() or not layout.sequences:
        return
    *cos_sin, interleaved = (None,) if call.rotary is None else call.rotary
    tensors = *call[:4], *layout.tensors, *cos_sin
    key = tuple((x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors), interleaved
    with on_device(new):
        _launches.get_or_make(key, lambda: prepare(call))(new.device.index, arguments(call))


_launches: BoundedCache[Any, Launch] = BoundedCache(1024)


def arguments(call: Append) -> tuple[Any, ...]:
    layout, new = call.layout, call.k_new
    rows = (TensorArgs.of(layout.canonical(x)) for x in (new, call.v_new, call.k_cache, call.v_cache))
    starts = None if layout.cu_seqlens_q is None else layout.cu_seqlens_q.contiguous()
    cos, sin, positions = (None, None, 1) if call.rotary is None else (*call.rotary[:2], call.rotary.cos.shape[0])
    pages = page_table(layout, layout.canonical(call.k_cache))
    return *rows, starts, layout.seqused_k.contiguous(), pages, cos, sin, new.shape[-2], new.shape[-3], positions


def prepare(call: Append) -> Launch:
    """The launch, one program for each new row."""
    h_k, d, d_v = *call.k_new.shape[-2:], call.v_new.shape[-1]
    pairs, interleaved = (0, False) if call.rotary is None else (call.rotary.cos.shape[1], call.rotary.interleaved)
    blocks = (next_power_of_2(max(n, 1)) for n in (h_k, d, d_v, pairs))
    constants = call.k_cache.shape[1], d, d_v, pairs, interleaved, *blocks, many(call.layout)
    return Launch(append_kernel, (call.k_new.shape[:-2].numel(), 1, 1), constants)


def compiled(d: int, d_v: int, dtype: torch.dtype) -> Any:
    """The kernel as the compile gate sees it: packed sequences, and rotated keys."""
    operands = (torch.empty(*shape, dtype=dtype) for shape in ((9, 16, 8, d), (9, 16, 8, d_v), (4, 8, d), (4, 8, d_v)))
    layout = Paged(torch.zeros(3, 9, dtype=torch.int32), torch.zeros(3).int(), torch.zeros(4).int())
    call = Append(*operands, layout, Rotary(torch.empty(99, d // 2), torch.empty(99, d // 2), False))
    return prepare(call).warmup(arguments(call))
