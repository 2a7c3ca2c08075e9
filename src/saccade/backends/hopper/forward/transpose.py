"""8-bit values with keys side by side, as the tensor cores want them: 8-bit products read no other order.

The forward's weights are an accumulator that becomes an operand as it lies, so that of each 16 keys, 8 h + 2 q + e is
at place 4 q + 2 h + e (`ptx.pack_quads`). The values here are in the same order. What no row may see is zero here: keys
that are not in use, and whatever follows the last key of a packed sequence up to a whole block.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch
from saccade.backends.device.records import TensorArgs
from saccade.backends.device.sequences import block_of_rows, spans
from saccade.backends.device.tiles import head
from saccade.call import Call

BLOCK = 128
"""Keys of one program, and those in whose multiples a packed sequence has places."""
SEQUENCE_BLOCK = tl.constexpr(BLOCK)
_COLUMNS = 64
"""Columns of one program's tile at a time."""


@triton.jit(do_not_specialize=["blocks", "h_k", "s"])
def transpose_kernel(out, v, used, blocks, h_k, s, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """out (b, h_k, D, blocks BLOCK) int32, which are four bytes each, of v (b, h_k, s, D) bytes."""
    number = tl.program_id(0)
    bh = tl.program_id(1)
    b, h, first, start, _, rows = block_of_rows(used, bh, number, h_k, s, BLOCK)
    # [BLOCK / 4]: the first key of each four, of which the second is the next one, and the others 8 keys further
    place = tl.arange(0, BLOCK // 4)
    key = start + place // 4 * 16 + place % 4 * 2
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    words = tl.zeros([BLOCK // 4, WIDTH], tl.int32)
    for i in tl.static_range(4):  # type: ignore[reportGeneralTypeIssues]
        row = key + i // 2 * 8 + i % 2
        there = (row < rows)[:, None] & (column < D)[None, :]
        byte = tl.load(head(v, b, h, (first + row)[:, None]) + column[None, :], mask=there, other=0)
        words += byte.to(tl.int32) << (8 * i)
    line = (bh.to(tl.int64) * D + column) * (blocks * (BLOCK // 4)) + number * (BLOCK // 4)
    tl.store(out + line[:, None] + place[None, :], tl.trans(words), mask=(column < D)[:, None])


def transposed(call: Call, launches: Launches) -> Tensor:
    """v as (b, h_k, d_v, keys): columns of whole blocks of 128 keys; packed, those of each sequence are its own."""
    out = empty(call, call.v.device)
    launch, arguments = transpose_launch(call, launches, out)
    launch(out.device.index, arguments)
    return out


def empty(call: Call, device: torch.device) -> Tensor:
    """Memory for them."""
    b, h_k, s, d = call.v.shape
    return torch.empty(b, h_k, d, call.layout.tiles(s, BLOCK) * BLOCK, dtype=call.v.dtype, device=device)


def transpose_launch(call: Call, launches: Launches, out: Tensor) -> GivenLaunch:
    """The kernel that fills `out`, and its arguments."""
    b, h_k, s, d = call.v.shape
    blocks = out.shape[3] // BLOCK
    width = min(_COLUMNS, triton.next_power_of_2(d))
    grid = blocks, b * h_k, -(-d // width)
    launch = cached_launch(launches, "transpose", lambda: Launch(transpose_kernel, grid, (d, width, BLOCK)))
    _, used = spans(call)
    values = TensorArgs.of(call.v.view(torch.uint8))
    return launch, (out.view(torch.int32), values, used, blocks, h_k, s)
