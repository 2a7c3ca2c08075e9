"""What `merge` does, for some rows of packed results, in place: one launch."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from saccade.backends.device.launch import Launch, on_device
from saccade.backends.triton.merge_rows_kernel import merge_rows_kernel
from saccade.bounded_cache import BoundedCache


def merge_rows(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, late: Tensor) -> None:
    """out (t, h, d_v) and lse (h, t) become those of all keys in the rows `late`, (n,) int32, of which part (n, h, d_v)
    and part_lse (h, n) are over further keys.

    >>> out, lse = torch.ones(2, 1, 4), torch.zeros(1, 2)
    >>> merge_rows(out, lse, torch.zeros(1, 1, 4), torch.zeros(1, 1), torch.tensor([1]).int())  # doctest: +SKIP
    >>> out[1, 0], lse  # doctest: +SKIP
    (tensor([0.5, 0.5, 0.5, 0.5]), tensor([[0.0000, 0.6931]]))
    """
    assert lse.is_contiguous()
    assert part_lse.is_contiguous()
    strides = *out.stride()[:2], *part.stride()[:2]
    if part.numel():
        with on_device(out):
            aligned = (x.data_ptr() % 16 == 0 for x in (out, part))
            key = out.dtype, out.device, part.shape, strides, *aligned
            launch = _launches.get_or_make(key, lambda: prepare(part))
            launch(out.device.index, (out, lse, part, part_lse, late, len(part), len(out), *strides))


_launches: BoundedCache[Any, Launch] = BoundedCache(256)


def prepare(part: Tensor) -> Launch:
    rows, heads, d_v = part.shape
    width = next_power_of_2(d_v)
    block = max(1, 2048 // width)
    return Launch(merge_rows_kernel, (-(-rows // block), heads, 1), (d_v, block, width))


def compiled(dtype: torch.dtype, d_v: int) -> Any:
    """The kernel as the compile gate sees it: five of nine rows, eight heads."""
    out, lse = torch.empty(9, 8, d_v, dtype=dtype), torch.empty(8, 9)
    return prepare(out[:5]).warmup(
        (out, lse, out[:5], lse[:, :5], torch.empty(5, dtype=torch.int32), 5, 9, 8 * d_v, d_v, 8 * d_v, d_v)
    )
