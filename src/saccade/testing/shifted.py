"""Score modifications, masks and dropout as some batch rows and heads of a call see them, and captured tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade import scores
from saccade.dropout import Dropout
from saccade.masks import Extent, Mask

DRAWS = 8


def captured(score_mod: Any) -> dict[str, Tensor]:
    """The tensors of a score modification that require a gradient, by the names of their gradients."""
    leaves = scores.captured(score_mod)
    wanted = {id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}
    return {f"dscore{i}": x for i, x in enumerate(wanted.values())}


@dataclass(frozen=True, eq=False)
class ShiftedDropout(Dropout):
    """Dropout as some batch rows and heads draw it, from b and h on."""

    b: int
    h: int

    def keep(self, b: Tensor, h: Tensor, rows: slice, keys: slice) -> Tensor:
        return super().keep(b + self.b, h + self.h, rows, keys)

    def keep_at(self, b: Tensor, h: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return super().keep_at(b + self.b, h + self.h, p, r)


class ShiftedScore(scores.Score):
    """A score modification as some batch rows and heads see it, from b and h on."""

    def __init__(self, score: scores.Score, b: int, h: int) -> None:
        self.score, self.b, self.h = score, b, h
        self.kind, self.identity = score.kind, score.identity

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.score(score, b + self.b, h + self.h, q_idx, kv_idx)

    def captured(self) -> dict[str, Tensor]:
        return captured(getattr(self.score, "fn", None))

    def squares(self, gradient: Tensor, of_rows: Tensor, score: Tensor, at: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """The roundings of what is added up for captured tensors, squared: sum gradient (d modified / d tensor)^2, and
        what a row's keys have in common, of_rows (d modified / d tensor), added up by rows first."""
        leaves, held = self.captured(), self.score.tensors
        at = (at[0] + self.b, at[1] + self.h, *at[2:])

        def added(gradient: Tensor, power: int) -> list[Tensor | None]:
            sums = [torch.zeros_like(x, dtype=torch.float64) if x.requires_grad else None for x in held]
            self.score.accumulate(sums, gradient, score, *at, power=power)
            return sums

        total = added(gradient, 2)
        signs = torch.Generator().manual_seed(0)
        for _ in range(DRAWS):  # rows of random signs add up as their squares do
            sign = 2 * torch.randint(0, 2, (*score.shape[:3], 1), generator=signs).to(score) - 1
            for x, more in zip(total, added(sign * of_rows, 1), strict=True):
                if x is not None and more is not None:
                    x += more**2 / DRAWS
        # What the score computes from them beforehand is treated as a choice among them.
        pairs = zip(held, total, strict=True)
        made = [(x, t.clamp(max=torch.finfo(x.dtype).max).to(x.dtype)) for x, t in pairs if t is not None]
        outputs, totals = zip(*made, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), totals, allow_unused=True, retain_graph=True)
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(x) if x_sum is None else x_sum.abs() for (name, x), x_sum in pairs}


class ShiftedMask(Mask):
    """A mask as some batch rows and heads see it, from b and h on: as much as the oracle needs."""

    def __init__(self, mask: Mask, b: int, h: int) -> None:
        self.mask, self.b, self.h = mask, b, h
        self.kind = mask.kind  # pyright: ignore[reportAttributeAccessIssue]

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b + self.b, h + self.h, q_idx, kv_idx)
