"""Lists of keys as slots of a cache: for each row those that it sees, and nothing else.

One small kernel reads lists, their lengths, page tables and what a mask has besides. So kernels that gather rows know
no masks: the first `used` slots of a row are its keys. A row's slots keep the order of its list.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches
from saccade.backends.device import masks, positions
from saccade.backends.device.key_lists import ListArgs, list_of_row
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch, on_device
from saccade.backends.device.positions import extent
from saccade.backends.device.records import plain_int, runtime_int
from saccade.backends.device.tiles import visible
from saccade.backends.key_lists import one_list
from saccade.call import Call
from saccade.layouts import Paged, SlotRows
from saccade.layouts.slots import rows_apart, single_rows
from saccade.masks import Mask, Selected

CHUNK = 2048
"""Entries that a program looks at at once."""


class SlotLists(NamedTuple):
    """The keys of each row (b, s_q) of a call, or of each row of slots."""

    table: Tensor
    """int32 (rows, n)"""
    used: Tensor
    """int32 (rows): how many slots of each count"""
    cache: Tensor
    """(slots, h_k, 1, d)"""

    @staticmethod
    def of(call: Call, launches: Launches) -> SlotLists:
        found = SlotLists.empty(call)
        with on_device(call.q):
            launch, arguments = found.made(call, launches)
            launch(call.q.device.index, arguments)
        return found

    @staticmethod
    def empty(call: Call) -> SlotLists:
        if isinstance(call.layout, SlotRows):
            (rows, n), cache = call.layout.block_table.shape, call.k
        else:
            lists = _listed(call)[0]
            rows, n = call.q.shape[0] * call.q.shape[2], lists.lists.shape[-1] * lists.keys
            step = rows_apart(call.k.transpose(1, 2))
            assert step is not None
            cache = single_rows(call.k.transpose(1, 2), step).transpose(1, 2)
        make = {"dtype": torch.int32, "device": call.q.device}
        return SlotLists(torch.empty(rows, n, **make), torch.empty(rows, **make), cache)

    def made(self, call: Call, launches: Launches) -> GivenLaunch:
        """The launch that writes the lists."""
        layout, k, chunk = call.layout, call.k, min(CHUNK, max(32, 1 << (self.table.shape[1] - 1).bit_length()))
        pages, numbers = None, (1, 0, 1, self.cache.shape[0])
        if isinstance(layout, SlotRows):
            lists, others = Selected(layout.block_table[:, None, None], layout.seqused_k[:, None, None], 1), None
            spans = None, None
        else:
            lists, others = _listed(call)
            spans = positions.spans(call)
            numbers = call.q.shape[2], rows_apart(k.transpose(1, 2)), k.shape[2], layout.capacity(k.shape[2])
            if isinstance(layout, Paged):
                table = layout.block_table if layout.block_table.stride(1) == 1 else layout.block_table.contiguous()
                pages = table, runtime_int(table.stride(0)), runtime_int(k.shape[0])
        mask = masks.device_args(call.replace(mask=others))
        launch = cached_launch(
            launches,
            "slot lists",
            lambda: Launch(slots_kernel, (self.table.shape[0], 1, 1), (chunk,), max(1, chunk // 256)),
        )
        records = ListArgs.of(lists, call), pages, *spans, mask
        return launch, (self.table, self.used, *records, self.table.shape[1], *numbers)


def as_pages(call: Call, launches: Launches) -> Call:
    """A call over slots as one over pages of one row, with all of a row's slots that there are and no others."""
    layout = call.layout
    if not isinstance(layout, SlotRows):
        return call
    found = SlotLists.of(call, launches)
    pages = Paged(found.table, found.used, layout.cu_seqlens_q, layout.num_splits)
    return call.replace(layout=pages, mask=None)


def _listed(call: Call) -> tuple[Selected, Mask | None]:
    found = one_list(call)
    assert found is not None
    return found


@triton.jit(do_not_specialize=["n", "s_q", "step", "size", "s_k"])
def slots_kernel(table, used, lists, pages, used_q, used_k, mask, n, s_q, step, size, s_k, CHUNK: tl.constexpr):
    """The slots of one row: rows of s_q to a batch row, whose keys are in pages, or begin `step` rows after those of
    the batch row before."""
    number = tl.program_id(0)
    b = number // s_q
    row = number % s_q
    _, _, _, rows = extent(used_q, b, s_q)
    _, _, _, keys = extent(used_k, b, s_k)
    entries, length = list_of_row(lists, b, b * 0, b * 0, row)
    per_entry = plain_int(lists.keys)
    target = table + number.to(tl.int64) * n
    count = row * 0
    for start in range(0, length * per_entry, CHUNK):
        # [CHUNK]
        i = start + tl.arange(0, CHUNK)
        at = (i // per_entry).to(tl.int64) * plain_int(lists.steps[3])
        entry = tl.load(entries + at, mask=i < length * per_entry, other=-1)
        named = (entry >= 0) & (entry < tl.cdiv(keys, per_entry))
        kv_idx = tl.where(named, entry, 0).to(tl.int32) * per_entry + i % per_entry
        one = tl.zeros([1, 1], tl.int32)
        sees = visible(mask, b, one, row + one, kv_idx[None, :], rows, keys, keys - rows)
        named = named & tl.reshape(tl.broadcast_to(sees, [1, CHUNK]), [CHUNK])
        if pages is None:
            slot = b * step + kv_idx
        else:
            page = tl.load(pages[0] + b.to(tl.int64) * plain_int(pages[1]) + kv_idx // size, mask=named, other=0)
            slot = tl.minimum(tl.maximum(page, 0), plain_int(pages[2]) - 1).to(tl.int32) * step + kv_idx % size
        place = count + tl.cumsum(named.to(tl.int32), 0) - 1
        tl.store(target + place, slot, mask=named)
        count += tl.sum(named.to(tl.int32), 0)
    tl.store(used + number, count)
