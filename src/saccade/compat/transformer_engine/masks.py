"""TransformerEngine's masks and scores: the layout, the mask and the ScoreMod that its words stand for."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.compat.flash_attn.call import alibi
from saccade.compat.transformer_engine.call import CallArguments, WrongCall
from saccade.layouts import Dense, Layout, Packed
from saccade.masks import Mask, as_mask, window
from saccade.ops.dispatch import Unsupported
from saccade.scores import ScoreMod, bias, compose, score_callback, softcap
from saccade.util.arguments import broadcasts, is_one_of
from saccade.util.caches import derived
from saccade.util.kept_memory import capturing

Shape = tuple[int, int, int]
"""Sequences, and the longest one's queries and keys."""


class Visibility(NamedTuple):
    """Which query sees which key, and where they lie."""

    layout: Layout
    mask: Mask | None
    band: ScoreMod | None
    """What no mask of saccade's expresses: a diagonal from the top left, with lengths that differ by sequence."""
    keys: int | None
    """No row sees keys from here on."""
    offset: int | Tensor
    """Keys less rows, one number or (b,): how far the bottom right lies from the top left."""
    causal: bool
    """Whether ALiBi's distances all have one sign."""
    bottom_right: bool
    shape: Shape | None
    """None if only the device knows it."""


class Lengths(NamedTuple):
    """The sequences of a call; the fields are those of a Visibility."""

    layout: Layout
    offset: int | Tensor
    shape: Shape | None
    holes: Mask | None = None
    """What masks tokens that are not the last ones."""


def visibility(call: CallArguments) -> Visibility:
    """Raises WrongCall for lengths or masks that are missing, or do not fit."""
    kind = call.attn_mask_type or ""
    layout, offset, shape, mask = _packed(call, kind) if call.order == "thd" else _dense(call, kind)
    left, right = window_bounds(kind, call.window_size)
    bottom_right = "bottom_right" in kind or ("causal" not in kind and call.bottom_right_diagonal is not False)
    band, keys, windowed = None, None, None
    if (left, right) == (None, None):
        pass
    elif bottom_right and mask is not None and isinstance(offset, Tensor):
        raise Unsupported(
            "DotProductAttention: attention_mask masks tokens before the end, in queries and keys separately, and "
            f"{kind!r} with window_size={call.window_size} is aligned at the bottom right: give cu_seqlens_q and "
            "cu_seqlens_kv, with padding at the end"
        )
    elif bottom_right or (isinstance(offset, int) and offset == 0):
        windowed = window(left, right)
    elif isinstance(offset, int) and shape is not None:
        # Aligned at the top left, a window is one aligned at the bottom right with other bounds.
        _, s_q, s_k = shape
        keys = s_k if right is None else min(s_k, s_q + right)
        shift = keys - s_q
        moved = None if left is None else left + shift, None if right is None else right - shift
        if min((x for x in moved if x is not None), default=0) >= 0:
            windowed = window(*moved)
        else:
            band = _band(left, right)
    else:
        band = _band(left, right)
    if kind == "arbitrary":
        masked = call.attention_mask
        if not isinstance(masked, Tensor) or masked.dtype != torch.bool:
            raise WrongCall("attn_mask_type='arbitrary' needs attention_mask, a bool tensor that is True where masked")
        mask = as_mask(~masked if keys is None or masked.shape[-1] == 1 else ~masked[..., :keys])
    if windowed is not None:
        mask = windowed if mask is None else mask & windowed
    causal = right == 0 and (bottom_right or isinstance(offset, int)) and band is None
    return Visibility(layout, mask, band, keys, offset, causal, bottom_right, shape)


def window_bounds(kind: str, given: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """TransformerEngine's: causal masks have nothing on the right, and others take (-1, 0) for no window."""
    left, right = given or (-1, -1)
    if "causal" in kind:
        wrong = left < -1 or right < -1 or (left < 0 and right > 0)
        if right > 0 and not wrong:
            warnings.warn(
                f"window_size={given}: {kind!r} shows no keys on the right: the window is ({left}, 0)", stacklevel=2
            )
        right = 0
    else:
        left, right = (-1, -1) if (left, right) == (-1, 0) else (left, right)
        wrong = (left < 0 or right < 0) and (left, right) != (-1, -1)
    if wrong:
        raise WrongCall(f"window_size must be (left, right) from 0 on, or (-1, -1) for none, got {given} with {kind!r}")
    return None if left < 0 else left, None if right < 0 else right


_DENSE = {order: Dense(order) for order in ("sbhd", "bshd")}


def _packed(call: CallArguments, kind: str) -> Lengths:
    cu_q, cu_k, most_q, most_k = call.cu_seqlens_q, call.cu_seqlens_kv, call.max_seqlen_q, call.max_seqlen_kv
    if "padding" not in kind:
        raise WrongCall(f"qkv_format='thd' needs an attn_mask_type with padding, got {kind!r}")
    if cu_q is None or cu_k is None:
        raise WrongCall("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv")
    _check_offsets(call)
    q, k, _ = call.operands
    sides = (cu_q, call.cu_seqlens_q_padded), (cu_k, call.cu_seqlens_kv_padded)
    starts_q, starts_k = (cu if padded is None else padded for cu, padded in sides)
    used_q, used_k = (None if padded is None or padded is cu else cu.diff() for cu, padded in sides)
    layout = layout_of(q, k, starts_q, starts_k, most_q, most_k, used_q, used_k)
    shape = None if most_q is None or most_k is None else (layout.sequences, most_q, most_k)
    return Lengths(layout, 0 if cu_q is cu_k else cu_k.diff() - cu_q.diff(), shape)


def layout_of(
    q: Tensor, k: Tensor, starts_q: Tensor, starts_k: Tensor, most_q: int | None, most_k: int | None,
    used_q: Tensor | None = None, used_k: Tensor | None = None,
) -> Packed:  # fmt: skip
    """Sequences end to end."""
    return Packed(starts_q, starts_k, most_q or q.shape[0], most_k or k.shape[0], used_q, used_k)


def _check_offsets(call: CallArguments) -> None:
    """Before anything is computed from them."""
    sizes, device = [], call.operands[0].device
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        x = getattr(call, name)
        if x is None:
            continue
        if x.dim() != 1 or x.dtype not in (torch.int32, torch.int64) or not x.shape[0] or x.device != device:
            wanted = f"an int32 or int64 tensor (b + 1,) on {device}"
            raise WrongCall(f"{name} must be {wanted}, got {x.dtype} {tuple(x.shape)} on {x.device}")
        sizes.append(x.shape[0])
    if any(n != sizes[0] for n in sizes):
        raise WrongCall(f"cu_seqlens must all have b + 1 elements, got {', '.join(map(str, sizes))}")


def _dense(call: CallArguments, kind: str) -> Lengths:
    (q, k, _), order, masked = call.operands, call.order, call.attention_mask
    at = order.index("s")
    b, s_q, s_k = q.shape[1 - at], q.shape[at], k.shape[at]
    if "padding" not in kind:
        return Lengths(_DENSE[order], s_k - s_q, (b, s_q, s_k))
    cu_q, cu_k, holes = call.cu_seqlens_q, call.cu_seqlens_kv, None
    _check_offsets(call)
    if cu_q is not None and cu_k is not None:
        used_q, used_k = cu_q.diff(), cu_k.diff()
        same = cu_q is cu_k  # their values are not read
    elif masked is None:
        raise WrongCall(f"attn_mask_type={kind!r} needs cu_seqlens_q and cu_seqlens_kv, or attention_mask")
    else:
        first, second = masked if isinstance(masked, (tuple, list)) else (masked, masked)
        same = first is second
        masked_q, masked_k = _tokens(first, b, s_q), _tokens(second, b, s_k)
        used_q, used_k = (x.logical_not().sum(-1, dtype=torch.int32) for x in (masked_q, masked_k))
        if not (_at_the_end(masked_q) and (same or _at_the_end(masked_k))):
            holes = _tensor_mask(~masked_q[:, None, :, None]) & _tensor_mask(~masked_k[:, None, None, :])
    layout = Dense(order, used_q, used_k) if holes is None else Dense(order)
    return Lengths(layout, 0 if same else used_k - used_q, (b, s_q, s_k), holes)


def _tensor_mask(visible: Tensor) -> Mask:
    mask = as_mask(visible)
    assert mask is not None
    return mask


def _tokens(masked: Any, b: int, s: int) -> Tensor:
    """Which tokens are masked, (b, s)."""
    if not isinstance(masked, Tensor):
        raise WrongCall(f"attention_mask must be a bool tensor, or two of them, got {type(masked).__name__}")
    if masked.dtype != torch.bool or not is_one_of(masked.shape, (b, 1, 1, s), (b, s)):
        raise WrongCall(
            f"attention_mask for padding is a bool tensor ({b}, 1, 1, {s}), True where masked, or two of them, for "
            f"queries and keys; got {masked.dtype} {tuple(masked.shape)}"
        )
    return masked.reshape(b, s)


def _at_the_end(masked: Tensor) -> bool:
    """Whether the masked tokens of each sequence are known to be its last. The host waits for a GPU once for each mask,
    but not during compilation or capture, which may see other masks: block lists serve them all."""
    if torch.compiler.is_compiling() or capturing():
        return False
    key = "padding at the end", tuple(masked.shape)
    return derived(key, [masked], lambda: not bool((masked[:, :-1] & ~masked[:, 1:]).any()))


def _band(left: int | None, right: int | None) -> ScoreMod:
    return ScoreMod(partial(_mask_outside, left=left, right=right))


def _mask_outside(
    score: Tensor, b: Any, h: Any, q_idx: Tensor, kv_idx: Tensor, *, left: int | None, right: int | None
) -> Tensor:
    """A score of -inf counts as masked."""
    if left is not None:
        score = torch.where(kv_idx >= q_idx - left, score, -torch.inf)
    return score if right is None else torch.where(kv_idx <= q_idx + right, score, -torch.inf)


def combined_score_mod(call: CallArguments, visible: Visibility, scale: float) -> Any:
    """All that happens between scale and mask: a bias before the scale, score_mod, softcap, a bias after it, ALiBi.
    Raises WrongCall for tensors that do not broadcast to (b, h_q, s_q, s_k), and for slopes of other shapes."""
    q, kind, mods = call.operands[0], call.core_attention_bias_type, []
    added = call.core_attention_bias
    if added is not None:
        added = _visible_keys(visible, q, {"core_attention_bias": added})["core_attention_bias"]
    if added is not None and kind == "pre_scale_bias":
        mods.append(bias(added * scale))
    if call.score_mod is not None:
        named = call.score_mod_tensors, call.score_mod_bprop_tensors
        tensors = (None if given is None else _visible_keys(visible, q, given) for given in named)
        mods.append(score_callback(call.score_mod, call.score_mod_bprop, *tensors))
    if call.softcap:
        mods.append(softcap(call.softcap))
    if added is not None and kind == "post_scale_bias":
        mods.append(bias(added))
    if kind == "alibi":
        mods.append(_alibi(call.alibi_slopes, visible, q))
    if visible.band is not None:
        mods.append(visible.band)
    return mods[0] if len(mods) == 1 else compose(*mods) if mods else None


def _visible_keys(visible: Visibility, q: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without keys that no row sees."""
    if visible.shape is None:
        return tensors
    b, s_q, s_k = visible.shape
    shape = b, q.shape[-2], s_q, s_k
    for name, x in tensors.items():
        if not broadcasts(x.shape, shape):
            raise WrongCall(f"{name} must broadcast to (b, h_q, s_q, s_k) = {shape}, got {tuple(x.shape)}")
    if visible.keys is None:
        return tensors
    return {name: x[..., : visible.keys] if x.dim() and x.shape[-1] != 1 else x for name, x in tensors.items()}


def alibi_slopes(heads: int) -> Tensor:
    """(h,): powers of 2^(-8/n), n the largest power of 2 that is not above h; then the odd ones of 2^(-4/n).

    Source: Press, Smith, Lewis, arXiv 2108.12409.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    n = 2 ** int(math.log2(heads))
    exponents = [-8 * (i + 1) / n for i in range(n)] + [-4 * (2 * i + 1) / n for i in range(heads - n)]
    return torch.tensor(exponents, device="cpu").exp2()


def _alibi(slopes: Tensor | None, visible: Visibility, q: Tensor) -> ScoreMod:
    heads = q.shape[-2]
    slopes = alibi_slopes(heads).to(q.device) if slopes is None else slopes
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
        raise WrongCall(f"alibi_slopes must be ({heads},) or (b, {heads}), got {tuple(slopes.shape)}")
    offset = visible.offset if visible.bottom_right else 0
    return alibi(slopes, offset, visible.causal)
