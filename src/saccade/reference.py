"""The oracle: the definition of the function, in plain PyTorch, differentiated by PyTorch.

It holds the whole score matrix, runs on any device in any dtype up to float64, and is a backend only by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.problem import Problem


def attention(problem: Problem) -> tuple[Tensor, Tensor]:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)))) v` and `lse = log sum exp`, every step in the dtype of q.

    Returns:
        out (b, h_q, s_q, d_v) in q's dtype, and lse (b, h_q, s_q), natural log, float32 or float64.
    """
    q, k, v = operands(problem)
    p, lse = probability(problem, q, k)
    if problem.dropout is not None:
        return torch.where(_rows_in_use(problem), (p * kept(problem)) @ v * problem.dropout.rescale, 0), lse
    return torch.where(_rows_in_use(problem), p @ v, 0), lse


def operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a head of k and v for every one of q, (b, h_q, s, d), and zero in rows that are not in use.

    Those hold anything, NaN included: they are replaced, not multiplied by zero.
    """
    key_in_use = _keys_in_use(problem).mT
    q = torch.where(_rows_in_use(problem), problem.q, 0)
    k, v = (torch.where(key_in_use, x, 0).repeat_interleave(problem.group, dim=1) for x in (problem.k, problem.v))
    return q, k, v


def probability(problem: Problem, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(mask(score_mod(scale q k^T))), (b, h_q, s_q, s_k), without the sink's column, and lse (b, h_q, s_q)."""
    extent, device = problem.extent, q.device
    b = torch.arange(q.shape[0], device=device)[:, None, None, None]
    h = torch.arange(q.shape[1], device=device)[:, None, None]
    q_idx, kv_idx = torch.arange(extent.s_q, device=device)[:, None], torch.arange(extent.s_k, device=device)
    in_use = _rows_in_use(problem)
    visible = in_use & _keys_in_use(problem)
    if problem.mask is not None:
        visible = visible & problem.mask.sees(extent, b, h, q_idx, kv_idx)
    score = q @ k.mT * problem.scale
    if problem.score is not None:
        score = problem.score(score, b, h, q_idx, kv_idx)
    score = torch.where(visible, score, -torch.inf)
    if problem.sink is not None:  # one more column, whose value is zero
        column = problem.sink.to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, torch.where(in_use, column, -torch.inf)], dim=-1)

    top = score.detach().amax(-1, keepdim=True) if score.shape[-1] else score.new_zeros(*score.shape[:-1], 1)
    top = torch.where(top == -torch.inf, 0, top)
    weight = (score - top).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, top + total.log())[..., 0]
    return (weight / total)[..., : extent.s_k], lse.to(problem.lse_dtype())


def kept(problem: Problem) -> Tensor:
    """Which probabilities dropout keeps, bool (b, h_q, s_q, s_k)."""
    dropout, q = problem.dropout, problem.q
    assert dropout is not None
    b, h = (torch.arange(n, device=q.device) for n in q.shape[:2])
    return dropout.keep(b, h, slice(0, q.shape[2]), slice(0, problem.k.shape[2]))


def _rows_in_use(problem: Problem) -> Tensor:
    """(b or 1, 1, s_q, 1)"""
    return (problem.extent.q_idx() < problem.extent.rows)[:, None, :, None]


def _keys_in_use(problem: Problem) -> Tensor:
    """(b or 1, 1, 1, s_k)"""
    return (torch.arange(problem.extent.s_k, device=problem.k.device) < problem.extent.keys)[:, None, None]
