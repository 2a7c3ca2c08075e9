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

from saccade.backends import Saved
from saccade.backends.device import block_lists, captured_gradients, scores, sequences
from saccade.backends.device.gradients import padded
from saccade.backends.device.launch import on_device, run
from saccade.backends.device.records import Rows
from saccade.backends.device.row_totals_kernel import row_totals_kernel
from saccade.layouts import Packed, empty_like_rows
from saccade.problem import ALIGNMENT, Problem, aligned
from saccade.scores import Traced


def settled(problem: Problem, saved: Saved, fast: bool = False) -> Saved:
    """dout and dlse divided by what the probabilities of their row add up to. Scores that no function changes, or that
    a softcap bounds, are not so large. `fast` is as `scores.record` says."""
    q, k = problem.q, problem.k
    layout = problem.layout
    packed = isinstance(layout, Packed)
    nothing = not q.numel() or not k.numel() or (isinstance(layout, Packed) and not layout.sequences)
    if not isinstance(problem.score, Traced) or nothing:
        return saved
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    made = replace(
        saved,
        dout=empty_like_rows(saved.dout, saved.dout.shape[3]),
        dlse=None if dlse is None else torch.empty_like(dlse),
    )
    block_q, options = captured_gradients.tile(problem)
    spans, blocks = sequences.spans(problem), q.shape[0] * -(-q.shape[2] // block_q)
    if packed:
        spans = sequences.spans(problem, sequences.table(problem, 0, block_q))
        blocks = sequences.slots(problem, 0, block_q)
    with on_device(q):
        records = *spans, block_lists.record(problem, block_q, options["BLOCK_K"]), scores.record(problem.score, fast)
        given = _arguments(problem, replace(saved, dlse=dlse), made)
        _launch(problem, (q.shape[1] * blocks, 1, 1), (*given, *records, *_numbers(problem)), options, fast)
    return made


def _launch(
    problem: Problem, grid: tuple[int, int, int], arguments: tuple[Any, ...], options: dict[str, Any], fast: bool
) -> None:
    dout, weighted, lse, dlse = arguments[2:6]
    # What Triton specialises for and the Problem's key does not hold: how dout and what belongs to rows lie.
    rows = (None if x is None else x.data_ptr() % ALIGNMENT for x in (lse, dlse))
    key = "totals", fast, *(x.value for y in (dout, weighted) for x in (y.unit, y.wide)), *rows, options["PRECISION"]
    found = problem.launches.get(key)
    if found is not None:
        compiled, fixed = found
        run(compiled, grid, problem.q.device.index, (*arguments, *fixed))
        return
    compiled = row_totals_kernel[grid](*arguments, **options)
    if compiled is not None:  # the interpreter compiles nothing
        fixed = tuple(value for name, value in options.items() if name not in ("num_warps", "num_stages"))
        problem.launches[key] = compiled, fixed


def _arguments(problem: Problem, saved: Saved, made: Saved) -> tuple[Any, ...]:
    operands = (problem.q, problem.k, saved.dout)
    rows = [*(Rows.of(x if aligned(x) else padded(x)) for x in operands), Rows.of(made.dout)]
    sink = None if problem.sink is None else problem.sink.contiguous()
    return *rows, saved.lse.contiguous(), saved.dlse, made.dlse, sink


def _numbers(problem: Problem) -> tuple[Any, ...]:
    return problem.q.shape[1], problem.q.shape[2], problem.k.shape[2], problem.scale


def compiled(problem: Problem) -> Any:
    """The kernel as the compile gate sees it."""
    lse = torch.empty(problem.q.shape[:3])
    saved = Saved(problem.v, lse, problem.v, lse)
    records = *sequences.spans(problem), block_lists.stand_in(problem), scores.record(problem.score)
    options = captured_gradients.tile(problem)[1]
    return row_totals_kernel.warmup(
        *_arguments(problem, saved, saved), *records, *_numbers(problem), **options, grid=(1,)
    )
