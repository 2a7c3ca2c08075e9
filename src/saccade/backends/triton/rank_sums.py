"""Sums over ranks of the gradients that each returned for the same rows."""

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

# Sums over ranks of what each has returned, row by row.


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


# The gradients of rows that several ranks had, added up by the one that owns them: one launch.


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
            key = sums.dtype, sums.device, sums.shape, *aligned
            launch = _launches.get_or_make(key, lambda: prepare(sums, len(parts)))
            launch(sums.device.index, (tuple(parts), table, sums, rows))
    return sums


_launches: BoundedCache[Any, Launch] = BoundedCache(256)


def prepare(sums: Tensor, rows: int) -> Launch:
    width = sums.shape[1:].numel()
    block = min(next_power_of_2(width), 1024)
    grid = sums.shape[0], -(-width // block), 1
    return Launch(rank_sums_kernel, grid, (width, rows, block))
