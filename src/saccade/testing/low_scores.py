"""Score functions by which all that a row sees scores one very low number, so that its weights are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.scores import bias

VALUES = -2000.0, -1e4, -1e9, -1e30, torch.finfo(torch.float32).min
EVERY = 3
"""One row of so many."""


def filled(value: float) -> Callable[..., Tensor]:
    """In the place of the scores."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx % EVERY == 1, value, score)


def filled_from(value: float) -> Callable[..., Tensor]:
    """From the fifth key on, of rows that a window may leave nothing else."""
    return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx % EVERY == 1) & (kv_idx > 4), value, score)


def added(value: float, s_q: int, s_k: int, device: str = "cpu") -> Any:
    """A table that learns, which scores are lost in, in float64 too: up to -1e30."""
    assert value <= -1e30
    table = torch.zeros(s_q, s_k, device=device)
    table[1::EVERY] = value
    return bias(table.requires_grad_())
