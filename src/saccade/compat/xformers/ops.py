"""`memory_efficient_attention` and its relatives, and what a bias means to them: a layout, a mask and a score function.

Biases are known by the names of their classes, so those of an installed xformers are as good as ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import ops
from saccade.api import attention
from saccade.call import check_call
from saccade.layouts import Dense, Layout, Packed, Paged
from saccade.masks import Mask, causal, interval, window
from saccade.scores import ScoreMod, bias
from saccade.util import arguments

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
    """What attn_bias, which is None, a tensor or a bias, means for q and k of one form: (b, s, h, d), (b, s, d) or
    (b, s, groups, h, d). Raises TypeError for a bool tensor, or another class than those of xformers 0.0.35, and
    ValueError for a bias that does not fit the tensors."""
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
    raise ValueError(f"{type(attn_bias).__name__} is for query (1, {rows}, …) and key (1, {keys}, …), got {shapes}")


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


def memory_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`dropout(softmax(scale q k^T + attn_bias)) v`, as xformers' function of this name.

    Args:
        query: (b, s_q, h_q, d); (b, s_q, d) for one head; or (b, s_q, groups, h, d).
        key: (b, s_k, h_k, d), in the same form; h_q may be a multiple of h_k. Heads that are one memory, as `expand`
            makes them, are read once where they need no gradient.
        value: (b, s_k, h_k, d_v).
        attn_bias: None; floats (b, h_q, s_q, s_k) that are added to the scores and get a gradient if they require one,
            (b, s_q, s_k) for query (b, s_q, d), and (b, groups, h, s_q, s_k); or one of the classes of
            `saccade.compat.xformers.attn_bias`, ours or those of an installed xformers. With sequences end to end, and
            pages, tensors are (1, t, h, d).
        p: the share of probabilities that become zero.
        scale: 1/sqrt(d) when None.
        op: not read: it names kernels of xformers.
        output_dtype: query's, or None.

    Returns:
        out (b, s_q, h_q, d_v), in query's form. A row that sees no key is 0.

    Raises:
        ValueError: shapes that do not fit one another, or the bias.
        TypeError: an attn_bias of another class; a bool tensor.
        NotImplementedError: another output_dtype than query's.
        Unsupported: no backend runs the call.

    Source: https://facebookresearch.github.io/xformers/components/ops.html

    >>> from saccade.compat.xformers.attn_bias import BlockDiagonalCausalMask
    >>> q, k, v = (torch.randn(1, 10, 4, 16) for _ in range(3))
    >>> memory_efficient_attention(q, k, v, BlockDiagonalCausalMask.from_seqlens([3, 7], device="cpu")).shape
    torch.Size([1, 10, 4, 16])
    """
    call = _call(query, key, value, attn_bias, output_dtype)
    found = call.meaning
    out = attention(
        *call.operands, mask=found.mask, score_mod=found.score_mod, layout=found.layout, scale=scale, dropout_p=p
    )
    return out if out.shape == call.shape else out.reshape(call.shape)


def memory_efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0, scale: float | None = None, *,
    op: Any = None, output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out, and the LSE that `memory_efficient_attention_backward` takes: (b, h_q, s_q), or (b, groups, h, s_q); of
    sequences end to end (1, h_q, t_q).

    Raises:
        NotImplementedError: dropout, which the backward could not repeat.
    """
    _refuse_dropout(p)
    with torch.no_grad():
        call = _call(query, key, value, attn_bias, output_dtype)
        found = call.meaning
        out, lse = attention(
            *call.operands, mask=found.mask, score_mod=found.score_mod, layout=found.layout, scale=scale,
            return_lse=True,
        )  # fmt: skip
        assert lse is not None
        return out.reshape(call.shape), call.unfolded_lse(lse, query)


def memory_efficient_attention_backward(
    grad: Tensor, output: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None,
    p: float = 0.0, scale: float | None = None, *, op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of query, key and value, of their shapes.

    Args:
        grad: of output's shape.
        output: the forward's.
        lse: the forward's, of `memory_efficient_attention_forward_requires_grad`.

    The others are the forward's.

    Raises:
        NotImplementedError: dropout.
    """
    _refuse_dropout(p)
    arguments.tensors(grad=grad, output=output, lse=lse)
    with torch.no_grad():
        call = _call(query, key, value, attn_bias, None, as_one=False)
        if grad.shape != call.shape or output.shape != call.shape:
            raise ValueError(f"grad and output must be {call.shape}, got {tuple(grad.shape)}, {tuple(output.shape)}")
        q, k, v = call.operands
        found = call.meaning
        bound = check_call(
            q, k, v, mask=found.mask, score_mod=found.score_mod, layout=found.layout, scale=scale, return_lse=True
        )
        rows = (*q.shape[:-1], v.shape[-1])
        lse = lse.flatten(1, 2) if query.dim() == 5 else lse
        lse = lse[0] if found.layout.order == "thd" else lse
        dq, dk, dv = ops.gradients(bound, "auto", grad.reshape(rows), None, output.reshape(rows), lse)
        if k.shape[call.dim_s] != key.shape[1]:  # the keys that no row sees
            dk, dv = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, key.shape[1] - x.shape[1])) for x in (dk, dv))
        return dq.reshape(query.shape), dk.reshape(key.shape), dv.reshape(value.shape)


class _Call(NamedTuple):
    """A call in saccade's words."""

    operands: tuple[Tensor, Tensor, Tensor]
    meaning: Meaning
    shape: tuple[int, ...]
    """out's, in query's form"""

    @property
    def dim_s(self) -> int:
        """Which dimension of an operand counts its rows."""
        return self.operands[1].dim() - 3

    def unfolded_lse(self, lse: Tensor, query: Tensor) -> Tensor:
        lse = lse if self.operands[0].dim() == 4 else lse[None]
        return lse.unflatten(1, query.shape[2:4]) if query.dim() == 5 else lse


def _call(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, output_dtype: Any, as_one: bool | None = None
) -> _Call:
    """`as_one`: heads that are one memory are one; None: where they need no gradient."""
    arguments.tensors(query=query, key=key, value=value)
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4, 5):
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value are all (b, s, h, d), (b, s, d) or (b, s, groups, h, d), got {shapes}")
    if output_dtype not in (None, query.dtype):
        raise NotImplementedError(f"output_dtype={output_dtype}: out has query's dtype {query.dtype}; convert it")
    found = meaning(attn_bias, query, key)
    if as_one is None:
        as_one = not (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad))
    if found.keys is not None and found.keys != key.shape[1]:
        key, value = key[:, : found.keys], value[:, : found.keys]
    q, k, v = _folded(query, False), _folded(key, as_one), _folded(value, as_one)
    if k.shape[2] != v.shape[2]:
        k, v = _folded(key, False), _folded(value, False)
    if found.layout.order != "bshd":
        q, k, v = q.squeeze(0), k.squeeze(0), v.squeeze(0)
    if found.page_size is not None:
        if k.shape[0] % found.page_size:
            shape = tuple(key.shape)
            raise ValueError(f"keys must be (1, pages * page_size, …) with pages of {found.page_size}, got {shape}")
        k, v = k.unflatten(0, (-1, found.page_size)), v.unflatten(0, (-1, found.page_size))
    return _Call((q, k, v), found, (*query.shape[:-1], value.shape[-1]))


def _folded(x: Tensor, as_one: bool) -> Tensor:
    """(b, s, h, d), or with the heads that are one memory as one."""
    if x.dim() == 3:
        return x.unsqueeze(2)
    if as_one and x.stride(-2) == 0:
        x = x.narrow(-2, 0, 1)
    return x if x.dim() == 4 else x.flatten(2, 3)


def _refuse_dropout(p: float) -> None:
    if p:
        raise NotImplementedError("dropout: call memory_efficient_attention, whose backward draws the same numbers")
