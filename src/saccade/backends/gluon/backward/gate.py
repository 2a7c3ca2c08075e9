"""The backward kernels as the compile gate sees them, compiled from stand-in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from saccade.backends import Saved
from saccade.backends.device import block_lists, sequences
from saccade.backends.device.dropout import DROPPED, stand_in
from saccade.backends.device.scores import SCORED, score_of
from saccade.backends.gluon.backward.launch import arguments, options, workspace
from saccade.backends.gluon.backward.plan import BackwardConfig, BackwardPlan
from saccade.backends.gluon.tma_launch import descriptor
from saccade.layouts import Dense
from saccade.problem import Problem

ALLOWED = {
    "gluon backward 16bit d64/64 full": 32,
    "gluon backward 16bit d64/64 masked": 52,
    "gluon backward 16bit d64/64 queued": 44,
    "gluon backward 16bit d64/64 full dropout": 288,  # 108 in 3.6, but 428 in 3.9
    "gluon backward 16bit d64/64 masked relative_bias": 460,
    "gluon backward 16bit d128/128 masked": 16,
    "gluon backward 16bit d128/128 queued": 16,
    "gluon backward 16bit d128/128 packed": 152,  # 44 in 3.6, but 292 in 3.9
    "gluon backward 16bit d128/128 listed": 40,
    "gluon backward 16bit d128/128 listed packed": 256,  # 24 in 3.6, but 396 in 3.9
    "gluon backward 16bit d128/128 packed dropout": 472,  # 224 in 3.6, but 612 in 3.9
    "gluon backward 16bit d256/256 listed": 12,
    "gluon backward 16bit d256/256 queued": 8,
    "gluon backward 16bit d256/256 masked dropout": 208,
}
"""Bytes that rows may spill: what Triton 3.6 leaves; at d = 256, and without score and dropout, outside of the loops
over steps or where these have the mask."""


SCORE_SPILL = 192
"""The same of rows with a score function, whose values need registers that the products leave few of."""


def configs() -> Iterator[str]:
    """Every kernel for each width of its tiles; the main one without and with a mask, and adding to dq in order."""
    for dims in ("d64/64", "d128/128", "d256/256"):
        yield from (f"gluon backward 16bit {dims} {edges}" for edges in ("full", "masked", "queued"))
    # One width of those that need few registers: CI has little time.
    yield from (f"gluon {name} 16bit d128/128 queued" for name in ("preprocess", "rank", "postprocess"))
    yield "gluon backward 16bit d192/128 masked"


def features() -> Iterator[str]:
    """What a call may have besides."""
    yield from (f"gluon backward 16bit d128/128 {edges}" for edges in ("packed", "listed"))
    yield from (f"gluon backward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[:1])
    yield from (f"gluon backward 16bit d{d}/{d} {edges}" for d, edges in DROPPED[1:])


def combinations() -> Iterator[str]:
    """Several of these in one call."""
    yield from (f"gluon backward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[1:])
    yield from (f"gluon backward 16bit d128/128 {edges}" for edges in ("listed packed", "packed dropout"))


def compiled(row: str) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that the row allows itself."""
    _, name, _, dims, edges, *words = row.split()
    score = [word for word in words if word not in ("dropout", "packed")]
    d, d_v = map(int, dims.removeprefix("d").split("/"))
    q, k, v, out = (torch.empty(1, 2, 512, n, dtype=torch.bfloat16) for n in (d, d, d_v, d_v))
    mask = block_lists.mask_of(edges)
    deterministic = edges == "queued"
    layout = sequences.stand_in() if "packed" in (edges, *words) else Dense()
    dropout = stand_in(q.device) if "dropout" in words else None
    problem = Problem(q, k, v, None, mask, score_of(score, q), layout, 1.0, deterministic, dropout)
    config = BackwardConfig.of(d, d_v)
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    plan = BackwardPlan.of(problem, out, out, gradients, 1, config)
    saved = Saved(out, torch.empty(1, 2, 512), out, torch.empty(1, 2, 512))
    record = block_lists.stand_in(problem)
    spans = sequences.spans(problem)
    counter = torch.zeros(2, dtype=torch.int32) if config.stays else None
    space = *workspace(plan, q.device, record, spans), counter
    calls = arguments(problem, plan, saved, gradients, space, record, spans)
    launches = zip(plan.kernels, calls, plan.fixed, strict=True)
    names = f"{name}_kernel", f"wide_{name}_kernel"
    kernel, (operands, rest), fixed = next(x for x in launches if x[0].__name__ in names)
    call = *map(descriptor, operands, plan.shapes), *rest
    return kernel.warmup(*call, **fixed, **options(kernel), grid=(1,)), ALLOWED.get(row, SCORE_SPILL if words else 0)
