"""`torch.nn.functional.scaled_dot_product_attention`, always fused, with gradients of masks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from saccade.api import attention
from saccade.masks import causal, window
from saccade.scores import bias
from saccade.util import arguments

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """`softmax(scale q k^T + attn_mask) v`, as torch computes it.

    Args:
        query: (..., h_q, s_q, d); any number of dimensions from two on.
        key: (..., h_k, s_k, d).
        value: (..., h_k, s_k, d_v).
        attn_mask: bool, True where a query sees a key, or floats that are added to the scores and get a gradient if
            they require one; any shape that broadcasts to (..., h_q, s_q, s_k). Or torch's
            `causal_upper_left(s_q, s_k)` or `causal_lower_right(s_q, s_k)`, which run as intervals.
        dropout_p: the share of probabilities that become zero, in [0, 1].
        is_causal: row i sees keys `j <= i`, aligned at the top left.
        scale: 1/sqrt(d) when None.
        enable_gqa: h_q may be a multiple of h_k.

    Returns:
        out (..., h_q, s_q, d_v). A row that sees no key is 0.

    Raises:
        ValueError: both a mask and is_causal, or shapes that do not fit one another.
        TypeError: an operand or a mask that is not a tensor.
        Unsupported: no backend runs the call.

    >>> q, k, v = (torch.randn(2, 4, 16, 8) for _ in range(3))
    >>> scaled_dot_product_attention(q, k, v, is_causal=True).shape
    torch.Size([2, 4, 16, 8])
    """
    # What plainly is as it should be is not checked by name: this is the hot path of small calls.
    if attn_mask is not None or not type(query) is type(key) is type(value) is Tensor:
        masks = {} if attn_mask is None else {"attn_mask": attn_mask}
        arguments.tensors(query=query, key=key, value=value, **masks)
    if not (type(is_causal) is type(enable_gqa) is bool and type(dropout_p) is float):
        arguments.flags(is_causal=is_causal, enable_gqa=enable_gqa)
        dropout_p = arguments.number("dropout_p", dropout_p)
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention takes attn_mask or is_causal=True, not both")
    outer, q, k, v = _operands(query, key, value, enable_gqa)
    mask, score_mod = None, None
    if attn_mask is not None and isinstance(attn_mask, CausalBias):
        lengths = attn_mask.seq_len_q, attn_mask.seq_len_kv
        if lengths != (q.shape[2], k.shape[2]):
            raise ValueError(f"the causal bias is for (s_q, s_k) = {lengths}, got {_shapes(query, key, value)}")
        is_causal = attn_mask.variant == CausalVariant.UPPER_LEFT
        mask = None if is_causal else causal()
    if is_causal and q.is_nested:
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                "is_causal needs nested query and key of the same offsets, as nested_tensor_from_jagged(x, offsets) "
                f"makes them, got {_shapes(query, key, value)}"
            )
        mask = causal()
    elif is_causal and k.shape[2] == v.shape[2]:  # attention refuses others
        s_q, s_k = q.shape[2], k.shape[2]
        if s_k > s_q:  # no row sees later keys
            k, v = k[:, :, :s_q], v[:, :, :s_q]
        mask = window(None, 0 if s_k > s_q else s_q - s_k)
    elif attn_mask is not None and mask is None:
        tensor = _mask(attn_mask, (*outer, *q.shape[1:3], k.shape[2]))
        mask, score_mod = (tensor, None) if tensor.dtype == torch.bool else (None, bias(tensor))
    p = 0.0 if dropout_p == 1 else dropout_p  # attention cannot drop everything
    out = attention(q, k, v, mask=mask, score_mod=score_mod, scale=scale, dropout_p=p)
    out = torch.dropout(out, 1.0, True) if dropout_p == 1 else out
    if len(outer) == 1:
        return out
    shape = (*outer, *out.shape[1:]) if max(x.dim() for x in (query, key, value)) > 2 else out.shape[2:]
    return out.reshape(shape)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _operands(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Any, Tensor, Tensor, Tensor]:
    """The dimensions before heads, and operands as attention takes them."""
    q, k, v = query.shape, key.shape, value.shape
    if len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and (grouped or q[1] == k[1] == v[1]):
        return (q[0],), query, key, value  # for the host's sake: what follows would return the same
    if query.is_nested or key.is_nested or value.is_nested:  # attention takes no other form of them
        return q[:1], *_heads(query, key, value, grouped or len(q) != 4)
    outer = _outer(query, key, value)
    return outer, *_heads(_four(query, outer), _four(key, outer), _four(value, outer), grouped)


def _outer(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The dimensions before heads, of all operands together."""
    outer = query.shape[:-3]
    if query.dim() > 2 and key.shape[:-3] == value.shape[:-3] == outer and key.dim() == value.dim() == query.dim():
        return outer
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise ValueError(f"query, key and value need two dimensions or more, got {_shapes(query, key, value)}")
    try:
        return torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    except RuntimeError:
        shapes = _shapes(query, key, value)
        raise ValueError(f"query, key and value must have batch sizes that broadcast, got {shapes}") from None


def _four(x: Tensor, outer: tuple[int, ...]) -> Tensor:
    """(b, h, s, d), with all outer dimensions in one."""
    if x.dim() == 4 and x.shape[:1] == outer:
        return x
    x = x[None] if x.dim() == 2 else x
    return x.expand(*outer, *x.shape[-3:]).reshape(math.prod(outer), *x.shape[-3:])


def _heads(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Operands with the heads that attention takes; without groups, one head is broadcast to all."""
    counts = [x.shape[1] for x in (q, k, v)]
    if grouped or counts[0] == counts[1] == counts[2]:
        return q, k, v
    heads = next((n for n in counts if n != 1), 1)
    if not all(arguments.broadcasts([n], [heads]) for n in counts):
        raise ValueError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}: heads that share keys need enable_gqa=True; "
            f"with outer dimensions in one, {_shapes(q, k, v)}"
        )
    return q.expand(-1, heads, -1, -1), k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)


def _mask(mask: Tensor, call: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to (…, h_q, s_q, s_k), with four dimensions or fewer."""
    if not arguments.broadcasts(mask.shape, call):
        raise ValueError(f"attn_mask must broadcast to (…, h_q, s_q, s_k) = {call}, got {tuple(mask.shape)}")
    if mask.dim() <= 3 or mask.shape[:-3].numel() == 1:
        return mask.reshape(mask.shape[-3:])
    if len(call) == 4:
        return mask
    return mask.expand(*call[:-3], *mask.shape[-3:]).reshape(math.prod(call[:-3]), *mask.shape[-3:])
