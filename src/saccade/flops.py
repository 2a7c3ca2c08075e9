"""Flop formulas of the operators, for `torch.utils.flop_counter`: masked pairs are counted too, as torch does."""

from __future__ import annotations

from typing import Any

from saccade.flat_call import FlatCall


def forward(*args: Any, **_: Any) -> int:
    scores, values = _products(FlatCall(*args[:-1]))
    return 2 * (scores + values)


def forward_out(out: Any, *args: Any, **_: Any) -> int:
    return forward(*args)


def backward(dout: Any, dlse: Any, out: Any, lse: Any, *args: Any, **_: Any) -> int:
    scores, values = _products(FlatCall(*args[:-1]))
    return 2 * (3 * scores + 2 * values)


def _products(call: FlatCall) -> tuple[int, int]:
    """Multiply-adds of q k^T and of p v."""
    pairs = call.layout().pairs(call.q, call.k)
    return pairs * call.q.shape[-1], pairs * call.v.shape[-1]
