"""TransformerEngine's score modifications, as one of saccade's: callbacks, softcap, biases, ALiBi."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.compat.transformer_engine.call import Call, WrongCall
from saccade.compat.transformer_engine.visibility import Visible
from saccade.scores import ScoreMod, bias, compose, score_callback, softcap


def modification(call: Call, seen: Visible, scale: float, q: Tensor) -> Any:
    """All that happens between scale and mask: a bias before the scale, score_mod, softcap, a bias after it, ALiBi.

    Raises:
        WrongCall: tensors that do not broadcast to (b, h_q, s_q, s_k), slopes of other shapes.
    """
    mods: list[Any] = []
    given = call.core_attention_bias
    if given is not None:
        given = _cut(seen, q, {"core_attention_bias": given})["core_attention_bias"]
    if given is not None and call.core_attention_bias_type == "pre_scale_bias":
        mods.append(bias(given * scale))
    if call.score_mod is not None:
        named = call.score_mod_tensors, call.score_mod_bprop_tensors
        tensors = (None if given is None else _cut(seen, q, given) for given in named)
        mods.append(score_callback(call.score_mod, call.score_mod_bprop, *tensors))
    if call.softcap:
        mods.append(softcap(call.softcap))
    if given is not None and call.core_attention_bias_type == "post_scale_bias":
        mods.append(bias(given))
    if call.core_attention_bias_type == "alibi":
        mods.append(_alibi(call.alibi_slopes, seen, q))
    if seen.band is not None:
        mods.append(seen.band)
    return mods[0] if len(mods) == 1 else compose(*mods) if mods else None


def _cut(seen: Visible, q: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is given for keys that somebody sees."""
    if seen.shape is None:
        return tensors
    b, s_q, s_k = seen.shape
    shape = b, q.shape[-2], s_q, s_k
    for name, x in tensors.items():
        fits = x.dim() <= 4 and all(n in (1, m) for n, m in zip(x.shape[::-1], shape[::-1], strict=False))
        if not fits:
            raise WrongCall(f"{name} must broadcast to (b, h_q, s_q, s_k) = {shape}, got {tuple(x.shape)}")
    if seen.keys is None:
        return tensors
    return {name: x[..., : seen.keys] if x.dim() and x.shape[-1] != 1 else x for name, x in tensors.items()}


def alibi_slopes(heads: int) -> Tensor:
    """(h,): powers of 2^(-8/n), n the largest power of 2 that is not above h; then the odd ones of 2^(-4/n).

    Source: Press, Smith, Lewis, arXiv 2108.12409.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    n = 2 ** int(math.log2(heads))
    exponents = [-8 * (i + 1) / n for i in range(n)] + [-4 * (2 * i + 1) / n for i in range(heads - n)]
    return torch.tensor(exponents).exp2()


def _alibi(slopes: Tensor | None, seen: Visible, q: Tensor) -> ScoreMod:
    heads = q.shape[-2]
    slopes = alibi_slopes(heads).to(q.device) if slopes is None else slopes
    if slopes.dim() not in (1, 2) or slopes.shape[-1] != heads:
        raise WrongCall(f"alibi_slopes must be ({heads},) or (b, {heads}), got {tuple(slopes.shape)}")
    offset = seen.offset if seen.bottom_right else 0
    tensors = [slopes, offset] if isinstance(offset, Tensor) else [slopes]
    number = 0 if isinstance(offset, Tensor) else offset
    return ScoreMod(partial(_with_alibi, offset=number, causal=seen.causal), *tensors)


def _with_alibi(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    slopes: Tensor,
    offsets: Tensor | None = None,
    *,
    offset: int,
    causal: bool,
) -> Tensor:
    distance = kv_idx - q_idx - (offset if offsets is None else offsets[b])
    slope = slopes[h] if slopes.dim() == 1 else slopes[b, h]
    return score + slope * (distance if causal else -distance.abs())
