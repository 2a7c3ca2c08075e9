"""PyTorch's own CPU kernel, where it expresses the call and is the fastest way.

Seen at 1x8x4096x64 on two cores, this kernel against our tiles, in ms: fp32 forward 169 against 230 (AVX512); bf16
forward 47 against 100 and backward 200 against 240 on a CPU with AMX, forward 173 against 70 on one with AVX512-BF16
alone, 309 against 1150 without either. There its own bf16 backward takes 1766, and 850 on operands made float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade import hardware
from saccade.backends import Saved
from saccade.backends.cpu import sink
from saccade.layouts import empty_like_rows
from saccade.masks import Window
from saccade.problem import Problem

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def runs_forward(problem: Problem) -> bool:
    dtype = problem.q.dtype
    half = dtype == torch.bfloat16 and hardware.cpu_bf16() != "avx512_bf16"
    return (half or dtype in (torch.float32, torch.float16)) and _expresses(problem)


def runs_backward(problem: Problem, saved: Saved) -> bool:
    # Rows that are NaN or see nothing are the tiles'.
    return saved.dlse is None and runs_forward(problem) and bool(saved.lse.isfinite().all())


def _expresses(problem: Problem) -> bool:
    q, k, v = problem.q, problem.k, problem.v
    # Its causal mask is aligned top-left, and is -inf before the scale multiplies it.
    causal = problem.mask is not None and problem.mask.kind == "causal" and q.shape[2] == k.shape[2]
    plain = (causal and problem.scale > 0) or _sees_all(problem)
    return (
        plain
        and problem.score is None
        and problem.dropout is None
        and not problem.layout.records
        and k.shape[3] == v.shape[3]
        and min(q.numel(), k.numel()) > 0
    )


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
    out = problem.empty_out()
    lse = torch.empty(problem.q.shape[:3], dtype=problem.lse_dtype())
    q, outs, lses = (x.unflatten(1, (-1, problem.group)) for x in (problem.q, out, lse))
    for member in range(problem.group):  # k and v are read as they are, not repeated
        found, found_lse = _forward(
            q[:, :, member], problem.k, problem.v, 0.0, not _sees_all(problem), scale=problem.scale
        )
        lses[:, :, member] = found_lse
        if problem.group == 1 and problem.out is None and found.stride() == out.stride():
            out = found
        else:
            outs[:, :, member] = found
    if not bool(lse.all()) and bool(((lse == 0) & (out == 0).all(-1)).any()):
        return None
    if problem.sink is not None:
        lse = sink.join(out, lse, problem.sink)
    return out, lse


def backward(problem: Problem, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # The kernel's formula holds with any lse and out that belong together, a sink's included.
    def members(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, problem.group))

    amx = problem.q.dtype == torch.bfloat16 and hardware.cpu_bf16() == "amx"
    compute = torch.bfloat16 if amx else torch.float32
    q, dout, out = (members(x.to(compute)) for x in (problem.q, saved.dout, saved.out))
    k, v, lse = problem.k.to(compute), problem.v.to(compute), members(saved.lse)
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (problem.q, problem.k, problem.v))
    dk_sum: Any = None
    dv_sum: Any = None
    for member in range(problem.group):
        tensors = dout[:, :, member], q[:, :, member], k, v, out[:, :, member], lse[:, :, member]
        found = _backward(*tensors, 0.0, not _sees_all(problem), scale=problem.scale)
        members(dq)[:, :, member] = found[0]
        # Several heads' sums stay in float32 until all are in.
        dk_sum = found[1] if problem.group == 1 else found[1].float() if dk_sum is None else dk_sum.add_(found[1])
        dv_sum = found[2] if problem.group == 1 else found[2].float() if dv_sum is None else dv_sum.add_(found[2])
    delta = saved.lse if problem.sink is None else sink.delta(saved)
    return dq, dk.copy_(dk_sum), dv.copy_(dv_sum), sink.gradient(problem, saved, delta)
