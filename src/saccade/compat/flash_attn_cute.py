"""FlashAttention-4's functions by saccade: the names, arguments and results of `flash_attn.cute`, on CPUs too.

    from saccade.compat.flash_attn_cute import flash_attn_func, flash_attn_varlen_func

`score_mod` and `mask_mod` are functions of torch operations in FlexAttention's form, `(score, b, h, q_idx, kv_idx)` and
`(b, h, q_idx, kv_idx)`, that capture their tensors, which get gradients; not those of CuTe. Not there yet, and refused
by name: qv, gather_kv_indices and block_sparse_tensors. Source: https://github.com/Dao-AILab/flash-attention, 4.0.0b36
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from saccade import masks
from saccade.api import ScoreFunction, attention
from saccade.call.partial import Partial
from saccade.compat.flash_attn.call import BSHD, band, offset, sequences, without_gradients
from saccade.layouts import Dense, Layout, Paged
from saccade.scores import softcap as capped
from saccade.util import arguments

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


class _Terms(NamedTuple):
    """The arguments that both functions share."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    learnable_sink: Any
    softcap: Any
    deterministic: Any
    score_mod: Any
    mask_mod: Any
    return_lse: Any


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: ScoreFunction | None = None, score_mod_bwd: Any = None,
    mask_mod: Any = None, aux_tensors: list[Tensor] | None = None, aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None, block_sparse_tensors_bwd: Any = None, return_lse: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`softmax(mask(score_mod(scale q k^T)), with sink) v`.

    Args:
        q: (b, s_q, h_q, d).
        k: (b, s_k, h_k, d).
        v: (b, s_k, h_k, d_v).
        window_size: (left, right): row i sees keys `i + off - left <= j <= i + off + right`, with `off = s_k - s_q`;
            None is unbounded, and so are two negative bounds. One negative bound is a number like any other.
        learnable_sink: (h_q) logits, one more column of the softmax; it gets a gradient.
        softcap: `softcap tanh(score / softcap)`, 0 for none; not together with score_mod.
        num_splits: not read, and neither is pack_gqa.
        deterministic: False follows `torch.are_deterministic_algorithms_enabled()`.
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, in the place of causal and window_size.
        return_lse: whether the second result is the LSE.

    Returns:
        out (b, s_q, h_q, d_v), and the LSE (b, h_q, s_q), natural log, differentiable, or None.

    Raises:
        NotImplementedError: the other arguments, where they are given; the text says what to do instead.
        ValueError, TypeError: arguments that do not fit one another.

    >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
    >>> sink, slopes = torch.zeros(4), torch.rand(4)
    >>> out, lse = flash_attn_func(q, k, v, causal=True, learnable_sink=sink, return_lse=True,
    ...     score_mod=lambda score, b, h, q_idx, kv_idx: score + slopes[h] * (kv_idx - q_idx))
    >>> out.shape, lse.shape
    (torch.Size([2, 16, 4, 8]), torch.Size([2, 4, 16]))
    """
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_bwd_recompute_p=gather_bwd_recompute_p,
        gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    terms = _Terms(
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, score_mod, mask_mod, return_lse
    )
    return _attend(q, k, v, BSHD, terms)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None, min_seqlen_k: int | None = None, seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None, gather_kv_indices: Tensor | None = None, page_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None, softcap: float = 0.0, num_splits: int = 1, pack_gqa: bool | None = None,
    deterministic: bool = False, score_mod: ScoreFunction | None = None, score_mod_bwd: Any = None,
    mask_mod: Any = None, block_sparse_tensors: Any = None, aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None, return_lse: bool = False, scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None, disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False, gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`flash_attn_func` of sequences of different lengths. Each side is end to end, or padded to one length.

    Args:
        q: (t_q, h_q, d) with cu_seqlens_q, else (b, s_q, h_q, d).
        k: (t_k, h_k, d) with cu_seqlens_k, with page_table (pages, page_size, h_k, d), else (b, s_k, h_k, d).
        v: the same with d_v.
        cu_seqlens_q: (b + 1,): 0, then where each sequence of q ends; cu_seqlens_k the same for k and v.
        max_seqlen_q: a bound that nothing reads, as are max_seqlen_k and min_seqlen_k.
        seqused_q: (b,) how many rows of each sequence are in use; seqused_k the same for k and v.
        page_table: (b, width): the pages of each sequence; with seqused_k or cu_seqlens_k; a backward is refused.
        num_splits: with page_table, into how many parts the keys are split; 0 lets the backend choose.
        scheduler_metadata: not read, and neither is disable_scheduler_metadata.

    Returns:
        out, of q's form, and the LSE, (h_q, t_q) or (b, h_q, s_q), or None.

    >>> offsets, x = torch.tensor([0, 3, 10]), torch.randn(10, 2, 16)
    >>> out, lse = flash_attn_varlen_func(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    >>> out.shape, lse is None
    (torch.Size([10, 2, 16]), True)
    """
    if isinstance(qv, Tensor) and qv.dim() == 1 and not qv.is_floating_point():
        offsets = qv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        qv, (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) = None, _by_position(*offsets)
    _refuse(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod_bwd=score_mod_bwd, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors, seqlen_k_per_split=seqlen_k_per_split,
        gather_bwd_recompute_p=gather_bwd_recompute_p, gather_bwd_token_chunk=gather_bwd_token_chunk,
    )  # fmt: skip
    terms = _Terms(
        softmax_scale, causal, window_size, learnable_sink, softcap, deterministic, score_mod, mask_mod, return_lse
    )
    arguments.tensors(q=q, k=k, v=v)
    if page_table is not None:
        return _attend(q, k, v, _paged(page_table, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, num_splits), terms)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return _attend(q, k, v, Dense("bshd", seqused_q, seqused_k), terms)
    return _attend_ragged(
        (q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), (seqused_q, seqused_k), terms
    )


def _by_position(cu_q: Tensor, cu_k: Any, most_q: Any, most_k: Any, more: Any) -> tuple[Any, Any, Any, Any]:
    """Offsets and the longest lengths of calls that give them after v, where other versions have no qv. Raises
    TypeError if something else than bounds follows, as seqused_q in yet others."""
    if most_q is None:  # the bounds are keywords, if they are there
        return cu_q, cu_k, most_k, more
    for x in (most_q, most_k):
        if isinstance(x, Tensor) and x.dim():
            raise TypeError(
                "after cu_seqlens_q and cu_seqlens_k by position come max_seqlen_q and max_seqlen_k, two integers; got "
                f"{arguments.describe(x)}: give it by its name, as in seqused_q=…"
            )
    if more is not None:
        raise TypeError(
            f"give what follows max_seqlen_k by its name, as in seqused_q=…; got {arguments.describe(more)}"
        )
    return cu_q, cu_k, most_q, most_k


def _attend_ragged(
    operands: tuple[Tensor, Tensor, Tensor], offsets: Any, longest: Any, used: Any, terms: _Terms
) -> tuple[Tensor, Tensor | None]:
    """A side that is padded becomes sequences end to end."""
    (q, k, v), (cu_q, cu_k) = operands, offsets
    padded = None
    if cu_q is None:
        cu_q, q, padded = _offsets("q", q), q.flatten(0, 1), q.shape[:2]
    if cu_k is None:
        cu_k, k, v = _offsets("k", k), k.flatten(0, 1), v.flatten(0, 1)
    layout = sequences(cu_q, cu_k, *longest, seqused_q=used[0], seqused_k=used[1])
    out, lse = _attend(q, k, v, layout, terms)
    if padded is None:
        return out, lse
    return out.unflatten(0, padded), None if lse is None else lse.unflatten(1, padded).transpose(0, 1)


def _offsets(name: str, x: Tensor) -> Tensor:
    if x.dim() != 4:
        raise ValueError(f"{name} without cu_seqlens_{name} must be (b, s, h, d), got {tuple(x.shape)}")
    return torch.arange(x.shape[0] + 1, device=x.device, dtype=torch.int32) * x.shape[1]


def _paged(
    table: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, used_q: Tensor | None, used_k: Tensor | None, splits: int
) -> Paged:
    if used_q is not None:
        raise NotImplementedError(
            "seqused_q with page_table is not supported: put queries end to end, with cu_seqlens_q"
        )
    if used_k is None:
        if cu_k is None:
            raise ValueError("page_table needs seqused_k, (b,), the lengths of the sequences")
        arguments.tensors(cu_seqlens_k=cu_k)
        used_k = cu_k.diff()
    return Paged(table, used_k, cu_q, arguments.integer("num_splits", splits) or None)


def _attend(q: Tensor, k: Tensor, v: Tensor, layout: Layout, terms: _Terms) -> tuple[Tensor, Tensor | None]:
    scale, causal, window_size, sink, softcap, deterministic, score_mod, mask_mod, return_lse = terms
    arguments.flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    mask = _mask(causal, window_size, mask_mod, (layout, q, k))
    if softcap != 0.0:
        if score_mod is not None:
            raise ValueError("softcap and score_mod do not go together: score_mod=saccade.compose(mod, softcap(cap))")
        score_mod = capped(softcap)
    elif score_mod is not None:
        score_mod = _of_rows(score_mod, layout, q, k)

    def run() -> Any:
        return attention(
            q, k, v, mask=mask, score_mod=score_mod, layout=layout, scale=scale, sink=sink, return_lse=return_lse,
            deterministic=deterministic or None,
        )  # fmt: skip

    result = without_gradients(run, q, k, v, sink) if layout.has_pages else run()
    return result if isinstance(result, Partial) else (result, None)


def _mask(causal: Any, window_size: Any, mask_mod: Any, call: tuple[Layout, Tensor, Tensor]) -> masks.Mask | None:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is (left, right), got {arguments.describe(window_size)}")
    left, right = (x if x is None else arguments.integer("window_size", x, least=None) for x in window_size)
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    if mask_mod is not None:
        if causal or (left, right) != (None, None):
            raise ValueError("mask_mod takes the place of causal and window_size: test q_idx and kv_idx in it")
        return masks.mask_mod(_of_rows(mask_mod, *call))
    right = 0 if causal else right
    if left is None and right is None:
        return None
    if (left or 0) >= 0 and (right or 0) >= 0:
        return masks.window(left, right)
    return band(left, right, *call)


def _of_rows(function: Any, layout: Layout, q: Tensor, k: Tensor) -> Any:
    """The function with a q_idx that counts rows. Over a cache, kernels pass positions instead."""
    if not layout.has_pages:
        return function
    off = cast(Tensor, offset(layout, q, k))

    def shifted(*arguments: Tensor) -> Tensor:
        *before, b, h, q_idx, kv_idx = arguments
        return function(*before, b, h, q_idx - off[b], kv_idx)

    return shifted


_INSTEAD = {
    "qv": "attend with q = cat([q, qv], -1) and k = cat([k, v], -1)",
    "gather_kv_indices": "a mask_mod says which keys a query sees",
    "score_mod_bwd": "the derivative follows from score_mod; saccade.ScoreMod(fn, bprop=…) takes one of your own",
    "aux_tensors": "score_mod and mask_mod capture the tensors that they read, which then get gradients",
    "aux_scalars": "score_mod and mask_mod capture the numbers that they read, and new values compile nothing",
    "block_sparse_tensors": "tiles that mask_mod leaves empty are found on the device; saccade.attention takes torch's "
    "BlockMask as its mask",
    "block_sparse_tensors_bwd": "the backward visits the tiles that the forward visits",
    "seqlen_k_per_split": "num_splits=1 gives each row the same bits in every batch",
    "gather_bwd_recompute_p": "it belongs to gather_kv_indices",
    "gather_bwd_token_chunk": "it belongs to gather_kv_indices",
}


def _refuse(**given: Any) -> None:
    for name, x in given.items():
        if x is not None and x is not False:
            raise NotImplementedError(f"{name} is not supported: {_INSTEAD[name]}")
