"""8-bit values with keys side by side, as the tensor cores want them: transposed before the kernel, or in it."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from saccade.backends import Launches
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch
from saccade.backends.device.positions import block_of_rows, spans
from saccade.backends.device.records import TensorArgs
from saccade.backends.device.tiles import head
from saccade.call import Call

# 8-bit values of pages and of key ranges: four warps that turn each tile as it comes.
#
# Such values have no copy with keys side by side (`transpose.py`): a cache is larger than what one call reads of it,
# and ranges overlap. The tiles here are the same as those of that copy.


@gluon.jit
def turn_tile(raw, turned, used, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """turned [COLUMNS, BLOCK_K] of raw [BLOCK_K, COLUMNS], with zeros for keys from `used` on; keys in the order of
    `ptx.pack_quads`."""
    # Pieces of 16 keys and 4 columns are what ldmatrix brings and stmatrix takes.
    WIDE: gl.constexpr = 4 if COLUMNS == 128 else 2
    layout: gl.constexpr = gl.BlockedLayout([16, 4], [4, 8], [4 // WIDE, WIDE], [1, 0])
    if used < BLOCK_K:  # in memory: where two ways meet, bytes in registers are taken apart
        kv_idx = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
        x = raw.load(layout).to(gl.int8, bitcast=True)
        raw.store(gl.where((kv_idx < used)[:, None], x, gl.zeros_like(x)).to(DTYPE, bitcast=True))
    # [BLOCK_K, COLUMNS]
    x = raw.load(layout).to(gl.int8, bitcast=True)
    # [16s, h, q, e, COLUMNS] to [16s, q, h, e, COLUMNS]
    x = x.reshape([BLOCK_K // 16, 2, 4, 2, COLUMNS]).permute((0, 2, 1, 3, 4)).reshape([BLOCK_K, COLUMNS])
    turned.store(x.permute((1, 0)).to(DTYPE, bitcast=True))


@gluon.jit
def transpose(args, pipe):
    """Turns the tiles of values that the producer loads, until it says that there are no more."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    WIDTH: gl.constexpr = min(128, BLOCK_DV)
    DTYPE: gl.constexpr = pipe.values.tiles.dtype
    n = gl.to_tensor(0)
    slot = pipe.raw.wait(0)
    used = pipe.raw.get(pipe.raw.record_of(0), 0)
    while used >= 0:
        stage = pipe.values.claim(n)
        raw = pipe.raw.tiles.index(slot).reshape([BLOCK_K, BLOCK_DV])
        turned = pipe.values.tiles.index(stage).reshape([BLOCK_DV, BLOCK_K])
        for column in gl.static_range(0, BLOCK_DV, WIDTH):
            turn_tile(raw.slice(column, WIDTH, 1), turned.slice(column, WIDTH, 0), used, BLOCK_K, WIDTH, DTYPE)
        fence_async_shared()
        pipe.raw.release(n)
        pipe.values.fill(stage)
        n += 1
        slot = pipe.raw.wait(n)
        used = pipe.raw.get(pipe.raw.record_of(n), 0)


# 8-bit values with keys side by side, as the tensor cores want them: 8-bit products read no other order.
#
# The forward's weights are an accumulator that becomes an operand as it lies, so that of each 16 keys, 8 h + 2 q + e is
# at place 4 q + 2 h + e (`ptx.pack_quads`). The values here are in the same order. What no row may see is zero here:
# keys that are not in use, and whatever follows the last key of a packed sequence up to a whole block.


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
    offset = tl.arange(0, BLOCK // 4)
    key = start + offset // 4 * 16 + offset % 4 * 2
    column = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    words = tl.zeros([BLOCK // 4, WIDTH], tl.int32)
    for i in tl.static_range(4):
        row = key + i // 2 * 8 + i % 2
        there = (row < rows)[:, None] & (column < D)[None, :]
        byte = tl.load(head(v, b, h, (first + row)[:, None]) + column[None, :], mask=there, other=0)
        words += byte.to(tl.int32) << (8 * i)
    line = (bh.to(tl.int64) * D + column) * (blocks * (BLOCK // 4)) + number * (BLOCK // 4)
    tl.store(out + line[:, None] + offset[None, :], tl.trans(words), mask=(column < D)[:, None])


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
