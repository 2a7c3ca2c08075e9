"""Attention as a module with projections, norms and rotary positions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from saccade.api import attention
from saccade.layouts import Dense, Layout, Packed, Paged
from saccade.masks import Mask
from saccade.ops.kv_cache import append_kv
from saccade.util import arguments

__all__ = ["Attention"]

_BSHD = Dense("bshd")


class Attention(nn.Module):
    """`out = o_proj(attention(turned(q_norm(q_proj(x))), turned(k_norm(k_proj(x))), v_proj(x)))`.

    `turned` is the rotation by positions. Parameters have the names of common checkpoints: `q_proj`, `k_proj`,
    `v_proj`, `o_proj`, `q_norm`, `k_norm` and `sinks`.

    Args:
        dim: the size of a token.
        num_heads: query heads.
        num_key_heads: key heads, a divisor of num_heads; num_heads when None.
        head_dim: the size of a head; dim / num_heads when None.
        mask: which keys a query sees, such as `causal()` or `window(1023, 0)`; all when None. A call may have another.
        score_mod: how a scaled score changes, as in `attention`.
        rotary_base: rotates queries and keys by their positions. The pair of elements i and i + d / 2 turns by
            `position rotary_base^(-2 i / d)`. None: no rotation.
        qk_norm: applies RMSNorm to each head's queries and keys, before the rotation.
        sink: adds one learnable logit for each query head.
        bias: whether q_proj, k_proj and v_proj have a bias.
        out_bias: whether o_proj has a bias.
        dropout_p: the probability with which a weight becomes zero in training.
        scale: factor on q k^T; 1/sqrt(head_dim) when None.
        backend: as in `attention`.
        device: the device of the parameters.
        dtype: the dtype of the parameters.

    Raises:
        TypeError: rotary_base or dropout_p is not a number.
        ValueError: sizes do not divide one another, or rotary_base is not above 0.

    Sources: RoFormer (arXiv 2104.09864); grouped heads: arXiv 2305.13245; q/k norm: arXiv 2302.05442.

    >>> layer = Attention(64, num_heads=4, num_key_heads=2, mask=causal(), rotary_base=10000.0, qk_norm=True)
    >>> layer(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> layer(torch.randn(10, 64), layout=Packed(torch.tensor([0, 3, 10]))).shape
    torch.Size([10, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_key_heads: int | None = None,
        head_dim: int | None = None,
        *,
        mask: Mask | None = None,
        score_mod: Callable[..., Tensor] | None = None,
        rotary_base: float | None = None,
        qk_norm: bool = False,
        sink: bool = False,
        bias: bool = False,
        out_bias: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        arguments.flags(qk_norm=qk_norm, sink=sink, bias=bias, out_bias=out_bias)
        h_q = arguments.integer("num_heads", num_heads, 1)
        h_k = h_q if num_key_heads is None else arguments.integer("num_key_heads", num_key_heads, 1)
        if head_dim is None and dim % h_q:
            raise ValueError(f"num_heads must divide dim, or head_dim be given: got dim {dim} and {h_q} heads")
        d = dim // h_q if head_dim is None else arguments.integer("head_dim", head_dim, 1)
        if h_q % h_k:
            raise ValueError(f"num_heads must be a multiple of num_key_heads, got {h_q} and {h_k}")
        if rotary_base is not None and d % 2:
            raise ValueError(f"head_dim must be even for rotary positions, which rotate pairs, got {d}")
        if rotary_base is not None and not 0.0 < arguments.number("rotary_base", rotary_base) < math.inf:
            raise ValueError(f"rotary_base must be a number above 0, such as 10000.0, got {rotary_base}")
        if not 0.0 <= arguments.number("dropout_p", dropout_p) < 1.0:
            raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
        self.num_heads, self.num_key_heads, self.head_dim = h_q, h_k, d
        self.mask, self.score_mod, self.rotary_base = mask, score_mod, rotary_base
        self.dropout_p, self.scale, self.backend = dropout_p, scale, backend
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(dim, h_q * d, bias, **made)
        self.k_proj = nn.Linear(dim, h_k * d, bias, **made)
        self.v_proj = nn.Linear(dim, h_k * d, bias, **made)
        self.o_proj = nn.Linear(h_q * d, dim, out_bias, **made)
        self.q_norm = nn.RMSNorm(d, **made) if qk_norm else None
        self.k_norm = nn.RMSNorm(d, **made) if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(h_q, **made)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the initial values: those of PyTorch's modules, and zeros for sinks."""
        for part in (self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.q_norm, self.k_norm):
            if part is not None:
                part.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        *,
        layout: Layout | None = None,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The module's formula for tokens x.

        Args:
            x: (b, s, dim), or (t, dim) for sequences end to end.
            layout: `Dense("bshd", …)` or `Packed(offsets)`; None is `Dense("bshd")`. With a cache, `Paged(…)` with the
                lengths *before* these tokens.
            mask: replaces the module's mask.
            positions: (s,), (b, s) or (t,): the tokens' positions for the rotation. None: they count from 0, from the
                layout's `q_offset`, or from the start of their sequence. With a cache they follow from its lengths.
            cache: (k_cache, v_cache), each (pages, page_size, h_k, d). The call writes new keys and values to it. Only
                without gradients.

        Returns:
            out, in x's shape.

        Raises:
            TypeError: x or positions are not tensors.
            ValueError: x has another shape, positions are not one per token, or the layout has another order; or only
                one of a cache and a Paged layout is given.
        """
        arguments.tensors(x=x)
        if x.dim() not in (2, 3) or x.shape[-1] != self.q_proj.in_features:
            dim = self.q_proj.in_features
            raise ValueError(f"x must be (b, s, {dim}), or (t, {dim}) for sequences end to end, got {tuple(x.shape)}")
        layout = _BSHD if layout is None else layout
        if isinstance(layout, Dense) and layout.order != "bshd":
            raise ValueError(
                f"the module's tokens are (b, s, dim), so a Dense layout is Dense('bshd', …), got {layout!r}"
            )
        if (cache is not None) != isinstance(layout, Paged):
            raise ValueError(f"a cache and a Paged layout go together, got {layout!r} and cache={cache is not None}")
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        k, v = (proj(x).unflatten(-1, (self.num_key_heads, self.head_dim)) for proj in (self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None:
            assert isinstance(layout, Paged)
            if positions is not None:
                raise ValueError("omit positions in calls with a cache, whose lengths give the positions of new tokens")
            q, layout = self._append(cache, layout, q, k, v)
            k, v = cache
        elif self.rotary_base is not None:
            cos, sin = self._angles(_positions(layout, x) if positions is None else _given(positions, x), x.dtype)
            q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        out = attention(
            q, k, v, mask=self.mask if mask is None else mask, score_mod=self.score_mod, layout=layout,
            scale=self.scale, sink=self.sinks, dropout_p=self.dropout_p if self.training else 0.0, backend=self.backend,
        )  # fmt: skip
        return self.o_proj(out.flatten(-2))

    def _append(
        self, cache: tuple[Tensor, Tensor], layout: Paged, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Paged]:
        """The rotated queries and the new layout, after writing keys and values to the cache."""
        if self.rotary_base is None:
            append_kv(*cache, layout, k, v)
        else:
            longest = layout.block_table.shape[1] * cache[0].shape[1]
            rotary = self._angles(torch.arange(longest, device=q.device), q.dtype)
            q = append_kv(*cache, layout, k, v, q=q, rotary=rotary)
        new = q.shape[1] if layout.cu_seqlens_q is None else layout.cu_seqlens_q.diff()
        return q, replace(layout, seqused_k=layout.seqused_k + new)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin (…, d / 2) of positions (…), float32; float64 for such tokens."""
        assert self.rotary_base is not None
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        pairs = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=wide)
        angles = positions[..., None].to(wide) * self.rotary_base ** (-pairs / self.head_dim)
        return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        words = [f"heads={self.num_heads}, key_heads={self.num_key_heads}, head_dim={self.head_dim}"]
        words += [] if self.mask is None else [f"mask={self.mask!r}"]
        words += [] if self.rotary_base is None else [f"rotary_base={self.rotary_base}"]
        return ", ".join(words)


def _given(positions: Tensor, x: Tensor) -> Tensor:
    """The positions. Raises TypeError if they are not a tensor, and ValueError if there is not one position for each
    token."""
    arguments.tensors(positions=positions)
    tokens = x.shape[:-1]
    fits = positions.dim() > 0 and arguments.broadcasts(positions.shape[:-1], tokens[:-1])
    if not fits or positions.shape[-1] != tokens[-1]:
        forms = " or ".join(str(tuple(form)) for form in dict.fromkeys((tuple(tokens[-1:]), tuple(tokens))))
        raise ValueError(f"positions must be {forms} for x {tuple(x.shape)}, got {tuple(positions.shape)}")
    return positions


def _positions(layout: Layout, x: Tensor) -> Tensor:
    """(s,), (b, s) or (t,): the position of each token in its sequence."""
    tokens = torch.arange(x.shape[-2], device=x.device)
    if isinstance(layout, Packed):
        number = torch.searchsorted(layout.cu_seqlens_q[1:].contiguous(), tokens, right=True)
        starts = layout.cu_seqlens_q[number.clamp(max=layout.sequences)]
        tokens = tokens - starts
    offset = layout.q_offset
    if isinstance(offset, Tensor):
        if isinstance(layout, Packed):
            raise ValueError("packed sequences with a q_offset that is a tensor need positions=…")
        return offset if offset.dim() == 2 and offset.shape[1] == tokens.shape[0] else offset.reshape(-1, 1) + tokens
    return tokens if offset is None else tokens + offset


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (…, h, d) rotated by angles (…, d / 2). It computes in the angles' dtype."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    one, two = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1).to(x.dtype)
