"""The kernels that backends share, compiled from stand-in tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton.language as tl

from saccade.backends import Saved
from saccade.backends.device import (
    bias_sums,
    block_lists,
    captured_gradients,
    distance_tables,
    masks,
    merge_kernel,
    positions,
    visits,
)
from saccade.backends.device.arguments import common_arguments
from saccade.backends.device.bias_sums import BiasSums
from saccade.backends.device.captured_gradients import captured_gradients_kernel, in_any_order
from saccade.backends.device.gradients import copy_launch, recompute_launch, sink_launch
from saccade.backends.device.key_lists import Tabulated, table_launch
from saccade.backends.device.launch import Launch
from saccade.backends.device.merge_kernel import row_totals_kernel
from saccade.backends.device.records import TensorArgs, runtime_int
from saccade.backends.device.scores import scatter
from saccade.backends.triton.backward_kernels import delta_kernel
from saccade.backends.triton.launch import DELTA_ROWS
from saccade.call import Call
from saccade.scores import Traced
from tests.gate.rows import PACKED, device_mask, warmed

NEVER = tl.constexpr(0), tl.constexpr(0)
"""No tiles of the kernel of captured tensors are passed over."""

SHARED = (
    "order", "captured_gradients", "bias_sums", "row_totals", "sink", "tile_states", "block_list",
    "packed_tile_states", "packed_block_list", "mark", "ranks", "results", "copy", "key_table", "delta", "hulls",
    "visits",
)  # fmt: skip
SMALL = "copy", "delta", "hulls", "visits"


def compiled(kernel: str, call: Call) -> Any:
    """One of the SHARED kernels, not run."""
    lse = torch.empty(call.q.shape[:3])
    if kernel in SMALL:
        return _small(kernel, call, lse)
    saved = Saved(call.v, lse, call.v, lse)
    distances = () if kernel == "row_totals" else distance_tables.empty(call)
    arguments = common_arguments(call, device_mask(call), distances=distances)
    if kernel == "order":
        tiles = torch.empty(9, 2, dtype=torch.int32)
        launch, arguments = positions.order_launch(call, {}, tiles, 0, 64)
    elif kernel == "captured_gradients":
        assert isinstance(call.score, Traced)
        sums = tuple(torch.empty(x.shape) for x in call.score.tensors)
        adding = scatter(call, [True] * len(sums))
        launch = recompute_launch(captured_gradients_kernel, call, tl.constexpr(in_any_order), adding, *NEVER)
        saved = replace(saved, dlse=None)
        arguments = *captured_gradients.tensors(call, {}, saved), sums, *arguments
    elif kernel == "bias_sums":
        biases = BiasSums(torch.empty(1, 2, 4, 2, 128), 128, 128)
        launch = bias_sums.launch(call, biases, in_any_order, [True], False)
        arguments = bias_sums.arguments(call, biases, [torch.empty(2, 1)])
    elif kernel == "row_totals":
        launch = recompute_launch(row_totals_kernel, call)
        arguments = *merge_kernel.tensors(call, {}, saved, saved), *arguments
    elif kernel == "sink":
        launch, arguments = sink_launch({}, torch.empty(2), lse, lse, 1.0, torch.empty(2))
    elif kernel == "key_table":
        mask = next(leaf for leaf in call.mask.leaves() if isinstance(leaf, Tabulated))  # pyright: ignore[reportOptionalMemberAccess]
        launch, arguments = table_launch(mask, call, {}, mask.table, 0)  # pyright: ignore[reportArgumentType]
    elif kernel == "results":
        launch, made = captured_gradients.results_launch({}, lse), lse.long()
        arguments = lse.bfloat16(), made, made[0, 0].int(), runtime_int(40), lse.numel()
    elif kernel in ("mark", "ranks"):
        index = torch.empty(1, 1, 4, 4, dtype=torch.int32)
        found = block_lists.BlockLists(index, index, *map(runtime_int, (1, 1, 1)))
        launch, arguments = block_lists.ranks_launches({}, index, found, index)[kernel == "ranks"]
    else:
        states, lists = torch.empty(1, 1, 8, 8, dtype=torch.uint8), torch.empty(1, 1, 4, 4, dtype=torch.int32)
        packed = kernel.startswith("packed")
        if packed:
            call = call.replace(layout=PACKED)
        table = lists if packed else None
        if kernel.endswith("states"):
            launch, arguments = block_lists.states_launch(call, {}, states, table)
        else:
            launch, arguments = block_lists.lists_launch(call, {}, states, lists, lists, (128, 128), packed, table)
    return warmed(launch, arguments)


def _small(kernel: str, call: Call, lse: torch.Tensor) -> Any:
    """One of the SMALL kernels."""
    if kernel == "copy":
        return warmed(*copy_launch({}, call.q, call.q))
    if kernel == "delta":
        rows, sizes = TensorArgs.of(call.v), (call.v.shape[3], DELTA_ROWS, call.v.shape[3])
        terms = torch.empty(*lse.shape, 2)
        return warmed(Launch(delta_kernel, (1, 1, 1), sizes), (rows, rows, None, lse, terms, None, *lse.shape[1:], 1.0))
    numbers, tail = torch.empty(4, 4, dtype=torch.int32), (*positions.spans(call), 512, 512, 4, 4)
    if kernel == "hulls":
        given = numbers, numbers, numbers, masks.device_args(call), *tail
        return warmed(Launch(visits.hulls_kernel, (1, 1, 1), (128,), warps=1), given)
    return warmed(Launch(visits.visits_kernel, (1, 1, 1), (visits.CHUNK,), warps=1), (numbers, numbers, *tail))
