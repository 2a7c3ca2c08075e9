"""The oracle: the definition of the function, in plain PyTorch, differentiated by PyTorch.

It holds the whole score matrix, runs on any device in any dtype up to float64, and is a backend only by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.call import Call
from saccade.partial import finite, infinite


def attention(problem: Call) -> tuple[Tensor, Tensor, Tensor]:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)))) v` and `lse = log sum exp`, every step in the dtype of the
    LSE: float32, or float64 for float64 inputs.

    Returns:
        out (b, h_q, s_q, d_v) in q's dtype, lse (b, h_q, s_q), natural log, float32 or float64, and the largest score
        of each row, of the form of lse.
    """
    if not problem.layout.rectangular:
        return _by_sequence(problem)
    if problem.descale is not None:
        out, lse, largest = attention(problem.dequantized())
        return out.to(problem.out_dtype), lse, largest
    q, k, v = operands(problem)
    p, lse, largest = probability(problem, q, k)
    p, rescale = (p, 1.0) if problem.dropout is None else (p * kept(problem), problem.dropout.rescale)
    out = p @ v * rescale
    return torch.where(_rows_in_use(problem), out, 0).to(problem.out_dtype), lse, largest


def _by_sequence(problem: Call) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence after the other; zeros and -inf in rows after the last."""
    results = [attention(sequence.call.dequantized()) for sequence in problem.sequences()]
    dim = 2 if problem.layout.cu_seqlens_q is not None else 0
    done = sum(lse.shape[dim] for _, lse, _ in results)
    rest = problem.q.narrow(dim, done, problem.q.shape[dim] - done)
    # Of q, so that gradients exist, and are zero, where there is no sequence at all.
    never = torch.zeros((), dtype=torch.bool, device=problem.q.device)
    rest = rest.to(problem.lse_dtype())
    zeros = torch.where(never, rest[..., :1], 0).expand(*rest.shape[:3], problem.v.shape[3])
    nothing = torch.where(never, rest[..., 0], -torch.inf).to(problem.lse_dtype())
    outs, lses, tops = zip(*results, (zeros, nothing, nothing.detach()), strict=True)
    return torch.cat(outs, dim).to(problem.out_dtype), torch.cat(lses, dim), torch.cat(tops, dim)


def operands(problem: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the LSE's dtype, with a head of k and v for every one of q, (b, h_q, s, d), and zero in rows that
    are not in use.

    Those hold anything, NaN included: they are replaced, not multiplied by zero.
    """
    key_in_use, dtype = _keys_in_use(problem).mT, problem.lse_dtype()
    q = torch.where(_rows_in_use(problem), problem.q, 0).to(dtype)
    k, v = (torch.where(key_in_use, x, 0).to(dtype) for x in (problem.k, problem.v))
    return q, k.repeat_interleave(problem.group, dim=1), v.repeat_interleave(problem.group, dim=1)


def probability(problem: Call, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(mask(score_mod(scale q k^T))), (b, h_q, s_q, s_k), without the sink's column; lse and the largest score,
    (b, h_q, s_q)."""
    extent, device = problem.extent, q.device
    b = torch.arange(q.shape[0], device=device)[:, None, None, None]
    b_of_score = b + problem.first_b
    h = torch.arange(q.shape[1], device=device)[:, None, None]
    q_idx, kv_idx = torch.arange(extent.s_q, device=device)[:, None], torch.arange(extent.s_k, device=device)
    p, r = extent.q_position(b, q_idx), extent.k_position(b, kv_idx)  # what functions take for indices
    in_use = _rows_in_use(problem)
    visible = in_use & _keys_in_use(problem)
    if problem.mask is not None:
        visible = visible & problem.mask.sees(extent, b, h, q_idx, kv_idx)
    score = q @ k.mT * problem.scale
    if problem.score is not None:
        score = problem.score(score, b_of_score, h, p, r)
    score = torch.where(visible, score, -torch.inf)
    largest = _largest(score)
    if problem.sink is not None:  # one more column, whose value is zero
        column = finite(problem.sink.to(score.dtype))[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, torch.where(in_use, column, -torch.inf)], dim=-1)

    top = largest if problem.sink is None else _largest(score)
    top = torch.where(top == -torch.inf, 0, top)
    weight = (score - top).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = infinite(torch.where(empty, -torch.inf, top + total.log()), top)[..., 0]
    return (weight / total)[..., : extent.s_k], lse.to(problem.lse_dtype()), largest[..., 0].to(problem.lse_dtype())


def _largest(score: Tensor) -> Tensor:
    """(b, h_q, s_q, 1); it has no gradient."""
    score = score.detach()
    return score.amax(-1, keepdim=True) if score.shape[-1] else score.new_full((*score.shape[:-1], 1), -torch.inf)


def kept(problem: Call) -> Tensor:
    """Which probabilities dropout keeps, bool (b, h_q, s_q, s_k)."""
    dropout, q = problem.dropout, problem.q
    assert dropout is not None
    (b, h, s_q, _), s_k, extent = q.shape, problem.k.shape[2], problem.extent
    b_idx, h_idx, q_idx, kv_idx = (torch.arange(n, device=q.device) for n in (b, h, s_q, s_k))
    if extent.p is None:
        return dropout.keep(b_idx + problem.first_b, h_idx, slice(0, s_q), slice(0, s_k))
    b_idx, h_idx, q_idx = b_idx[:, None, None, None], h_idx[:, None, None], q_idx[:, None]
    p, r = extent.q_position(b_idx, q_idx), extent.k_position(b_idx, kv_idx)
    return dropout.keep_at(b_idx + problem.first_b, h_idx, p, r)


def _rows_in_use(problem: Call) -> Tensor:
    """(b or 1, 1, s_q, 1)"""
    return (problem.extent.q_idx() < problem.extent.rows)[:, None, :, None]


def _keys_in_use(problem: Call) -> Tensor:
    """(b or 1, 1, 1, s_k)"""
    return (torch.arange(problem.extent.s_k, device=problem.k.device) < problem.extent.keys)[:, None, None]
