"""Attention on a CPU: tiles of plain PyTorch operations, and PyTorch's own kernel where that is faster."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from saccade.backends import EVERYTHING, Gradients, Launches, Outputs, Saved
from saccade.backends.cpu import paged, sdpa, tiled
from saccade.backends.cpu.tiling import TILE_ELEMENTS
from saccade.backends.key_lists import listed_keys, lists_and_rest
from saccade.call import Call
from saccade.call.spec import Spec
from saccade.layouts import empty_like_rows

SUPPORT = replace(EVERYTHING, devices=("cpu",))
GRADIENT = replace(
    SUPPORT, layouts=("dense", "padded", "packed", "ranges"), dtypes=("fp16", "bf16", "fp32", "fp64"), kv=()
)


def obstacle() -> str | None:
    return None


def workspace(spec: Spec) -> str:
    return f"a few tiles of scores, at most {4 * 4 * TILE_ELEMENTS >> 20} MB for each thread"


def run_forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    if call.layout.ragged_keys:
        return _packed_forward(call, lse)
    if call.layout.has_pages:
        return paged.forward(call, lse)
    if call.descale is None:
        return _forward(call, lse)
    out, row_lse, top = _forward(call, lse)
    return out.to(call.out_dtype), row_lse, top


def run_backward(call: Call, launches: Launches, saved: Saved) -> Gradients:
    if call.layout.ragged_keys:
        return _packed_backward(call, saved)
    return _backward(call, saved)


def _forward(call: Call, lse: bool) -> Outputs:
    """Of dense operands; the result of 8-bit ones is float32."""
    if call.descale is not None:
        call = call.dequantized()
    if call.mask is not None and call.mask.bounds_per_row:
        call = _without_unlisted(call)
    if not call.max_scores and (result := sdpa.forward(call)) is not None:
        return *result, None
    return tiled.forward(call, lse)


def _backward(call: Call, saved: Saved) -> Gradients:
    if call.mask is not None and call.mask.bounds_per_row:
        call = _without_unlisted(call)
    if sdpa.runs_backward(call, saved):
        return *sdpa.backward(call, saved), ()
    return tiled.backward(call, saved)


def _without_unlisted(call: Call) -> Call:
    """The call with zeros for what is not finite in keys that no list names: a tile multiplies it by zero."""
    if not lists_and_rest(call.mask)[0]:
        return call
    if math.isfinite((call.k.sum(dtype=call.lse_dtype()) + call.v.sum(dtype=call.lse_dtype())).item()):
        return call
    if (named := listed_keys(call)) is None:
        return call
    k, v = (torch.where(named[..., None], x, 0) for x in (call.k, call.v))
    return call.replace(k=k, v=v)


def _packed_forward(call: Call, lse: bool) -> Outputs:
    """Runs packed sequences one after the other, each by the path that is fastest for it. Returns out (1, h_q, t_q,
    d_v) and, if requested, lse and max_scores (1, h_q, t_q)."""
    out = call.empty_out()
    row_lse = torch.full(call.q.shape[:3], -torch.inf, dtype=call.lse_dtype(), device="cpu")
    top = torch.full_like(row_lse, -torch.inf)
    end = 0
    for rows, _, sequence in call.sequences():
        end = rows.stop
        out[:, :, rows], *parts = _forward(sequence, lse)
        for whole, part in zip((row_lse, top), parts, strict=True):
            if part is not None:
                whole[:, :, rows] = part
    out[:, :, end:] = 0
    return out, row_lse if lse else None, top if call.max_scores else None


def _packed_backward(call: Call, saved: Saved) -> Gradients:
    """dq, dk and dv, and the sums over all sequences of dsink and of captured tensors' gradients. Where sequences may
    share keys, dk and dv are sums too, in the order of the sequences."""
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (call.q, call.k, call.v))
    shared = call.layout.starts_k is not None
    shares = tuple(torch.zeros_like(x, dtype=call.lse_dtype()) for x in (dk, dv)) if shared else ()
    captures = call.score.tensors if call.score else ()
    pairs = zip(captures, saved.wanted, strict=True)
    sums = [torch.zeros(x.shape, dtype=call.lse_dtype(), device="cpu") if want else None for x, want in pairs]
    end_q = end_k = 0
    for rows, keys, sequence in call.sequences():
        end_q, end_k = rows.stop, keys.stop
        dlse = None if saved.dlse is None else saved.dlse[:, :, rows]
        part = Saved(saved.dout[:, :, rows], dlse, saved.out[:, :, rows], saved.lse[:, :, rows], saved.wanted)
        dq[:, :, rows], *more_keys, _, of_captures = _backward(sequence, part)
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
    dsink = tiled.gradient(call, saved, tiled.delta(saved)) if call.sink is not None else None
    return dq, dk, dv, dsink, [None if x is None else x.to(y.dtype) for x, y in zip(sums, captures, strict=True)]
