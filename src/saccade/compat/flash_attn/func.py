"""Attention over batches whose rows are all in use: (b, s, h, d)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.compat.flash_attn.call import BSHD, Terms, attend_with_probabilities, parts


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`dropout(softmax(mask(softcap(scale q k^T) - slopes[h] |i + off - j|))) v`, with `off = s_k - s_q`.

    Args:
        q: (b, s_q, h_q, d).
        k: (b, s_k, h_k, d), with h_q a multiple of h_k.
        v: (b, s_k, h_k, d_v).
        dropout_p: the share of probabilities that become zero, in [0, 1).
        softmax_scale: 1/sqrt(d) when None.
        causal: row i sees keys `j <= i + off`.
        window_size: (left, right): row i sees keys `i + off - left <= j <= i + off + right`; a negative bound is
            unbounded. With causal, right is 0.
        softcap: `softcap tanh(score / softcap)`; none where it is not above 0.
        alibi_slopes: (h_q) or (b, h_q); they get a gradient if they require one.
        deterministic: gradients bitwise equal from run to run; False follows
            `torch.are_deterministic_algorithms_enabled()`.
        return_attn_probs: return (out, softmax_lse, an empty tensor).

    Returns:
        out (b, s_q, h_q, d_v), and softmax_lse (b, h_q, s_q), natural log, float32, differentiable. A row that sees no
        key has `out = 0` and an LSE of -inf, where FlashAttention-2 has +inf.

    Raises:
        NotImplementedError: return_attn_probs with dropout, which would return the probabilities.
        ValueError, TypeError: arguments that do not fit one another.

    Source: https://github.com/Dao-AILab/flash-attention, 2.8.

    >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 16, 4, 8])
    """
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, BSHD, terms)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of q, k and v in one tensor, qkv (b, s, 3, h, d), which gets one gradient.

    >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 8), causal=True).shape
    torch.Size([2, 16, 4, 8])
    """
    q, k, v = parts("qkv", qkv, 2, 3, "(b, s, 3, h, d)")
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, BSHD, terms)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of k and v in one tensor, kv (b, s_k, 2, h_k, d), which gets one gradient.

    >>> flash_attn_kvpacked_func(torch.randn(2, 16, 4, 8), torch.randn(2, 24, 2, 2, 8)).shape
    torch.Size([2, 16, 4, 8])
    """
    k, v = parts("kv", kv, 2, 2, "(b, s_k, 2, h_k, d)")
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, BSHD, terms)
