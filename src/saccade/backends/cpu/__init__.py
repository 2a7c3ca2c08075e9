"""Attention on a CPU: tiles of plain PyTorch operations, and PyTorch's own kernel where that is faster."""

from __future__ import annotations

from dataclasses import replace

from saccade.backends import ANY_SCORE, Gradients, Outputs, Saved, Support
from saccade.backends.cpu import packed, paged, sdpa, tiled
from saccade.backends.cpu.tiling import TILE_ELEMENTS
from saccade.call import Call
from saccade.masks import KINDS as MASKS
from saccade.spec import Spec

SUPPORT = Support(
    devices=("cpu",),
    dtypes=("fp16", "bf16", "fp32", "fp64", "fp8_e4m3", "fp8_e5m2"),
    kv=("fp8_e4m3", "fp8_e5m2"),
    layouts=("dense", "padded", "packed", "ranges", "paged"),
    masks=MASKS,
    scores=(ANY_SCORE,),
    flags=("sink", "dropout", "deterministic", "max_scores", "offsets", "block_scales", "latent", "aligned"),
    max_d=1 << 20,
)
GRADIENT = replace(
    SUPPORT, layouts=("dense", "padded", "packed", "ranges"), dtypes=("fp16", "bf16", "fp32", "fp64"), kv=()
)


def obstacle() -> str | None:
    return None


def workspace(spec: Spec) -> str:
    return f"a few tiles of scores, at most {4 * 4 * TILE_ELEMENTS >> 20} MB for each thread"


def run_forward(call: Call, lse: bool) -> Outputs:
    if call.layout.ragged_keys:
        return packed.forward(call, lse, _forward)
    if call.layout.has_pages:
        return paged.forward(call, lse)
    if call.descale is None:
        return _forward(call, lse)
    out, row_lse, top = _forward(call, lse)
    return out.to(call.out_dtype), row_lse, top


def run_backward(call: Call, saved: Saved) -> Gradients:
    if call.layout.ragged_keys:
        return packed.backward(call, saved, _backward)
    return _backward(call, saved)


def _forward(call: Call, lse: bool) -> Outputs:
    """Of dense operands; the result of 8-bit ones is float32."""
    if call.descale is not None:
        call = call.dequantized()
    if not call.max_scores and (result := sdpa.forward(call)) is not None:
        return *result, None
    return tiled.forward(call, lse)


def _backward(call: Call, saved: Saved) -> Gradients:
    if sdpa.runs_backward(call, saved):
        return *sdpa.backward(call, saved), ()
    return tiled.backward(call, saved)
