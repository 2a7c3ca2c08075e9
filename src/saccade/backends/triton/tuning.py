"""Candidates for the tile tables, and how long each one takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton.testing
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.triton import launch
from saccade.backends.triton.config import Config, block_d
from saccade.problem import Problem
from saccade.spec import Spec

SHARED_BYTES = 228 << 10
"""What the largest GPU has for one program; a candidate that needs more on a smaller one fails and is passed over."""


def candidates(kernel: str, spec: Spec) -> Iterator[Config]:
    """Tiles worth a try: operands fit shared memory, accumulators fit the registers of their warps."""
    size = 4 if spec.dtype == "fp32" else 2
    d, d_v = block_d(spec.d), block_d(spec.d_v)
    for block_q in (32, 64, 128):
        for block_k in (32, 64, 128):
            for warps in (4, 8):
                for stages in (1, 2, 3, 4):
                    streamed = block_k if kernel != "keys" else block_q
                    resident = block_q if kernel != "keys" else block_k
                    scores = block_q * block_k * (1 if kernel == "forward" else 2)
                    sums = {"forward": block_q * d_v, "rows": block_q * d, "keys": block_k * (d + d_v)}[kernel]
                    shared = size * (d + d_v) * (streamed * stages + (0 if kernel == "forward" else resident))
                    registers = (scores + sums) / (warps * 32)
                    if shared <= SHARED_BYTES and 32 <= registers <= 230 and (kernel != "forward" or block_q >= 64):
                        yield Config(block_q, block_k, warps, stages)


def milliseconds(kernel: str, config: Config, problem: Problem, dout: Tensor) -> float:
    """The median time of the forward, or of the whole backward, with this Config for this kernel."""
    if kernel == "forward":
        return triton.testing.do_bench(lambda: launch.forward(problem, {kernel: config}), return_mode="median")
    out, lse = launch.forward(problem)
    saved = Saved(dout, None, out, lse)
    return triton.testing.do_bench(lambda: launch.backward(problem, saved, {kernel: config}), return_mode="median")


def compile_only(kernel: str, config: Config, problem: Problem) -> str | None:
    """Fills Triton's cache for one candidate; says why it cannot run, if it cannot."""
    try:
        out, lse = launch.forward(problem, {kernel: config})
        if kernel != "forward":
            launch.backward(problem, Saved(torch.ones_like(out), None, out, lse), {kernel: config})
        torch.cuda.synchronize()
    except Exception as problem_found:  # a candidate may fail in any stage of the compiler; the others still count
        return f"{type(problem_found).__name__}: {problem_found}".splitlines()[0]
    return None
