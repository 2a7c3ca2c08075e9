"""The latent kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from saccade.backends.device import masks, positions
from saccade.backends.device.records import FLAGS, TensorArgs
from saccade.backends.device.slot_lists import SlotLists
from saccade.backends.hopper.forward.launch import score_args
from saccade.backends.hopper.latent import launch
from saccade.call import Call
from saccade.layouts import Dense, Paged, SlotRows
from saccade.masks import ListedSlots, causal, mask_mod, selected
from tests.gate.rows import GateRow, warmed

SPILL = 96
"""Bytes: in Triton 3.6 none without a mask, and up to 88 with one, of the producer's numbers and the arguments."""
LISTED_SPILL = 220
"""The same of a mask that is asked, not timed."""


def features() -> Iterator[str]:
    yield from (
        f"gluon latent 16bit d576/512 {words}"
        for words in (
            "full",
            "causal",
            "causal gathered",
            "causal records",
            "slots",
            "slots records",
            "shared",
            "shared records",
            "selected",
            "selected groups",
            "schedule",
            "merge",
            "merge shared",
        )
    )


def combinations() -> Iterator[str]:
    yield "gluon latent 16bit d576/512 listed small"


def compiled(row: GateRow) -> tuple[Any, int]:
    """The compiled kernel of one row, and the spill bytes that it allows itself: 128 heads, four sequences of up to two
    queries, pages of 64 or, `small`, of 16, or, `gathered`, of 1."""
    size = 16 if "small" in row.words else 1 if "gathered" in row.words else 64
    match row.words[0]:
        case "full":
            s_q, mask = 1, None
        case "listed":
            s_q, mask = 2, causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0)
        case _:
            s_q, mask = 2, causal()
    q, cache = torch.empty(4, 128, s_q, row.d, dtype=row.dtype), torch.empty(256, 1, size, row.d, dtype=row.dtype)
    layout = Paged(torch.zeros(4, 512, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    lists, listed = None, next((word for word in ("slots", "shared", "groups", "selected") if word in row.words), None)
    if listed:  # of 16 heads each, a table for four rows
        rows, heads = (4, 128) if listed == "slots" else (1024, 16)
        slots = torch.zeros(rows, 512, dtype=torch.int32)
        q, cache = torch.empty(rows, heads, 1, row.d, dtype=row.dtype), torch.empty(256, 1, 1, row.d, dtype=row.dtype)
        s_q, mask, layout = rows, ListedSlots(slots, 256), SlotRows(slots, slots[:, 0])
        if listed in ("selected", "groups"):
            q, cache = q.transpose(0, 2), cache.transpose(0, 2)
            mask, layout = selected(slots[None, None]) & causal(), Dense()
        call = Call.of_views(q, cache, cache[..., : row.d_v], layout, mask=mask)
        lists = SlotLists.empty(call, listed != "slots")
        if row.words[0] == "selected":
            first, last = lists.made(call, {}, lists.empty_members(q.device))
            return warmed(*(last if listed == "groups" else first)), 0
        q, cache = q.transpose(0, 2), lists.cache
        call = call.replace(q=q, mask=None, max_scores=True)
    else:
        call = Call.of_views(q, cache, cache[..., : row.d_v], layout, mask=mask)
    if "records" in row.words:
        cache = torch.empty(256, 1, cache.shape[2], 164, dtype=torch.int32)
    cut = launch.Cut.of(call, 132, lists)
    schedule, parts = launch.empty_schedule(call, cut), launch.empty_parts(call, cut)
    lse = TensorArgs.of(torch.empty(*q.shape[:3], 1))
    top = lse if call.max_scores else None
    if row.words[0] == "schedule":
        numbers = schedule, *positions.spans(call), masks.device_args(call), s_q, 4096
        return warmed(launch.scheduling({}, cut), numbers), 0
    if row.words[0] == "merge":
        out, sink = TensorArgs.of(call.empty_out()), torch.empty(128)
        tensors = *parts, out, lse, top, sink, positions.spans(call)[0], schedule, 128, s_q
        return warmed(launch.merging(call, {}, cut), tensors), 0
    kernel = launch.prepare(call, cut, cache)
    results = TensorArgs.of(call.empty_out()), lse, top, *parts, None
    pages, mask = launch.pages_of(call, lists), masks.device_args(call)
    mask = mask._replace(all_tiles=FLAGS[call.mask is not None and call.mask.block_sparse])
    given = launch.arguments(cache, results, schedule, positions.spans(call), pages, mask, score_args(call))
    return warmed(kernel, (q, cache), given, 1.0), LISTED_SPILL if row.words[0] == "listed" else SPILL
