"""Attention within each of several sequences that lie end to end: (t, h, d)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.compat.flash_attn.call import Terms, attend_with_probabilities, parts, sequences


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """`flash_attn_func` within each sequence: sequence b has the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.

    Args:
        q: (t_q, h_q, d).
        k: (t_k, h_k, d), or with a block_table (pages, page_size, h_k, d).
        v: (t_k, h_k, d_v), or with a block_table (pages, page_size, h_k, d_v).
        cu_seqlens_q: (b + 1,) int32 or int64: 0, then where each sequence of q ends.
        cu_seqlens_k: the same for k and v; with a block_table, the sums of the lengths.
        max_seqlen_q: an upper bound of q's lengths, an integer or a tensor of one, which nothing reads.
        max_seqlen_k: the same for k and v.
        alibi_slopes: (h_q) or (b, h_q).
        block_table: (b, width): the pages of each sequence, of any size; a backward is refused.

    The other arguments, results and errors are those of `flash_attn_func`; softmax_lse is (h_q, t_q). Rows after the
    last sequence are zero.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, k, v = (torch.randn(10, 2, 16) for _ in range(3))
    >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 2, 16])
    """
    layout = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, layout, terms)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of q, k and v in one tensor, qkv (t, 3, h, d), which gets one gradient.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 2, 16), offsets, 7).shape
    torch.Size([10, 2, 16])
    """
    q, k, v = parts("qkv", qkv, 1, 3, "(t, 3, h, d)")
    layout = sequences(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, layout, terms)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of k and v in one tensor, kv (t_k, 2, h_k, d), which gets one gradient.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, kv = torch.randn(10, 2, 16), torch.randn(10, 2, 1, 16)
    >>> flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7).shape
    torch.Size([10, 2, 16])
    """
    k, v = parts("kv", kv, 1, 2, "(t_k, 2, h_k, d)")
    layout = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, layout, terms)
