"""PyTorch's own CPU kernel of scaled_dot_product_attention, for calls that it runs and where it is the fastest way.

Measured at 1x8x4096x64 on two cores, this kernel against our tiles, in ms: fp32 forward 169 against 230 (AVX512); bf16
forward 47 against 100 and backward 200 against 240 on a CPU with AMX, forward 173 against 70 on one with AVX512-BF16
alone, 309 against 1150 without either. There its own bf16 backward takes 1766, and 850 on operands made float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade import hardware
from saccade.backends import Saved
from saccade.backends.cpu import score_mods, sink
from saccade.backends.cpu.tiling import tiling_of
from saccade.backends.cpu.worker import Worker
from saccade.layouts import empty_like_rows
from saccade.masks import Window
from saccade.problem import Problem

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def runs_forward(problem: Problem) -> bool:
    q, k, dtype = problem.q, problem.k, problem.q.dtype
    half = dtype == torch.bfloat16 and hardware.cpu_bf16() != "avx512_bf16"
    if not (half or dtype in (torch.float32, torch.float16)) or problem.score is not None or not _plain(problem):
        return False
    # Its causal mask is aligned top-left, and is -inf before the scale multiplies it.
    causal = problem.mask is not None and problem.mask.kind == "causal" and q.shape[2] == k.shape[2]
    return (causal and problem.scale > 0) or _sees_all(problem)


def runs_backward(problem: Problem, saved: Saved) -> bool:
    # Rows that are NaN or see nothing are the tiles'.
    return saved.dlse is None and runs_forward(problem) and bool(saved.lse.isfinite().all())


def _plain(problem: Problem) -> bool:
    """Whether the kernel runs the call, whatever its mask and score are."""
    q, k, v = problem.q, problem.k, problem.v
    same_head_dims = k.shape[3] == v.shape[3]
    return problem.dropout is None and not problem.layout.tensors and same_head_dims and min(q.numel(), k.numel()) > 0


def _sees_all(problem: Problem) -> bool:
    """Whether every row sees every key, where all of them are in use."""
    if problem.mask is None:
        return True
    if not isinstance(problem.mask, Window):
        return False
    left, right = problem.mask.bounds
    return right >= problem.q.shape[2] - 1 and left >= problem.k.shape[2] - 1


def forward(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """out and lse; None where a row may be NaN or see nothing: the kernel makes zeros and an LSE of 0 of both, as its
    maximum leaves NaN out where keys are fewer than a vector."""
    out, lse = _without_sink(problem)
    if not bool(lse.all()) and bool(((lse == 0) & (out == 0).all(-1)).any()):
        return None
    return _with_sink(problem, out, lse)


def _with_sink(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse if problem.sink is None else sink.join(out, lse, problem.sink)


def _without_sink(problem: Problem, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`added` stands for mask and score: (b or 1, h_q or 1, s_q, s_k), added to the scaled scores."""
    causal = added is None and not _sees_all(problem)
    # Query heads find their key heads themselves.
    result, lse = _forward(problem.q, problem.k, problem.v, 0.0, causal, attn_mask=added, scale=problem.scale)
    out = problem.out if problem.out is not None else empty_like_rows(problem.q, problem.v.shape[3])
    same = problem.out is None and result.stride() == out.stride()
    return result if same else out.copy_(result), lse.contiguous()


def forward_with_added(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The forward with a tensor that the kernel adds to the scores, a mask or a bias, where that is cached and the
    fastest; else None.

    The kernel adds -inf where our tiles replace a score: a score that is not finite gives NaN, in the LSE too. A row
    that sees nothing has an LSE of 0. The answer is None where an LSE is one of these, whatever made it so.
    """
    if problem.q.dtype != torch.float32 or not _plain(problem):
        return None
    tiling = None if problem.score is not None else tiling_of(problem)
    if tiling is not None:
        added = Worker(problem, tiling).additive_mask()
    else:
        added = score_mods.bias(problem) if problem.mask is None else None
    if added is None or added.shape[2:] != (problem.q.shape[2], problem.k.shape[2]):
        return None
    out, lse = _without_sink(problem, added)
    if bool(lse.all()) and math.isfinite(lse.sum().item()):
        return _with_sink(problem, out, lse)
    if tiling is not None:
        tiling.visited = 0.0  # from now on the tiles run this mask at once
    return None


def backward(problem: Problem, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # The kernel's formula holds with any lse and out that belong together, a sink's included.
    def members(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, problem.group))

    amx = problem.q.dtype == torch.bfloat16 and hardware.cpu_bf16() == "amx"
    compute = torch.bfloat16 if amx else torch.float32
    q, dout, out = (members(x.to(compute)) for x in (problem.q, saved.dout, saved.out))
    k, v, lse = problem.k.to(compute), problem.v.to(compute), members(saved.lse)
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (problem.q, problem.k, problem.v))
    sums: list[Tensor] = []
    for member in range(problem.group):
        tensors = dout[:, :, member], q[:, :, member], k, v, out[:, :, member], lse[:, :, member]
        dq_member, *more = _backward(*tensors, 0.0, not _sees_all(problem), scale=problem.scale)
        members(dq)[:, :, member] = dq_member
        if not sums:  # those of several heads stay in float32 until all are in
            sums = more if problem.group == 1 else [x.float() for x in more]
        else:
            sums = [total.add_(x) for total, x in zip(sums, more, strict=True)]
    delta = saved.lse if problem.sink is None else sink.delta(saved)
    return dq, dk.copy_(sums[0]), dv.copy_(sums[1]), sink.gradient(problem, saved, delta)
