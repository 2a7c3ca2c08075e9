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


def run_forward(problem: Call, lse: bool) -> Outputs:
    if problem.layout.ragged_keys:
        return packed.forward(problem, lse, _forward)
    if problem.layout.has_pages:
        return paged.forward(problem, lse)
    if problem.descale is None:
        return _forward(problem, lse)
    out, row_lse, top = _forward(problem, lse)
    return out.to(problem.out_dtype), row_lse, top


def run_backward(problem: Call, saved: Saved) -> Gradients:
    if problem.layout.ragged_keys:
        return packed.backward(problem, saved, _backward)
    return _backward(problem, saved)


def _forward(problem: Call, lse: bool) -> Outputs:
    """Of dense operands; the result of 8-bit ones is float32."""
    if problem.descale is not None:
        problem = problem.dequantized()
    if not problem.max_scores and (result := sdpa.forward(problem)) is not None:
        return *result, None
    return tiled.forward(problem, lse)


def _backward(problem: Call, saved: Saved) -> Gradients:
    if sdpa.runs_backward(problem, saved):
        return *sdpa.backward(problem, saved), ()
    return tiled.backward(problem, saved)
