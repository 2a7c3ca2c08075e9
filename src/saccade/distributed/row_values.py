"""Values of rows: padding, what fills it, and dtypes that torch sends and places."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade import arguments


def padded(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """With so many more rows of one value."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows), value=value) if rows else x


def check_fill(x: Tensor, fill: float) -> None:
    """On every rank, also on those without rows to fill.

    Raises:
        TypeError: no number.
        ValueError: one that x's dtype does not have.
    """
    arguments.number("fill", fill)
    if x.is_complex() or (x.is_floating_point() and not math.isfinite(fill)):
        return
    if x.dtype == torch.bool:
        least, most = 0, 1
    else:
        limits = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        least, most = limits.min, limits.max
    if not (least <= fill <= most and (x.is_floating_point() or fill == int(fill))):
        raise ValueError(f"fill={fill!r} is no number of x's {x.dtype}: pass another fill, or x.long()")


def bits(x: Tensor) -> Tensor:
    """x, or where torch can neither send nor place its dtype the same bits as integers."""
    eight = x.dtype.is_floating_point and x.dtype.itemsize == 1
    return of_dtype(x, torch.uint8 if eight else _SIGNED.get(x.dtype, x.dtype))


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)  # a view of the same dtype has no gradient either


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
