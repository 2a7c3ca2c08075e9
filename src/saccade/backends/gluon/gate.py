"""The Gluon kernels as the compile gate sees them: each schedule, compiled from stand-in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from saccade.backends.device import block_lists, dropout, sequences
from saccade.backends.device.dropout import DROPPED, stand_in
from saccade.backends.device.records import Head
from saccade.backends.device.scores import SCORED, score_of, weight
from saccade.backends.gluon.backward import gate as backward_gate
from saccade.backends.gluon.forward import launch, paged_tma
from saccade.backends.gluon.forward.config import forward_config, key
from saccade.backends.gluon.forward.kernel import forward_kernel
from saccade.backends.gluon.tma_launch import OPTIONS
from saccade.configs import table
from saccade.layouts import Dense, Paged
from saccade.problem import Problem
from saccade.spec import Spec

GPU = "h200"
PACKED_SPILL = 180
"""Bytes that packed sequences may spill besides: 8 on Triton 3.6, and up to 316 on 3.9, of the loader's numbers."""
LISTED_SPILL = 52
"""Bytes that the place in a block list costs: 52 in Triton 3.6, none of them in a loop."""
PAGED_SPILL = 24
"""Bytes that pages cost: 24 in Triton 3.6, of the loader's numbers and the epilogue's, none of them in a loop."""
_DIMS = (64, 64), (128, 128), (256, 256), (192, 128)


def configs() -> Iterator[str]:
    """Every row of the table, then formulas where the table is silent."""
    yield from (row for row in table(GPU) if row.startswith("gluon "))
    silent = (key(Spec("bf16", d, d_v, mask=mask)) for d, d_v in _DIMS for mask in ("none", "causal"))
    yield from (row for row in silent if row not in table(GPU))
    yield from backward_gate.configs()


def features() -> Iterator[str]:
    """What a call may have besides."""
    yield from (f"gluon forward 16bit d128/128 {edges}" for edges in ("causal", "packed", "listed"))
    yield from (f"gluon forward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[:1])
    yield from (f"gluon forward 16bit d{d}/{d} {edges}" for d, edges in DROPPED[:1])
    yield from (f"gluon forward 16bit d128/128 {words}" for words in ("masked max_scores", "causal paged"))
    yield from backward_gate.features()


def combinations() -> Iterator[str]:
    """Several of these in one call."""
    yield from (f"gluon forward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[1:])
    yield from (f"gluon forward 16bit d128/128 {words}" for words in ("listed packed", "listed paged packed"))
    yield from backward_gate.combinations()


def _pages(packed: bool) -> Paged:
    """Two sequences, whose queries are end to end, or one of a batch."""
    offsets, b = (torch.zeros(3, dtype=torch.int32), 2) if packed else (None, 1)
    return Paged(torch.zeros(b, 32, dtype=torch.int32), torch.zeros(b, dtype=torch.int32), offsets)


def compiled(row: str) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that the row allows itself."""
    _, kernel, _, dims, edges, *words = row.split()
    packed, paged = "packed" in (edges, *words), "paged" in words
    score = [word for word in words if word not in ("dropout", "max_scores", "packed", "paged")]
    if kernel != "forward":
        return backward_gate.compiled(row)
    d, d_v = map(int, dims.removeprefix("d").split("/"))
    q, k, v = (torch.empty(1, 2, 512, n, dtype=torch.bfloat16) for n in (d, d, d_v))
    if paged:  # caches of pages of 16 rows
        k, v = (x.view(32, 2, 16, x.shape[3]) for x in (k, v))
    layout = _pages(packed) if paged else sequences.stand_in() if packed else Dense()
    drops = stand_in(q.device) if "dropout" in words else None
    problem = Problem(q, k, v, None, block_lists.mask_of(edges), score_of(score, q), layout, 1.0, dropout=drops)
    out = torch.empty(1, 2, 512, d_v, dtype=v.dtype)
    lse, counter = torch.empty(1, 2, 512), torch.empty(2, dtype=torch.int32)
    made = forward_config(problem.spec(), GPU, weight(problem.score))
    shapes, numbers, fixed, _ = launch.arguments(problem, out, made, processors=1)
    operands = zip((q, problem.k, problem.v, out), shapes, strict=True)
    descriptors = (TensorDescriptor(x, **shape) for x, shape in operands)
    mask = launch.mask_record(problem, made) if paged else block_lists.stand_in(problem)
    records = mask, launch.score_record(problem), dropout.record(problem.dropout)
    return forward_kernel.warmup(
        *descriptors,
        *(
            Head.of(out) if packed else None,
            lse,
            lse if "max_scores" in words else None,
            None,
            counter,
            *sequences.spans(problem, counter if packed else None),
            paged_tma.record(problem),
            *records,
            *numbers,
            problem.scale,
        ),
        **fixed,
        **OPTIONS,
        grid=(1,),
    ), (LISTED_SPILL if edges == "listed" else made.spill) + PACKED_SPILL * packed + PAGED_SPILL * paged
