"""The online softmax, in PyTorch operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def exp(x: Tensor) -> Tensor:
    """exp(x), in place. PyTorch's own is up to 30 times as slow where x is -inf or far below zero, as hidden scores are
    (its vector library leaves the fast path there); exp2 is not."""
    return x.exp_() if x.dtype == torch.bfloat16 else x.mul_(math.log2(math.e)).exp2_()


class Softmax:
    """The online softmax over parts of the keys: `acc = sum exp(score - top) v`, `total = sum exp(score - top)`."""

    def __init__(self, whole: Callable[[Tensor], Tensor], streaming: bool) -> None:
        self.whole, self.streaming = whole, streaming
        self.acc: Any = None
        self.top: Any = None
        self.total: Any = None

    def add(self, score: Tensor, v: Tensor, keep: Tensor | None, only: bool) -> None:
        """score (n, m, keys), overwritten, with v (n, keys, d_v); `keep` is 1 where dropout keeps, else 0; `only` says
        that no other part follows."""
        if only and not self.streaming:
            p = self.whole(score)
            self.acc = torch.bmm(p if keep is None else p.mul_(keep), v)
            return
        top = score.amax(-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        shift = torch.where(top == -torch.inf, 0, top)  # a row that has seen nothing yet
        weight = exp(score.sub_(shift))
        dtype = torch.float64 if score.dtype == torch.float64 else torch.float32
        total = weight.sum(-1, keepdim=True, dtype=dtype)
        if keep is not None:
            weight.mul_(keep)
        acc = torch.bmm(weight, v).to(dtype)
        if self.top is not None:
            rescale = (self.top - shift).to(dtype).exp_()
            acc += self.acc * rescale
            total += self.total * rescale
        self.acc, self.top, self.total = acc, top, total

    def out(self) -> Tensor:
        return self.acc if self.total is None else self.acc / torch.where(self.total == 0, 1, self.total)

    def lse(self) -> Tensor:
        return self.top.to(self.total.dtype) + self.total.log()
