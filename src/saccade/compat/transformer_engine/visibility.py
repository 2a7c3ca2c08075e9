"""TransformerEngine's masks: from a mask type, a window and lengths to a layout and a mask of saccade's."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.bounded_cache import derived
from saccade.compat.transformer_engine.call import Call, WrongCall
from saccade.dispatch import Unsupported
from saccade.layouts import ORDERS, Dense, Layout, Packed
from saccade.masks import Mask, as_mask, window
from saccade.scores import ScoreMod


class Visible(NamedTuple):
    """Who sees whom, and where."""

    layout: Layout
    mask: Mask | None
    band: ScoreMod | None
    """Hides what no mask of saccade's expresses: a diagonal from the top left, of lengths that differ by sequence."""
    keys: int | None
    """Keys from here on are seen by nobody."""
    offset: int | Tensor
    """Keys less rows, one number or (b,): how far the bottom right lies from the top left."""
    causal: bool
    """Whether ALiBi's distances all have one sign."""
    bottom_right: bool
    shape: tuple[int, int, int] | None
    """Sequences, and the longest one's queries and keys; None where only the device knows them."""


def visible(call: Call, q: Tensor, k: Tensor) -> Visible:
    """
    Raises:
        WrongCall: lengths or masks that are missing, or do not fit.
    """
    kind = call.attn_mask_type or ""
    layout, offset, holes = (*_packed(call, kind), None) if call.order == "thd" else _dense(call, kind, q, k)
    left, right = bounds(kind, call.window_size)
    bottom_right = "bottom_right" in kind or ("causal" not in kind and call.bottom_right_diagonal is not False)
    mask, band, keys = None, None, None
    if (left, right) == (None, None):
        pass
    elif bottom_right and holes is not None and isinstance(offset, Tensor):
        raise Unsupported(
            "DotProductAttention: attention_mask hides other tokens than the last ones, of queries and keys apart, and "
            f"{kind!r} with window_size={call.window_size} is aligned at the bottom right: give cu_seqlens_q and "
            "cu_seqlens_kv, with padding at the end"
        )
    elif bottom_right or (isinstance(offset, int) and offset == 0):
        mask = window(left, right)
    elif isinstance(offset, int):
        # Aligned at the top left, a window is one aligned at the bottom right with other bounds.
        s_q, s_k = (x.shape[ORDERS[call.order][2]] for x in (q, k))
        keys = s_k if right is None else min(s_k, s_q + right)
        shift = keys - s_q
        moved = None if left is None else left + shift, None if right is None else right - shift
        if min((x for x in moved if x is not None), default=0) >= 0:
            mask = window(*moved)
        else:
            band = _band(left, right)
    else:
        band = _band(left, right)
    if kind == "arbitrary":
        hidden = call.attention_mask
        if not isinstance(hidden, Tensor) or hidden.dtype != torch.bool:
            raise WrongCall(
                "attn_mask_type='arbitrary' needs attention_mask, bools that are True where nothing is seen"
            )
        seen = as_mask(~hidden if keys is None or hidden.shape[-1] == 1 else ~hidden[..., :keys])
        assert seen is not None
        mask = seen if mask is None else seen & mask
    if holes is not None:
        mask = holes if mask is None else holes & mask
    causal = right == 0 and (bottom_right or isinstance(offset, int)) and band is None
    return Visible(layout, mask, band, keys, offset, causal, bottom_right, _shape(call, layout, q, k))


def _shape(call: Call, layout: Layout, q: Tensor, k: Tensor) -> tuple[int, int, int] | None:
    if not layout.ragged_keys:
        b, s = (ORDERS[call.order][i] for i in (0, 2))
        return q.shape[b], q.shape[s], k.shape[s]
    if call.max_seqlen_q is None or call.max_seqlen_kv is None:
        return None
    return layout.sequences, call.max_seqlen_q, call.max_seqlen_kv


def bounds(kind: str, given: tuple[int, int] | None) -> tuple[int | None, int | None]:
    """TransformerEngine's: causal masks have nothing on the right, and others take (-1, 0) for no window."""
    left, right = given or (-1, -1)
    if "causal" in kind:
        wrong = left < -1 or right < -1 or (left < 0 and right > 0)
        if right > 0 and not wrong:
            warnings.warn(f"window_size={given}: {kind!r} has no keys on the right, and is ({left}, 0)", stacklevel=2)
        right = 0
    else:
        left, right = (-1, -1) if (left, right) == (-1, 0) else (left, right)
        wrong = (left < 0 or right < 0) and (left, right) != (-1, -1)
    if wrong:
        raise WrongCall(f"window_size is (left, right) from 0 on, or (-1, -1) for none, got {given} with {kind!r}")
    return None if left < 0 else left, None if right < 0 else right


def _packed(call: Call, kind: str) -> tuple[Packed, int | Tensor]:
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_kv
    if "padding" not in kind:
        raise WrongCall(f"qkv_format='thd' needs an attn_mask_type with padding, got {kind!r}")
    if cu_q is None or cu_k is None:
        raise WrongCall("qkv_format='thd' needs cu_seqlens_q and cu_seqlens_kv")
    q, k = call.query_layer, call.key_layer
    assert q is not None
    assert k is not None
    _check_offsets(call, q)
    starts = call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded
    used = (
        cu if padded is not None and padded is not cu else None for cu, padded in zip((cu_q, cu_k), starts, strict=True)
    )
    seqused_q, seqused_k = (None if x is None else x.diff() for x in used)
    offsets = cu_q if starts[0] is None else starts[0], cu_k if starts[1] is None else starts[1]
    longest = call.max_seqlen_q or q.shape[0], call.max_seqlen_kv or k.shape[0]
    layout = Packed(*offsets, *longest, seqused_q, seqused_k)
    return layout, 0 if cu_q is cu_k else cu_k.diff() - cu_q.diff()


def _check_offsets(call: Call, q: Tensor) -> None:
    """Before anything is computed of them."""
    sizes = set()
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
        x = getattr(call, name)
        if x is None:
            continue
        if x.dim() != 1 or x.dtype not in (torch.int32, torch.int64) or not len(x) or x.device != q.device:
            wanted = f"an int32 or int64 tensor (b + 1,) on {q.device}"
            raise WrongCall(f"{name} must be {wanted}, got {x.dtype} {tuple(x.shape)} on {x.device}")
        sizes.add(len(x))
    if len(sizes) > 1:
        raise WrongCall(f"cu_seqlens must all have b + 1 elements, got {', '.join(map(str, sorted(sizes)))}")


def _dense(call: Call, kind: str, q: Tensor, k: Tensor) -> tuple[Dense, int | Tensor, Mask | None]:
    """The layout, the keys less the rows, and what hides tokens that are not the last ones."""
    b, s = (ORDERS[call.order][i] for i in (0, 2))
    s_q, s_k = q.shape[s], k.shape[s]
    if "padding" not in kind:
        return Dense(call.order), s_k - s_q, None
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_kv
    _check_offsets(call, q)
    if cu_q is not None and cu_k is not None:
        used_q, used_k = cu_q.diff(), cu_k.diff()
        same = cu_q is cu_k  # their values are not read
    elif call.attention_mask is None:
        raise WrongCall(f"attn_mask_type={kind!r} needs cu_seqlens_q and cu_seqlens_kv, or attention_mask")
    else:
        hidden = call.attention_mask
        of_q, of_k = hidden if isinstance(hidden, (tuple, list)) else (hidden, hidden)
        of_q, of_k = (_tokens(x, q.shape[b], s) for x, s in ((of_q, s_q), (of_k, s_k)))
        used_q, used_k = (x.logical_not().sum(-1, dtype=torch.int32) for x in (of_q, of_k))
        same = not isinstance(hidden, (tuple, list)) or hidden[0] is hidden[1]
        if not all(map(_at_the_end, (of_q,) if same else (of_q, of_k))):
            seen = as_mask(~of_q[:, None, :, None]), as_mask(~of_k[:, None, None, :])
            assert seen[0] is not None
            assert seen[1] is not None
            return Dense(call.order), 0 if same else used_k - used_q, seen[0] & seen[1]
    return Dense(call.order, used_q, used_k), 0 if same else used_k - used_q, None


def _tokens(hidden: Any, b: int, s: int) -> Tensor:
    """Which tokens are hidden, (b, s)."""
    if not isinstance(hidden, Tensor):
        raise WrongCall(f"attention_mask must be a tensor of bools, or two of them, got {type(hidden).__name__}")
    if hidden.dtype != torch.bool or hidden.shape not in ((b, 1, 1, s), (b, s)):
        raise WrongCall(
            f"attention_mask for padding holds bools ({b}, 1, 1, {s}), True where nothing is, or two of them, of "
            f"queries and keys; got {hidden.dtype} {tuple(hidden.shape)}"
        )
    return hidden.reshape(b, s)


def _at_the_end(hidden: Tensor) -> bool:
    """Whether it is known that each sequence's hidden tokens are its last. A GPU is waited for once for each mask, and
    not while something is compiled or captured, which may see other masks: lists of tiles serve them all."""
    if torch.compiler.is_compiling() or (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    key = "padding at the end", tuple(hidden.shape)
    return derived(key, [hidden], lambda: not bool((hidden[:, :-1] & ~hidden[:, 1:]).any()))


def _band(left: int | None, right: int | None) -> ScoreMod:
    return ScoreMod(partial(_shown, left=left, right=right))


def _shown(
    score: Tensor, b: Any, h: Any, q_idx: Tensor, kv_idx: Tensor, *, left: int | None, right: int | None
) -> Tensor:
    """A score of -inf counts as masked."""
    if left is not None:
        score = torch.where(kv_idx >= q_idx - left, score, -torch.inf)
    return score if right is None else torch.where(kv_idx <= q_idx + right, score, -torch.inf)
