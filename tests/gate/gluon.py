"""The Gluon kernels: each schedule, compiled from stand-in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton

from saccade.backends.configs import table
from saccade.backends.device import distance_tables
from saccade.backends.device.scores import weight
from saccade.backends.hopper.forward import launch, load, transpose
from saccade.backends.hopper.forward.config import THREE_CONSUMERS, TWO_CONSUMERS, forward_config, key
from saccade.call.call import ArrivalArgs, Arrivals
from saccade.call.descale import EIGHT_BITS
from saccade.call.spec import Spec
from tests.gate import gluon_backward, gluon_latent
from tests.gate.rows import DROPPED, GPU, SCORED, GateRow, device_mask, warmed

PACKED_SPILL = 180
"""Bytes that packed sequences may spill besides: 8 on Triton 3.6, and up to 316 on 3.9, of the loader's numbers."""
LISTED_SPILL = 52
"""Bytes that the place in a block list costs: 52 in Triton 3.6, none of them in a loop."""
PAGED_SPILL = 24
"""Bytes that pages cost: 24 in Triton 3.6, of the loader's numbers and the epilogue's, none of them in a loop."""
EIGHT_BIT_SPILL, WIDE_MASKED_SPILL = 600, 220
"""Bytes that 8-bit operands spill besides on other Tritons than 3.6, and, with masks at d 256, besides these: on 3.9 up
to 432, five loads in a loop's step, and 1020. None was timed there (notes/fp8.md)."""
_DIMS = (64, 64), (128, 128), (256, 256), (192, 128)


def configs() -> Iterator[str]:
    """Every row of the table, then formulas where the table is silent."""
    yield from (row for row in table(GPU) if row.startswith("gluon "))
    dtypes = "bf16", "fp8_e4m3"
    silent = (key(Spec(word, d, d_v, mask=mask)) for word in dtypes for d, d_v in _DIMS for mask in ("none", "causal"))
    yield from (row for row in silent if row not in table(GPU))
    yield from gluon_backward.configs()


def features() -> Iterator[str]:
    """What a call may have besides."""
    yield from (
        f"gluon forward 16bit d128/128 {edges}" for edges in ("causal", "packed", "listed", "selected", "interval")
    )
    yield from (f"gluon forward 16bit d{d}/{d} masked padded" for d in (128, 256))
    yield from (f"gluon forward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[:1])
    yield from (f"gluon forward 16bit {words}" for words in ("d64/64 full relative_bias", "d128/128 causal bias"))
    yield from (f"gluon forward 16bit d{d}/{d} {edges}" for d, edges in DROPPED[:1])
    yield from (f"gluon forward 16bit d128/128 {words}" for words in ("masked max_scores", "causal paged split"))
    yield "gluon forward 16bit d64/64 causal alibi paged"
    yield "gluon forward 16bit d64/64 causal sinks"
    yield from (f"gluon forward 8bit d128/128 {words}" for words in ("causal packed", "full blocks", "causal paged"))
    yield "gluon transpose 8bit d128/128 full"
    yield "gluon forward 16bit d128/128 causal packed arriving"
    yield from (f"gluon forward 16bit {words}" for words in ("d96/96 full", "d96/96 full short", "d64/64 causal short"))
    yield from gluon_latent.features()
    yield from gluon_backward.features()


def combinations() -> Iterator[str]:
    """Several of these in one call."""
    yield from (f"gluon forward 16bit d{d}/{d} {edges} {word}" for d, edges, word in SCORED[1:])
    yield from (f"gluon forward 8bit d128/128 {words}" for words in ("full alibi blocks", "listed packed blocks"))
    yield "gluon transpose 8bit d128/128 full packed"
    yield from (
        f"gluon forward 16bit d128/128 {words}"
        for words in ("listed packed", "listed paged packed", "causal paged packed tail")
    )
    yield from gluon_latent.combinations()
    yield from gluon_backward.combinations()


def compiled(name: str) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that the row allows itself."""
    row = GateRow.of(name)
    if row.kernel == "latent":
        return gluon_latent.compiled(row)
    if row.kernel not in ("forward", "transpose"):
        return gluon_backward.compiled(name)
    call = row.call()
    if row.kernel == "transpose":
        kernel, arguments = transpose.transpose_launch(call, {}, transpose.empty(call, call.v.device))
        return warmed(kernel, arguments), 0
    packed, paged = "packed" in row.words, "paged" in row.words
    out = torch.empty(*call.q.shape[:3], row.d_v, dtype=call.out_dtype)
    if "tail" in row.words:  # of the caller's, whose rows after the last sequence stay
        call = call.replace(out=out)
    lse, counter = torch.empty(1, 2, 512), torch.empty(2, dtype=torch.int32)
    arrivals = None
    if "arriving" in row.words:
        arrivals = Arrivals(ArrivalArgs(counter, torch.empty(3, 2, dtype=torch.int32), counter), lambda: None)
    top, table = lse if "max_scores" in row.words else None, counter if packed else None
    captured = launch.captured_rows(call)
    score = launch.score_args(call, distance_tables.empty(call), captured)
    config = forward_config(call.spec, GPU, "tile" if captured else weight(call, score))
    if "short" in row.words:
        config = TWO_CONSUMERS if row.d <= 64 else THREE_CONSUMERS
    mask = launch.mask_args(call, {}, config) if paged else device_mask(call)
    parts = load.Parts.of(torch.empty(2, *out.shape)) if "split" in row.words else None
    arguments = launch.arguments(call, out, lse, top, counter, table, mask, score, parts, captured, arrivals)
    forward = launch.prepare(call, out, config, 1, captured, arrivals is not None)
    spill = LISTED_SPILL if row.words[0] in ("listed", "selected") else config.spill
    operands = launch.operands(call.q, call.k, call.v, out, captured)
    compiled = warmed(forward, operands, arguments, call.scale)
    spill += PACKED_SPILL * packed + PAGED_SPILL * paged
    eight_bits = row.dtype in EIGHT_BITS and not triton.__version__.startswith("3.6")
    wide = row.d > 192 and row.words[0] == "masked"
    return compiled, spill + (EIGHT_BIT_SPILL + WIDE_MASKED_SPILL * wide) * eight_bits
