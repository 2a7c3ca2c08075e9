"""Error over tolerance of one result, whose parts come one after the other; `accuracy` says what the tolerance is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

COMMON = 1 / 4
"""How much of what is rounded may lean one way: numbers that are alike are rounded alike, and sums are cut off."""


class ErrorTally:
    """Of a tensor's errors and terms, part after part: the largest elements, the sums of squares, the worst row, and
    how much of the errors lies along the exact result."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.top = torch.zeros(3, dtype=torch.float64)
        self.squares = torch.zeros(3, dtype=torch.float64)
        self.along = torch.zeros(2, dtype=torch.float64)
        self.spread, self.common = 0.0, 0.0
        self.row = 0.0
        self.broken = False

    def add(self, x: Tensor, exact: Tensor, eager: Tensor, terms: Tensor) -> None:
        """Rows are along the last dimension."""
        if not x.numel():
            return
        x, exact, eager, terms = (torch.atleast_1d(y.detach().double()) for y in (x, exact, eager, terms))
        finite = exact.isfinite()
        self.broken |= bool((x.isfinite() != finite).any()) or bool((x != exact)[~finite].any())
        # Where the plain run overflows, it says nothing.
        found = torch.stack([y.nan_to_num(0, 0, 0) for y in (x - exact, eager - exact, terms)])
        exact = exact.nan_to_num(0, 0, 0)
        if x.shape[-1] > 1:  # an LSE has what its exponentials have
            self.along += (found[:2] * exact).flatten(1).sum(1).cpu()
            of_rows = (found[2] * exact.abs()).sum(-1)  # a row's errors may be one and the same
            self.spread += float(of_rows.square().sum())
            self.common += float(of_rows.sum())
        self.top = torch.maximum(self.top, found.abs().flatten(1).amax(1).cpu())
        self.squares += found.square().flatten(1).sum(1).cpu()
        error, other, term = found.square().mean(-1).sqrt()
        self.row = max(self.row, float(self._shares(error, other, term).max()))

    def ratio(self) -> float:
        if self.broken:
            return math.inf
        # The roots of the sums stand for the roots of the means.
        along = [*self.along.abs().tolist(), math.sqrt(self.spread) + COMMON * self.common]
        wholes = torch.stack([self.top, self.squares.sqrt(), torch.tensor(along, dtype=torch.float64)], dim=1)
        return max(self.row, float(self._shares(*wholes).max()))

    def _shares(self, error: Tensor, other: Tensor, term: Tensor) -> Tensor:
        """Infinite where there is an error and nothing is allowed."""
        return torch.where(error == 0, 0, error / (2 * (other + self.eps / 2 * term)))


def worst_row_error(x: Tensor, exact: Tensor, eps: float, least: float = 0.0) -> Tensor:
    """Error over tolerance of the worst row, (), on its device and without a wait for the host: for thousands of calls.

    Rows are along the last dimension, and each may be off by two roundings of eps/2 for what is rounded on the way, of
    two numbers of its size, or of `least` if that is more. NaN where x has one, infinite for infinities out of place.
    """
    x, exact = x.double(), exact.double()
    finite = exact.isfinite()
    error, size = (torch.where(finite, y, 0).square().mean(-1).sqrt() for y in (x - exact, exact))
    right = torch.where(finite, True, x == exact).all()
    return torch.where(right, error / (2 * eps * size.clamp(min=max(least, 1e-30))), torch.inf).amax()
