"""PyTorch's own CPU kernel, where it expresses the call and is the fastest way.

Seen at 1x8x4096x64 on two cores, this kernel against our tiles, in ms: fp32 forward 169 against 230 (AVX512); bf16
forward 47 against 100 and backward 200 against 240 on a CPU with AMX, forward 173 against 70 on one with AVX512-BF16
alone, 309 against 1150 without either. There its own bf16 backward takes 1766, and 850 on operands made float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saccade import hardware
from saccade.backends import Saved
from saccade.backends.cpu import reads, sink
from saccade.backends.cpu.grid import Grid
from saccade.layouts import empty_like_rows
from saccade.masks import Window
from saccade.problem import Problem

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def runs_forward(problem: Problem) -> bool:
    dtype = problem.q.dtype
    half = dtype == torch.bfloat16 and hardware.cpu_bf16() != "avx512_bf16"
    return (half or dtype in (torch.float32, torch.float16)) and _expresses(problem)


def runs_backward(problem: Problem, saved: Saved) -> bool:
    # Rows that are NaN or see nothing are the tiles'.
    return saved.dlse is None and runs_forward(problem) and bool(saved.lse.isfinite().all())


def _expresses(problem: Problem) -> bool:
    q, k = problem.q, problem.k
    # Its causal mask is aligned top-left, and is -inf before the scale multiplies it.
    causal = problem.mask is not None and problem.mask.kind == "causal" and q.shape[2] == k.shape[2]
    plain = (causal and problem.scale > 0) or _sees_all(problem)
    return plain and problem.score is None and _expressible(problem)


def _expressible(problem: Problem) -> bool:
    """Whatever its mask and score are."""
    q, k, v = problem.q, problem.k, problem.v
    return (
        problem.dropout is None
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
    out, lse = _without_sink(problem)
    if not bool(lse.all()) and bool(((lse == 0) & (out == 0).all(-1)).any()):
        return None
    return _with_sink(problem, out, lse)


def _with_sink(problem: Problem, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse if problem.sink is None else sink.join(out, lse, problem.sink)


def _without_sink(problem: Problem, plus: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`plus` takes the place of mask and score: (b or 1, h_q or 1, s_q, s_k), added to the scaled scores."""
    causal = plus is None and not _sees_all(problem)
    # Query heads find their key heads themselves.
    found, lse = _forward(problem.q, problem.k, problem.v, 0.0, causal, attn_mask=plus, scale=problem.scale)
    out = problem.out if problem.out is not None else empty_like_rows(problem.q, problem.v.shape[3])
    same = problem.out is None and found.stride() == out.stride()
    return found if same else out.copy_(found), lse.contiguous()


def added(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The forward with a tensor that the kernel adds to the scores, what a mask hides or a bias, where that is known
    and the fastest; else None.

    The kernel adds -inf where our tiles replace a score: a score that is not finite gives NaN, in the LSE too. A row
    that sees nothing has an LSE of 0. The answer is None where an LSE is one of these, whatever made it so.
    """
    if problem.q.dtype != torch.float32 or not _expressible(problem):
        return None
    if problem.score is None:
        grid = Grid.of(problem)
        tensor = grid.added()
    else:
        grid, tensor = None, reads.bias(problem) if problem.mask is None else None
    if tensor is None or tensor.shape[2:] != (problem.q.shape[2], problem.k.shape[2]):
        return None
    out, lse = _without_sink(problem, tensor)
    if bool(lse.all()) and math.isfinite(lse.sum().item()):
        return _with_sink(problem, out, lse)
    if grid is not None:
        grid.cut.visited = 0.0  # the tiles are to be asked at once from now on
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
