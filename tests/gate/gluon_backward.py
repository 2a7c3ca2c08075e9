"""The backward kernels, compiled from stand-in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from saccade.backends import Saved
from saccade.backends.device import distance_tables, positions
from saccade.backends.hopper.backward.kernel import backward_kernel
from saccade.backends.hopper.backward.launch import arguments, bias_sums_of, captured_of, workspace
from saccade.backends.hopper.backward.plan import BackwardConfig, BackwardPlan, is_plain
from tests.gate.rows import DROPPED, SCORED, GateRow, device_mask, warmed

ALLOWED = {
    "gluon backward 16bit d64/64 full": 32,
    "gluon backward 16bit d64/64 masked": 44,
    "gluon backward 16bit d64/64 queued": 48,
    "gluon backward 16bit d64/64 full dropout": 288,  # 108 in 3.6, but 428 in 3.9
    "gluon backward 16bit d64/64 masked relative_bias": 460,
    "gluon backward 16bit d64/64 full relative_bias": 244,
    "gluon backward 16bit d64/64 full bias": 8,
    "gluon backward 16bit d64/64 full text": 16,
    "gluon backward 16bit d64/64 causal text": 24,
    "gluon backward 16bit d128/128 causal bias": 60,
    "gluon backward 16bit d128/128 queued": 4,
    "gluon backward 16bit d128/128 packed": 164,  # 48 in 3.6, but 304 in 3.9: the producer's, at the start of an item
    "gluon backward 16bit d128/128 listed": 132,
    "gluon backward 16bit d128/128 selected": 608,  # 512 in 3.9: of words of bits, where the mask is asked; not timed
    "gluon backward 16bit d128/128 interval": 24,
    "gluon backward 16bit d128/128 listed packed": 256,  # 24 in 3.6, but 396 in 3.9
    "gluon backward 16bit d128/128 packed dropout": 472,  # 224 in 3.6, but 612 in 3.9
    "gluon backward 16bit d192/128 full": 24,  # three loads of a step, as of the others of these head dims
    "gluon backward 16bit d192/128 masked": 48,
    "gluon backward 16bit d192/128 packed": 52,
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
    yield from (f"gluon backward 16bit d192/128 {edges}" for edges in ("full", "masked", "queued"))


def features() -> Iterator[str]:
    """What a call may have besides."""
    yield from (f"gluon backward 16bit d128/128 {edges}" for edges in ("packed", "listed", "selected", "interval"))
    yield from (f"gluon backward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[:1])
    yield from (f"gluon backward 16bit {words}" for words in ("d64/64 full relative_bias", "d64/64 full bias"))
    yield from (f"gluon {name} 16bit d128/128 causal bias" for name in ("backward", "clear"))
    yield from (f"gluon backward 16bit d{d}/{d} {edges}" for d, edges in DROPPED[1:])
    yield "gluon backward 16bit d96/96 full"
    yield from (f"gluon backward 16bit d64/64 {edges} text" for edges in ("full", "causal"))
    yield "gluon backward 16bit d192/128 packed"
    yield "gluon backward 16bit d64/64 full temperatures"
    yield "gluon share_sums 16bit d192/128 grouped"


def combinations() -> Iterator[str]:
    """Several of these in one call."""
    yield from (f"gluon backward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[1:])
    yield from (f"gluon backward 16bit d128/128 {edges}" for edges in ("listed packed", "packed dropout"))


def compiled(name: str) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that the row allows itself."""
    row = GateRow.of(name)
    call = row.call()
    q, k, v = call.q, call.k, call.v
    out, lse = torch.empty_like(v), torch.empty(1, 2, 512)
    saved = Saved(out, lse, out, lse, (True,))
    captured = captured_of(call, saved)
    config = BackwardConfig.of(row.d, row.d_v, captured is not None, is_plain(call))
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    processors = 132 if row.kernel == "share_sums" else 1  # so many that a group is divided
    plan = BackwardPlan.of(call, out, out, gradients, processors, config, captured)
    mask, spans = device_mask(call, by_keys=True), positions.spans(call)
    counter = torch.zeros(2, dtype=torch.int32) if config.stays else None
    space = *workspace(call, {}, plan, mask, spans, gradients[0]), counter, lse
    tables = distance_tables.empty(call)
    biases = bias_sums_of(call, saved)
    written = *gradients, *gradients[1:]
    all_given = arguments(call, plan, saved, written, space, mask, spans, tables, biases, captured)
    names = f"{row.kernel}_kernel", f"wide_{row.kernel}_kernel"
    launch, given = next(x for x in zip(plan.launches, all_given, strict=True) if x[0].kernel.__name__ in names)
    kernel = warmed(launch, *given)
    if launch.kernel is backward_kernel:
        promised = config.shared_bytes(call, captured is not None, plan.tight)
        assert kernel.metadata.shared <= promised, f"{kernel.metadata.shared} bytes of shared memory, not {promised}"
    return kernel, ALLOWED.get(name, SCORE_SPILL if row.words[1:] else 0)
