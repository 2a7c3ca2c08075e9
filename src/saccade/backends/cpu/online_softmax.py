"""The online softmax, in PyTorch operations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

AMX_COLUMNS = 32
"""bfloat16 numbers in a row of an AMX tile."""


def exp(x: Tensor) -> Tensor:
    """exp(x), in place. PyTorch's own is up to 30 times as slow where x is -inf or far below zero, as masked scores are
    (its vector library leaves the fast path there). exp2 is not."""
    return x.mul_(math.log2(math.e)).exp2_()


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
    """The online softmax over parts of the keys: `acc = sum exp(score - top) v`, `total = sum exp(score - top)`.

    Scores are float32, or float64, whatever v is. A row that has seen nothing has `top = -inf` and `total = 0`; NaN
    stays NaN.
    """

    def __init__(self, scratch: Scratch) -> None:
        self.scratch = scratch
        self.acc: Any = None
        self.top: Any = None
        self.total: Any = None

    def add(self, score: Tensor, v: Tensor | None = None, keep: Tensor | None = None) -> None:
        """score (n, m, keys), overwritten, with v (n, keys, d_v), None where `acc` is not asked for; `keep` is 1 where
        dropout keeps, else 0."""
        top = score.amax(-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        shift = torch.where(top == -torch.inf, 0, top)
        weight = exp(score.sub_(shift))
        total = weight.sum(-1, keepdim=True)
        acc = None
        if v is not None:
            if keep is not None:
                weight.mul_(keep)
            acc = product(self.scratch.cast("weight", weight, v.dtype), v).to(score.dtype)
        if self.top is not None:
            rescale = (self.top - shift).exp_()
            total += self.total * rescale
            if acc is not None:
                acc += self.acc * rescale
        self.acc, self.top, self.total = acc, top, total

    def out(self) -> Tensor:
        return self.acc / torch.where(self.total == 0, 1, self.total)

    def lse(self) -> Tensor:
        return self.top + self.total.log()
