"""FlashAttention-2's functions: of batches (b, s, h, d), of sequences end to end (t, h, d), and of caches.

The private ones below autograd are those that ring and Ulysses libraries call. A backward takes out and softmax_lse of
any keys: where those of several calls were merged, the gradients are this call's share of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import layouts, ops
from saccade.call import Call, flatten
from saccade.call.dropout import Dropout
from saccade.compat.flash_attn.cache import CacheTerms, attend_to_cache
from saccade.compat.flash_attn.call import BSHD, Terms, attend_with_probabilities, bound_call, parts, sequences
from saccade.layouts import Layout
from saccade.util import arguments

__all__ = [
    "_flash_attn_backward", "_flash_attn_forward", "_flash_attn_varlen_backward", "_flash_attn_varlen_forward",
    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]  # fmt: skip


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`dropout(softmax(mask(softcap(scale q k^T) - slopes[h] |i + off - j|))) v`, with `off = s_k - s_q`.

    Args:
        q: (b, s_q, h_q, d).
        k: (b, s_k, h_k, d), with h_q a multiple of h_k.
        v: (b, s_k, h_k, d_v).
        dropout_p: the share of probabilities that become zero, in [0, 1).
        softmax_scale: 1/sqrt(d) when None.
        causal: row i sees keys `j <= i + off`.
        window_size: (left, right): row i sees keys `i + off - left <= j <= i + off + right`; a negative bound is
            unbounded. With causal, right is 0.
        softcap: `softcap tanh(score / softcap)`; none where it is not above 0.
        alibi_slopes: (h_q) or (b, h_q); they get a gradient if they require one.
        deterministic: gradients bitwise equal from run to run; False follows
            `torch.are_deterministic_algorithms_enabled()`.
        return_attn_probs: return (out, softmax_lse, an empty tensor).

    Returns:
        out (b, s_q, h_q, d_v), and softmax_lse (b, h_q, s_q), natural log, float32, differentiable. A row that sees no
        key has `out = 0` and an LSE of -inf, where FlashAttention-2 has +inf.

    Raises:
        NotImplementedError: return_attn_probs with dropout, which would return the probabilities.
        ValueError, TypeError: arguments that do not fit one another.

    Source: https://github.com/Dao-AILab/flash-attention, 2.8.

    >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 16, 4, 8])
    """
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, BSHD, terms)


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of q, k and v in one tensor, qkv (b, s, 3, h, d), which gets one gradient.

    >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 8), causal=True).shape
    torch.Size([2, 16, 4, 8])
    """
    terms = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = parts("qkv", qkv, 2, 3, "(b, s, 3, h, d)")
    return flash_attn_func(q, k, v, *terms)


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_func` of k and v in one tensor, kv (b, s_k, 2, h_k, d), which gets one gradient.

    >>> flash_attn_kvpacked_func(torch.randn(2, 16, 4, 8), torch.randn(2, 24, 2, 2, 8)).shape
    torch.Size([2, 16, 4, 8])
    """
    terms = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = parts("kv", kv, 2, 2, "(b, s_k, 2, h_k, d)")
    return flash_attn_func(q, k, v, *terms)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Any:  # fmt: skip
    """`flash_attn_func` within each sequence: sequence b has the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]`.

    Args:
        q: (t_q, h_q, d).
        k: (t_k, h_k, d), or with a block_table (pages, page_size, h_k, d).
        v: (t_k, h_k, d_v), or with a block_table (pages, page_size, h_k, d_v).
        cu_seqlens_q: (b + 1,) int32 or int64: 0, then where each sequence of q ends.
        cu_seqlens_k: the same for k and v; with a block_table, the sums of the lengths.
        max_seqlen_q: an upper bound of q's lengths, an integer or a tensor of one, which nothing reads.
        max_seqlen_k: the same for k and v.
        alibi_slopes: (h_q) or (b, h_q).
        block_table: (b, width): the pages of each sequence, of any size; a backward is refused.

    The other arguments, results and errors are those of `flash_attn_func`; softmax_lse is (h_q, t_q). Rows after the
    last sequence are zero.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, k, v = (torch.randn(10, 2, 16) for _ in range(3))
    >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 7, 7, causal=True).shape
    torch.Size([10, 2, 16])
    """
    layout = sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table)
    terms = Terms(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )
    return attend_with_probabilities(q, k, v, layout, terms)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of q, k and v in one tensor, qkv (t, 3, h, d), which gets one gradient.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 2, 16), offsets, 7).shape
    torch.Size([10, 2, 16])
    """
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    terms = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = parts("qkv", qkv, 1, 3, "(t, 3, h, d)")
    return flash_attn_varlen_func(q, k, v, *lengths, *terms)


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """`flash_attn_varlen_func` of k and v in one tensor, kv (t_k, 2, h_k, d), which gets one gradient.

    >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, kv = torch.randn(10, 2, 16), torch.randn(10, 2, 1, 16)
    >>> flash_attn_varlen_kvpacked_func(q, kv, offsets, offsets, 7, 7).shape
    torch.Size([10, 2, 16])
    """
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    terms = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = parts("kv", kv, 1, 2, "(t_k, 2, h_k, d)")
    return flash_attn_varlen_func(q, k, v, *lengths, *terms)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Writes new keys and values to a cache, if there are any, and attends to all; without gradients.

    Formula: row `i` of k and v becomes key `cache_seqlens[b] + i` of sequence b. Then q attends to the first
    `cache_seqlens[b] + s_new` keys; masks are aligned at the last of them.

    Args:
        q: (b, s_q, h_q, d).
        k_cache: (b_cache, s_cache, h_k, d), or with a block_table (pages, page_size, h_k, d); written in place.
        v_cache: the same with d_v.
        k: (b, s_new, h_k, d), or None.
        v: (b, s_new, h_k, d_v), or None.
        rotary_cos: (positions, pairs), 2 pairs <= d, one position for each key that a sequence has room for: new keys
            are rotated by their places, and queries by `cache_seqlens[b] + i` under a causal mask or a window, else by
            `cache_seqlens[b]`.
        rotary_sin: the same.
        cache_seqlens: how many keys each sequence has before the call, (b,) or one number; None: the cache is full.
        cache_batch_idx: (b,) which row of the cache, or of the block_table, is whose; None: row b is sequence b's.
        cache_leftpad: (b,) the first key of each sequence.
        block_table: (b, width): the pages of each sequence, of any size.
        window_size: as of `flash_attn_func`, and so are softmax_scale, causal, softcap and alibi_slopes.
        rotary_interleaved: pairs are the elements (0, 1), (2, 3), …; else (0, pairs), (1, pairs + 1), …
        num_splits: into how many parts the keys are split; 0 lets the backend choose.
        return_softmax_lse: return (out, softmax_lse).

    Returns:
        out (b, s_q, h_q, d_v), and softmax_lse (b, h_q, s_q).

    Raises:
        ValueError, TypeError: arguments that do not fit one another.
        Unsupported: in a backward, where an operand requires a gradient.

    >>> cache = torch.zeros(2, 32, 1, 8), torch.zeros(2, 32, 1, 8)
    >>> q, new, lengths = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 1, 8), torch.tensor([3, 20], dtype=torch.int32)
    >>> flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=lengths, causal=True).shape
    torch.Size([2, 1, 4, 8])
    >>> cache[0][1, 20, 0].equal(new[1, 0, 0])
    True
    """
    terms = CacheTerms(
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, softmax_scale, causal,
        window_size, softcap, rotary_interleaved, num_splits, return_softmax_lse, alibi_slopes,
    )  # fmt: skip
    return attend_to_cache(q, k_cache, v_cache, terms)


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size_left: int, window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None,
) -> None:  # fmt: skip
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
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
    rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> None:  # fmt: skip
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
    operands: tuple[Tensor, Tensor, Tensor], results: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor | None, ...], layout: Layout, terms: Terms, state: Tensor | None,
) -> None:  # fmt: skip
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
