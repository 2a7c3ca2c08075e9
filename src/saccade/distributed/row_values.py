"""Values of rows: padding, what fills it, and dtypes that torch sends and places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def padded(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """With so many more rows of one value."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows), value=value) if rows else x


def check_fill(x: Tensor, fill: float) -> None:
    if x.is_floating_point() or x.is_complex():
        return
    least, most = (0, 1) if x.dtype == torch.bool else (torch.iinfo(x.dtype).min, torch.iinfo(x.dtype).max)
    if not (least <= fill <= most and fill == int(fill)):
        raise ValueError(f"fill={fill!r} is no number of x's {x.dtype}: pass another fill, or x.long()")


def bits(x: Tensor) -> Tensor:
    """x, or where torch can neither send nor place its dtype the same bits as integers."""
    eight = x.dtype.is_floating_point and x.dtype.itemsize == 1
    return of_dtype(x, torch.uint8 if eight else _SIGNED.get(x.dtype, x.dtype))


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)  # a view of the same dtype has no gradient either


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
