"""The memory order of tensors: outputs that have an operand's, and copies that keep it."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_like_rows(x: Tensor, d: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor of x's shape with last dimension `d`, dense, its dimensions in x's memory order; of x's
    dtype, or another.

    So a transposed view in gives a transposed view out, as torch's own attention does.
    """
    shape, dtype = [*x.shape[:-1], d], dtype or x.dtype
    if x.is_contiguous():
        return torch.empty(shape, dtype=dtype, device=x.device)
    order = _memory_order(x)
    out = torch.empty([shape[dim] for dim in order], dtype=dtype, device=x.device)
    return out.permute([order.index(dim) for dim in range(x.dim())])


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions, those with the largest strides first, and the last one last."""
    order: list[int] = []
    for dim in range(x.dim() - 1):  # by insertion: torch.compile compares strides that it does not know, and sorts none
        order.insert(len([i for i in order if x.stride(i) >= x.stride(dim)]), dim)
    return [*order, x.dim() - 1]


def ordered_like(x: Tensor, other: Tensor) -> Tensor:
    """x, dense, with its dimensions in another tensor's memory order."""
    return _in_order(x, _memory_order(other))


def _in_order(x: Tensor, order: list[int]) -> Tensor:
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def with_rows(x: Tensor) -> Tensor:
    """x with a contiguous last dimension: itself, or a copy whose other dimensions keep their memory order."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return _in_order(x, _memory_order(x))


def empty_bytes(x: Tensor, dtype: torch.dtype, keys_first: bool = False) -> Tensor:
    """Uninitialised 8-bit numbers of the shape of x (b, h, s, d), in x's memory order; or, with `keys_first`, (b, h, d,
    s) in memory, where rows of s keys begin at multiples of 16 bytes, as TMA reads them."""
    if keys_first:
        b, h, s, d = x.shape
        return torch.empty((b, h, d, -(-s // 16) * 16), dtype=dtype, device=x.device)[..., :s].transpose(2, 3)
    return empty_like_rows(x, x.shape[-1], dtype)
