"""The way from FlashAttention's arguments and back to its results, that all functions share."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import arguments
from saccade.api import ScoreFunction, attention
from saccade.call import Call, check_call
from saccade.compat.flash_attn.gradients import without_gradients
from saccade.compat.flash_attn.masks import chunked, visible
from saccade.compat.flash_attn.scores import score_mod
from saccade.descale import Descale
from saccade.layouts import Dense, Layout, Packed, Paged
from saccade.masks import Mask
from saccade.partial import Partial

BSHD = Dense("bshd")


class Terms(NamedTuple):
    """The arguments that functions of FlashAttention-2 share, by its names."""

    dropout_p: Any
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    alibi_slopes: Any
    deterministic: Any
    return_attn_probs: Any
    descale: Descale | None = None
    """Version 3's."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, terms: Terms, leftpad: Tensor | None = None, chunk: int = 0
) -> Tensor | Partial:
    """out, or with return_attn_probs (out, softmax_lse)."""
    if layout.has_pages:
        return without_gradients(lambda: _attend(q, k, v, layout, terms, leftpad, chunk), q, k, v, terms.alibi_slopes)
    return _attend(q, k, v, layout, terms, leftpad, chunk)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, terms: Terms, leftpad: Tensor | None, chunk: int
) -> Tensor | Partial:
    mask, mod = meaning(q, k, layout, terms, leftpad, chunk)
    dropout_p, scale, *_, deterministic, return_attn_probs, descale = terms
    return attention(
        q, k, v, mask=mask, score_mod=mod, layout=layout, scale=scale, dropout_p=dropout_p,
        return_lse=return_attn_probs, deterministic=deterministic or None, descale=descale,
    )  # fmt: skip


def attend_with_probabilities(q: Tensor, k: Tensor, v: Tensor, layout: Layout, terms: Terms) -> Any:
    """out, or with return_attn_probs (out, softmax_lse, an empty tensor), as FlashAttention-2 returns them."""
    result = attend(q, k, v, layout, terms)
    return result if isinstance(result, Tensor) else (*result, result.out.new_empty(0))


def bound_call(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, terms: Terms, leftpad: Tensor | None = None, chunk: int = 0
) -> Call:
    """The call that `attention` would run, for those who run one half of it."""
    mask, mod = meaning(q, k, layout, terms, leftpad, chunk)
    return check_call(
        q, k, v, mask=mask, score_mod=mod, layout=layout, scale=terms.softmax_scale, dropout_p=terms.dropout_p,
        return_lse=True, deterministic=terms.deterministic or None,
    )  # fmt: skip


def meaning(
    q: Tensor, k: Tensor, layout: Layout, terms: Terms, leftpad: Tensor | None = None, chunk: int = 0
) -> tuple[Mask | None, ScoreFunction | None]:
    """Mask and score function of a call.

    Raises:
        NotImplementedError: the probabilities of a call with dropout are asked for.
        ValueError, TypeError: arguments that mean nothing.
    """
    dropout_p, _, causal, window_size, softcap, slopes, deterministic, return_attn_probs, _ = terms
    arguments.flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    if return_attn_probs and dropout_p:
        raise NotImplementedError(
            "return_attn_probs with dropout returns S_dmask, (b, h, s_q, s_k) probabilities, which no kernel here "
            "holds: pass dropout_p=0.0, or omit return_attn_probs"
        )
    mask = visible(causal, window_size, leftpad)
    if chunk != 0:
        own = chunked(chunk, layout, q, k, leftpad)
        mask = own if mask is None else own & mask
    if slopes is None and softcap == 0.0:
        return mask, None
    return mask, score_mod(softcap, slopes, causal or window_size[1] == 0, layout, q, k)


def sequences(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Any, max_seqlen_k: Any,
    block_table: Tensor | None = None, seqused_k: Tensor | None = None, num_splits: int = 0,
    seqused_q: Tensor | None = None,
) -> Packed | Paged:  # fmt: skip
    """The layout of sequences end to end, with keys that are too, or that are in the pages of a cache."""
    arguments.tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if block_table is None:
        longest = (_longest("q", max_seqlen_q), _longest("k", max_seqlen_k))
        return Packed(cu_seqlens_q, cu_seqlens_k, *longest, seqused_q, seqused_k)
    used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    return Paged(block_table, used, cu_seqlens_q, num_splits or None)


def _longest(side: str, bound: Any) -> Any:
    """An upper bound of lengths, as Packed takes it: numpy's integers too."""
    if bound is None or isinstance(bound, (Tensor, int, torch.SymInt)):
        return bound
    return int(arguments.integer(f"max_seqlen_{side}", bound))


def parts(name: str, packed: Any, dim: int, count: int, shape: str) -> tuple[Tensor, ...]:
    """The operands that one tensor holds, along its dimension `dim` of `count` elements."""
    arguments.tensors(**{name: packed})
    if packed.dim() != dim + 3 or packed.shape[dim] != count:
        raise ValueError(f"{name} must be {shape}, got {tuple(packed.shape)}")
    return packed.unbind(dim)
