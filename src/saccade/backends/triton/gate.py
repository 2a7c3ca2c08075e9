"""The Triton kernels as the compile gate sees them: each config row, compiled from stand-in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from saccade.backends.device import block_lists, captured_gradients, row_totals, sequences
from saccade.backends.device.arguments import common_arguments
from saccade.backends.device.dropout import stand_in
from saccade.backends.device.records import Rows
from saccade.backends.device.scores import score_of
from saccade.backends.triton import append, launch, paged
from saccade.backends.triton.config import KERNELS, config, key
from saccade.configs import table
from saccade.layouts import Dense
from saccade.problem import Problem
from saccade.spec import Spec

GPU = "h200"
_OTHERS = {
    "order": sequences.compiled,
    "captured_gradients": captured_gradients.compiled,
    "row_totals": row_totals.compiled,
}
DROPOUT_SPILL = 96
"""What 3.6 spills with dropout, whose numbers need registers."""
MAX_SCORES = "forward 16bit d128/128 masked", "paged 16bit d128/128 decode", "paged 16bit d128/128 merge"
_DTYPES = {"16bit": torch.bfloat16, "32bit": torch.float32}


def configs() -> Iterator[str]:
    """Every row of the table, then formulas where the table is silent."""
    yield from (row for row in table(GPU) if row.startswith("triton "))
    silent = Spec("fp32", 256, mask="causal"), Spec("bf16", 32)
    for spec in silent:
        yield from (key(kernel, spec) for kernel in KERNELS if key(kernel, spec) not in table(GPU))


def features() -> Iterator[str]:
    """What a call may have besides."""
    yield from (f"triton dkdv 16bit d128/128 {edges}" for edges in ("packed", "listed"))
    yield "triton order 16bit d128/128 packed"
    yield "triton captured_gradients 16bit d128/128 packed relative_bias"
    yield from (f"triton row_totals 16bit {words} relative_bias" for words in ("d128/128 packed", "d256/256 masked"))
    yield from (f"triton {name} 16bit d128/128 listed" for name in block_lists.KERNELS)
    yield f"{key('dkdv', Spec('bf16', 128, mask='causal'))} dropout"
    yield from (f"triton paged 16bit d128/128 {word}" for word in (*paged.ROWS, "append"))
    yield from (f"triton {words} max_scores" for words in MAX_SCORES)


def combinations() -> Iterator[str]:
    """None: these kernels have their features one beside the other."""
    return iter(())


def compiled(row: str) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that the row allows itself."""
    _, kernel, size, dims, edges, *words = row.split()
    d, d_v = map(int, dims.removeprefix("d").split("/"))
    dtype = _DTYPES[size]
    if kernel == "paged":
        if edges == "append":
            return append.compiled(d, d_v, dtype), 0
        return paged.compiled(edges, d, d_v, dtype, "max_scores" in words), 0
    q, k, v = (torch.empty(1, 2, 512, n, dtype=dtype) for n in (d, d, d_v))
    layout = sequences.stand_in() if edges == "packed" else Dense()
    score = score_of([word for word in words if word not in ("dropout", "max_scores")], q)
    dropout = stand_in(q.device) if "dropout" in words else None
    problem = Problem(q, k, v, None, block_lists.mask_of(edges), score, layout, 1.0, dropout=dropout)
    if kernel in _OTHERS:
        return _OTHERS[kernel](problem), 0
    if kernel in block_lists.KERNELS:
        return block_lists.compiled(kernel, problem), 0
    rows = torch.empty(1, 2, 512)
    operands = Rows.of(q), Rows.of(k), Rows.of(v), Rows.of(torch.empty_like(v))
    outputs = {
        "forward": (rows, rows if "max_scores" in words else None, None),
        "dkdv": (Rows.of(torch.empty_like(k)), Rows.of(torch.empty_like(v)), rows, rows),
        "dq": (Rows.of(torch.empty_like(q)), rows, rows),
    }
    tile = config(kernel, problem.spec(), GPU)
    tensors = *operands, *outputs[kernel], *common_arguments(problem, block_lists.stand_in(problem))
    made = launch.prepare(kernel, problem, tile).warmup(tensors)
    return made, tile.spill + (DROPOUT_SPILL if "dropout" in words else 0)
