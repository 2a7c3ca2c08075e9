"""Rotary embedding by PyTorch's operations, where flash-attn's tests call its Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`(a, b) -> (a cos - b sin, a sin + b cos)` for each pair of x (b, s, h, d), at its position and its offset.

    Raises:
        NotImplementedError: sequences end to end, which the tests do not rotate.
    """
    if cu_seqlens is not None or max_seqlen is not None:
        raise NotImplementedError("cu_seqlens and max_seqlen are not needed by the tests")
    position = torch.arange(x.shape[1], device=x.device) + torch.as_tensor(seqlen_offsets, device=x.device)[..., None]
    pairs = cos.shape[-1]
    c, s = (angle.float()[position.expand(x.shape[0], -1)][:, :, None] for angle in (cos, -sin if conjugate else sin))
    if interleaved:
        even, odd = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        even, odd = slice(0, pairs), slice(pairs, 2 * pairs)
    a, b = x[..., even].float(), x[..., odd].float()
    out = x if inplace else x.clone()
    out[..., even], out[..., odd] = (a * c - b * s).to(x.dtype), (a * s + b * c).to(x.dtype)
    return out
