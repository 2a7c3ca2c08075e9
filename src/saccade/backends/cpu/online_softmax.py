"""The online softmax, in PyTorch operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

AMX_COLUMNS = 32
"""bfloat16 numbers in a row of an AMX tile."""


LARGE = 1 << 13
"""A shift of scores beyond which float32 has no digits left for what is subtracted from it."""


FEW = 32
"""Rows of a product for which its other operand stays bfloat16."""
SPREAD = 4
"""A sum of weights, of which the largest is one, that has no weight that is most of it."""


def exp_less(score: Tensor, shift: Tensor, alone: bool = False) -> Tensor:
    """exp(score - shift), in place, of scores (n, m, keys) and a shift (n, m, 1).

    PyTorch's own exp is up to 30 times as slow where it is of -inf or far below zero, as masked scores are (its vector
    library leaves the fast path there). exp2 is not. One pass subtracts and multiplies, unless some row is so large
    that it must cancel first, or each row is `alone`, with bits that no other row changes.
    """
    log2_e = math.log2(math.e)
    if not alone and shift.nan_to_num(0, 0, 0).abs().max().item() <= LARGE:
        return torch.add(shift * -log2_e, score, alpha=log2_e, out=score).exp2_()
    return score.sub_(shift).mul_(log2_e).exp2_()


def product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """alpha a b, rounded to the operands' dtype once.

    On a CPU with AMX a bfloat16 product multiplies what lies behind a row of a, the row after it, by zero: where that
    is NaN or infinite, this row becomes NaN too. A product with such a value is computed again in float32.
    """
    out = torch.empty((*a.shape[:2], b.shape[2]), dtype=a.dtype, device="cpu") if out is None else out
    if alpha == 0:  # where `baddbmm` writes nothing
        torch.bmm(a, b, out=out).mul_(0)
    else:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    part_of_tile = a.dtype == torch.bfloat16 and a.shape[2] % AMX_COLUMNS
    if part_of_tile and not math.isfinite(out.sum(dtype=torch.float32).item()):
        out.copy_(product(a.float(), b.float(), alpha))
    return out


def wide_product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """alpha a b, which leaves in float32, or float64, where b is bfloat16 too.

    It is a product of float32, but for few rows, for which to convert b takes longer than the product: a second product
    of bfloat16 then finds what the first one lost when it was rounded.
    """
    if b.dtype == torch.bfloat16 and a.shape[1] <= FEW and alpha:
        a = a.to(b.dtype)
        rounded = product(a, b, alpha)
        rest = torch.baddbmm(rounded, a, b, beta=-1, alpha=alpha)
        if math.isfinite(rest.sum(dtype=torch.float32).item()):
            return rest.float().add_(rounded)
    wide = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
    return product(a.to(wide), b.to(wide), alpha, out)


class Scratch:
    """Memory that tiles use again: fresh pages cost more than the arithmetic that fills them. One thread owns it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, the same memory whenever name and dtype are the same."""
        size = math.prod(shape)
        buffer = self.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer[:size].view(shape)

    def cast(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in the dtype: itself, or a copy in this memory."""
        return x if x.dtype == dtype else self(name, x.shape, dtype).copy_(x)


class OnlineSoftmax:
    """The online softmax over parts of the keys: `total = sum exp(score - top)`, and `out = sum exp(score - top) v`
    divided by it.

    Scores are float32, or float64, whatever v is. A row that has seen nothing has `top = -inf` and `total = 0`; NaN
    stays NaN. Where v is bfloat16, weights are divided by their sum before they are rounded to it, so that the product
    is `out` and is rounded once. But the weight of the largest score is one, without a rounding, until it is divided:
    where that may be most of a row, and where `alone` forbids a row to depend on others, it waits for a wide product.
    Scores that are `bounded`, near zero, need no largest one: `top` is 0.
    """

    def __init__(self, scratch: Scratch, alone: bool = False, bounded: bool = False) -> None:
        self.scratch, self.alone, self.bounded = scratch, alone, bounded
        self.mean: Any = None
        self.top: Any = None
        self.total: Any = None

    def add(self, score: Tensor, v: Tensor | None = None, keep: Tensor | None = None) -> None:
        """score (n, m, keys), overwritten, with v (n, keys, d_v), None where `out` is not asked for; `keep` is 1 where
        dropout keeps, else 0."""
        top = score.new_zeros(*score.shape[:2], 1) if self.bounded else score.amax(-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        shift = torch.where(top == -torch.inf, 0, top)
        weight = exp_less(score, shift, self.alone)
        total = weight.sum(-1, keepdim=True)
        mean = None
        if v is not None:
            if keep is not None:
                weight.mul_(keep)
            if v.dtype != weight.dtype and not self.alone and not bool((total < SPREAD).any()):
                weight = self.scratch.cast("weight", weight.div_(total), v.dtype)
                mean = product(weight, v).to(score.dtype)
            else:
                mean = wide_product(weight, v).div_(_positive(total))
        if self.top is not None:
            before = self.total * (self.top - shift).exp_()
            both = _positive(before + total)
            if mean is not None:
                mean = mean.mul_(total / both).add_(self.mean * (before / both))
            total += before
        self.mean, self.top, self.total = mean, top, total

    def out(self) -> Tensor:
        """0 of a row that has seen nothing, whatever its zeros were multiplied by."""
        empty = self.total == 0
        return self.mean.masked_fill_(empty, 0) if bool(empty.any()) else self.mean

    def lse(self) -> Tensor:
        return self.top + self.total.log()


def _positive(total: Tensor) -> Tensor:
    """1 for the sum of a row that sees nothing."""
    return torch.where(total == 0, 1, total)
