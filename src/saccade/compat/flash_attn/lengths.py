"""What is counted from the lengths of a call's sequences, on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.layouts import Layout


def offset(layout: Layout, q: Tensor, k: Tensor) -> int | Tensor:
    """`off`: keys in use less query rows in use; a tensor (b) where sequences differ."""
    cu_q, cu_k, used_q, used_k = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.seqused_q, layout.seqused_k
    if cu_q is not None and cu_q is cu_k and used_q is used_k:
        return 0
    rows = used_q if used_q is not None else q.shape[1] if cu_q is None else cu_q.diff()
    keys = used_k if used_k is not None else k.shape[1] if cu_k is None else cu_k.diff()
    return keys - rows


def row_numbers(cu_seqlens: Tensor | None, q: Tensor) -> Tensor:
    """The number of each row within its sequence: (1, s), or (t,) of sequences end to end."""
    if cu_seqlens is None:
        return torch.arange(q.shape[1], device=q.device)[None]
    return torch.arange(q.shape[0], device=q.device) - of_rows(cu_seqlens[:-1], cu_seqlens, q)


def of_rows(x: Tensor, cu_seqlens: Tensor | None, q: Tensor) -> Tensor:
    """What each row's sequence has in x (b): (b, 1), or (t,) of sequences end to end."""
    if cu_seqlens is None:
        return x[:, None]
    row = torch.arange(q.shape[0], device=q.device, dtype=cu_seqlens.dtype)
    return x[torch.bucketize(row, cu_seqlens[1:-1], right=True)]  # rows after the last sequence count to it
