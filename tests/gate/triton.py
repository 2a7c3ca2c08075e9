"""The Triton kernels: each config row, compiled from stand-in tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from saccade.backends.configs import table
from saccade.backends.device import descale, distance_tables
from saccade.backends.device.arguments import common_arguments
from saccade.backends.device.key_lists import ListArgs
from saccade.backends.device.records import TensorArgs, runtime_int
from saccade.backends.triton import launch, listed_launch
from saccade.backends.triton.config import config, formula, kernels, key
from saccade.backends.triton.listed_kernel import Inverted, Unions, listed_dq_kernel
from saccade.call import Call
from saccade.call.spec import Spec
from tests.gate import fit, shared, triton_others
from tests.gate.rows import GPU, GateRow, device_mask, warmed
from tests.gate.shared import SHARED

DROPOUT_SPILL = 96
"""What 3.6 spills with dropout, whose numbers need registers."""
RANGES_SPILL = 1400
"""What sums over sequences cost: those of the sequences before leave the registers, outside of the loops over rows."""
DRAFTS_SPILL = 96
"""What a loop for tiles inside of the core costs beside one for the others, whose mask has parts. Not timed."""
BIAS_SPILL = 250
"""What a bias of every score costs dk and dv: 312 and more on 3.9, where loads of 16 bits spilled 452. Not timed."""
OTHER_SPILL = 40
"""What the forward of d 64 spills on sm120, where others spill nothing. Not timed."""
LISTED_SPILL = 64
"""What gradients of gathered rows' keys spill: 40 at d 128."""
QUANTIZE = (
    "16bit d128/128 quantize block", "16bit d64/64 quantize block packed e5m2", "16bit d128/128 quantize head grouped",
    "16bit d128/128 quantize block grouped shifted", "16bit d128/128 quantize block centred rotated",
    "16bit d256/256 quantize block grouped shifted rotated", "32bit d256/256 quantize head rotated",
    "16bit d128/128 quantize block keys_first", "16bit d128/128 largest head", "16bit d128/128 largest tensor rotated",
    "16bit d128/128 quantize block grouped", "16bit d256/256 quantize block", "32bit d128/128 quantize block rotated",
    "16bit d128/128 quantize block rotated", "16bit d128/128 quantize block grouped rotated",
    "16bit d128/128 quantize head grouped rotated", "16bit d128/128 parts", "16bit d256/256 mean rotated",
)  # fmt: skip
"""A kernel, and what a call has: see `triton_others.quantize`."""
WIDE_ROWS = "dk 16bit d512/512 ranges", "dv 16bit d512/512 masked dropout", "dk 16bit d64/512 packed"
EIGHT_BITS = (
    "d64/64 full", "d128/128 masked", "d256/256 full", "d128/128 masked blocks", "d128/128 full wide",
    "d64/32 causal wide", "d64/64 full wide relative_bias", "d512/512 masked",
)  # fmt: skip
LISTED = "union", "listed", "listed_dq", "listed_dkdv"
TOKENS = "token_keys", "token_weights", "token_dq", "token_parts", "token_sums"
MAX_SCORES = "forward 16bit d128/128 masked", "paged 16bit d128/128 decode", "paged 16bit d128/128 merge"

OTHERS = (
    "triton dq 16bit d64/64 masked sm80",
    "triton forward 16bit d256/256 masked sm89",
    "triton dkdv 16bit d256/256 masked sm120",
    "triton dkdv 16bit d128/128 masked gfx942",
)
"""A row of each other architecture: what did not fit or spilled there most."""
SCORED_ROWS = "d128/128 masked alibi", "d64/64 full relative_bias"
"""Scores that are linear, and scores that are one number beyond a table's reach."""


def configs() -> Iterator[str]:
    """Every row of the table, then formulas where the table is silent."""
    yield from (row for row in table(GPU) if row.startswith("triton "))
    silent = Spec("fp32", 256, mask="causal"), Spec("bf16", 32), *(Spec(dtype, 512) for dtype in ("bf16", "fp32"))
    for spec in silent:
        yield from (key(kernel, spec) for kernel in kernels(spec) if key(kernel, spec) not in table(GPU))
    yield from OTHERS


def features() -> Iterator[str]:
    """What a call may have besides."""
    yield from (f"triton dkdv 16bit d128/128 {edges}" for edges in ("packed", "ranges", "listed", "selected"))
    yield "triton order 16bit d128/128 packed"
    yield from (f"triton {name} 16bit d128/128 full" for name in ("sink", "results", "copy", "delta"))
    yield from (f"triton {name} 16bit d128/128 interval" for name in ("hulls", "visits"))
    yield "triton forward 16bit d128/128 full sinks"
    yield "triton captured_gradients 16bit d128/128 packed relative_bias"
    yield from (f"triton {name} 16bit d64/64 full one_distance" for name in ("captured_gradients", "bias_sums"))
    yield from (f"triton {name} 16bit d128/128 masked bias" for name in ("forward", "dkdv", "dq", "captured_gradients"))
    yield from (f"triton {name} 16bit {words}" for name in ("forward", "dkdv", "dq") for words in SCORED_ROWS)
    yield from (f"triton row_totals 16bit {words} relative_bias" for words in ("d128/128 packed", "d256/256 masked"))
    lists = (name for name in SHARED if name.endswith(("states", "list", "mark", "ranks")))
    yield from (f"triton {name} 16bit d128/128 listed" for name in lists)
    of_keys = "key_table", "tile_states", "packed_tile_states"
    yield from (f"triton {name} 16bit d128/128 selected" for name in of_keys)
    for size in ("16bit d128/128", "16bit d256/256", "32bit d64/64"):
        yield from (f"triton {name} {size} few grouped" for name in LISTED[1:])
    yield "triton union 16bit d128/128 few grouped"
    yield "triton listed 16bit d128/128 keys grouped"
    yield from (f"triton {name} 16bit d576/512" for name in TOKENS)
    yield from (f"triton {name} 16bit d96/40" for name in TOKENS[1:4])
    yield f"{key('dkdv', Spec('bf16', 128, mask='causal'))} dropout"
    yield from (f"triton paged 16bit d128/128 {word}" for word in (*triton_others.ROWS, "append", "slots"))
    yield from (f"triton paged 16bit d576/512 {word} latent" for word in triton_others.LATENT)
    yield from (f"triton {words} max_scores" for words in MAX_SCORES)
    yield "triton forward 16bit d75/1 listed dropout"
    yield from (f"triton paged {size} d512/512 {word}" for size in ("8bit", "16bit") for word in ("decode", "fixed"))
    yield from (f"triton {name} 16bit d512/512 relative_bias" for name in ("captured_gradients", "row_totals"))
    yield from (f"triton {words}" for words in WIDE_ROWS)
    yield from (f"triton paged 8bit d128/128 {word}" for word in (*triton_others.ROWS[:4], "append", "slots"))
    yield "triton paged 8bit d64/32 prompt"
    yield "triton paged 8bit d16/16 few"
    yield from (f"triton forward 8bit {words}" for words in EIGHT_BITS)
    yield from (f"triton quantize {words}" for words in QUANTIZE)
    yield from (
        f"triton {name} {size} d128/128" for name in ("rank_sums", "spread_rows") for size in ("16bit", "32bit")
    )


def combinations() -> Iterator[str]:
    """The formulas' tiles on other architectures, besides those of `configs`: these kernels have their features one
    beside the other."""
    for word in fit.SHARED:
        for kernel in ("forward", "dkdv", "dq"):
            rows = (f"triton {kernel} 16bit d{d}/{d} masked {word}" for d in (64, 128, 256))
            yield from (row for row in rows if row not in OTHERS)


def compiled(name: str) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that the row allows itself."""
    row = GateRow.of(name)
    if row.kernel == "quantize":
        return triton_others.quantize(row.words[0], row.d, row.dtype, row.words[1:]), 0
    if row.kernel == "rank_sums":
        return triton_others.rank_sums(row.dtype, row.d), 0
    if row.kernel == "spread_rows":
        return triton_others.spread_rows(row.dtype, row.d), 0
    if row.kernel in TOKENS:
        return triton_others.tokens(row.kernel, row.d, row.d_v, row.dtype), 0
    if row.kernel == "paged":
        word, *features = row.words
        if word in ("append", "slots"):
            return triton_others.append(row.d, row.d_v, row.dtype, by_slot=word == "slots"), 0
        latent = "latent" in features
        kernel = triton_others.paged(word, row.d, row.d_v, row.dtype, "max_scores" in features, latent)
        spill = DRAFTS_SPILL if word.startswith("drafts") else 0
        return kernel, triton_others.LATENT[word] if latent else spill
    call = row.call()
    if row.kernel in SHARED:
        return shared.compiled(row.kernel, call), 0
    q, k, v, rows = call.q, call.k, call.v, torch.empty(1, 2, 512)
    if row.kernel in LISTED:
        return _listed(row.kernel, call), LISTED_SPILL * (row.kernel == "listed_dkdv")
    top = rows if "max_scores" in row.words else None
    out = v if v.element_size() > 1 else v.to(torch.bfloat16)
    outputs = {
        "forward": (out, rows, top, call.sink, descale.device_args(call)),
        "dkdv": (v, k, v, rows),
        "dk": (v, k, None, rows),
        "dv": (v, None, v, rows),
        "dq": (v, q, rows, None),
    }[row.kernel]
    tensors = (TensorArgs.of(x) if isinstance(x, torch.Tensor) and x.dim() == 4 else x for x in (q, k, v, *outputs))
    other = row.words[-1] in fit.SHARED
    tile = (
        formula(row.kernel, replace(call.spec, device=row.words[-1])) if other else config(row.kernel, call.spec, GPU)
    )
    arguments = common_arguments(call, device_mask(call), distances=distance_tables.empty(call))
    kernel = warmed(launch.prepare(row.kernel, call, tile), (*tensors, *arguments))
    more = RANGES_SPILL if "ranges" in row.words else 0 if call.dropout is None else DROPOUT_SPILL
    return kernel, tile.spill + more + BIAS_SPILL * ("bias" in row.words) + OTHER_SPILL * other


def _listed(kernel: str, call: Call) -> Any:
    """A kernel that gathers the keys of lists."""
    work, numbers, rows = (
        listed_launch.Work.of(call, {}),
        torch.empty(16, dtype=torch.int32),
        torch.empty(call.q.shape[:3]),
    )
    lists, common = ListArgs.of(work.mask, call), work.common(None)
    unions = Unions(numbers, numbers, numbers, runtime_int(16)) if work.tile.entries else None
    q, k, v = (TensorArgs.of(x) for x in (call.q, call.k, call.v))
    out, by_rows = TensorArgs.of(call.empty_out()), (lists, unions, *common)
    if kernel == "union":
        assert unions is not None
        return warmed(*work.union(unions, lists, common))
    if kernel == "listed":
        return warmed(*listed_launch.forward_launch(work, call.empty_out(), rows, None, by_rows))
    if kernel == "listed_dq":
        return warmed(work.launch(listed_dq_kernel, q, out), (q, k, v, out, q, rows, *by_rows))
    inverted = Inverted(numbers, numbers, *map(runtime_int, (0, 8)))
    return warmed(*listed_launch.keys_launch(work, (q, k, v, out, k, v, rows), inverted, common))
