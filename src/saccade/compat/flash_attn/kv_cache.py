"""Attention to a cache of keys and values, for decoding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.compat.flash_attn.cache import CacheTerms, attend_to_cache


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Writes new keys and values to a cache, if there are any, and attends to all; without gradients.

    Formula: row `i` of k and v becomes key `cache_seqlens[b] + i` of sequence b. Then q attends to the first
    `cache_seqlens[b] + s_new` keys; masks are aligned at the last of them.

    Args:
        q: (b, s_q, h_q, d).
        k_cache: (b_cache, s_cache, h_k, d), or with a block_table (pages, page_size, h_k, d); written in place.
        v_cache: the same with d_v.
        k: (b, s_new, h_k, d), or None.
        v: (b, s_new, h_k, d_v), or None.
        rotary_cos: (positions, pairs), 2 pairs <= d, one position for each key that a sequence has room for: new keys
            are rotated by their places, and queries by `cache_seqlens[b] + i` under a causal mask or a window, else by
            `cache_seqlens[b]`.
        rotary_sin: the same.
        cache_seqlens: how many keys each sequence has before the call, (b,) or one number; None: the cache is full.
        cache_batch_idx: (b,) which row of the cache, or of the block_table, is whose; None: row b is sequence b's.
        cache_leftpad: (b,) the first key of each sequence.
        block_table: (b, width): the pages of each sequence, of any size.
        window_size: as of `flash_attn_func`, and so are softmax_scale, causal, softcap and alibi_slopes.
        rotary_interleaved: pairs are the elements (0, 1), (2, 3), …; else (0, pairs), (1, pairs + 1), …
        num_splits: into how many parts the keys are split; 0 lets the backend choose.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        out (b, s_q, h_q, d_v), and softmax_lse (b, h_q, s_q).

    Raises:
        ValueError, TypeError: arguments that do not fit one another.
        Unsupported: in a backward, where an operand requires a gradient.

    >>> cache = torch.zeros(2, 32, 1, 8), torch.zeros(2, 32, 1, 8)
    >>> q, new, lengths = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 1, 8), torch.tensor([3, 20], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lengths, causal=True).shape
    torch.Size([2, 1, 4, 8])
    >>> cache[0][1, 20, 0].equal(new[1, 0, 0])
    True
    """
    terms = CacheTerms(
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal,
        window_size, softcap, rotary_interleaved, num_splits, return_softmax_lse, alibi_slopes,
    )  # fmt: skip
    return attend_to_cache(q, k_cache, v_cache, terms)
