"""Launches latent attention for a Call: the kernel of the schedule, of the parts, and of their merge."""

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
from saccade.backends.device.key_lists import tabulated
from saccade.backends.device.launch import Launch, cached_launch, multiprocessors, nothing_seen, on_device, per_row
from saccade.backends.device.positions import spans_of
from saccade.backends.device.records import FLAGS, TensorArgs, runtime_int
from saccade.backends.device.slot_lists import SlotLists
from saccade.backends.hopper.forward import load
from saccade.backends.hopper.forward.launch import score_args
from saccade.backends.hopper.latent import limits
from saccade.backends.hopper.latent.kernel import LatentShape, latent_kernel
from saccade.backends.hopper.latent.load import Schedule, merge_kernel, schedule_kernel
from saccade.backends.hopper.tma_launch import OPTIONS, TMALaunch, shape_of
from saccade.call import Call, aligned
from saccade.layouts import SlotRows

BLOCK_K = 64


@dataclass(frozen=True)
class Cut:
    """How a call is divided into programs. It follows from shapes alone."""

    rows: int
    """of a tile's 64 rows those of one head"""
    blocks: int
    """of a head's rows"""
    tiles: int
    """of rows, of one sequence"""
    lines: int
    """programs for each of them, for the keys of all sequences together"""

    has_lists: bool
    """Each row, or group of rows, is a sequence, and has slots of its own."""
    sequences: int
    capacity: int
    """of keys, of a sequence"""

    @staticmethod
    def of(call: Call, processors: int, lists: SlotLists | None) -> Cut:
        h_k, s_q, group = call.k.shape[1], lists.rows if lists else call.q.shape[2], call.group

        def packs(rows: int) -> tuple[int, int]:
            return -(-group // (64 // rows)), -(-s_q // rows)

        rows = min((1, 2, 4, 8, 16, 32, 64), key=lambda rows: packs(rows)[0] * packs(rows)[1])
        rows = lists.rows if lists else rows
        tiles = h_k * packs(rows)[0] * packs(rows)[1]
        layout = call.layout
        keys = lists.table.shape if lists else (layout.sequences, layout.capacity(call.k.shape[2]))
        return Cut(rows, packs(rows)[1], tiles, max(1, processors // tiles), lists is not None, *keys)


def forward(call: Call, launches: Launches, lse: bool = True) -> Outputs:
    """Returns out (b, h_q, s_q, d_v), lse and max_scores (b, h_q, s_q). The last two are None if not requested."""
    layout = call.layout
    if not aligned(call.q):  # which the Spec of a cache leaves open
        call = call.replace(q=padded(launches, call.q))
    results = out, row_lse, top = call.empty_out(), per_row(call, lse), per_row(call, call.max_scores)
    if (layout.has_pages and not layout.sequences) or not layout.capacity(call.k.shape[2]) or not call.k.numel():
        return out.zero_(), nothing_seen(row_lse), nothing_seen(top)
    if not out.numel():
        return results
    with on_device(call.q):
        lists, cache, spans = None, call.k, positions.spans(call)
        if limits.has_lists(call):
            lists = SlotLists.of(call, launches, shares=True)
            cache, spans = lists.cache, (spans[0], spans_of(None, lists.used))
            call = call.replace(mask=None)
            if isinstance(layout, SlotRows):  # one batch row, in which rows are neighbours
                call, out = call.replace(q=call.q.transpose(0, 2)), out.transpose(0, 2)
        if cache.dtype == torch.uint8:  # words of records
            cache = cache.view(torch.int32)
        call, q = tabulated(call, launches), call.q
        cut = launches.get("latent cut")
        if cut is None:
            cut = launches["latent cut"] = Cut.of(call, multiprocessors(q.device), lists)
        block_sparse = call.mask is not None and call.mask.block_sparse
        score, mask = score_args(call), masks.device_args(call)._replace(all_tiles=FLAGS[block_sparse])
        target, rows = TensorArgs.of(out), [_of_rows(x, out.shape) for x in (row_lse, top)]
        sink = None if call.sink is None else call.sink.contiguous()
        # What is compiled for, and the Call's key does not hold.
        key = "latent", lse, target.unit.value, score.identity.value, score.linear.value, score.large_scores.value
        launch = launches.get(key)
        if launch is None:
            launch = launches[key] = prepare(call, cut, cache)
        index, schedule, parts = q.device.index, empty_schedule(call, cut), empty_parts(call, cut)
        sizes = (None, spans[1], mask, 1) if cut.has_lists else (*spans, mask, q.shape[2])
        scheduling(launches, cut)(index, (schedule, *sizes, cut.capacity))
        given = arguments(cache, (target, *rows, *parts, sink), schedule, spans, pages_of(call, lists), mask, score)
        launch(index, (q, cache), given, call.scale)
        if cut.lines > 1:
            tensors = *parts, target, *rows, sink, spans[0], schedule, *q.shape[1:3]
            merging(call, launches, cut, (lse, target.unit.value))(index, tensors)
    return results


def _of_rows(x: Tensor | None, shape: torch.Size) -> TensorArgs | None:
    """Returns the arguments of x, which has one number per row of an out of this shape, (b, h_q, s_q)."""
    if x is None:
        return None
    return TensorArgs.of((x if x.shape == shape[:3] else x.transpose(0, 2))[..., None])


def pages_of(call: Call, lists: SlotLists | None) -> load.Pages | None:
    """Returns the page table, which says where the keys of each sequence are."""
    return load.device_args(call) if lists is None else load.page_args(lists.table, lists.cache)


def empty_schedule(call: Call, cut: Cut) -> Schedule:
    b = cut.sequences
    pointers = torch.empty(3 * b + 2 + cut.lines, dtype=torch.int32, device=call.q.device)
    starts, firsts, tiles, lines_first = pointers.split([b + 1, b, b, cut.lines + 1])
    return Schedule(starts, firsts, tiles, lines_first, runtime_int(b), runtime_int(cut.lines))


def empty_parts(call: Call, cut: Cut) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns memory for the parts' out, LSE and largest scores."""
    rows = 2 * cut.lines, cut.tiles, 64
    make = {"dtype": torch.float32, "device": call.q.device}
    top = torch.empty(rows, **make) if call.max_scores else None
    return torch.empty(*rows, call.v.shape[3], **make), torch.empty(rows, **make), top


def scheduling(launches: Launches, cut: Cut) -> Launch:
    constants = BLOCK_K, max(32, 1 << (cut.lines - 1).bit_length()), 64 if cut.sequences <= 64 else 1024
    return cached_launch(launches, "latent schedule", lambda: Launch(schedule_kernel, (1, 1, 1), constants))


def merging(call: Call, launches: Launches, cut: Cut, key: tuple[Any, ...] = ()) -> Launch:
    """`key`: what is compiled for besides, and the Call's key does not hold."""

    def make() -> Launch:
        # Many sequences have few parts each, whose rows are small programs; few sequences have as many as lines.
        warps, chunk = (1, 4) if 2 * cut.sequences >= cut.lines else (4, 16)
        by_line = cut.sequences > cut.lines - 1
        splits = 1 << (cut.lines - 1).bit_length()
        constants = call.group, cut.rows, call.v.shape[3], splits, chunk, cut.has_lists, by_line
        rows = call.q.shape[1] * (cut.rows if cut.has_lists else call.q.shape[2])
        grid = rows * (cut.lines - 1 if by_line else cut.sequences), 1, 1
        return Launch(merge_kernel, grid, constants, warps, stages=1)

    return cached_launch(launches, ("latent merge", *key), make)


def arguments(
    cache: Tensor, results: tuple[Any, ...], schedule: Schedule, spans: tuple[Any, Any], pages: load.Pages | None,
    mask: masks.DeviceMask, score: scores.DeviceScore,
) -> tuple[Any, ...]:  # fmt: skip
    """What the kernel takes between its descriptors and the numbers; results: out, lse, max_scores, the parts of all
    three, the sink."""
    # Bulk copies would be of fewer rows than are swizzled together, or of numbers that are to be widened.
    gathered = TensorArgs.of(cache) if cache.shape[2] % 8 or cache.dtype == torch.int32 else None
    return gathered, *results, *spans, pages, schedule, mask, score


def prepare(call: Call, cut: Cut, cache: Tensor) -> TMALaunch:
    """Returns the launch that all calls with the Call's key share."""
    q = call.q
    box = load.box_rows(cache.shape[2], BLOCK_K)
    shapes = [
        shape_of(q, (1, 1, 64 // cut.rows, cut.rows, 64), call.group),
        shape_of(cache, (1, 1, box, 128 // cache.element_size())),
    ]
    numbers = cut.tiles, cut.blocks, cache.shape[1], call.group, q.shape[2], cut.capacity
    records = cache.dtype == torch.int32
    registers = {"REGISTERS": 216, "LOADER_REGISTERS": 72} if records else {"REGISTERS": 232, "LOADER_REGISTERS": 48}
    sizes = {"ROWS": cut.rows, "LISTED": cut.has_lists, "RECORDS": records, **registers}
    constants = {"shape": LatentShape(**{name: tl.constexpr(value) for name, value in sizes.items()})}
    return TMALaunch(latent_kernel, (cut.tiles * cut.lines, 1, 1), shapes, numbers, constants, OPTIONS)
