"""Launches of the kernels that gather the keys of lists, forward and backward."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from saccade.backends import Launches, Outputs, Saved
from saccade.backends.device import masks, positions, scores
from saccade.backends.device.arguments import TileShape, precision
from saccade.backends.device.gradients import sink_gradient
from saccade.backends.device.key_lists import ListArgs, lengths_of, sequence_of
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch, on_device, per_row
from saccade.backends.device.records import TensorArgs, constants, runtime_int
from saccade.backends.key_lists import ListTile, list_tile, one_list
from saccade.backends.triton.launch import operand, row_sums
from saccade.backends.triton.listed_kernel import (
    GatherTile,
    Inverted,
    Unions,
    listed_dkdv_kernel,
    listed_dq_kernel,
    listed_kernel,
    union_kernel,
)
from saccade.backends.triton.paged import page_table
from saccade.call import Call
from saccade.layouts import Paged, empty_like_rows
from saccade.masks import Mask, Selected

BLOCK = 64
"""Keys, or rows of all heads that share lists, of a tile; half as many of float32, and of head dims above 128."""


class Work(NamedTuple):
    """What the kernels of a call share."""

    call: Call
    launches: Launches
    mask: Selected
    others: Mask | None
    """beside the list"""
    tile: ListTile
    block: int

    @staticmethod
    def of(call: Call, launches: Launches) -> Work:
        found, tile = one_list(call), list_tile(call)
        assert found is not None
        assert tile is not None
        small = call.q.dtype == torch.float32 or max(call.q.shape[3], call.v.shape[3]) > 128
        return Work(call, launches, *found, tile, BLOCK // 2 if small else BLOCK)

    @property
    def block_q(self) -> int:
        return max(16, triton.next_power_of_2(self.tile.share * self.tile.rows))

    @property
    def programs(self) -> int:
        (b, h_q, s_q, _), (share, rows, _) = self.call.q.shape, self.tile
        ragged = self.call.layout.cu_seqlens_q is not None
        blocks = positions.slots(self.call, 0, rows) if ragged else b * -(-s_q // rows)
        return h_q // share * blocks

    def common(self, table: Tensor | None) -> tuple[Any, ...]:
        """The arguments from `used_q` to `scale`."""
        call = self.call
        device_mask = masks.device_args(call.replace(mask=self.others))
        records = *positions.spans(call, table), device_mask, scores.device_args(call)
        return *records, call.q.shape[1], *positions.lengths(call), call.scale

    def by_rows(self) -> tuple[Any, ...]:
        """The arguments from `lists` on of kernels whose programs have rows."""
        call, launches, ragged = self.call, self.launches, self.call.layout.cu_seqlens_q is not None
        common = self.common(positions.table(call, launches, 0, self.tile.rows) if ragged else None)
        lists = ListArgs.of(self.mask, call)
        if not self.tile.entries:
            return lists, None, *common
        most, device = self.tile.rows * self.tile.entries, call.q.device
        entries, bits = torch.empty(2, self.programs, most, dtype=torch.int32, device=device)
        count = torch.empty(self.programs, dtype=torch.int32, device=device)
        unions = Unions(entries, bits, count, runtime_int(most))
        launch, arguments = self.union(unions, lists, common)
        launch(device.index, arguments)
        return lists, unions, *common

    def union(self, unions: Unions, lists: ListArgs, common: tuple[Any, ...]) -> GivenLaunch:
        launch = cached_launch(
            self.launches, "union", lambda: Launch(union_kernel, (self.programs, 1, 1), tuple(self.tile))
        )
        return launch, (unions, lists, *common[:2], *common[4:7])

    def launch(self, kernel: Any, *target: TensorArgs | Tensor | None) -> Launch:
        """Of a kernel whose programs have rows; target: what it is compiled for, and the Call's key does not hold."""

        def make() -> Launch:
            tile = GatherTile(*constants(self.tile.share, self.tile.rows, self.mask.keys % self.block == 0))
            shape = TileShape.of(self.call, self.block_q, self.block)
            return Launch(kernel, (self.programs, 1, 1), (shape, tile), *CONFIGS[kernel.__name__], 1)

        forms = [
            None if x is None else (x.unit.value, x.wide.value) if isinstance(x, TensorArgs) else 0 for x in target
        ]
        return cached_launch(self.launches, (kernel.__name__, *forms, precision()), make)


ROWS_OF_KEYS = 32
"""Rows of all heads that share lists, in a tile of gradients of keys."""
CONFIGS = {"listed_kernel": (4, 3), "listed_dq_kernel": (4, 2), "listed_dkdv_kernel": (4, 4)}
"""Warps of a program, and stages of loads in flight."""


def forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q)."""
    out, row_lse, top = call.empty_out(), per_row(call, lse), per_row(call, call.max_scores)
    with on_device(out):
        work = Work.of(call, launches)
        launch, arguments = forward_launch(work, out, row_lse, top, work.by_rows())
        launch(out.device.index, arguments)
    return out, row_lse, top


def forward_launch(
    work: Work, out: Tensor, lse: Tensor | None, top: Tensor | None, by_rows: tuple[Any, ...]
) -> GivenLaunch:
    """The launch that writes these results, and its arguments."""
    call, target = work.call, TensorArgs.of(out)
    sink = None if call.sink is None else call.sink.contiguous()
    operands = (operand(call, work.launches, name) for name in ("q", "k", "v"))
    layout, size = call.layout, call.k.shape[2]
    pages = page_table(layout, call.k) if isinstance(layout, Paged) else None
    tensors = *operands, target, lse, top, sink, pages, size, *by_rows
    return work.launch(listed_kernel, target, lse), tensors


def backward(call: Call, launches: Launches, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink."""
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (call.q, call.k, call.v))
    with on_device(dq):
        work, (dout, terms) = Work.of(call, launches), row_sums(call, launches, saved)
        operands = (*(operand(call, launches, name) for name in ("q", "k", "v")), dout)
        target = TensorArgs.of(dq)
        launch = work.launch(listed_dq_kernel, target, dout)
        launch(dq.device.index, (*operands, target, terms, *work.by_rows()))
        ragged, keys = call.layout.ragged_keys, work.mask.keys
        common = work.common(positions.table(call, launches, 1, keys) if ragged else None)
        given = *operands, TensorArgs.of(dk), TensorArgs.of(dv), terms
        launch, arguments = keys_launch(work, given, inverted(work), common)
        launch(dq.device.index, arguments)
    return dq, dk, dv, sink_gradient(call, launches, saved, terms[..., 1])


def keys_launch(work: Work, given: tuple[Any, ...], lists: Inverted, common: tuple[Any, ...]) -> GivenLaunch:
    """The launch that computes dk and dv, and its arguments."""
    call, keys, share = work.call, work.mask.keys, work.tile.share
    dout, dk, dv = given[3:6]

    def make() -> Launch:
        block_k = min(work.block, max(16, triton.next_power_of_2(keys)))
        b, h_k, s_k, _ = call.k.shape
        blocks = positions.slots(call, 1, keys) if call.layout.ragged_keys else b * -(-s_k // keys)
        shape = TileShape.of(call, max(ROWS_OF_KEYS * work.block // BLOCK, triton.next_power_of_2(share)), block_k)
        fixed = shape, *constants(share, keys)
        return Launch(
            listed_dkdv_kernel, (blocks * h_k, -(-keys // block_k), 1), fixed, *CONFIGS["listed_dkdv_kernel"], 1
        )

    key = "listed dkdv", *((x.unit.value, x.wide.value) for x in (dout, dk, dv)), precision()
    return cached_launch(work.launches, key, make), (*given, ListArgs.of(work.mask, call), lists, *common)


def inverted(work: Work) -> Inverted:
    """Sorted in a stable way, so that sums over a block's rows have one order."""
    call, mask, layout = work.call, work.mask, work.call.layout
    lists, lengths = mask.lists if mask.lists.dim() == 4 else mask.lists[None], lengths_of(mask, call)
    n, device = lists.shape[3], lists.device
    if lengths is not None:
        lists = lists.expand(max(len(lists), len(lengths)), -1, -1, -1)
    b, heads, groups, _ = lists.shape
    starts, used = layout.cu_seqlens_k, layout.seqused_k
    if starts is None:  # of a batch row
        blocks = limit = -(-call.k.shape[2] // mask.keys)
        before = torch.arange(b, device=device)[:, None, None, None] * (heads * blocks)
    else:  # of a sequence, or of the row that has a list
        blocks, i = layout.tiles(call.k.shape[2], mask.keys), torch.arange(layout.sequences, device=device)
        of_sequence = starts.diff() if used is None else torch.minimum(starts.diff(), used)
        limit, before = -(-of_sequence // mask.keys), starts[:-1] // mask.keys + i
        if mask.end_to_end:  # rows after the last sequence list nothing
            row = sequence_of(torch.arange(groups, device=device), call)
            limit, before = (torch.cat([x, x.new_zeros(1)])[row, None] for x in (limit, before))
        else:
            limit, before = (x[:, None, None, None] for x in (limit, before))
    named = (lists >= 0) & (lists < limit)
    if lengths is not None:
        named &= torch.arange(n, device=device) < lengths[..., None]
    total = (b if starts is None else 1) * heads * blocks
    head = torch.arange(heads, device=device)[:, None, None] * blocks
    number = torch.where(named, lists + before + head, total).clamp(0, total).int().flatten()
    ordered, order = number.sort(stable=True)
    first = torch.searchsorted(ordered, torch.arange(total + 1, device=device, dtype=torch.int32), out_int32=True)
    strides = heads * blocks if starts is None and b > 1 else 0, blocks if heads > 1 else 0
    return Inverted((order // n % groups).int(), first, *map(runtime_int, strides))
