"""Lists of keys as slots of a cache: for each row those that it sees, and nothing else.

One small kernel reads lists, their lengths, page tables and what a mask has besides. So kernels that gather rows know
no masks: the first `used` slots of a row are its keys. A row's slots keep the order of its list.

Neighbouring rows may share a table, of the slots that some of them see, in the order of slots: each comes once. Its low
bits say which rows see it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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
MOST_SHARED = 8
"""Rows that share a table at most."""
LEAST_ROWS = 1024
"""Rows of a call from which neighbours share tables: prompts, whose tiles would be half empty otherwise."""
MOST_MEMBERS = 1 << 30
"""Bytes of the bits of all slots and rows, of which shared tables are made."""


class PageArgs(NamedTuple):
    """Where keys are that are in pages; numbers are `runtime_int`s."""

    table: Any
    stride: Any
    """of a row of the table"""
    count: Any
    """pages of the cache"""


class SlotLists(NamedTuple):
    """The keys of each row (b, s_q) of a call, or of each row of slots."""

    table: Tensor
    """int32 (groups of rows, n)"""
    used: Tensor
    """int32 (groups): how many entries of each count"""
    cache: Tensor
    """(slots, h_k, 1, d)"""
    rows: int
    """of a group"""
    length: int
    """rows of a batch row; no group has rows of two"""

    @staticmethod
    def of(call: Call, launches: Launches, shares: bool = False) -> SlotLists:
        """shares: rows may share a table."""
        found = SlotLists.empty(call, shares)
        members = found.empty_members(call.q.device)
        with on_device(call.q):
            for launch, arguments in found.made(call, launches, members):
                launch(call.q.device.index, arguments)
        return found

    @staticmethod
    def empty(call: Call, shares: bool) -> SlotLists:
        if isinstance(call.layout, SlotRows):
            (length, n), cache, b = call.layout.block_table.shape, call.k, 1
        else:
            lists = _listed(call)[0]
            b, length, n = call.q.shape[0], call.q.shape[2], lists.lists.shape[-1] * lists.keys
            step = rows_apart(call.k.transpose(1, 2))
            assert step is not None
            cache = single_rows(call.k.transpose(1, 2), step).transpose(1, 2)
        rows, count = shared_rows(call.group) if shares and b * length >= LEAST_ROWS else 1, cache.shape[0]
        if count << rows >= 1 << 31 or b * length * count > 8 * MOST_MEMBERS:
            rows = 1
        groups, make = b * -(-length // rows), {"dtype": torch.int32, "device": call.q.device}
        tables = torch.empty(groups, n if rows == 1 else min(rows * n, count), **make), torch.empty(groups, **make)
        return SlotLists(*tables, cache, rows, length)

    def empty_members(self, device: torch.device) -> Tensor | None:
        """A bit for each slot and row of each group."""
        words = -(-self.cache.shape[0] * self.rows // 32)
        return torch.zeros(len(self.used), words, dtype=torch.int32, device=device) if self.rows > 1 else None

    def made(self, call: Call, launches: Launches, members: Tensor | None) -> Iterator[GivenLaunch]:
        """The launches that write the tables."""
        layout, k, step = call.layout, call.k, rows_apart(call.k.transpose(1, 2))
        pages, spans, s_q = None, (None, None), self.length
        if isinstance(layout, SlotRows):
            lists, others = Selected(layout.block_table[:, None, None], layout.seqused_k[:, None, None], 1), None
            s_q, step, size, s_k = 1, 0, 1, self.cache.shape[0]
        else:
            (lists, others), spans = _listed(call), positions.spans(call)
            size, s_k = k.shape[2], layout.capacity(k.shape[2])
            if isinstance(layout, Paged):
                table = layout.block_table if layout.block_table.stride(1) == 1 else layout.block_table.contiguous()
                pages = PageArgs(table, runtime_int(table.stride(0)), runtime_int(k.shape[0]))
        records = ListArgs.of(lists, call), pages, *spans, masks.device_args(call.replace(mask=others))
        all_rows = len(self.used) // -(-self.length // self.rows) * self.length if self.length else 0
        target = self.table if members is None else members
        n, rows = target.shape[1], tl.constexpr(self.rows)
        launch = _slots_launch(launches, all_rows, lists, rows)
        yield launch, (target, self.used, *records, n, 1, s_q, self.length, step, size, s_k)
        if members is not None:
            launch = cached_launch(
                launches, "slots of groups", lambda: Launch(groups_kernel, (len(self.used), 1, 1), (CHUNK, rows), 8)
            )
            yield launch, (self.table, self.used, members, n, self.table.shape[1])


def keys_of_rows(call: Call, launches: Launches) -> tuple[Tensor, Tensor]:
    """The keys that each row of a dense call sees, int32 (b, heads with lists, s_q, n), and how many of n count."""
    lists, (b, _, s_q, _) = _listed(call)[0], call.q.shape
    heads, n = lists.lists.shape[1], lists.lists.shape[-1] * lists.keys
    make = {"dtype": torch.int32, "device": call.q.device}
    table, used = torch.empty(b, heads, s_q, n, **make), torch.empty(b, heads, s_q, **make)
    if used.numel():
        with on_device(table):
            launch, arguments = keys_launch(call, launches, table, used)
            launch(table.device.index, arguments)
    return table, used


def keys_launch(call: Call, launches: Launches, table: Tensor, used: Tensor) -> GivenLaunch:
    """The launch that writes these tables."""
    lists, others = _listed(call)
    _, heads, s_q, n = table.shape
    records = ListArgs.of(lists, call), None, *positions.spans(call), masks.device_args(call.replace(mask=others))
    launch = _slots_launch(launches, used.numel(), lists, tl.constexpr(1))
    return launch, (table, used, *records, n, heads, s_q, s_q, 0, 1, call.k.shape[2])


def _slots_launch(launches: Launches, programs: int, lists: Selected, rows: tl.constexpr) -> Launch:
    chunk = min(CHUNK, max(32, 1 << (lists.lists.shape[-1] * lists.keys - 1).bit_length()))
    return cached_launch(
        launches, "slots", lambda: Launch(slots_kernel, (programs, 1, 1), (chunk, rows), max(1, chunk // 256))
    )


def shared_rows(group: int) -> int:
    """How many rows of so many heads fill a tile of 64, or half of it.

    >>> [shared_rows(n) for n in (128, 64, 20, 16, 8, 1)]
    [1, 1, 2, 4, 8, 8]
    """
    return max(1, min(MOST_SHARED, 1 << max(64 // max(group, 1), 1).bit_length() - 1))


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


@triton.jit(do_not_specialize=["n", "heads", "s_q", "length", "step", "size", "s_k"])
def slots_kernel(
    table, used, lists, pages, used_q, used_k, mask, n, heads, s_q, length, step, size, s_k, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The slots of one row of one of the heads: rows of s_q to a batch row, whose keys are in pages, or begin `step`
    rows after those of the batch row before. With ROWS of a group the bits of those slots, in zeros: `length` rows are
    cut in groups."""
    number = tl.program_id(0)
    b = number // s_q // heads
    row = number % s_q
    _, _, _, rows = extent(used_q, b, s_q)
    _, _, _, keys = extent(used_k, b, s_k)
    entries, entry_count = list_of_row(lists, b, number // s_q % heads, b * 0, row)
    per_entry = plain_int(lists.keys)
    within = number % length
    group = number // length * tl.cdiv(length, ROWS) + within // ROWS
    target = table + group.to(tl.int64) * n
    count = row * 0
    for start in range(0, entry_count * per_entry, CHUNK):
        # [CHUNK]
        i = start + tl.arange(0, CHUNK)
        at = (i // per_entry).to(tl.int64) * plain_int(lists.steps[3])
        entry = tl.load(entries + at, mask=i < entry_count * per_entry, other=-1)
        named = (entry >= 0) & (entry < tl.cdiv(keys, per_entry))
        kv_idx = tl.where(named, entry, 0).to(tl.int32) * per_entry + i % per_entry
        one = tl.zeros([1, 1], tl.int32)
        sees = visible(mask, b, one, row + one, kv_idx[None, :], rows, keys, keys - rows)
        named = named & tl.reshape(tl.broadcast_to(sees, [1, CHUNK]), [CHUNK])
        if pages is None:
            slot = b * step + kv_idx
        else:
            page = tl.load(pages.table + b.to(tl.int64) * plain_int(pages.stride) + kv_idx // size, mask=named, other=0)
            slot = tl.minimum(tl.maximum(page, 0), plain_int(pages.count) - 1).to(tl.int32) * step + kv_idx % size
        if ROWS == 1:
            offset = count + tl.cumsum(named.to(tl.int32), 0) - 1
            tl.store(target + offset, slot, mask=named)
            count += tl.sum(named.to(tl.int32), 0)
        else:
            bit = slot % (32 // ROWS) * ROWS + within % ROWS
            one_bit = tl.full([CHUNK], 1, tl.int32) << bit
            tl.atomic_or(target + slot // (32 // ROWS), one_bit, mask=named, sem="relaxed")
    if ROWS == 1:
        tl.store(used + group, count)


@triton.jit(do_not_specialize=["words", "n"])
def groups_kernel(table, used, members, words, n, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """The slots that some of ROWS rows see, times 2^ROWS, and a bit for each of these rows."""
    PER_WORD: tl.constexpr = 32 // ROWS
    group = tl.program_id(0)
    target = table + group.to(tl.int64) * n
    count = group * 0
    for start in range(0, words, CHUNK):
        # [CHUNK]
        i = start + tl.arange(0, CHUNK)
        word = tl.load(members + group.to(tl.int64) * words + i, mask=i < words, other=0)
        found = i * 0
        for j in tl.static_range(PER_WORD):
            found += ((word >> (j * ROWS)) & ((1 << ROWS) - 1) != 0).to(tl.int32)
        offset = count + tl.cumsum(found, 0) - found
        for j in tl.static_range(PER_WORD):
            bits = (word >> (j * ROWS)) & ((1 << ROWS) - 1)
            tl.store(target + offset, ((i * PER_WORD + j) << ROWS) | bits, mask=bits != 0)
            offset += (bits != 0).to(tl.int32)
        count += tl.sum(found, 0)
    tl.store(used + group, count)
