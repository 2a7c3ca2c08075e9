"""Rows of ranks: copies of keys and values to all the places where calls need them, and sums of their gradients."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from saccade.backends.device.launch import Launch, on_device
from saccade.util.caches import BoundedCache

_launches: BoundedCache[Any, Launch] = BoundedCache(512)

# The gradients of rows that several ranks had, added up by the one that owns them: one launch.


@triton.jit(do_not_specialize=["rows"])
def rank_sums_kernel(parts, table, sums, rows, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """`sums[row] = sum_i parts[i][table[i, row]]` in order, in float32 at least, for numbers that are not negative.

    parts: PLACES times (…, WIDTH). table: int32 (PLACES, rows). sums: (rows, WIDTH).
    """
    row = tl.program_id(0)
    # [BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.float64 if sums.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([BLOCK], wide)
    for i in tl.static_range(PLACES):
        at = tl.load(table + i * rows + row).to(tl.int64)
        there = column < tl.where(at >= 0, WIDTH, 0)
        total += tl.load(parts[i] + at * WIDTH + column, mask=there, other=0.0).to(wide)
    pointers = sums + row.to(tl.int64) * WIDTH + column
    tl.store(pointers, total.to(sums.dtype.element_ty), mask=column < WIDTH)


def rank_sums(parts: Sequence[Tensor], table: Tensor, like: Tensor) -> Tensor:
    """(rows, …) beside `like`: for each row the sum over i, in order, of row `table[i, row]` of parts[i], which may be
    in the memory of another device. -1 is nothing. Sums are of float32 at least.

    >>> own, theirs = torch.tensor([[1.0], [2.0]]), torch.tensor([[4.0]])
    >>> rank_sums([theirs, own], torch.tensor([[-1, 0], [1, 0]], dtype=torch.int32), own)  # doctest: +SKIP
    tensor([[2.], [5.]])
    """
    rows = table.shape[1]
    sums = like.new_empty(rows, *like.shape[1:])
    if sums.numel():
        with on_device(sums):
            aligned = (x.data_ptr() % 16 == 0 for x in (*parts, sums))
            key = "sums", sums.dtype, sums.device, sums.shape, *aligned
            launch = _launches.get_or_make(key, lambda: sums_launch(sums, len(parts)))
            launch(sums.device.index, (tuple(parts), table, sums, rows))
    return sums


def sums_launch(sums: Tensor, rows: int) -> Launch:
    width = sums.shape[1:].numel()
    block = min(next_power_of_2(width), 1024)
    grid = sums.shape[0], -(-width // block), 1
    return Launch(rank_sums_kernel, grid, (width, rows, block))


# A rank's keys and values, read once, to where its own call needs them and to where others find them: one launch.


@triton.jit(do_not_specialize=["rows"])
def spread_rows_kernel(
    keys, values, targets, table, rows,
    HEADS: tl.constexpr, D: tl.constexpr, D_V: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """`targets[i][table[i, row]] = keys[row], values[row]` for all i, for numbers that are not negative.

    keys, values: (rows, HEADS, D) and (rows, HEADS, D_V). targets: PLACES times (…, HEADS, D + D_V). table: int32
    (PLACES, rows).
    """
    if tl.program_id(2) == 0:
        _spread(keys, targets, table, rows, HEADS, D, 0, D + D_V, PLACES, BLOCK, ROWS)
    else:
        _spread(values, targets, table, rows, HEADS, D_V, D, D + D_V, PLACES, BLOCK, ROWS)


@triton.jit
def _spread(
    x, targets, table, rows,
    HEADS: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, PITCH: tl.constexpr, PLACES: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The numbers of each head, D of them, to those from FIRST on of PITCH."""
    # [ROWS, 1]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    # [1, BLOCK]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    target = column // D * PITCH + column % D + FIRST
    # [ROWS, BLOCK]; with a `where` in masks some Tritons move 16 bits at a time
    numbers = tl.load(x + row.to(tl.int64) * (HEADS * D) + column, mask=(row < rows) & (column < HEADS * D))
    for i in tl.static_range(PLACES):
        at = tl.load(table + i * rows + row, mask=row < rows, other=-1).to(tl.int64)
        tl.store(targets[i] + at * (HEADS * PITCH) + target, numbers, mask=(at >= 0) & (column < HEADS * D))


ELEMENTS = 4096
"""Of a program."""


def spread_rows(keys: Tensor, values: Tensor, targets: Sequence[Tensor], table: Tensor) -> None:
    """Writes each row, a head's key beside its value, to row `table[i, row]` of targets[i], for every i; -1 is none.

    >>> keys, values = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    >>> here, there = torch.zeros(2, 1, 2), torch.zeros(1, 1, 2)
    >>> table = torch.tensor([[1, 0], [-1, 0]], dtype=torch.int32)
    >>> spread_rows(keys[..., None], values[..., None], [here, there], table)  # doctest: +SKIP
    >>> here, there  # doctest: +SKIP
    (tensor([[[2., 4.]], [[1., 3.]]]), tensor([[[2., 4.]]]))

    Args:
        keys, values: (rows, h_k, d) and (rows, h_k, d_v), contiguous, of one dtype.
        targets: (…, h_k, d + d_v) each, contiguous.
    """
    if keys.numel() or values.numel():
        with on_device(keys):
            aligned = (x.data_ptr() % 16 == 0 for x in (keys, values, *targets))
            key = "spread", keys.dtype, keys.device, keys.shape, values.shape, len(targets), *aligned
            launch = _launches.get_or_make(key, lambda: spread_launch(keys, values, len(targets)))
            launch(keys.device.index, (keys, values, tuple(targets), table, keys.shape[0]))


def spread_launch(keys: Tensor, values: Tensor, most_rows: int) -> Launch:
    heads, d, d_v = keys.shape[1], keys.shape[2], values.shape[2]
    width = heads * max(d, d_v)
    block = min(next_power_of_2(width), ELEMENTS)
    rows = ELEMENTS // block
    grid = -(-keys.shape[0] // rows), -(-width // block), 2
    return Launch(spread_rows_kernel, grid, (heads, d, d_v, most_rows, block, rows))
