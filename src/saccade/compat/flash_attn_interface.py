"""FlashAttention-3's functions by saccade: the names, arguments and results of `flash_attn_interface`, on CPUs too.

    from saccade.compat.flash_attn_interface import flash_attn_func, flash_attn_with_kvcache

More than there: float32 and float64, 8-bit keys and values beside wider queries, float8_e5m2, any head dim, gradients
of the LSE and with attention_chunk. Refused by name: `qv`. Tuning arguments (num_splits, pack_gqa, sm_margin,
scheduler_metadata) are taken; num_splits is read where keys are in a cache.

Source: https://github.com/Dao-AILab/flash-attention, hopper/
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.call.descale import Descale
from saccade.call.partial import Partial, merge
from saccade.compat.flash_attn.cache import CacheTerms, attend_to_cache
from saccade.compat.flash_attn.call import BSHD, Terms, attend, parts, sequences
from saccade.layouts import Dense
from saccade.util import arguments

__all__ = [
    "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_with_kvcache", "get_scheduler_metadata",
]  # fmt: skip


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None, v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1,
    pack_gqa: bool | None = None, deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`softmax(mask(softcap(scale q k^T))) v`; arguments as in `saccade.compat.flash_attn.flash_attn_func`.

    Args:
        q: (b, s_q, h_q, d).
        k: (b, s_k, h_k, d).
        v: (b, s_k, h_k, d_v).
        qv: refused.
        q_descale: (b, h_k), float32: what 8-bit numbers are multiplied by; and so are k_descale and v_descale.
        attention_chunk: row i sees keys of its own chunk, `floor(j / chunk) = floor((i + off) / chunk)`; 0: all.
        num_splits: not read, and neither are pack_gqa and sm_margin.
        return_attn_probs: return (out, softmax_lse).

    Raises:
        NotImplementedError: an argument that is refused.
        ValueError, TypeError: arguments that do not fit one another.

    >>> q, k, v = torch.randn(2, 16, 4, 8), torch.randn(2, 24, 2, 8), torch.randn(2, 24, 2, 8)
    >>> out, lse = flash_attn_func(q, k, v, causal=True, attention_chunk=8, return_attn_probs=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 16]))
    """
    descale = _descale(qv, q_descale, k_descale, v_descale)
    terms = Terms(0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs, descale)
    return attend(q, k, v, BSHD, terms, None, attention_chunk)


def flash_attn_qkvpacked_func(
    qkv: Tensor, softmax_scale: float | None = None, causal: bool = False, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, deterministic: bool = False, num_heads_q: int | None = None,
    sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of one tensor, qkv (b, s, 3, h, d); or with num_heads_q (b, s, h_q + 2 h_k, d).

    >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 4 + 2 + 2, 8), num_heads_q=4).shape
    torch.Size([2, 16, 4, 8])
    """
    q, k, v = _unpacked(qkv, num_heads_q)
    scales = q_descale, k_descale, v_descale
    terms = window_size, attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs
    return flash_attn_func(q, k, v, softmax_scale, causal, None, *scales, *terms)


def _unpacked(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, ...]:
    arguments.tensors(qkv=qkv)
    if qkv.dim() != 4:
        return parts("qkv", qkv, 2, 3, "(b, s, 3, h, d), or (b, s, h_q + 2 h_k, d) with num_heads_q")
    if num_heads_q is None:
        raise ValueError(f"qkv of four dimensions, {tuple(qkv.shape)}, needs num_heads_q, the number of query heads")
    heads, both = arguments.integer("num_heads_q", num_heads_q, 1), qkv.shape[2] - num_heads_q
    if both < 2 or both % 2:
        raise ValueError(f"qkv must be (b, s, h_q + 2 h_k, d), got {tuple(qkv.shape)} with num_heads_q={num_heads_q}")
    return qkv.split([heads, both // 2, both // 2], 2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, qv: Tensor | None = None, q_descale: Tensor | None = None,
    k_descale: Tensor | None = None, v_descale: Tensor | None = None, window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, sm_margin: int = 0, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` within each of several sequences end to end, as in `saccade.compat.flash_attn`.

    Args:
        q: (t_q, h_q, d).
        k: (t_k, h_k, d).
        v: (t_k, h_k, d_v).
        cu_seqlens_q: (b + 1,): 0, then where each sequence of q ends.
        cu_seqlens_k: the same for k and v.
        max_seqlen_q: an upper bound of q's lengths, which nothing reads, and so is max_seqlen_k of k's.
        seqused_q: (b,) how many rows of each sequence are in use; the results of others are zero.
        seqused_k: the same for k and v.

    Returns:
        out (t_q, h_q, d_v), and with return_attn_probs softmax_lse (h_q, t_q).

    >>> offsets, x = torch.tensor([0, 3, 10]), torch.randn(10, 2, 16)
    >>> flash_attn_varlen_func(x, x, x, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 2, 16])
    """
    descale = _descale(qv, q_descale, k_descale, v_descale)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    layout = sequences(*lengths, seqused_q=seqused_q, seqused_k=seqused_k)
    terms = Terms(0.0, softmax_scale, causal, window_size, softcap, None, deterministic, return_attn_probs, descale)
    return attend(q, k, v, layout, terms, None, attention_chunk)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    qv: Tensor | None = None, rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, page_table: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, softcap: float = 0.0,
    rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes new keys and values to a cache and attends to all, as `saccade.compat.flash_attn.flash_attn_with_kvcache`.

    Args:
        q: (b, s_q, h_q, d), or with cu_seqlens_q sequences end to end, (t_q, h_q, d).
        k: (b, s_new, h_k, d), or with cu_seqlens_k_new (t_new, h_k, d); and so is v.
        page_table: (b, width), called block_table in version 2.
        rotary_seqlens: (b,) where the rotation's positions start; cache_seqlens without it. Not read without angles.
        max_seqlen_q: not read, and neither are scheduler_metadata, pack_gqa and sm_margin.

    Returns:
        out, and with return_softmax_lse (out, softmax_lse, and two empty tensors where parts of keys would be).

    >>> cache, q = torch.randn(9, 16, 2, 8), torch.randn(5, 4, 8)
    >>> table, offsets = torch.tensor([[4, 1], [7, 2]]).int(), torch.tensor([0, 1, 5]).int()
    >>> given = {"cache_seqlens": torch.tensor([20, 9]), "page_table": table, "cu_seqlens_q": offsets}
    >>> flash_attn_with_kvcache(q, cache, cache, causal=True, **given).shape
    torch.Size([5, 4, 8])
    """
    descale = _descale(qv, q_descale, k_descale, v_descale)
    terms = CacheTerms(
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, softmax_scale, causal,
        window_size, softcap, rotary_interleaved, num_splits, return_softmax_lse, None, cu_seqlens_q, cu_seqlens_k_new,
        rotary_seqlens, attention_chunk, descale,
    )  # fmt: skip
    result = attend_to_cache(q, k_cache, v_cache, terms)
    if isinstance(result, Tensor):
        return result
    return (*result, result.lse.new_empty(0), result.lse.new_empty(0))


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`lse = log sum_i exp(lse_i)`, `out = sum_i exp(lse_i - lse) out_i`: results over parts of the keys as one.

    Args:
        out_partial: (parts, b, s, h, d), or of packed sequences (parts, t, h, d).
        lse_partial: (parts, b, s, h), or (parts, t, h).
        out: where the result is written; None makes it.
        out_dtype: that of out_partial when None.

    Returns:
        out (b, s, h, d) and softmax_lse (b, s, h).

    >>> out, lse = flash_attn_combine(torch.randn(3, 2, 8, 4, 16), torch.randn(3, 2, 8, 4))
    >>> out.shape, lse.shape
    (torch.Size([2, 8, 4, 16]), torch.Size([2, 8, 4]))
    """
    arguments.tensors(out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape or not out_partial.shape[0]:
        shapes = f"{tuple(out_partial.shape)}, {tuple(lse_partial.shape)}"
        raise ValueError(f"out_partial and lse_partial must be (parts, b, s, h, d) and (parts, b, s, h), got {shapes}")
    packed = out_partial.dim() == 4
    outs, lses = (x[:, None] if packed else x for x in (out_partial, lse_partial))
    pairs = zip(outs, lses.transpose(-1, -2), strict=True)
    merged, lse = merge(*(Partial(o, m) for o, m in pairs), layout=Dense("bshd"))
    merged, lse = merged.to(out_dtype or out_partial.dtype), lse.transpose(-1, -2)
    merged, lse = (merged[0], lse[0]) if packed else (merged, lse)
    return (merged, lse) if out is None else (out.copy_(merged), lse)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: Tensor, qkv_dtype: torch.dtype = torch.bfloat16, headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None, cache_leftpad: Tensor | None = None,
    page_size: int | None = None, max_seqlen_k_new: int = 0, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), attention_chunk: int = 0, has_softcap: bool = False, num_splits: int = 0,
    pack_gqa: bool | None = None, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """An empty tensor: kernels here find their work on the device, and read no metadata.

    >>> get_scheduler_metadata(2, 1, 128, 8, 2, 64, torch.tensor([5, 9])).numel()
    0
    """
    arguments.tensors(cache_seqlens=cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _descale(qv: Any, q: Tensor | None, k: Tensor | None, v: Tensor | None) -> Descale | None:
    """What 8-bit operands stand for."""
    if qv is not None:
        raise NotImplementedError(
            "qv is not supported: scores of scale (q k^T + qv v^T) are those of q = cat([q, qv], -1), "
            "k = cat([k, v], -1) and scale = (d + d_v)^-0.5"
        )
    return None if q is k is v is None else Descale(q, k, v)
