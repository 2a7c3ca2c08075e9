"""TransformerEngine's changes of the score as one ScoreMod: callbacks, softcap, biases, ALiBi."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saccade.arguments import broadcasts
from saccade.compat.alibi import alibi
from saccade.compat.transformer_engine.call import CallArguments, WrongCall
from saccade.compat.transformer_engine.masks import Visibility
from saccade.scores import ScoreMod, bias, compose, score_callback, softcap


def combined_score_mod(call: CallArguments, visible: Visibility, scale: float) -> Any:
    """All that happens between scale and mask: a bias before the scale, score_mod, softcap, a bias after it, ALiBi.

    Raises:
        WrongCall: tensors that do not broadcast to (b, h_q, s_q, s_k), slopes of other shapes.
    """
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
