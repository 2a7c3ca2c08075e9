"""Gradients of the tensors that a score function captures, for every backend that has kernels."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.device import block_lists, dropout, scores, sequences
from saccade.backends.device.captured_gradients_kernel import (
    as_integers,
    captured_gradients_kernel,
    in_any_order,
    largest,
)
from saccade.backends.device.gradients import padded
from saccade.backends.device.launch import on_device
from saccade.backends.device.records import Rows
from saccade.layouts import Packed
from saccade.problem import Problem, aligned
from saccade.scores import Traced


def gradients(problem: Problem, saved: Saved, fast: bool = False) -> Sequence[Tensor | None]:
    """Of each of the score's tensors, in its dtype, or None where it is not wanted. `fast` is as `scores.record` says.

    A launch of its own: only who captures what learns pays for it. Sums are float32, and added up by atomics in
    whatever order the programs come. Where they are to be the same bits each time, a first launch finds the largest
    value, and a second one adds up integers, of which no order changes the sum.
    """
    score = problem.score
    if not isinstance(score, Traced) or not any(saved.wanted):
        return [None] * len(saved.wanted)
    wanted = [want and x.is_floating_point() for want, x in zip(saved.wanted, score.tensors, strict=True)]
    held = [x for x, want in zip(score.tensors, wanted, strict=True) if want]
    with on_device(problem.q):
        launch = _launch_of(problem, saved, score, wanted, fast)
        many = len(score.program.reads) * problem.q.shape[:3].numel() * problem.k.shape[2]
        sums = iter(_repeatable(held, launch, many) if problem.deterministic else _in_any_order(held, launch))
    return [next(sums).to(x.dtype) if want else None for x, want in zip(score.tensors, wanted, strict=True)]


Launch = Callable[[Any, Sequence[Any]], None]
"""Of the kernel, by what adds and to what."""


def _in_any_order(held: Sequence[Tensor], launch: Launch) -> list[Tensor]:
    sums = [torch.zeros(x.shape, device=x.device) for x in held]
    launch(in_any_order, sums)
    return sums


def _repeatable(held: Sequence[Tensor], launch: Launch, many: int) -> list[Tensor]:
    """`many`: more values than can meet in one place."""
    tops = torch.zeros(len(held), dtype=torch.int32, device=held[0].device)
    launch(largest, tops.unbind())
    # All of them, of the largest size, stay below 2^62.
    room = 62 - math.ceil(math.log2(max(many, 1)))
    top = tops.view(torch.float32)
    # 2^shift: exact in every product. A top of NaN or infinity, of which there is no integer, comes out as NaN.
    shift = (room - torch.frexp(top).exponent).clamp(-120, 120)
    unit = torch.ldexp(torch.ones_like(top), shift)
    sums = [torch.zeros(x.shape, dtype=torch.int64, device=x.device) for x in held]
    launch(as_integers, list(zip(sums, unit.unbind(), strict=True)))
    broken = torch.where(top.isfinite(), 0.0, torch.nan)
    return [(x.double() / unit[i] + broken[i]).float() for i, x in enumerate(sums)]


def _launch_of(problem: Problem, saved: Saved, score: Traced, wanted: Sequence[bool], fast: bool) -> Launch:
    q, k = problem.q, problem.k
    if not q.numel() or not k.numel():
        return lambda add, sums: None
    block_q, options = tile(problem)
    spans, blocks = sequences.spans(problem), q.shape[0] * -(-q.shape[2] // block_q)
    if isinstance(problem.layout, Packed):
        spans = sequences.spans(problem, sequences.table(problem, 0, block_q))
        blocks = sequences.slots(problem, 0, block_q)
    grid = (q.shape[1] * blocks,)
    mask = block_lists.record(problem, block_q, options["BLOCK_K"])
    given = _arguments(problem, saved, (*spans, mask, scores.record(score, fast)))
    scatter = scores.scatter(score, wanted, fast)

    def launch(add: Any, sums: Sequence[Any]) -> None:
        captured_gradients_kernel[grid](
            *given, tuple(sums), *_numbers(problem), ADD=tl.constexpr(add), SCATTER=scatter, **options
        )

    return launch


def _arguments(problem: Problem, saved: Saved, records: tuple[Any, ...]) -> tuple[Any, ...]:
    tensors = problem.q, problem.k, problem.v, saved.dout, saved.out
    operands = [Rows.of(x if aligned(x) else padded(x)) for x in tensors]
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    return *operands, saved.lse.contiguous(), dlse, *records, dropout.record(problem.dropout)


def _numbers(problem: Problem) -> tuple[Any, ...]:
    return problem.q.shape[1], problem.q.shape[2], problem.k.shape[2], problem.scale


def compiled(problem: Problem) -> Any:
    """The kernel as the compile gate sees it, adding to all that the problem's score captures."""
    score, lse = problem.score, torch.empty(problem.q.shape[:3])
    assert isinstance(score, Traced)
    records = *sequences.spans(problem), block_lists.stand_in(problem), scores.record(score)
    given = _arguments(problem, Saved(problem.v, None, problem.v, lse), records)
    sums = tuple(torch.empty(x.shape) for x in score.tensors)
    scatter = scores.scatter(score, [True] * len(sums))
    options = tile(problem)[1]
    return captured_gradients_kernel.warmup(
        *given, sums, *_numbers(problem), ADD=tl.constexpr(in_any_order), SCATTER=scatter, **options, grid=(1,)
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
        "BLOCK_DV": block_dv, "PRECISION": precision, "num_warps": 4 if wide <= 64 and problem.dropout is None else 8,
        "num_stages": 2,
    }  # fmt: skip
