"""The four functions below autograd that ring and Ulysses libraries call: forward and backward, dense and packed.

A backward takes out and softmax_lse of any keys: where those of several calls were merged, the gradients are this
call's share of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import arguments, layouts, ops
from saccade.call import Call, flatten
from saccade.compat.flash_attn.call import BSHD, Terms, bound_call, sequences
from saccade.dropout import Dropout
from saccade.layouts import Layout


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flash_attn_func` below autograd.

    Returns:
        out (b, s_q, h_q, d_v), softmax_lse (b, h_q, s_q), an empty tensor in the place of S_dmask, and rng_state (2)
        int64, by which the backward repeats the dropout.

    Raises:
        NotImplementedError: return_softmax with dropout, which would return the probabilities.

    >>> q, k, v = (torch.randn(1, 8, 2, 16) for _ in range(3))
    >>> out, lse, _, rng_state = _flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    >>> out.shape, lse.shape
    (torch.Size([1, 8, 2, 16]), torch.Size([1, 2, 8]))
    """
    window = window_size_left, window_size_right
    terms = Terms(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, return_softmax)
    return _forward(q, k, v, BSHD, terms)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`flash_attn_varlen_func` below autograd; results as those of `_flash_attn_forward`, softmax_lse (h_q, t_q).

    Args:
        leftpad_k: (b,) the first key of each sequence.
        seqused_k: (b,) how many keys of each sequence are in use, those before leftpad_k among them.
        zero_tensors: not read; results are always whole.
        num_splits: with a block_table, into how many parts the keys are split; 0 lets the backend choose.

    >>> offsets, x = torch.tensor([0, 3, 10]), torch.randn(10, 2, 16)
    >>> out, lse, *_ = _flash_attn_varlen_forward(x, x, x, offsets, offsets, 7, 7, 0.0, 0.25, True)
    >>> out.shape, lse.shape
    (torch.Size([10, 2, 16]), torch.Size([2, 10]))
    """
    layout = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k, num_splits)
    window = window_size_left, window_size_right
    terms = Terms(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, False, return_softmax)
    return _forward(q, k, v, layout, terms, leftpad_k)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:
    """The gradients of `_flash_attn_forward`, written to dq, dk and dv; those that are None are not kept.

    FlashAttention returns the sums `rowsum(dout * out)` in rows of its own tiles; here the result is None.

    Args:
        dout: the gradient of out, (b, s_q, h_q, d_v).
        out: the forward's, or that of all keys where softmax_lse is.
        softmax_lse: (b, h_q, s_q) float32.
        rng_state: the forward's; needed with dropout.

    Raises:
        ValueError: tensors of other shapes, or dropout without rng_state.

    >>> q, k, v, dout = (torch.randn(1, 8, 2, 16) for _ in range(4))
    >>> out, lse, _, state = _flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    >>> dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    >>> _flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, True, -1, -1, 0.0, None, False, state)
    """
    window = window_size_left, window_size_right
    terms = Terms(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, False)
    _backward((q, k, v), (dout, out, softmax_lse), (dq, dk, dv), BSHD, terms, rng_state)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> None:
    """The gradients of `_flash_attn_varlen_forward`, as `_flash_attn_backward`; softmax_lse is (h_q, t_q).

    >>> offsets, x = torch.tensor([0, 3, 10]), torch.randn(10, 2, 16)
    >>> lengths = offsets, offsets, 7, 7
    >>> out, lse, *_ = _flash_attn_varlen_forward(x, x, x, *lengths, 0.0, 0.25, True)
    >>> dq, dk, dv = (torch.empty_like(x) for _ in range(3))
    >>> options = 0.0, 0.25, True, -1, -1, 0.0, None, False
    >>> _flash_attn_varlen_backward(x, x, x, x, out, lse, dq, dk, dv, *lengths, *options)
    """
    layout = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    window = window_size_left, window_size_right
    terms = Terms(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic, False)
    _backward((q, k, v), (dout, out, softmax_lse), (dq, dk, dv), layout, terms, rng_state)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, terms: Terms, leftpad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = bound_call(q, k, v, layout, terms, leftpad)
    out, lse, _ = ops.run(call, "auto", True)
    assert lse is not None
    state = q.new_empty(2, dtype=torch.int64) if call.dropout is None else call.dropout.state
    return out, lse, out.new_empty(0), state


def _backward(
    operands: tuple[Tensor, Tensor, Tensor],
    results: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor | None, ...],
    layout: Layout,
    terms: Terms,
    state: Tensor | None,
) -> None:
    dout, out, lse = results
    call = bound_call(*operands, layout, terms._replace(dropout_p=0.0))
    if terms.dropout_p:
        if state is None:
            raise ValueError("the backward of a call with dropout needs the rng_state that its forward returned")
        _check("rng_state", state, (2,), torch.int64, call)
        call = call.replace(given=call.given, dropout=Dropout(state, float(terms.dropout_p)))
    shape = *call.given[0].shape[:-1], call.given[2].shape[-1]
    rows = layout.ordered_lse(call.q[..., 0]).shape
    _check("dout", dout, shape, call.given[0].dtype, call)
    _check("out", out, shape, call.given[0].dtype, call)
    _check("softmax_lse", lse, rows, torch.float64 if call.given[0].dtype == torch.float64 else torch.float32, call)
    for name, x, operand in zip(("dq", "dk", "dv"), gradients, operands, strict=True):
        if x is not None:
            _check(name, x, operand.shape, None, call)
    flat = flatten(call, "auto")
    wanted = [False] * len(flat[4])
    saved = layouts.with_rows(dout), None, layouts.with_rows(out), lse.contiguous()
    found: Any = torch.ops.saccade.backward.default(*saved, *flat, wanted)
    for x, result in zip(gradients, found[:3], strict=True):
        if x is not None:
            x.copy_(result)


def _check(name: str, x: Any, shape: tuple[int, ...], dtype: torch.dtype | None, call: Call) -> None:
    """dtype None: any."""
    arguments.tensors(**{name: x})
    q = call.given[0]
    if tuple(x.shape) != tuple(shape) or x.device != q.device or (dtype is not None and x.dtype != dtype):
        wanted = f"{'' if dtype is None else f'{dtype} '}{tuple(shape)} on {q.device}"
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"{name} must be {wanted}, got {got}: q {q.dtype} {tuple(q.shape)}")
