"""The sink: one more logit per query head, in the sum of the softmax but not in its value."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.backends import Saved
from saccade.call import Call


def join(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Rescales `out` (b, h, s, d_v) in place for a softmax that holds the sink (h) too; returns its lse (b, h, s)."""
    joined = torch.logaddexp(lse, sink.to(lse.dtype)[:, None])
    share = torch.exp(lse - torch.where(joined == -torch.inf, 0, joined))
    out.mul_(share[..., None])
    return joined


def gradient(call: Call, saved: Saved, delta: Tensor) -> Tensor | None:
    """`-sum p_sink delta`, with p_sink = exp(sink - lse) and delta (b, h, s) = rowsum(dout out) - dlse."""
    if call.sink is None:
        return None
    share = torch.exp(call.sink.to(saved.lse.dtype)[:, None] - saved.lse)
    # Rows that are not in use have lse = -inf, and anything in dout; a sink of +inf, with lse = +inf, has no gradient.
    return -torch.where(saved.lse.isinf(), 0, share * delta).sum((0, 2)).to(call.sink.dtype)


def delta(saved: Saved) -> Tensor:
    """rowsum(dout out) - dlse, (b, h, s) in lse's dtype."""
    dtype = saved.lse.dtype
    delta = (saved.dout.to(dtype) * saved.out.to(dtype)).sum(-1)
    return delta if saved.dlse is None else delta - saved.dlse
