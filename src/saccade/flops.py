"""Flop formulas of the operators, for `torch.utils.flop_counter`: hidden pairs are counted too, as torch does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from saccade.layouts import Packed, Paged, form
from saccade.problem import Header


def forward(q, k, v, sink, captures, records, header, *args, **kwargs) -> int:
    scores, values = _products(q, k, v, records, header)
    return 2 * (scores + values)


def forward_out(out, *args, **kwargs) -> int:
    return forward(*args, **kwargs)


def backward(dout, dlse, out, lse, q, k, v, sink, captures, records, header, *args, **kwargs) -> int:
    scores, values = _products(q, k, v, records, header)
    return 2 * (3 * scores + 2 * values)


def _products(q: Tensor, k: Tensor, v: Tensor, records: Any, header: str) -> tuple[int, int]:
    """Multiply-adds of q k^T and of p v."""
    layout = form(Header.parse(header).layout)
    if isinstance(layout, Packed):
        pairs = q.shape[1] * _pairs(records[0], records[1], q.shape[0], k.shape[0])
    elif isinstance(layout, Paged):
        pairs = _paged_pairs(layout.canonical(q).shape, records, k.shape[1])
    else:
        b, h, s, _ = layout.canonical(q).shape
        pairs = b * h * s * layout.canonical(k).shape[2]
    return pairs * q.shape[-1], pairs * v.shape[-1]


def _pairs(cu_q: Tensor, cu_k: Tensor, t_q: int, t_k: int) -> int:
    """Of rows and keys of the same sequence; without values to read, those of sequences of one length."""
    if is_fake(cu_q) or cu_q.device.type == "meta":
        return t_q * t_k // max(len(cu_q) - 1, 1)
    return int((cu_q.diff().long() * cu_k.diff()).sum())


def _paged_pairs(q: torch.Size, records: Any, page_size: int) -> int:
    """Of rows and keys of the same sequence, and of all heads; without values to read, with full tables."""
    table, used, *offsets = records
    if is_fake(used) or used.device.type == "meta":
        return q[0] * q[1] * q[2] * table.shape[1] * page_size
    return q[1] * int((used.long() * (offsets[0].diff() if offsets else q[2])).sum())
