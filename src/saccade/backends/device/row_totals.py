"""Gradients of rows whose scores are so large that log(total) is lost in their LSE, for backends that have kernels.

Where all that a row sees scores -1e9, its weights are 1 / n, and its LSE is -1e9 too: exp(score - lse) is 1. Gradients
are linear in a row's p, dout and dlse together, so what p lacks is a factor of dout and dlse, and no kernel of a
backward has to know.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from saccade.backends import Launches, Saved
from saccade.backends.device.arguments import precision, tile_arguments
from saccade.backends.device.gradients import aligned_rows, specialised
from saccade.backends.device.launch import cached_launch, on_device
from saccade.backends.device.recompute import recompute_blocks, recompute_launch
from saccade.backends.device.records import TensorArgs
from saccade.backends.device.row_totals_kernel import row_totals_kernel
from saccade.call import Call
from saccade.layouts import empty_like_rows
from saccade.scores import Traced


def divide_gradients(call: Call, launches: Launches, saved: Saved, fast: bool = False) -> Saved:
    """dout and dlse divided by what the probabilities of their row add up to. Scores that no function changes, or that
    a softcap bounds, are not so large. `fast` is as `scores.record` says."""
    if not isinstance(call.score, Traced) or call.scoreless:
        return saved
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    divided = replace(
        saved,
        dout=empty_like_rows(saved.dout, saved.dout.shape[3]),
        dlse=None if dlse is None else torch.empty_like(dlse),
    )
    with on_device(call.q):
        operands = tensors(call, launches, replace(saved, dlse=dlse), divided)
        _, _, dout, weighted, *rows = operands[:6]
        key = "totals", fast, precision(), *specialised((dout, weighted), rows)
        launch = cached_launch(launches, key, lambda: recompute_launch(row_totals_kernel, call))
        arguments = tile_arguments(call, launches, recompute_blocks(call), fast=fast, reads=False)
        launch(call.q.device.index, (*operands, *arguments))
    return divided


def tensors(call: Call, launches: Launches, saved: Saved, divided: Saved) -> tuple[Any, ...]:
    """What the kernel takes before the common arguments."""
    operands = (aligned_rows(launches, x) for x in (call.q, call.k, saved.dout))
    sink = None if call.sink is None else call.sink.contiguous()
    return *operands, TensorArgs.of(divided.dout), saved.lse.contiguous(), saved.dlse, divided.dlse, sink
