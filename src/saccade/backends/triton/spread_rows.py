"""A rank's rows, read once, to where its own call needs them and to where others find them: one launch."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from saccade.backends.device.launch import Launch, on_device
from saccade.backends.triton.spread_rows_kernel import spread_rows_kernel
from saccade.bounded_cache import BoundedCache

ELEMENTS = 4096
"""Of a program."""


def spread_rows(x: Tensor, targets: Sequence[Tensor], table: Tensor) -> None:
    """Writes each row of x to row `table[i, row]` of targets[i], for every i; -1 is none. The adjoint of `rank_sums`.

    >>> here, there = torch.zeros(2, 1), torch.zeros(1, 1)
    >>> spread_rows(torch.tensor([[1.0], [2.0]]), [here, there], torch.tensor([[1, 0], [-1, 0]], dtype=torch.int32))
    ... # doctest: +SKIP
    >>> here, there  # doctest: +SKIP
    (tensor([[2.], [1.]]), tensor([[2.]]))
    """
    if x.numel():
        with on_device(x):
            aligned = (y.data_ptr() % 16 == 0 for y in (x, *targets))
            key = x.dtype, x.device, x.shape, len(targets), *aligned
            launch = _launches.get_or_make(key, lambda: prepare(x, len(targets)))
            launch(x.device.index, (x, tuple(targets), table, x.shape[0]))


_launches: BoundedCache[Any, Launch] = BoundedCache(256)


def prepare(x: Tensor, places: int) -> Launch:
    width = x.shape[1:].numel()
    block = min(next_power_of_2(width), ELEMENTS)
    rows = ELEMENTS // block
    grid = -(-x.shape[0] // rows), -(-width // block), 1
    return Launch(spread_rows_kernel, grid, (width, places, block, rows))


def compiled(dtype: torch.dtype, d: int) -> Any:
    """The kernel as the compile gate sees it: three places, eight heads."""
    x, table = torch.empty(9, 8, d, dtype=dtype), torch.zeros(3, 9, dtype=torch.int32)
    return prepare(x, 3).warmup((x, (x,) * 3, table, 9))
