"""Which keys a query sees, by FlashAttention's words."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade import arguments
from saccade.compat.flash_attn.lengths import of_rows, offset, row_numbers
from saccade.layouts import Layout
from saccade.masks import Mask, causal, interval, window


def visible(is_causal: bool, window_size: Any, leftpad: Tensor | None = None) -> Mask | None:
    """Row i sees keys `i + off - left <= j <= i + off + right`, with `off = s_k - s_q` for each sequence.

    Args:
        is_causal: right is 0.
        window_size: (left, right), as a tensor too; a bound that is negative or None is unbounded.
        leftpad: (b,) the first key of each sequence.

    Raises:
        TypeError: bounds that are not two integers.
        ValueError: another leftpad than an integer vector.
    """
    left, right = bounds(window_size)
    if is_causal:
        right = 0
    if left is None:
        mask = None if right is None else causal() if right == 0 else window(None, right)
    else:
        mask = window(left, right)
    if leftpad is None:
        return mask
    starts = interval(_vector("leftpad", leftpad)[:, None], None)
    return starts if mask is None else starts & mask


def bounds(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right), None where a bound is negative; they may be a tensor of two integers."""
    if type(window_size) is tuple and window_size == (-1, -1):  # in the hot path of small calls
        return None, None
    if isinstance(window_size, Tensor) and window_size.shape == (2,):
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is (left, right), got {arguments.told(window_size)}")
    left, right = (
        None if bound is None or arguments.integer("window_size", bound, least=None) < 0 else bound
        for bound in window_size
    )
    return left, right


def _vector(name: str, x: Any) -> Tensor:
    arguments.tensors(**{name: x})
    if x.dim() != 1:
        raise ValueError(f"{name} must be an integer tensor (b,), got {x.dtype} {tuple(x.shape)}")
    return x


def band(left: int | None, right: int | None, layout: Layout, q: Tensor, k: Tensor) -> Mask:
    """Row i sees keys `i + off - left <= j <= i + off + right`, as a window does; bounds may be negative."""
    row = _diagonal(layout, q, k)
    return interval(None if left is None else row - left, None if right is None else row + right + 1)


def chunked(chunk: int, layout: Layout, q: Tensor, k: Tensor, leftpad: Tensor | None = None) -> Mask:
    """Row i sees the keys of its own chunk: `floor(r / chunk) <= j' / chunk < floor(r / chunk) + 1`, with j' and
    `r = i + off` counted from the first key in use.

    Raises:
        ValueError, TypeError: a chunk that is no integer from 1 on.

    Source: FlashAttention-3's attention_chunk.
    """
    arguments.integer("attention_chunk", chunk, least=1)
    first = 0 if leftpad is None else of_rows(_vector("leftpad", leftpad), layout.cu_seqlens_q, q)
    row = _diagonal(layout, q, k) - first
    start = row - row % chunk + first
    return interval(start, start + chunk)


def _diagonal(layout: Layout, q: Tensor, k: Tensor) -> Tensor:
    """`i + off` of each row: (b or 1, s_q), or (t_q,) of sequences end to end."""
    arguments.tensors(q=q, k=k)
    cu, off = layout.cu_seqlens_q, offset(layout, q, k)
    return row_numbers(cu, q) + (of_rows(off, cu, q) if isinstance(off, Tensor) else off)
