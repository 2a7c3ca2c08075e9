"""Packed sequences: one after the other, each in the way that is the fastest for it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from saccade.backends import Gradients, Outputs, Saved
from saccade.backends.cpu import sink
from saccade.call import Call
from saccade.layouts import empty_like_rows

Forward = Callable[[Call, bool], Outputs]
Backward = Callable[[Call, Saved], Gradients]


def forward(problem: Call, lse: bool, dense: Forward) -> Outputs:
    """out (1, h_q, t_q, d_v) and, if asked for, lse and max_scores (1, h_q, t_q); `dense` is what runs a sequence."""
    out = problem.empty_out()
    row_lse = torch.full(problem.q.shape[:3], -torch.inf, dtype=problem.lse_dtype(), device="cpu")
    top = torch.full_like(row_lse, -torch.inf)
    end = 0
    for rows, _, sequence in problem.sequences():
        end = rows.stop
        out[:, :, rows], *parts = dense(sequence, lse)
        for whole, part in zip((row_lse, top), parts, strict=True):
            if part is not None:
                whole[:, :, rows] = part
    out[:, :, end:] = 0
    return out, row_lse if lse else None, top if problem.max_scores else None


def backward(problem: Call, saved: Saved, dense: Backward) -> Gradients:
    """dq, dk and dv, and the sums over all sequences of dsink and of captured tensors' gradients. Where sequences may
    share keys, dk and dv are sums too, in the order of the sequences."""
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (problem.q, problem.k, problem.v))
    shared = problem.layout.starts_k is not None
    shares = tuple(torch.zeros_like(x, dtype=problem.lse_dtype()) for x in (dk, dv)) if shared else ()
    captures = problem.score.tensors if problem.score else ()
    pairs = zip(captures, saved.wanted, strict=True)
    sums = [torch.zeros(x.shape, dtype=problem.lse_dtype(), device="cpu") if want else None for x, want in pairs]
    end_q = end_k = 0
    for rows, keys, sequence in problem.sequences():
        end_q, end_k = rows.stop, keys.stop
        dlse = None if saved.dlse is None else saved.dlse[:, :, rows]
        part = Saved(saved.dout[:, :, rows], dlse, saved.out[:, :, rows], saved.lse[:, :, rows], saved.wanted)
        dq[:, :, rows], *more_keys, _, of_captures = dense(sequence, part)
        for x, share, more in zip((dk, dv), shares or (None, None), more_keys, strict=True):
            if share is None:
                x[:, :, keys] = more
            else:
                share[:, :, keys] += more
        for total, more in zip(sums, of_captures, strict=False):
            if total is not None and more is not None:
                total += more
    dq[:, :, end_q:] = 0
    for x, share in zip((dk, dv), shares or (None, None), strict=True):
        if share is None:
            x[:, :, end_k:] = 0
        else:
            x.copy_(share)
    dsink = sink.gradient(problem, saved, sink.delta(saved)) if problem.sink is not None else None
    return dq, dk, dv, dsink, [None if x is None else x.to(y.dtype) for x, y in zip(sums, captures, strict=True)]
