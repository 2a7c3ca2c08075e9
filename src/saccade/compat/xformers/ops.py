"""`memory_efficient_attention` and its relatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import arguments, ops
from saccade.api import attention
from saccade.call import check_call
from saccade.compat.xformers.meaning import Meaning, meaning


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
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
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`memory_efficient_attention` without gradients."""
    with torch.no_grad():
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
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
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
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
