"""The oracle: the definition of the function, in plain PyTorch, differentiated by PyTorch.

It holds the whole score matrix, runs on any device in any dtype up to float64, and is a backend only by name.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from saccade.layouts import Dense, Packed, Paged
from saccade.problem import Problem


def attention(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)))) v` and `lse = log sum exp`, every step in the dtype of q.

    Returns:
        out (b, h_q, s_q, d_v) in q's dtype, lse (b, h_q, s_q), natural log, float32 or float64, and the largest score
        of each row, of the form of lse.
    """
    if isinstance(problem.layout, Packed):
        return _packed(problem)
    if isinstance(problem.layout, Paged):
        return _paged(problem)
    q, k, v = operands(problem)
    p, lse, largest = probability(problem, q, k)
    if problem.dropout is not None:
        return torch.where(_rows_in_use(problem), (p * kept(problem)) @ v * problem.dropout.rescale, 0), lse, largest
    return torch.where(_rows_in_use(problem), p @ v, 0), lse, largest


def _packed(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """One sequence after the other; zeros and -inf beyond the last."""
    b, h_q, t_q, _ = problem.q.shape
    found = [attention(sequence.problem) for sequence in problem.sequences()]
    rest = t_q - sum(lse.shape[2] for _, lse, _ in found)
    # Of q, so that gradients exist, and are zero, where there is no sequence at all.
    never = torch.zeros((), dtype=torch.bool, device=problem.q.device)
    zeros = torch.where(never, problem.q[:, :, t_q - rest :, :1], 0).expand(b, h_q, rest, problem.v.shape[3])
    nothing = torch.where(never, problem.q[:, :, t_q - rest :, 0], -torch.inf).to(problem.lse_dtype())
    outs, lses, tops = zip(*found, (zeros, nothing, nothing.detach()), strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2), torch.cat(tops, dim=2)


def _paged(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """As a padded batch, with the pages of every sequence gathered."""
    layout, extent, q = problem.layout, problem.extent, problem.q
    assert isinstance(layout, Paged)
    pages = layout.block_table.long().clamp(0, problem.k.shape[0] - 1)
    k, v = (x[pages].transpose(1, 2).flatten(2, 3) for x in (problem.k, problem.v))  # (b, h_k, width * page_size, d)
    if not extent.s_q or not layout.sequences:
        nothing = q.new_full(q.shape[:3], -torch.inf, dtype=problem.lse_dtype())
        return q.new_zeros(*q.shape[:3], v.shape[3]), nothing, nothing.clone()
    if layout.cu_seqlens_q is None:
        return attention(replace(problem, k=k, v=v, layout=Dense("bhsd", None, layout.seqused_k)))
    t_q, starts = q.shape[2], layout.cu_seqlens_q.long()
    place = (starts[:-1, None] + extent.q_idx()).clamp(max=t_q - 1)  # (b, s_q)
    dense = Dense("bhsd", extent.rows[:, 0], layout.seqused_k)
    out, *of_rows = attention(replace(problem, q=q[0, :, place].transpose(0, 1), k=k, v=v, layout=dense))
    # And back: each row of q has its sequence and its number there; those behind the last have none.
    row = torch.arange(t_q, device=q.device)
    inside = row < starts[-1]
    b = torch.bucketize(row, starts[1:], right=True).clamp(max=layout.sequences - 1)
    i = (row - starts[b]).clamp(0, extent.s_q - 1)
    lse, largest = (torch.where(inside, x[b, :, i].mT, -torch.inf)[None] for x in of_rows)
    return torch.where(inside[:, None], out[b, :, i].transpose(0, 1), 0)[None], lse, largest


def operands(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a head of k and v for every one of q, (b, h_q, s, d), and zero in rows that are not in use.

    Those hold anything, NaN included: they are replaced, not multiplied by zero.
    """
    key_in_use = _keys_in_use(problem).mT
    q = torch.where(_rows_in_use(problem), problem.q, 0)
    k, v = (torch.where(key_in_use, x, 0).repeat_interleave(problem.group, dim=1) for x in (problem.k, problem.v))
    return q, k, v


def probability(problem: Problem, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(mask(score_mod(scale q k^T))), (b, h_q, s_q, s_k), without the sink's column; lse and the largest score,
    (b, h_q, s_q)."""
    extent, device = problem.extent, q.device
    b = torch.arange(q.shape[0], device=device)[:, None, None, None]
    b_of_score = b + problem.first_b
    h = torch.arange(q.shape[1], device=device)[:, None, None]
    q_idx, kv_idx = torch.arange(extent.s_q, device=device)[:, None], torch.arange(extent.s_k, device=device)
    in_use = _rows_in_use(problem)
    visible = in_use & _keys_in_use(problem)
    if problem.mask is not None:
        visible = visible & problem.mask.sees(extent, b, h, q_idx, kv_idx)
    score = q @ k.mT * problem.scale
    if problem.score is not None:
        score = problem.score(score, b_of_score, h, q_idx, kv_idx)
    score = torch.where(visible, score, -torch.inf)
    largest = _largest(score)
    if problem.sink is not None:  # one more column, whose value is zero
        column = problem.sink.to(score.dtype)[:, None, None].expand(*score.shape[:-1], 1)
        score = torch.cat([score, torch.where(in_use, column, -torch.inf)], dim=-1)

    top = largest if problem.sink is None else _largest(score)
    top = torch.where(top == -torch.inf, 0, top)
    weight = (score - top).exp()
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1, total)
    lse = torch.where(empty, -torch.inf, top + total.log())[..., 0]
    return (weight / total)[..., : extent.s_k], lse.to(problem.lse_dtype()), largest[..., 0].to(problem.lse_dtype())


def _largest(score: Tensor) -> Tensor:
    """(b, h_q, s_q, 1); it has no gradient."""
    score = score.detach()
    return score.amax(-1, keepdim=True) if score.shape[-1] else score.new_full((*score.shape[:-1], 1), -torch.inf)


def kept(problem: Problem) -> Tensor:
    """Which probabilities dropout keeps, bool (b, h_q, s_q, s_k)."""
    dropout, q = problem.dropout, problem.q
    assert dropout is not None
    b, h = (torch.arange(n, device=q.device) for n in q.shape[:2])
    return dropout.keep(b + problem.first_b, h, slice(0, q.shape[2]), slice(0, problem.k.shape[2]))


def _rows_in_use(problem: Problem) -> Tensor:
    """(b or 1, 1, s_q, 1)"""
    return (problem.extent.q_idx() < problem.extent.rows)[:, None, :, None]


def _keys_in_use(problem: Problem) -> Tensor:
    """(b or 1, 1, 1, s_k)"""
    return (torch.arange(problem.extent.s_k, device=problem.k.device) < problem.extent.keys)[:, None, None]
