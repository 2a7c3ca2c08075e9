"""Flop formulas of the operators, for `torch.utils.flop_counter`: masked pairs are counted too, as torch does."""

from __future__ import annotations

from typing import Any

import torch

from saccade.call import unflatten


def register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    for formula in (forward, forward_out, backward):
        operator = getattr(torch.ops.saccade, formula.__name__)
        register_flop_formula(operator, get_raw=True)(formula)  # pyright: ignore[reportArgumentType]


def forward(*args: Any, **_: Any) -> int:
    scores, values = _products(*args[:-1])
    return 2 * (scores + values)


def forward_out(out: Any, *args: Any, **_: Any) -> int:
    return forward(*args)


def backward(dout: Any, dlse: Any, out: Any, lse: Any, *args: Any, **_: Any) -> int:
    scores, values = _products(*args[:-1])
    return 2 * (3 * scores + 2 * values)


def _products(*flat: Any) -> tuple[int, int]:
    """Multiply-adds of q k^T and of p v."""
    call, _ = unflatten(*flat)
    q, k, v, _ = call.given
    pairs = call.layout.pairs(q, k)
    return pairs * q.shape[-1], pairs * v.shape[-1]
