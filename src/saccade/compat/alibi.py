"""ALiBi as other libraries define it: by distance from the diagonal that ends in the bottom right corner."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from saccade.scores import ScoreMod


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
