"""Gradients of the tensors that a score function captures, for every backend that has kernels."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.device import lists, scores
from saccade.backends.device.captures_kernel import captures_kernel
from saccade.backends.device.gradients import padded
from saccade.backends.device.launch import on_device
from saccade.backends.device.records import Rows
from saccade.problem import Problem, aligned
from saccade.scores import Traced


def gradients(problem: Problem, saved: Saved) -> Sequence[Tensor | None]:
    """Of each of the score's tensors, in its dtype, or None where it is not wanted.

    A launch of its own: only who captures what learns pays for it. Sums are float32, and added up by atomics in
    whatever order the programs come.
    """
    score = problem.score
    if not isinstance(score, Traced) or not any(saved.wanted):
        return [None] * len(saved.wanted)
    wanted = [want and x.is_floating_point() for want, x in zip(saved.wanted, score.tensors, strict=True)]
    sums = [
        torch.zeros(x.shape, device=x.device) if want else None for want, x in zip(wanted, score.tensors, strict=True)
    ]
    if problem.q.numel() and problem.k.numel():
        with on_device(problem.q):
            _launch(problem, saved, score, wanted, [x for x in sums if x is not None])
    return [None if x is None else x.to(held.dtype) for x, held in zip(sums, score.tensors, strict=True)]


def _launch(problem: Problem, saved: Saved, score: Traced, wanted: list[bool], sums: list[Tensor]) -> None:
    q, k, v = problem.q, problem.k, problem.v
    operands = (Rows.of(x if aligned(x) else padded(x)) for x in (q, k, v, saved.dout, saved.out))
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    used = (None if x is None else x.contiguous() for x in (problem.layout.seqused_q, problem.layout.seqused_k))
    block_q, options = tile(problem)
    records = lists.record(problem, block_q, options["BLOCK_K"]), scores.record(score), tuple(sums)
    grid = (q.shape[0] * q.shape[1] * -(-q.shape[2] // block_q),)
    captures_kernel[grid](
        *operands,
        *(saved.lse.contiguous(), dlse, *used, *records, q.shape[1], q.shape[2], k.shape[2], problem.scale),
        SCATTER=scores.scatter(score, wanted),
        **options,
    )


def tile(problem: Problem) -> tuple[int, dict[str, Any]]:
    """Rows of a tile, at most as many as keys, and all constants."""
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    block_d, block_dv = (max(16, 1 << (n - 1).bit_length()) for n in (d, d_v))
    wide = max(block_d, block_dv)
    if problem.q.dtype == torch.float32:
        block_q, block_k = (32, 32) if wide <= 128 else (16, 16)
    else:
        block_q, block_k = (64, 64) if wide <= 128 else (32, 32)
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    return block_q, {
        "GROUP": problem.group, "D": d, "D_V": d_v, "BLOCK_Q": block_q, "BLOCK_K": block_k, "BLOCK_D": block_d,
        "BLOCK_DV": block_dv, "PRECISION": precision, "num_warps": 4 if wide <= 64 else 8, "num_stages": 2,
    }  # fmt: skip
