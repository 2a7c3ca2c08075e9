"""The gradients of rows that several ranks had, added up by the one that owns them: one launch."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton import next_power_of_2

from saccade.backends.device.launch import Launch, on_device
from saccade.backends.triton.rank_sums_kernel import rank_sums_kernel
from saccade.util.bounded_cache import BoundedCache


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


def prepare(sums: Tensor, places: int) -> Launch:
    width = sums.shape[1:].numel()
    block = min(next_power_of_2(width), 1024)
    grid = sums.shape[0], -(-width // block), 1
    return Launch(rank_sums_kernel, grid, (width, places, block))
