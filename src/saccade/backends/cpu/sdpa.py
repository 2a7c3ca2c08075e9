"""PyTorch's own CPU kernel of scaled_dot_product_attention, for calls that it runs and where it is the fastest way.

Measured at 1x8x4096x64 on two cores, this kernel against our tiles, in ms: fp32 forward 169 against 230 (AVX512); bf16
forward 47 against 100 and backward 200 against 240 on a CPU with AMX, forward 173 against 70 on one with AVX512-BF16
alone, 309 against 1150 without either. There its own bf16 backward takes 1766, and 850 on operands made float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.cpu import score_mods, tiled
from saccade.backends.cpu.tiling import Worker, tiling_of
from saccade.call import Call
from saccade.layouts import empty_like_rows
from saccade.masks import Window
from saccade.util import hardware

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def runs_forward(call: Call) -> bool:
    q, k, dtype = call.q, call.k, call.q.dtype
    half = dtype == torch.bfloat16 and hardware.cpu_bf16() != "avx512_bf16"
    if not (half or dtype in (torch.float32, torch.float16)) or call.score is not None or not _plain(call):
        return False
    # Its causal mask is aligned top-left, and is -inf before the scale multiplies it.
    causal = call.mask is not None and call.mask.kind == "causal" and q.shape[2] == k.shape[2]
    return (causal and call.scale > 0) or _sees_all(call)


def runs_backward(call: Call, saved: Saved) -> bool:
    # Rows that are NaN or see nothing are the tiles'.
    return saved.dlse is None and runs_forward(call) and bool(saved.lse.isfinite().all())


def _plain(call: Call) -> bool:
    """Whether the kernel runs the call, whatever its mask and score are."""
    q, k, v = call.q, call.k, call.v
    same_head_dims = k.shape[3] == v.shape[3]
    plain = not call.layout.tensors and not call.layout.positioned and call.dropout is None
    return plain and same_head_dims and min(q.numel(), k.numel()) > 0


def _sees_all(call: Call) -> bool:
    """Whether every row sees every key, where all of them are in use."""
    if call.mask is None:
        return True
    if not isinstance(call.mask, Window):
        return False
    left, right = call.mask.bounds
    return right >= call.q.shape[2] - 1 and left >= call.k.shape[2] - 1


def forward(call: Call) -> tuple[Tensor, Tensor] | None:
    """out and lse; None where the kernel does not run the call, or is not the fastest, or its result may be wrong.

    A mask or a bias is a tensor that the kernel adds to the scores: a score that is not finite, where our tiles replace
    it by -inf, gives NaN, in the LSE too. The kernel returns zeros and an LSE of 0 for a row that sees nothing, and for
    one that is NaN where its keys are fewer than a vector; without AVX512, it returns zeros for a score of +inf, with
    an LSE of +inf. So a row is kept where its LSE is finite, and is not 0 beside zeros, or beside the NaN of zero times
    what is not finite in v; the tiles work on all others.
    """
    if runs_forward(call):
        out, lse = _without_sink(call)
        if not (_finite(lse) and bool(lse.all())):
            wrong = ~lse.isfinite() | ((lse == 0) & ((out == 0) | out.isnan()).all(-1))
            if bool(wrong.any()):
                again, lse_again, _ = tiled.forward(call.replace(sink=None, out=None), lse=True)
                assert lse_again is not None
                out[wrong], lse[wrong] = again[wrong], lse_again[wrong]
    else:
        if (added := _added_tensor(call)) is None:
            return None
        out, lse = _without_sink(call, added)
        if not (_finite(lse) and bool(lse.all())):
            if call.score is None:
                tiling_of(call).visited = 0.0  # from now on the tiles run this mask at once
            return None
    return out, lse if call.sink is None else tiled.join(out, lse, call.sink)


def _finite(lse: Tensor) -> bool:
    """Whether all are; a sum that overflows says no too."""
    return math.isfinite(lse.sum().item())


def _added_tensor(call: Call) -> Tensor | None:
    """The mask or the bias of a call as a tensor (b or 1, h_q or 1, s_q, s_k), where the kernel is the fastest with it
    and it is cached."""
    if call.q.dtype != torch.float32 or not _plain(call):
        return None
    if call.score is None:
        return Worker(call, tiling_of(call)).additive_mask()
    added = score_mods.bias(call) if call.mask is None else None
    whole = added is not None and added.shape[2:] == (call.q.shape[2], call.k.shape[2])
    return added if whole else None


def _apart(x: Tensor) -> Tensor:
    """x, or a copy of one whose rows are not whole, or share a part with one another. PyTorch's products refuse some of
    these, and its kernel lays the result out in the order of q's strides: d must come last, so nothing ties with it."""
    _, _, s, d = x.stride()
    return x if x.stride().count(1) == 1 == d and (s == 0 or s >= x.shape[3]) else x.contiguous()


def _without_sink(call: Call, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
    causal = added is None and not _sees_all(call)
    # Query heads find their key heads themselves.
    q, k, v = call.q, call.k, call.v
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        q, k, v = map(_apart, (q, k, v))
    result, lse = _forward(q, k, v, 0.0, causal, attn_mask=added, scale=call.scale)
    if call.out is None and call.q.is_contiguous() and result.is_contiguous():
        return result, lse.contiguous()
    out = call.out if call.out is not None else empty_like_rows(call.q, call.v.shape[3])
    same = call.out is None and result.stride() == out.stride()
    return result if same else out.copy_(result), lse.contiguous()


def backward(call: Call, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    # The kernel's formula holds with any lse and out that belong together, a sink's included.
    def members(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, call.group))

    amx = call.q.dtype == torch.bfloat16 and hardware.cpu_bf16() == "amx"
    compute = torch.bfloat16 if amx else torch.float32

    q, dout, out = (members(_apart(x.to(compute))) for x in (call.q, saved.dout, saved.out))
    k, v, lse = _apart(call.k.to(compute)), _apart(call.v.to(compute)), members(saved.lse)
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (call.q, call.k, call.v))
    sums: list[Tensor] = []
    for member in range(call.group):
        tensors = dout[:, :, member], q[:, :, member], k, v, out[:, :, member], lse[:, :, member]
        dq_member, *more = _backward(*tensors, 0.0, not _sees_all(call), scale=call.scale)
        members(dq)[:, :, member] = dq_member
        if not sums:  # those of several heads stay in float32 until all are in
            sums = more if call.group == 1 else [x.float() for x in more]
        else:
            sums = [total.add_(x) for total, x in zip(sums, more, strict=True)]
    delta = saved.lse if call.sink is None else tiled.delta(saved)
    return dq, dk.copy_(sums[0]), dv.copy_(sums[1]), tiled.gradient(call, saved, delta)
