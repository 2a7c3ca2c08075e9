"""The ScoreMod record and the ready score modifications.

A ScoreMod is a function of the scaled score with the scalars and tensors it captures. Called, it is plain PyTorch on
tiles of scores that broadcast against the index tensors; `derivative` carries a gradient back through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class ScoreMod:
    """`score -> score`, elementwise; `kind` names the function, `floats` are its runtime scalars."""

    kind: ClassVar[str]

    @property
    def floats(self) -> list[float]:
        raise NotImplementedError

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """The modified score; all arguments broadcast to (b, h, q, k)."""
        raise NotImplementedError

    def derivative(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """d modified / d score at the *modified* score's input, in the score's dtype."""
        raise NotImplementedError


@dataclass(frozen=True)
class Softcap(ScoreMod):
    """`cap tanh(score / cap)`."""

    kind: ClassVar[str] = "softcap"
    cap: float

    @property
    def floats(self) -> list[float]:
        return [self.cap]

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)

    def derivative(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return 1 - torch.tanh(score / self.cap).square()


def softcap(cap: float) -> Softcap:
    """`score -> cap tanh(score / cap)`: keeps scores inside (-cap, cap), as Gemma 2 does.

    Args:
        cap: positive and finite, in units of the scaled score. A runtime value: a new one never recompiles.

    Raises:
        ValueError: a cap that is not positive and finite.

    Source: Gemma 2 report, arXiv 2408.00118, section 2.

    >>> softcap(50.0)
    Softcap(cap=50.0)
    """
    cap = float(cap)
    if not (cap > 0 and math.isfinite(cap)):
        raise ValueError(f"softcap needs a positive, finite cap, got {cap}")
    return Softcap(cap)


KINDS = {"softcap": Softcap}


def from_records(kind: str, floats: list[float]) -> ScoreMod | None:
    """The inverse of `kind` and `floats`; takes what it needs from the front of `floats`."""
    return None if kind == "none" else KINDS[kind](floats.pop(0))
