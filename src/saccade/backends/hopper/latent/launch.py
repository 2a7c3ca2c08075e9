"""From a Call to the launches of latent attention: the schedule, the parts, their merge."""

# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Outputs
from saccade.backends.device import masks, positions, scores
from saccade.backends.device.gradients import padded
from saccade.backends.device.launch import Launch, cached_launch, multiprocessors, nothing_seen, on_device, per_row
from saccade.backends.device.records import FLAGS, TensorArgs, runtime_int
from saccade.backends.hopper.forward import load
from saccade.backends.hopper.forward.launch import grouped, score_args
from saccade.backends.hopper.latent.kernel import LatentShape, latent_kernel
from saccade.backends.hopper.latent.load import Schedule, gathers, merge_kernel, schedule_kernel
from saccade.backends.hopper.tma_launch import OPTIONS, TMALaunch, shape_of
from saccade.call import Call, aligned

BLOCK_K = 64


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
    def of(call: Call, processors: int) -> Cut:
        h_k, s_q, group = call.k.shape[1], call.q.shape[2], call.group

        def packs(rows: int) -> tuple[int, int]:
            return -(-group // (64 // rows)), -(-s_q // rows)

        rows = min((1, 2, 4, 8, 16, 32, 64), key=lambda rows: packs(rows)[0] * packs(rows)[1])
        tiles = h_k * packs(rows)[0] * packs(rows)[1]
        return Cut(rows, packs(rows)[1], tiles, max(1, processors // tiles))


def forward(call: Call, launches: Launches, lse: bool = True) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse (b, h_q, s_q)."""
    layout = call.layout
    if not aligned(call.q):  # which the Spec of a cache leaves open
        call = call.replace(q=padded(launches, call.q))
    q = call.q
    out, row_lse = call.empty_out(), per_row(call, lse)
    if not layout.sequences or not layout.capacity(call.k.shape[2]):
        return out.zero_(), nothing_seen(row_lse), None
    if not out.numel():
        return out, row_lse, None
    with on_device(q):
        cut = launches.get("latent cut")
        if cut is None:
            cut = launches["latent cut"] = Cut.of(call, multiprocessors(q.device))
        score, mask, spans = score_args(call), masks.device_args(call), positions.spans(call)
        target = TensorArgs.of(out)
        sink = None if call.sink is None else call.sink.contiguous()
        # What is compiled for, and the Call's key does not hold.
        key = "latent", lse, target.unit.value, score.identity.value, score.linear.value, score.large_scores.value
        launch = launches.get(key)
        if launch is None:
            launch = launches[key] = prepare(call, cut)
        index = q.device.index
        schedule, parts = empty_schedule(call, cut), empty_parts(call, cut)
        lengths = q.shape[2], layout.capacity(call.k.shape[2])
        scheduling(launches)(index, (schedule, *spans, mask, *lengths))
        results = target, row_lse, *parts, sink
        launch(index, (q, call.k), arguments(call, results, schedule, spans, mask, score), call.scale)
        tensors = *parts, target, row_lse, sink, schedule, *q.shape[1:3]
        merging(call, launches, cut, (lse, target.unit.value))(index, tensors)
    return out, row_lse, None


def empty_schedule(call: Call, cut: Cut) -> Schedule:
    b = call.layout.sequences
    pointers = torch.empty(2 * b + 1, dtype=torch.int32, device=call.q.device)
    return Schedule(pointers, pointers[b + 1 :], runtime_int(b), runtime_int(cut.lines))


def empty_parts(call: Call, cut: Cut) -> tuple[Tensor, Tensor]:
    """Memory for the parts' out and LSE."""
    rows = call.layout.sequences + cut.lines, cut.tiles, 64
    make = {"dtype": torch.float32, "device": call.q.device}
    return torch.empty(*rows, call.v.shape[3], **make), torch.empty(rows, **make)


def scheduling(launches: Launches) -> Launch:
    return cached_launch(launches, "latent schedule", lambda: Launch(schedule_kernel, (1, 1, 1), (BLOCK_K,)))


def merging(call: Call, launches: Launches, cut: Cut, key: tuple[Any, ...] = ()) -> Launch:
    """`key`: what is compiled for besides, and the Call's key does not hold."""

    def make() -> Launch:
        # Many sequences have few parts each, whose rows are small programs; few sequences have as many as lines.
        warps, chunk = (1, 4) if 2 * call.layout.sequences >= cut.lines else (4, 16)
        constants = call.group, cut.rows, call.v.shape[3], 1 << (cut.lines - 1).bit_length(), chunk
        return Launch(merge_kernel, (call.q.shape[:3].numel(), 1, 1), constants, warps, stages=1)

    return cached_launch(launches, ("latent merge", *key), make)


def arguments(
    call: Call,
    results: tuple[Any, ...],
    schedule: Schedule,
    spans: tuple[Any, Any],
    mask: masks.DeviceMask,
    score: scores.DeviceScore,
) -> tuple[Any, ...]:
    """What the kernel takes between its descriptors and the numbers; results: out, lse, the parts of both, the sink."""
    block_sparse = call.mask is not None and call.mask.block_sparse
    cache = TensorArgs.of(call.k) if gathers(call.k.shape[2]) else None
    return (
        cache,
        *results,
        *spans,
        load.device_args(call),
        schedule,
        mask._replace(all_tiles=FLAGS[block_sparse]),
        score,
    )


def prepare(call: Call, cut: Cut) -> TMALaunch:
    """The launch of all calls of the Call's key."""
    q, k = call.q, call.k
    box = load.box_rows(k.shape[2], BLOCK_K)
    shapes = [
        shape_of(grouped(q, call.group), (1, 1, 64 // cut.rows, cut.rows, 64)),
        shape_of(k, (1, 1, box, 64)),
    ]
    capacity = call.layout.capacity(k.shape[2])
    numbers = cut.tiles, cut.blocks, k.shape[1], call.group, q.shape[2], capacity
    sizes = {"ROWS": cut.rows, "REGISTERS": 232, "LOADER_REGISTERS": 48}
    constants = {"shape": LatentShape(**{name: tl.constexpr(value) for name, value in sizes.items()})}
    return TMALaunch(latent_kernel, (cut.tiles * cut.lines, 1, 1), shapes, numbers, constants, OPTIONS)
