"""Error over tolerance of one result, whose parts come one after the other; `accuracy` says what the tolerance is."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Tally:
    """Largest elements and sums of squares of a tensor's errors and terms, part after part."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.top = torch.zeros(3, dtype=torch.float64)
        self.squares = torch.zeros(3, dtype=torch.float64)
        self.broken = False

    def add(self, x: Tensor, exact: Tensor, eager: Tensor, terms: Tensor) -> None:
        if not x.numel():
            return
        x, exact, eager = x.double(), exact.double(), eager.double()
        finite = exact.isfinite()
        self.broken |= bool((x.isfinite() != finite).any()) or bool((x != exact)[~finite].any())
        for i, row in enumerate((x - exact, eager - exact, terms)):
            # Where the plain run overflows, it says nothing.
            row = row.double().nan_to_num(0, 0, 0).abs()
            self.top[i] = max(self.top[i], row.max().cpu())
            self.squares[i] += row.square().sum().cpu()

    def ratio(self) -> float:
        if self.broken:
            return math.inf

        def share(error: float, eager: float, terms: float) -> float:
            return error / (2 * (eager + self.eps / 2 * terms)) if error else 0.0

        try:  # the roots of the sums stand for the roots of the means
            return max(share(*self.top.tolist()), share(*self.squares.sqrt().tolist()))
        except ZeroDivisionError:
            return math.inf


def at_once(x: Tensor, exact: Tensor, eager: Tensor, eps: float) -> Tensor:
    """Error over tolerance of one tensor, (), on its device and without a wait for the host: for thousands of calls.

    By the largest elements alone, and of all terms with the rounding of the result alone, so that it grants less than a
    Tally does. NaN where x has one, and infinite for infinities out of place.
    """
    x, exact, eager = x.double(), exact.double(), eager.double()
    finite = exact.isfinite()
    error, other, terms = (torch.where(finite, y, 0).abs().amax() for y in (x - exact, eager - exact, exact))
    right = torch.where(finite, True, x == exact).all()
    return torch.where(right, torch.where(error == 0, 0, error / (2 * (other + eps / 2 * terms))), torch.inf)
