"""Lists of keys on the device: each call makes tables of bits of them, which kernels of any tiles look up.

A table has a bit for each key, or block of keys, and each list. One small kernel sets those that a list names: an entry
that is none sets no bit, and one that comes again sets none besides. Nothing waits for the host.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade import masks
from saccade.backends import Launches
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch, on_device
from saccade.backends.device.records import FLAGS, plain_int, runtime_int
from saccade.backends.key_lists import TableShape
from saccade.call import Call
from saccade.masks import Mask, Selected

CHUNK = 512
"""Entries that a program looks at at once."""


@dataclass(frozen=True, eq=False, repr=False)
class Tabulated(Selected):
    """Lists with what they name in one call."""

    table: tuple[TableShape, Tensor] | None = None
    """with bits, int32 (lists, words)"""


class KeyTable(NamedTuple):
    """Bits as kernels read them; numbers are `runtime_int`s."""

    bits: Any
    stride_b: Any
    stride_h: Any
    """in lists"""
    share: Any
    """query heads of a list"""
    rows: Any
    """of a list"""
    groups: Any
    words: Any
    keys: Any
    """of a bit"""
    starts: Any
    """int (b + 1): where each sequence's rows begin, if `end_to_end`; else some other tensor"""
    end_to_end: Any
    """constexpr: a list for each row of queries end to end"""

    @staticmethod
    def of(mask: Tabulated, call: Call) -> KeyTable:
        assert mask.table is not None
        (shape, bits), starts, flat = mask.table, call.layout.cu_seqlens_q, mask.end_to_end
        stride_b = shape.heads * shape.groups if shape.batch > 1 else 0
        numbers = stride_b, shape.groups, call.q.shape[1] // max(shape.heads, 1), mask.rows, shape.groups, shape.words
        given = starts.contiguous() if flat else bits
        return KeyTable(bits, *map(runtime_int, (*numbers, mask.keys)), given, FLAGS[flat])


class ListArgs(NamedTuple):
    """Lists as kernels read them; numbers are `runtime_int`s."""

    lists: Any
    lengths: Any
    """or some other tensor"""
    steps: Any
    """of batch row, head, list and entry; then of lengths, of batch row, head and list"""
    n: Any
    groups: Any
    """lists of a head"""
    rows: Any
    """of a list"""
    keys: Any
    """of an entry"""
    cut: Any
    """constexpr: there are lengths"""
    end_to_end: Any
    """constexpr: a list for each row of queries end to end"""

    @staticmethod
    def of(mask: Selected, call: Call) -> ListArgs:
        lists, lengths = mask.lists if mask.lists.dim() == 4 else mask.lists[None], lengths_of(mask, call)
        cut = lengths is not None
        of_lists, of_lengths = (
            [stride if n > 1 else 0 for n, stride in zip(x.shape[:3], x.stride(), strict=False)]
            for x in (lists, lists if lengths is None else lengths)
        )
        steps = *of_lists, lists.stride(3), *of_lengths
        numbers = lists.shape[3], lists.shape[2], mask.rows, mask.keys
        given = lists, lists if lengths is None else lengths, tuple(map(runtime_int, steps))
        return ListArgs(*given, *map(runtime_int, numbers), FLAGS[cut], FLAGS[mask.end_to_end])


def lengths_of(mask: Selected, call: Call) -> Tensor | None:
    """The lengths of lists, (b or 1, heads or 1, lists or 1); of rows after the last sequence any."""
    lengths = mask.lengths
    if lengths is None or lengths.dim() > 1:
        return lengths[None] if lengths is not None and lengths.dim() == 2 else lengths
    if len(lengths) == 1 or not mask.end_to_end:
        return lengths[:, None, None]
    row = torch.arange(mask.lists.shape[1], device=lengths.device)
    return lengths[sequence_of(row, call).clamp(max=len(lengths) - 1)][None, None]


def sequence_of(row: Tensor, call: Call) -> Tensor:
    """Which sequence rows end to end are of; after the last one their number."""
    return torch.bucketize(row, call.layout.cu_seqlens_q[1:], right=True)


def tabulated(call: Call, launches: Launches) -> Call:
    """The call with the table of each list in its mask."""
    if call.mask is None or not (call.mask.block_sparse and call.mask.bounds_per_row):
        return call

    number = count()

    def change(leaf: Mask) -> Mask:
        if not isinstance(leaf, Selected):
            return leaf
        table = _table(leaf, call, launches, next(number))
        return Tabulated(leaf.lists, leaf.lengths, leaf.rows, leaf.block_size, table)

    return call.replace(mask=masks.of_leaves(call.mask, change))


def _table(mask: Selected, call: Call, launches: Launches, number: int) -> tuple[TableShape, Tensor]:
    """Of the leaf of this number: launches of one are not those of another."""
    shape = TableShape.of(mask, call)
    bits = torch.zeros(shape.lists, shape.words, dtype=torch.int32, device=call.q.device)
    if bits.numel() and mask.lists.numel():
        with on_device(bits):
            launch, arguments = table_launch(mask, call, launches, (shape, bits), number)
            launch(bits.device.index, arguments)
    return shape, bits


def table_launch(
    mask: Selected, call: Call, launches: Launches, table: tuple[TableShape, Tensor], number: int
) -> GivenLaunch:
    """The kernel that sets bits, and its arguments."""
    shape, bits = table
    launch = cached_launch(launches, ("key lists", number), lambda: Launch(table_kernel, (shape.lists, 1, 1), (CHUNK,)))
    return launch, (bits, ListArgs.of(mask, call), *map(runtime_int, (shape.heads, shape.words, shape.blocks)))


@triton.jit
def list_at(args, b, head, group):
    """Pointers to the entries of lists, and how many of them count: of heads that have lists, or share one."""
    steps = args.steps
    b = b.to(tl.int64)
    head = head.to(tl.int64)
    group = group.to(tl.int64)
    entries = args.lists + b * plain_int(steps[0]) + head * plain_int(steps[1]) + group * plain_int(steps[2])
    length = group.to(tl.int32) * 0 + plain_int(args.n)
    if args.cut:
        offset = b * plain_int(steps[4]) + head * plain_int(steps[5]) + group * plain_int(steps[6])
        length = tl.minimum(tl.load(args.lengths + offset), length).to(tl.int32)
    return entries, length


@triton.jit
def list_of_row(args, b, head, first, row):
    """The same of rows of sequence b, whose first one is row `first` of those end to end. Rows without a list have an
    empty one."""
    group = first + row if args.end_to_end else row // plain_int(args.rows)
    there = group < plain_int(args.groups)
    entries, length = list_at(args, b, head, tl.where(there, group, 0))
    return entries, tl.where(there, length, 0)


@triton.jit
def table_kernel(bits, args, heads, words, blocks, CHUNK: tl.constexpr):
    """The bits of one list, in zeros."""
    number = tl.program_id(0).to(tl.int64)
    groups = plain_int(args.groups)
    head = number // groups % plain_int(heads)
    entries, length = list_at(args, number // groups // plain_int(heads), head, number % groups)
    row = bits + number * plain_int(words)
    for start in range(0, length, CHUNK):
        # [CHUNK]
        index = start + tl.arange(0, CHUNK)
        entry = tl.load(entries + index.to(tl.int64) * plain_int(args.steps[3]), mask=index < length, other=-1)
        valid = (entry >= 0) & (entry < plain_int(blocks))
        entry = tl.where(valid, entry, 0).to(tl.int32)
        one = tl.full([CHUNK], 1, tl.int32)
        tl.atomic_or(row + (entry >> 5), one << (entry & 31), mask=valid, sem="relaxed")


@triton.jit
def named(data, b, h, q_idx, kv_idx, off):
    """Which keys the lists of rows name. Indices beyond the last row or key are read inside of the table."""
    return _named(data[0], b, h, q_idx, kv_idx)


@triton.jit
def _named(table, b, h, q_idx, kv_idx):
    row = q_idx // plain_int(table.rows)
    first = (h // plain_int(table.share)).to(tl.int64) * plain_int(table.stride_h)  # of what 32 bits count from
    if table.end_to_end:
        row += tl.load(table.starts + b).to(tl.int32)
    else:
        first += b * plain_int(table.stride_b).to(tl.int64)
    there = (row >= 0) & (row < plain_int(table.groups))
    block = kv_idx // plain_int(table.keys)
    words = plain_int(table.words)
    word = tl.minimum(block >> 5, words - 1)
    bits = tl.load(table.bits + first * words + (tl.where(there, row, 0) * words + word))
    return there & (((bits >> (block & 31)) & 1) != 0)
