"""Helpers that the backwards of all kernel backends share."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Saved
from saccade.backends.device import block_d
from saccade.backends.device.arguments import TileShape, tile_grid
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch, on_device
from saccade.backends.device.records import TensorArgs, plain_int, runtime_int
from saccade.backends.device.tiles import head
from saccade.call import Call, aligned
from saccade.util.memory_layout import ALIGNMENT

# Launches of kernels that compute the weights of a call once more.


def recompute_launch(kernel: Any, call: Call, *constants: Any) -> Launch:
    """Of a kernel that computes the weights once more."""
    blocks = recompute_blocks(call)
    warps = 4 if _widest(call) <= 64 and call.dropout is None else 8
    shape = TileShape.of(call, *blocks)
    return Launch(kernel, tile_grid(call, *blocks), (*constants, shape), warps, 2)


def recompute_blocks(call: Call) -> tuple[int, int]:
    """BLOCK_Q, at most BLOCK_K, and BLOCK_K."""
    size = 32 if call.q.dtype == torch.float32 else 64
    widest = _widest(call)
    size = size if widest <= 128 else size // 2 if widest <= 256 else 16
    return size, size


def _widest(call: Call) -> int:
    return max(block_d(call.q.shape[3]), block_d(call.v.shape[3]))


def aligned_rows(launches: Launches, x: Tensor) -> TensorArgs:
    """Rows that kernels read in pieces of 16 bytes; others are copied, padded. (Element by element they would be slow,
    and Triton 3.6 miscompiles some such tiles: notes/triton.md.)"""
    return TensorArgs.of(x if aligned(x) else padded(launches, x))


def padded(launches: Launches, x: Tensor) -> Tensor:
    """A copy of x (b, h, s, d) whose rows start at multiples of 16 bytes."""
    whole = ALIGNMENT // x.element_size()
    copy = x.new_empty(*x.shape[:3], -(-x.shape[3] // whole) * whole)[..., : x.shape[3]]
    if copy.numel():
        with on_device(x):
            launch, arguments = copy_launch(launches, x, copy)
            launch(x.device.index, arguments)
    return copy


COPIED = 4096
"""Numbers of one program of `copy_kernel`."""


def copy_launch(launches: Launches, x: Tensor, copy: Tensor) -> GivenLaunch:
    """The kernel that copies x, and its arguments: integers of as many bits, whatever the numbers are."""
    b, h, s, d = x.shape
    block = min(triton.next_power_of_2(d), COPIED)
    grid, sizes = (b * h * -(-s // (COPIED // block)), -(-d // block), 1), (block, COPIED // block)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]
    rows = [TensorArgs.of(y.view(bits)) for y in (x, copy)]
    launch = cached_launch(
        launches, ("copy", grid, sizes, bits, *specialised(rows, [x])), lambda: Launch(copy_kernel, grid, sizes)
    )
    return launch, (*rows, *map(runtime_int, (x.stride(3), h, s, d)))


@triton.jit
def copy_kernel(x, copy, pitch, h, s, d, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """copy = x for ROWS rows of one head, and BLOCK columns, which lie `pitch` numbers apart in x."""
    h, s, d = plain_int(h), plain_int(s), plain_int(d)
    blocks = tl.cdiv(s, ROWS)
    bh = tl.program_id(0) // blocks
    # [ROWS, 1]
    row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)[:, None]
    # [1, BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = (row < s) & (column < d)
    value = tl.load(head(x, bh // h, bh % h, row) + column * plain_int(pitch).to(tl.int64), mask=there)
    tl.store(head(copy, bh // h, bh % h, row) + column, value, mask=there)


def specialised(operands: Iterable[TensorArgs], rows: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """What Triton specialises for and the Call's key does not hold: how a gradient's tensors lie, such as dout, and
    what belongs to rows."""
    units = (x.value for y in operands for x in (y.unit, y.wide))
    return *units, *(None if x is None else x.data_ptr() % ALIGNMENT for x in rows)


def sink_gradient(call: Call, launches: Launches, saved: Saved, delta: Tensor | None = None) -> Tensor | None:
    """`-sum p_sink delta` with p_sink = exp(sink - lse) and delta = rowsum(dout out) - dlse, (b, h_q, s_q)."""
    if call.sink is None:
        return None
    rows, sign = (saved.dlse, 1.0) if delta is None else (delta, -1.0)
    if rows is None or not rows.numel():  # no keys or no rows: only the LSE has a gradient
        return torch.zeros_like(call.sink)
    dsink = torch.empty_like(call.sink)
    with on_device(call.q):
        rows = rows if evenly_spaced(rows) else rows.contiguous()
        launch, arguments = sink_launch(launches, call.sink, saved.lse.contiguous(), rows, sign, dsink)
        launch(call.q.device.index, arguments)
    return dsink


def evenly_spaced(rows: Tensor) -> bool:
    """Whether rows (b, h_q, s_q) are contiguous, or every nth element of memory that is."""
    _, h_q, s_q = rows.shape
    step = rows.stride(2)
    return rows.stride() == (h_q * s_q * step, s_q * step, step)


def sink_launch(launches: Launches, sink: Tensor, lse: Tensor, rows: Tensor, sign: float, dsink: Tensor) -> GivenLaunch:
    """The kernel that fills dsink, and its arguments; rows: `evenly_spaced`."""
    b, h_q, s_q = rows.shape
    launch = cached_launch(launches, "sink", lambda: Launch(sink_kernel, (h_q, 1, 1), (SINK_ROWS,), warps=8))
    return launch, (
        sink, lse, rows, dsink, *map(runtime_int, (*sink.stride(), h_q, s_q, b * s_q, rows.stride(2))), sign,
    )  # fmt: skip


SINK_ROWS = 4096
"""Rows that `sink_kernel` adds up at a time."""


@triton.jit(do_not_specialize=["sign"], do_not_specialize_on_alignment=["lse", "values"])
def sink_kernel(sink, lse, values, dsink, pitch, h_q, s_q, count, step, sign, BLOCK: tl.constexpr):
    """`dsink = sign sum exp(sink - lse) values` of one head, over all of its `count` rows. Values are `step` elements
    apart. Rows that are not in use have lse = -inf, and those of a sink of +inf, which has no gradient, +inf."""
    h_q, s_q, count = plain_int(h_q), plain_int(s_q), plain_int(count)
    h = tl.program_id(0)
    own = tl.load(sink + h * plain_int(pitch)).to(tl.float32)
    # [BLOCK]
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        offset = ((row // s_q).to(tl.int64) * h_q + h) * s_q + row % s_q
        row_lse = tl.load(lse + offset, mask=row < count, other=float("-inf"))
        value = tl.load(values + offset * plain_int(step), mask=row < count, other=0.0)
        total += tl.where(tl.abs(row_lse) == float("inf"), 0.0, tl.exp(own - row_lse) * value)
    tl.store(dsink + h, (sign * tl.sum(total)).to(dsink.dtype.element_ty))
