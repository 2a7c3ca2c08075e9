"""From a Problem to the launches of latent attention: the schedule, the parts, their merge."""

# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Outputs
from saccade.backends.device import masks, sequences
from saccade.backends.device.launch import Launch, cached_launch, multiprocessors, nothing_seen, on_device, per_row
from saccade.backends.device.records import FLAGS, TensorArgs, runtime_int
from saccade.backends.gluon.forward import paged_tma
from saccade.backends.gluon.forward.launch import grouped, score_record
from saccade.backends.gluon.latent.kernel import LatentShape, latent_kernel
from saccade.backends.gluon.latent.load import gathers
from saccade.backends.gluon.latent.schedule import Schedule, merge_kernel, schedule_kernel
from saccade.backends.gluon.tma_launch import OPTIONS, TMALaunch, shape_of
from saccade.problem import Problem

BLOCK_K = 64
CHUNK = 8
"""Parts that the merge adds up at a time."""


@dataclass(frozen=True)
class Cut:
    """How a call is cut into programs, from shapes alone."""

    rows: int
    """of a tile's 64 rows those of one head"""
    blocks: int
    """of a head's rows"""
    tiles: int
    """of rows, of one sequence"""
    lines: int
    """programs for each of them, for the keys of all sequences together"""

    @staticmethod
    def of(problem: Problem, processors: int) -> Cut:
        h_k, s_q, group = problem.k.shape[1], problem.q.shape[2], problem.group

        def packs(rows: int) -> tuple[int, int]:
            return -(-group // (64 // rows)), -(-s_q // rows)

        rows = min((1, 2, 4, 8, 16, 32, 64), key=lambda rows: packs(rows)[0] * packs(rows)[1])
        tiles = h_k * packs(rows)[0] * packs(rows)[1]
        return Cut(rows, packs(rows)[1], tiles, max(1, processors // tiles))


def forward(problem: Problem, lse: bool = True, order: int = 1) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse (b, h_q, s_q)."""
    q, layout = problem.q, problem.layout
    out, row_lse = problem.empty_out(), per_row(problem, lse)
    if not layout.sequences or not layout.capacity(problem.k.shape[2]):
        return out.zero_(), nothing_seen(row_lse), None
    if not out.numel():
        return out, row_lse, None
    with on_device(q):
        cut = Cut.of(problem, multiprocessors(q.device))
        key = "latent", order, score_key(problem)
        launch = problem.launches.get(key)
        if launch is None:
            launch = problem.launches[key] = prepare(problem, cut, order)
        schedule = empty_schedule(problem, cut)
        used_q, used_k = sequences.spans(problem)
        lengths = q.shape[2], layout.capacity(problem.k.shape[2])
        index = q.device.index
        scheduling(problem)(index, (schedule, used_q, used_k, masks.record(problem), *lengths))
        parts, part_lse = empty_parts(problem, cut)
        launch(index, (q, problem.k), arguments(problem, parts, part_lse, schedule), problem.scale)
        sink = None if problem.sink is None else problem.sink.contiguous()
        merging(problem, cut)(index, (parts, part_lse, TensorArgs.of(out), row_lse, sink, schedule, *q.shape[1:3]))
    return out, row_lse, None


def score_key(problem: Problem) -> tuple[bool, ...]:
    """What is compiled for, and the Problem's key does not hold."""
    score = score_record(problem)
    return score.identity.value, score.linear.value, score.vast.value


def empty_schedule(problem: Problem, cut: Cut) -> Schedule:
    b = problem.layout.sequences
    places = torch.empty(2 * b + 1, dtype=torch.int32, device=problem.q.device)
    return Schedule(places, places[b + 1 :], runtime_int(b), runtime_int(cut.lines))


def empty_parts(problem: Problem, cut: Cut) -> tuple[Tensor, Tensor]:
    """Memory for the parts' out and LSE."""
    rows = problem.layout.sequences + cut.lines, cut.tiles, 64
    make = {"dtype": torch.float32, "device": problem.q.device}
    return torch.empty(*rows, problem.v.shape[3], **make), torch.empty(rows, **make)


def scheduling(problem: Problem) -> Launch:
    return cached_launch(problem, "latent schedule", lambda: Launch(schedule_kernel, (1, 1, 1), (BLOCK_K,)))


def merging(problem: Problem, cut: Cut) -> Launch:
    splits = 1 << (cut.lines - 1).bit_length()
    constants = problem.group, cut.rows, problem.v.shape[3], splits, CHUNK
    grid = problem.q.shape[:3].numel(), 1, 1
    return cached_launch(problem, "latent merge", lambda: Launch(merge_kernel, grid, constants, stages=1))


def arguments(problem: Problem, parts: Tensor, part_lse: Tensor, schedule: Schedule) -> tuple[Any, ...]:
    """What the kernel takes between its descriptors and the numbers."""
    listed = problem.mask is not None and problem.mask.listed
    mask = masks.record(problem)._replace(all_tiles=FLAGS[listed])
    pages = paged_tma.record(problem)
    cache = TensorArgs.of(problem.k) if gathers(problem.k.shape[2]) else None
    return cache, parts, part_lse, *sequences.spans(problem), pages, schedule, (mask, score_record(problem))


def prepare(problem: Problem, cut: Cut, order: int = 1) -> TMALaunch:
    """The launch of all calls of the Problem's key."""
    q, k = problem.q, problem.k
    box = paged_tma.box_rows(k.shape[2], BLOCK_K)
    shapes = [
        shape_of(grouped(q, problem.group), (1, 1, 64 // cut.rows, cut.rows, 64)),
        shape_of(k, (1, 1, box, 64)),
    ]
    capacity = problem.layout.capacity(k.shape[2])
    numbers = cut.tiles, cut.blocks, k.shape[1], problem.group, q.shape[2], capacity
    sizes = {"ROWS": cut.rows, "ORDER": order, "REGISTERS": 232, "LOADER_REGISTERS": 48}
    constants = {"shape": LatentShape(**{name: tl.constexpr(value) for name, value in sizes.items()})}
    return TMALaunch(latent_kernel, (cut.tiles * cut.lines, 1, 1), shapes, numbers, constants, OPTIONS)
