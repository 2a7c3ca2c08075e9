"""Helpers that the backwards of all kernel backends share."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.alignment import ALIGNMENT
from saccade.backends import Saved
from saccade.backends.device.records import TensorArgs
from saccade.call import Call, aligned


def aligned_rows(x: Tensor) -> TensorArgs:
    """Rows that kernels read in pieces of 16 bytes; others are copied, padded. (Element by element they would be slow,
    and Triton 3.6 miscompiles some such tiles: docs/findings/triton.md.)"""
    return TensorArgs.of(x if aligned(x) else padded(x))


def padded(x: Tensor) -> Tensor:
    """A copy of x (b, h, s, d) whose rows start at multiples of 16 bytes."""
    whole = ALIGNMENT // x.element_size()
    copy = x.new_empty(*x.shape[:3], -(-x.shape[3] // whole) * whole)[..., : x.shape[3]]
    return copy.copy_(x)


def sink_gradient(call: Call, saved: Saved, delta: Tensor | None = None) -> Tensor | None:
    """`-sum p_sink delta` with p_sink = exp(sink - lse) and delta = rowsum(dout out) - dlse; rows that are not in use
    have lse = -inf, and those of a sink of +inf, which has no gradient, +inf."""
    if call.sink is None:
        return None
    if delta is None:  # no keys or no rows: only the LSE has a gradient
        delta = torch.zeros_like(saved.lse) if saved.dlse is None else -saved.dlse
    share = torch.exp(call.sink.float()[:, None] - saved.lse)
    return -torch.where(saved.lse.isinf(), 0, share * delta).sum((0, 2)).to(call.sink.dtype)
