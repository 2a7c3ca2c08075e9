"""What a bias of xformers means: a layout, a mask and a score function. Biases are known by the names of their classes,
so those of an installed xformers are as good as ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from saccade import arguments
from saccade.layouts import Dense, Layout, Packed, Paged
from saccade.masks import Mask, causal, interval, window
from saccade.scores import ScoreMod, bias

BSHD = Dense("bshd")


class Meaning(NamedTuple):
    """A bias for tensors of some shape."""

    layout: Layout
    mask: Mask | None = None
    score_mod: ScoreMod | None = None
    page_size: int | None = None
    """Of a cache, whose keys come as one tensor."""
    keys: int | None = None
    """How many of the keys any row sees; None: all."""


def meaning(attn_bias: Any, q: Tensor, k: Tensor) -> Meaning:
    """
    Args:
        attn_bias: None, a tensor or a bias.
        q: (b, s_q, h_q, d), (b, s_q, d) or (b, s_q, groups, h, d).
        k: the keys, in the same form.

    Raises:
        TypeError: a bool tensor, or another class than those of xformers 0.0.35.
        ValueError: a bias that does not fit the tensors.
    """
    if attn_bias is None:
        return Meaning(BSHD)
    if isinstance(attn_bias, Tensor):
        return Meaning(BSHD, score_mod=_added(attn_bias, q))
    name = type(attn_bias).__name__
    if name in _DENSE:
        if name not in _TOP_LEFT:
            return Meaning(BSHD, _DENSE[name](attn_bias))
        keys = min(q.shape[1], k.shape[1])
        mask = causal() if keys == q.shape[1] else window(None, q.shape[1] - keys)  # aligned at the top left
        mod = _added(attn_bias._bias[..., :keys], q) if hasattr(attn_bias, "_bias") else None
        return Meaning(BSHD, mask, mod, keys=keys)
    if name not in _SEQUENCES:
        known = ", ".join((*_DENSE, *_SEQUENCES))
        raise TypeError(f"attn_bias must be a tensor that is added to the scores, or one of {known}; got {name}")
    _check_rows(attn_bias, q, k)
    form, visible = _SEQUENCES[name]
    return form(attn_bias, visible(attn_bias))


def _nothing(attn_bias: Any) -> Mask | None:
    return None


def _causal(attn_bias: Any) -> Mask:
    return causal()


def _local(attn_bias: Any) -> Mask:
    return window(attn_bias._window_size - 1, 0)


def _between(attn_bias: Any) -> Mask:
    return window(attn_bias.window_left, attn_bias.window_right)


def _packed(attn_bias: Any, mask: Mask | None) -> Meaning:
    q, k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    corner = 0 if q is not k and type(attn_bias).__name__ in _TOP_LEFT else None
    layout = Packed(q.seqstart, k.seqstart, max(q.max_seqlen, 0), max(k.max_seqlen, 0), q_offset=corner)
    return Meaning(layout, mask)


def _padded(attn_bias: Any, mask: Mask | None) -> Meaning:
    q, k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    return Meaning(Packed(q.seqstart, k.seqstart, max(q.max_seqlen, 0), k.padding, seqused_k=k.seqlen), mask)


def _gappy(attn_bias: Any, mask: Mask | None) -> Meaning:
    q, k = attn_bias.q_seqinfo, attn_bias.k_seqinfo
    layout = Packed(q.seqstart, None, max(q.max_seqlen, 0), starts_k=k.seqstart[:-1], seqused_k=k.seqlen)
    return Meaning(layout, mask)


def _paged(attn_bias: Any, mask: Mask | None) -> Meaning:
    layout = Paged(attn_bias.block_tables, attn_bias.k_seqinfo.seqlen, attn_bias.q_seqinfo.seqstart)
    return Meaning(layout, mask, page_size=arguments.integer("page_size", attn_bias.page_size, 1))


def _paged_gappy(attn_bias: Any, mask: Mask | None) -> Meaning:
    first = interval(attn_bias.k_seqinfo.seqstart[:-1, None], None)
    return _paged(attn_bias, first if mask is None else first & mask)


_Visible = Callable[[Any], Mask | None]
_DENSE: dict[str, _Visible] = {
    "LowerTriangularMask": _causal,
    "LowerTriangularMaskWithTensorBias": _causal,
    "LowerTriangularFromBottomRightMask": _causal,
    "LowerTriangularFromBottomRightLocalAttentionMask": _local,
    "LocalAttentionFromBottomRightMask": _between,
}
_TOP_LEFT = {
    "LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "BlockDiagonalCausalMask",
    "BlockDiagonalCausalLocalAttentionMask",
}  # fmt: skip
_SEQUENCES: dict[str, tuple[Callable[[Any, Mask | None], Meaning], _Visible]] = {
    "BlockDiagonalMask": (_packed, _nothing),
    "BlockDiagonalCausalMask": (_packed, _causal),
    "BlockDiagonalCausalFromBottomRightMask": (_packed, _causal),
    "BlockDiagonalCausalLocalAttentionMask": (_packed, _local),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (_packed, _local),
    "BlockDiagonalPaddedKeysMask": (_padded, _nothing),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (_padded, _causal),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (_padded, _between),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (_padded, _local),
    "BlockDiagonalGappyKeysMask": (_gappy, _nothing),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (_gappy, _causal),
    "PagedBlockDiagonalPaddedKeysMask": (_paged, _nothing),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (_paged, _causal),
    "PagedBlockDiagonalGappyKeysMask": (_paged_gappy, _nothing),
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": (_paged_gappy, _causal),
}
"""What a bias of sequences is: their layout, and what is visible in each."""


def _check_rows(attn_bias: Any, q: Tensor, k: Tensor) -> None:
    """By the numbers that the host has: nothing waits for the device."""
    rows, keys = attn_bias.q_seqinfo.seqstart_py[-1], attn_bias.k_seqinfo.seqstart_py[-1]
    here, there = q.shape[1], k.shape[1]
    if _SEQUENCES[type(attn_bias).__name__][0] is _packed:
        fits = (rows, keys) == (here, there)
    else:  # the keys of others lie in more memory
        fits = rows <= here and (keys <= there or hasattr(attn_bias, "page_size"))
    if q.shape[0] == k.shape[0] == 1 and fits:
        return
    shapes = f"query {tuple(q.shape)}, key {tuple(k.shape)}"
    raise ValueError(
        f"with {type(attn_bias).__name__} of {rows} rows and {keys} keys, tensors are (1, t, …), with as many; got "
        f"{shapes}"
    )


def _added(t: Tensor, q: Tensor) -> ScoreMod:
    """A tensor that is added to the scores, (b, h_q, s_q, s_k); without heads, or with groups of heads, as q is."""
    if not t.is_floating_point():
        raise TypeError(
            f"a tensor attn_bias is added to the scores and must be of floats, got {t.dtype} {tuple(t.shape)}; of a "
            "bool mask: torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)"
        )
    if t.dim() != q.dim():
        raise ValueError(
            f"a tensor attn_bias has the dimensions of the scores, (b, s_q, s_k), (b, h, s_q, s_k) or (b, groups, h, "
            f"s_q, s_k), as query has; got {tuple(t.shape)} with query {tuple(q.shape)}"
        )
    return bias(t[:, None] if t.dim() == 3 else t.flatten(1, 2) if t.dim() == 5 else t)
