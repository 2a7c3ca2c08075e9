"""Score functions that give all visible keys of a row one very low score, so that its weights are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.scores import bias

VALUES = -2000.0, -1e4, -1e9, -1e30, torch.finfo(torch.float32).min
EVERY = 3
"""One row in three is affected."""


def filled(value: float) -> Callable[..., Tensor]:
    """In place of the scores."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(q_idx % EVERY == 1, value, score)


def filled_from(value: float) -> Callable[..., Tensor]:
    """Keys from 5 on: a window may leave a row only those."""
    return lambda score, b, h, q_idx, kv_idx: torch.where((q_idx % EVERY == 1) & (kv_idx > 4), value, score)


def added(value: float, s_q: int, s_k: int, device: str = "cpu") -> Any:
    """A learned table, at most -1e30: even float64 loses the scores that are added to it."""
    assert value <= -1e30
    table = torch.zeros(s_q, s_k, device=device)
    table[1::EVERY] = value
    return bias(table.requires_grad_())
