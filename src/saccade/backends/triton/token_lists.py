"""Launches of the gradients of rows that each list their keys."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Outputs, Saved
from saccade.backends.device import positions, scores
from saccade.backends.device.arguments import SWIZZLED, TileShape, precision
from saccade.backends.device.gradients import sink_gradient
from saccade.backends.device.launch import Launch, cached_launch, on_device, per_row, without_scores
from saccade.backends.device.records import TensorArgs, constants, runtime_int
from saccade.backends.device.slot_lists import SlotLists, keys_of_rows
from saccade.backends.triton import paged
from saccade.backends.triton.launch import operand, row_sums
from saccade.backends.triton.token_lists_kernel import (
    Heads,
    RowKeys,
    key_parts_kernel,
    key_sums_kernel,
    token_dq_kernel,
    token_weights_kernel,
)
from saccade.call import Call
from saccade.layouts import Paged, empty_like_rows

MOST_BYTES = 2 << 30
"""Of parts: what some rows add to dk and dv of their keys."""
PARTS_OF = {torch.bfloat16: torch.bfloat16}
"""The dtype of parts of operands of this dtype; else float32. A part is rounded as the weights are that it sums."""
BLOCK_Q = 64
"""Heads of a tile."""
WEIGHTS = 32, 4, 2
"""Keys of a tile of scores, warps, and stages of loads in flight."""
DQ = 64, 8, 2
"""The same of dq."""
ROOM = 64
"""What the keys of a row have room for is a multiple of it."""
PARTS = 128, 128, 8, 3
"""Keys and columns of a tile of parts, warps and stages."""
SUMS = 512, 8, 4
"""Columns of a program that adds up parts, parts that it reads at a time, and warps."""


@dataclass(frozen=True)
class TokenWork:
    """How a call is cut into rows whose parts are there at a time."""

    call: Call
    launches: Launches
    heads: Heads
    groups: int
    room: int
    """keys of a row in tables of weights and parts"""
    rows: int

    @staticmethod
    def of(call: Call, launches: Launches, lists: int, n: int) -> TokenWork:
        """lists: heads that have lists, of n keys each."""
        (b, h_q, s_q, d), h_k = call.q.shape, call.k.shape[1]
        groups = max(lists, h_k)
        room = max(1, -(-n // ROOM)) * ROOM
        of_row = groups * room * (d + call.v.shape[3]) * PARTS_OF.get(call.q.dtype, torch.float32).itemsize
        rows = max(1, min(b * s_q, MOST_BYTES // of_row))
        return TokenWork(
            call, launches, Heads(*constants(h_q // groups, groups // h_k, groups // lists)), groups, room, rows
        )

    @property
    def columns(self) -> int:
        return self.call.q.shape[3] + self.call.v.shape[3]

    def empty(self) -> tuple[Tensor, Tensor]:
        """Memory for weights and parts of some rows."""
        q, columns = self.call.q, self.columns
        weights = torch.empty(2, self.rows, q.shape[1], self.room, dtype=q.dtype, device=q.device)
        dtype = PARTS_OF.get(q.dtype, torch.float32)
        parts = torch.empty(self.rows * self.groups * self.room, columns, dtype=dtype, device=q.device)
        return weights, parts

    def keys(self, tables: tuple[Tensor, Tensor], memory: tuple[Tensor, Tensor], first: int) -> RowKeys:
        table, used = tables
        numbers = runtime_int(table.shape[3]), *memory, *map(runtime_int, (first, self.rows, self.room))
        return RowKeys(table, used, *numbers)

    def made(self, given: tuple[Any, ...], keys: RowKeys, rows: int) -> Iterator[tuple[Launch, tuple[Any, ...]]]:
        """The launches that write dq and parts of some rows. given: q, k, v or None, dout, dq and terms."""
        call, (q, k, v, dout, dq, *of_rows) = self.call, given
        records, (_, h_q, s_q, d) = (*positions.spans(call), scores.device_args(call)), call.q.shape
        form = *((x.unit.value, x.wide.value) for x in (dout, dq)), precision(), rows
        launch = cached_launch(
            self.launches, ("tokens weights", *form), lambda: self._of_rows(token_weights_kernel, rows, *WEIGHTS)
        )
        yield launch, (q, k, v, dout, *of_rows, keys, *records, h_q, s_q, call.k.shape[2], call.scale)
        launch = cached_launch(self.launches, ("tokens dq", *form), lambda: self._of_rows(token_dq_kernel, rows, *DQ))
        yield launch, (k, dq, keys, h_q, s_q, call.scale)
        for which, x, first, columns, factor in ((1, q, 0, d, call.scale), (0, dout, d, call.v.shape[3], 1.0)):
            launch = cached_launch(
                self.launches, ("tokens parts", which, *form), lambda n=columns: self._of_keys(rows, n)
            )
            numbers = *map(runtime_int, (which, first, self.columns)), factor, h_q, s_q
            yield launch, (x, keys, *numbers)

    def _of_rows(self, kernel: Any, rows: int, block_k: int, warps: int, stages: int) -> Launch:
        call, share = self.call, self.heads.SHARE.value
        block_q = min(BLOCK_Q, max(16, 1 << (share - 1).bit_length()))
        first, rest = map(tl.constexpr, paged.columns(call.q.shape[3], call.q.dtype))
        shape = TileShape.of(call, block_q, block_k)
        if rest.value:  # a tile as wide as what is swizzled together: see SWIZZLED
            shape = shape._replace(BLOCK_D=first, REST=tl.constexpr(max(rest.value, SWIZZLED // 2)))
        grid = rows * self.groups * -(-share // block_q), 1, 1
        return Launch(kernel, grid, (shape, self.heads), warps, stages, 1)

    def _of_keys(self, rows: int, columns: int) -> Launch:
        block_h = min(128, max(16, 1 << (self.heads.SHARE.value - 1).bit_length()))
        block_k, block_d, warps, stages = PARTS
        sizes = constants(columns, block_h, block_k, block_d)
        grid = rows * self.groups * -(-columns // block_d), 1, 1
        return Launch(key_parts_kernel, grid, (self.heads, *sizes), warps, stages, 1)


def backward(call: Call, launches: Launches, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink."""
    q, k, v = call.q, call.k, call.v
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (q, k, v))
    if call.scoreless:
        return dq.zero_(), dk.zero_(), dv.zero_(), sink_gradient(call, launches, saved)
    with on_device(q):
        (dout, terms), tables = row_sums(call, launches, saved), keys_of_rows(call, launches)
        work = TokenWork.of(call, launches, tables[0].shape[1], tables[0].shape[3])
        v_args = None if paged.reads_once(call) else operand(call, launches, "v")
        given = *(operand(call, launches, name) for name in ("q", "k")), v_args, dout, TensorArgs.of(dq), terms
        sums = torch.zeros(*k.shape[:3], work.columns, dtype=torch.float32, device=q.device)
        memory, all_rows = work.empty(), q.shape[0] * q.shape[2]
        for first in range(0, all_rows, work.rows):
            rows = min(work.rows, all_rows - first)
            for launch, arguments in work.made(given, work.keys(tables, memory, first), rows):
                launch(q.device.index, arguments)
            target, order, starts = inverted(work, tables, sums, first, rows)
            launch, arguments = sums_launch(work, target, memory[1], order, starts)
            launch(q.device.index, arguments)
        dk.copy_(sums[..., : q.shape[3]])
        dv.copy_(sums[..., q.shape[3] :])
    return dq, dk, dv, sink_gradient(call, launches, saved, terms[..., 1])


def inverted(
    work: TokenWork, tables: tuple[Tensor, Tensor], sums: Tensor, first: int, rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums that some rows add to; numbers of parts, key after key; and where those of each key begin. The sort is
    stable: parts of a key come in the order of rows."""
    (table, used), (_, h_k, s_k, _), groups = tables, sums.shape, work.groups
    lists, s_q, n = table.shape[1:]
    row = torch.arange(first, first + rows, device=table.device)
    b, number = row // s_q, row % s_q
    group = torch.arange(groups, device=table.device)
    of_list = b[:, None], group // (groups // lists), number[:, None]
    start = (b[:, None] - first // s_q) * h_k + group // (groups // h_k)
    target = sums[first // s_q : (first + rows - 1) // s_q + 1].view(-1, work.columns)
    keys = start[..., None] * s_k + table[of_list]
    i = torch.arange(work.room, device=table.device)
    there = i[:n] < used[of_list][..., None]
    keys = torch.nn.functional.pad(torch.where(there, keys, len(target)), (0, work.room - n), value=len(target))
    ordered, order = keys.int().flatten().sort(stable=True)
    numbers = torch.arange(len(target) + 1, device=table.device, dtype=torch.int32)
    return target, order.int(), torch.searchsorted(ordered, numbers, out_int32=True)


def sums_launch(
    work: TokenWork, target: Tensor, parts: Tensor, order: Tensor, starts: Tensor
) -> tuple[Launch, tuple[Any, ...]]:
    """The launch that adds parts to the sums of their keys."""
    block, at_once, warps = SUMS
    grid = len(target) * -(-work.columns // block), 1, 1
    launch = cached_launch(
        work.launches, ("tokens sums", grid), lambda: Launch(key_sums_kernel, grid, constants(block, at_once), warps)
    )
    return launch, (target, parts, order, starts, runtime_int(work.columns))


def forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v), lse and max_scores of latents: each row is a sequence over pages of one row."""
    b, h_q, s_q, _ = call.q.shape
    lists = None if call.scoreless else SlotLists.of(call, launches)
    if lists is None or not lists.table.numel():
        return without_scores(call, call.empty_out(), per_row(call, lse), per_row(call, call.max_scores))
    q = call.q.transpose(1, 2).reshape(b * s_q, h_q, 1, -1)
    layout = Paged(lists.table, lists.used)
    rows = call.replace(q=q, k=lists.cache, v=lists.cache[..., : call.v.shape[3]], layout=layout, mask=None, out=None)
    found = paged.forward(rows, [(rows, launches)], lse)
    out = call.empty_out()
    out.copy_(found[0].view(b, s_q, h_q, -1).transpose(1, 2))
    row_lse, top = (None if x is None else x.view(b, s_q, h_q).transpose(1, 2).contiguous() for x in found[1:])
    if row_lse is not None and (in_use := call.layout.seqused_q) is not None:  # beside a sink others have none
        row_lse.masked_fill_((torch.arange(s_q, device=q.device) >= in_use[:, None])[:, None], -torch.inf)
    return out, row_lse, top
