"""How scores change, by FlashAttention's words: softcap, then ALiBi."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade import arguments
from saccade.compat.alibi import alibi
from saccade.compat.flash_attn.lengths import offset
from saccade.layouts import Layout
from saccade.scores import ScoreMod, compose
from saccade.scores import softcap as capped


def score_mod(
    softcap: float, slopes: Tensor | None, causal: Any, layout: Layout, q: Tensor, k: Tensor
) -> Callable[..., Tensor] | None:
    """`softcap tanh(score / softcap) - slopes[b, h] |i + off - j|`, with `off = s_k - s_q` for each sequence.

    Args:
        softcap: none where it is not above 0.
        slopes: (h_q) or (b, h_q), or None.
        causal: no row sees a key after its own.
        layout: of the call, for the offsets.
        q: of the call, and k.

    Raises:
        TypeError, ValueError: a cap that is no number, slopes of another shape.
    """
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
