"""The largest score that each row sees, which no kernel returns: by plain PyTorch, some rows at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import scores
from saccade.layouts import PLAIN, Layout, Packed
from saccade.masks import Mask
from saccade.problem import Problem

PAIRS_AT_ONCE = 1 << 24


@torch.no_grad()
def max_scores(
    q: Tensor, k: Tensor, *, score_mod: Any, mask: Mask | None, scale: float, layout: Layout = PLAIN["bhsd"]
) -> Tensor:
    """The largest modified score that each row sees, (b, h_q, s_q), packed (h_q, t_q), float32.

    -inf where it sees none. Packed sequences' offsets are read.
    """
    q, k = layout.canonical(q), layout.canonical(k)
    problem = Problem(q, k, k, None, mask, scores.bind(score_mod, q), layout, scale)
    if not isinstance(layout, Packed):
        return _largest(problem)
    found = torch.full(q.shape[:-1], -torch.inf, device=q.device)
    for sequence in problem.sequences():
        found[:, :, sequence.rows] = _largest(sequence.problem)
    return layout.ordered_lse(found)


def _largest(problem: Problem) -> Tensor:
    (b, h, s_q, _), s_k, device = problem.q.shape, problem.k.shape[2], problem.q.device
    extent = problem.extent
    batch, head = torch.arange(b, device=device)[:, None, None, None], torch.arange(h, device=device)[:, None, None]
    kv_idx = torch.arange(s_k, device=device)
    keys = torch.where((kv_idx < extent.keys)[:, None, :, None], problem.k, 0).float()
    keys = keys.repeat_interleave(problem.group, 1).mT
    found = torch.full((b, h, s_q), -torch.inf, device=device)
    step = max(1, PAIRS_AT_ONCE // max(1, b * h * s_k))
    for start in range(0, s_q if s_k else 0, step):
        q_idx = torch.arange(start, min(start + step, s_q), device=device)[:, None]
        in_use = (q_idx < extent.rows[:, None, None]) & (kv_idx < extent.keys[:, None, None])
        rows = torch.where(q_idx < extent.rows[:, None, None], problem.q[:, :, start : start + step], 0)
        x = rows.float() @ keys * problem.scale
        if problem.score is not None:
            x = problem.score(x, batch + problem.first_b, head, q_idx, kv_idx)
        if problem.mask is not None:
            in_use = in_use & problem.mask.sees(extent, batch, head, q_idx, kv_idx)
        found[:, :, start : start + step] = torch.where(in_use, x, -torch.inf).amax(-1)
    return found
