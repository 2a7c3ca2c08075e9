"""The oracle: the definition of the function, in plain PyTorch, differentiated by PyTorch.

It holds the whole score matrix, runs on any device in any dtype up to float64, and is a backend only by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.backends import EVERYTHING, Launches, Outputs
from saccade.backends.key_lists import listed_keys
from saccade.call import Call
from saccade.call.partial import finite, infinite
from saccade.call.spec import Spec
from saccade.layouts import ordered_like


def attention(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)))) v` and `lse = log sum exp`, every step in the dtype of the
    LSE: float32, or float64 for float64 inputs.

    Returns:
        out (b, h_q, s_q, d_v) in q's dtype, lse (b, h_q, s_q), natural log, float32 or float64, and the largest score
        of each row, of the form of lse.
    """
    if not call.layout.rectangular:
        return _by_sequence(call)
    if call.descale is not None:
        out, lse, largest = attention(call.dequantized())
        return out.to(call.out_dtype), lse, largest
    q, k, v = operands(call)
    p, lse, largest = probability(call, q, k)
    some = largest[..., None] != -torch.inf
    p = torch.where(some, p, 0)  # NaN in what others see, or in a sink, does not reach rows that see nothing
    p, rescale = (p, 1.0) if call.dropout is None else (p * kept(call), call.dropout.rescale)
    out = p @ v * rescale
    return torch.where(_rows_in_use(call) & some, out, 0).to(call.out_dtype), lse, largest


def _by_sequence(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence after the other; zeros and -inf in rows after the last."""
    results = [attention(sequence.call.dequantized()) for sequence in call.sequences()]
    dim = 2 if call.layout.cu_seqlens_q is not None else 0
    done = sum(lse.shape[dim] for _, lse, _ in results)
    rest = call.q.narrow(dim, done, call.q.shape[dim] - done)
    # Of q, so that gradients exist, and are zero, where there is no sequence at all.
    never = torch.zeros((), dtype=torch.bool, device=call.q.device)
    rest = rest.to(call.lse_dtype())
    zeros = torch.where(never, rest[..., :1], 0).expand(*rest.shape[:3], call.v.shape[3])
    nothing = torch.where(never, rest[..., 0], -torch.inf).to(call.lse_dtype())
    outs, lses, tops = zip(*results, (zeros, nothing, nothing.detach()), strict=True)
    return torch.cat(outs, dim).to(call.out_dtype), torch.cat(lses, dim), torch.cat(tops, dim)


def operands(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the LSE's dtype, with a head of k and v for every one of q, (b, h_q, s, d), and zero in rows that
    are not in use, and in keys that no list names.

    Those hold anything, NaN included: they are replaced, not multiplied by zero.
    """
    key_in_use, dtype = _keys_in_use(call).mT, call.lse_dtype()
    if (named := listed_keys(call)) is not None:
        key_in_use = key_in_use & named[..., None]
    q = torch.where(_rows_in_use(call), call.q, 0).to(dtype)
    k, v = (torch.where(key_in_use, x, 0).to(dtype) for x in (call.k, call.v))
    return q, k.repeat_interleave(call.group, dim=1), v.repeat_interleave(call.group, dim=1)


def probability(call: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(mask(score_mod(scale q k^T))), (b, h_q, s_q, s_k), without the sink's column; lse and the largest score,
    (b, h_q, s_q)."""
    extent, device = call.extent, q.device
    b = torch.arange(q.shape[0], device=device)[:, None, None, None]
    b_of_score = b + call.first_b
    h = torch.arange(q.shape[1], device=device)[:, None, None]
    q_idx, kv_idx = torch.arange(extent.s_q, device=device)[:, None], torch.arange(extent.s_k, device=device)
    p, r = extent.q_position(b, q_idx), extent.k_position(b, kv_idx)  # what functions take for indices
    in_use = _rows_in_use(call)
    visible = in_use & _keys_in_use(call)
    if call.mask is not None:
        visible = visible & call.mask.sees(extent, b, h, q_idx, kv_idx)
    score = q @ k.mT * call.scale
    if call.score is not None:
        score = call.score(score, b_of_score, h, p, r)
    score = torch.where(visible, score, -torch.inf)
    largest = _largest(score)
    if call.sink is not None:  # one more column, whose value is zero
        column = finite(call.sink.to(score.dtype))[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, torch.where(in_use, column, -torch.inf)], dim=-1)

    top = largest if call.sink is None else _largest(score)
    top = torch.where(top == -torch.inf, 0, top)
    weight = (score - top).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = infinite(torch.where(empty, -torch.inf, top + total.log()), top)[..., 0]
    return (weight / total)[..., : extent.s_k], lse.to(call.lse_dtype()), largest[..., 0].to(call.lse_dtype())


def _largest(score: Tensor) -> Tensor:
    """(b, h_q, s_q, 1); it has no gradient."""
    score = score.detach()
    return score.amax(-1, keepdim=True) if score.shape[-1] else score.new_full((*score.shape[:-1], 1), -torch.inf)


def kept(call: Call) -> Tensor:
    """Which probabilities dropout keeps, bool (b, h_q, s_q, s_k)."""
    dropout, q = call.dropout, call.q
    assert dropout is not None
    (b, h, s_q, _), s_k, extent = q.shape, call.k.shape[2], call.extent
    b_idx, h_idx, q_idx, kv_idx = (torch.arange(n, device=q.device) for n in (b, h, s_q, s_k))
    if extent.p is None:
        return dropout.keep(b_idx + call.first_b, h_idx, slice(0, s_q), slice(0, s_k))
    b_idx, h_idx, q_idx = b_idx[:, None, None, None], h_idx[:, None, None], q_idx[:, None]
    p, r = extent.q_position(b_idx, q_idx), extent.k_position(b_idx, kv_idx)
    return dropout.keep_at(b_idx + call.first_b, h_idx, p, r)


def _rows_in_use(call: Call) -> Tensor:
    """(b or 1, 1, s_q, 1)"""
    return (call.extent.q_idx() < call.extent.rows)[:, None, :, None]


def _keys_in_use(call: Call) -> Tensor:
    """(b or 1, 1, 1, s_k)"""
    return (torch.arange(call.extent.s_k, device=call.k.device) < call.extent.keys)[:, None, None]


# As a backend. It runs outside of the registered operator, so that PyTorch differentiates it, as often as one likes.

SUPPORT = EVERYTHING
GRADIENT = None


def obstacle() -> str | None:
    return None


def workspace(spec: Spec) -> str:
    return "several times the score matrix b h_q s_q s_k"


def run_forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    out, row_lse, max_scores = attention(call)
    return ordered_like(out, call.q), row_lse, max_scores
