"""Gradients of the tensors that a score function captures, for every backend that has kernels."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Saved
from saccade.backends.device import level_sums, positions, scores
from saccade.backends.device.arguments import precision, tile_arguments
from saccade.backends.device.captured_gradients_kernel import (
    as_integers,
    captured_gradients_kernel,
    in_any_order,
    largest,
    results_kernel,
)
from saccade.backends.device.gradients import aligned_rows, specialised
from saccade.backends.device.launch import Launch, cached_launch, on_device
from saccade.backends.device.level_sums import LevelSums
from saccade.backends.device.recompute import recompute_blocks, recompute_launch
from saccade.backends.device.records import runtime_int
from saccade.call import Call
from saccade.scores import Traced

BLOCK = 1024
"""Numbers of one program of `results_kernel`."""


def gradients(
    call: Call,
    launches: Launches,
    saved: Saved,
    fast: bool = False,
    levels: LevelSums | None = None,
    made: Mapping[int, Tensor] = MappingProxyType({}),
) -> Sequence[Tensor | None]:
    """Of each of the score's tensors, in its dtype, or None where it is not wanted. `fast` is as `scores.record` says;
    levels: what the main kernel has added up already; made: gradients that it has stored, by the tensors' numbers.

    A launch of its own: only calls that capture parameters pay for it. Where every score has an element of a tensor to
    itself, its gradient is stored there. Others add up: atomics add float32 sums in any order, and for a deterministic
    call a first launch computes the largest value, and a second one adds up integers, whose sum does not depend on the
    order.
    """
    score = call.score
    if not isinstance(score, Traced) or not any(saved.wanted):
        return [None] * len(saved.wanted)
    given = zip(saved.wanted, score.tensors, strict=True)
    wanted = [want and x.is_floating_point() and i not in made for i, (want, x) in enumerate(given)]
    if not any(wanted):
        return [made.get(i) for i in range(len(wanted))]
    single = alone(call, score, wanted) if levels is None else frozenset()
    own = {i: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for i, x in enumerate(score.tensors) if i in single}
    shared = [x for i, x in enumerate(score.tensors) if wanted[i] and i not in single]
    with on_device(call.q):
        launch = _accumulate(call, launches, saved, wanted, single, fast, levels)

        def accumulate(add: Any, sums: Sequence[Any]) -> None:
            rest = iter(sums)
            launch(add, [own[i] if i in single else next(rest) for i, want in enumerate(wanted) if want])

        many = len(score.program.reads) * call.q.shape[:3].numel() * call.k.shape[2]
        deterministic = call.deterministic and shared
        add_up = partial(_repeatable, many=many) if deterministic else _in_any_order
        sums = iter(add_up(launches, shared, accumulate))
    return [own[i] if i in single else next(sums) if want else made.get(i) for i, want in enumerate(wanted)]


def alone(call: Call, score: Traced, wanted: Sequence[bool]) -> frozenset[int]:
    """The tensors of which every score of the call has an element of its own."""
    if not positions.reached(call):
        return frozenset()
    one = {name for name, n in zip(("b", "h"), call.q.shape, strict=False) if n == 1}
    own = score.program.own_elements.items()
    return frozenset(i for i, names in own if wanted[i] and {"b", "h"} - {*names} <= one)


Accumulate = Callable[[Any, Sequence[Any]], None]
"""Runs the kernel, with the function that adds and the sums that it adds to."""


def _in_any_order(launches: Launches, captured: Sequence[Tensor], accumulate: Accumulate) -> list[Tensor]:
    sums = [torch.zeros(x.shape, device=x.device) for x in captured]
    accumulate(in_any_order, sums)
    return [x if x.dtype == t.dtype else _result(launches, x, t) for x, t in zip(sums, captured, strict=True)]


def _repeatable(launches: Launches, captured: Sequence[Tensor], accumulate: Accumulate, many: int) -> list[Tensor]:
    """`many`: more values than can meet in one place."""
    tops = torch.zeros(len(captured), dtype=torch.int32, device=captured[0].device).unbind()
    accumulate(largest, tops)
    # All of them, of the largest size, stay below 2^62.
    room = runtime_int(62 - math.ceil(math.log2(max(many, 1))))
    sums = [torch.zeros(x.shape, dtype=torch.int64, device=x.device) for x in captured]
    accumulate(as_integers, [(x, top, room) for x, top in zip(sums, tops, strict=True)])
    return [_result(launches, x, t, top, room) for x, t, top in zip(sums, captured, tops, strict=True)]


def _result(launches: Launches, sums: Tensor, captured: Tensor, top: Tensor | None = None, room: int = 0) -> Tensor:
    """The gradient of a captured tensor by its sums; `top` and `room` as `results_kernel` takes them."""
    made = torch.empty(captured.shape, dtype=captured.dtype, device=captured.device)
    if made.numel():
        results_launch(launches, made)(made.device.index, (made, sums, top, room, made.numel()))
    return made


def results_launch(launches: Launches, made: Tensor) -> Launch:
    grid = -(-made.numel() // BLOCK), 1, 1
    return cached_launch(launches, ("results", grid, made.dtype), lambda: Launch(results_kernel, grid, (BLOCK,)))


def _accumulate(
    call: Call,
    launches: Launches,
    saved: Saved,
    wanted: Sequence[bool],
    alone: frozenset[int],
    fast: bool,
    levels: LevelSums | None,
) -> Accumulate:
    if call.scoreless:
        return lambda add, sums: None
    blocks, operands = recompute_blocks(call), tensors(call, launches, saved)
    arguments = tile_arguments(call, launches, blocks, fast=fast)
    scatter = scores.scatter(call, wanted, alone, fast)
    near = (0, 0) if levels is None else (levels.block_q, levels.block_k)
    key = tuple(wanted), alone, fast, near, precision(), *specialised(operands[3:5], operands[5:])

    def accumulate(add: Any, sums: Sequence[Any]) -> None:
        constants = tl.constexpr(add), scatter, *map(tl.constexpr, near)
        make = partial(recompute_launch, captured_gradients_kernel, call, *constants)
        launch = cached_launch(launches, ("captured", add, *key), make)
        launch(call.q.device.index, (*operands, tuple(sums), *arguments))
        if levels is not None:
            make = partial(level_sums.launch, call, levels, add, wanted, fast)
            rest = cached_launch(launches, ("levels", *key), make)
            rest(call.q.device.index, level_sums.arguments(call, levels, sums))

    return accumulate


def tensors(call: Call, launches: Launches, saved: Saved) -> tuple[Any, ...]:
    """What the kernel takes before the sums."""
    operands = (aligned_rows(launches, x) for x in (call.q, call.k, call.v, saved.dout, saved.out))
    return *operands, saved.lse.contiguous(), None if saved.dlse is None else saved.dlse.contiguous()
