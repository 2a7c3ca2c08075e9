"""The way from FlashAttention's arguments and back to its results, that all functions share: lengths, masks, scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.api import ScoreFunction, attention
from saccade.call import Call, check_call, needs_gradient
from saccade.call.descale import Descale
from saccade.call.partial import Partial
from saccade.layouts import Dense, Layout, Packed, Paged
from saccade.masks import Mask, causal, interval, window
from saccade.scores import ScoreMod, compose
from saccade.scores import softcap as capped
from saccade.util import arguments
from saccade.util.arguments import Unsupported

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

    def run() -> Tensor | Partial:
        mask, mod = meaning(q, k, layout, terms, leftpad, chunk)
        dropout_p, scale, *_, deterministic, return_attn_probs, descale = terms
        return attention(
            q, k, v, mask=mask, score_mod=mod, layout=layout, scale=scale, dropout_p=dropout_p,
            return_lse=return_attn_probs, deterministic=deterministic or None, descale=descale,
        )  # fmt: skip

    return without_gradients(run, q, k, v, terms.alibi_slopes) if layout.has_pages else run()


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
    """Mask and score function of a call. Raises NotImplementedError if the probabilities of a call with dropout are
    asked for, ValueError or TypeError for arguments that mean nothing."""
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


# Which keys a query sees


def visible(is_causal: bool, window_size: Any, leftpad: Tensor | None = None) -> Mask | None:
    """Row i sees keys `i + off - left <= j <= i + off + right`, with `off = s_k - s_q` for each sequence, from
    leftpad[b] on. With `is_causal`, right is 0. A bound that is negative or None is unbounded. Raises TypeError for
    bounds that are not two integers, and ValueError for another leftpad than an integer vector."""
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
        got = window_size if isinstance(window_size, (tuple, list)) else arguments.describe(window_size)
        raise TypeError(f"window_size is (left, right), got {got}")
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
    """Row i sees the keys of its own chunk: `floor(r / chunk) <= j' / chunk < floor(r / chunk) + 1`, with j' and `r = i
    + off` counted from the first key in use. Raises ValueError or TypeError for a chunk that is no integer from 1 on.

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


# How scores change


def score_mod(
    softcap: float, slopes: Tensor | None, causal: Any, layout: Layout, q: Tensor, k: Tensor
) -> Callable[..., Tensor] | None:
    """`softcap tanh(score / softcap) - slopes[b, h] |i + off - j|`, with `off = s_k - s_q` for each sequence. There is
    no softcap that is not above 0. slopes: (h_q) or (b, h_q), or None. causal: no row sees a key after its own. Raises
    TypeError or ValueError for a cap that is no number, or slopes of another shape."""
    cap = None
    if softcap != 0.0 and not arguments.number("softcap", softcap) <= 0:
        cap = capped(arguments.number("softcap", softcap))
    if slopes is None:
        return cap
    bias = _bias(slopes, bool(causal), layout, q, k)
    return bias if cap is None else compose(cap, bias)


def _bias(slopes: Tensor, causal: bool, layout: Layout, q: Tensor, k: Tensor) -> ScoreMod:
    arguments.tensors(alibi_slopes=slopes, q=q, k=k)
    heads = q.shape[-2]
    b = q.shape[0] if layout.rectangular else layout.sequences
    if not arguments.is_one_of(slopes.shape, (heads,), (b, heads)) or not slopes.is_floating_point():
        got = f"{slopes.dtype} {tuple(slopes.shape)}"
        raise ValueError(f"alibi_slopes must be floats ({heads},) or ({b}, {heads}), got {got}")
    off = 0 if layout.has_pages else offset(layout, q, k)  # indices of a cache's queries are positions
    return alibi(slopes, off, causal)


# What is counted from the lengths of sequences, on the device


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


# Calls that have no gradients, where operands require them: they run, and a backward through them is refused


def without_gradients(run: Callable[[], Tensor | Partial], *operands: Tensor | None) -> Tensor | Partial:
    """`run()`, which reads a cache. FlashAttention runs such calls outside `torch.no_grad()` too.

    Its results then have no gradients, silently. Here they require one if an operand does. Raises Unsupported in the
    backward; under torch.compile in the call, which has its backward made beforehand.
    """
    if torch.compiler.is_compiling() or not needs_gradient(*operands):
        return run()
    result: Any = _Refused.apply(run, *operands)
    return Partial(*result) if isinstance(result, tuple) else result


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(run: Callable[[], Any], *_: Any) -> Any:
        return run()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """torch.func wants it; nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise Unsupported(
            "attention to a cache of keys has no gradients: call it inside torch.no_grad(), or pass keys and values "
            "without pages to flash_attn_func or flash_attn_varlen_func"
        )


# ALiBi as other libraries define it: by distance from the diagonal that ends in the bottom right corner.


def alibi(slopes: Tensor, offset: int | Tensor = 0, causal: bool = False) -> ScoreMod:
    """`score -> score - slopes[b, h] |q_idx + offset[b] - kv_idx|`.

    Args:
        slopes: (h_q) or (b, h_q).
        offset: what a row's number and that of its own key differ by; a tensor (b) holds one for each sequence.
        causal: no row sees a key after its own, so that the distance needs no absolute value.
    """
    if isinstance(offset, Tensor):
        return ScoreMod(partial(_alibi, offset=0, causal=causal), slopes, offset)
    return ScoreMod(partial(_alibi, offset=offset, causal=causal), slopes)


def _alibi(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, slopes: Tensor, offsets: Tensor | None = None,
    *, offset: int, causal: bool,
) -> Tensor:  # fmt: skip
    distance = kv_idx - q_idx - (offset if offsets is None else offsets[b])
    slopes = slopes.to(score.dtype)  # products of 16 bits would round distances
    slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
    return score + slope * (distance if causal else -distance.abs())
