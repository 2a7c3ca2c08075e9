"""The schedule of latent attention and the merge of its parts, around parts that PyTorch computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Paged
from saccade.backends.device import masks, positions
from saccade.backends.device.records import TensorArgs
from saccade.backends.hopper.latent import launch
from saccade.backends.reference import run_forward
from saccade.call import Call
from saccade.masks import Mask, causal, mask_mod, prefix, window

D, D_V = 24, 16


def latent(lens: list[int], h: int, s_q: int, mask: Mask | None, h_k: int = 1) -> Call:
    """A call whose sequences have pages in reversed order."""
    width = max(1, -(-max(lens) // 16))
    table = torch.arange(len(lens) * width, dtype=torch.int32).flip(0).view(len(lens), width)
    q = torch.randn(len(lens), h, s_q, D)
    k = torch.randn(table.numel(), h_k, 16, D)
    layout = Paged(table, torch.tensor(lens, dtype=torch.int32))
    return Call.of_views(q, k, k[..., :D_V], layout, mask=mask, scale=1 / math.sqrt(D))


def scheduled(call: Call, cut: launch.Cut) -> Any:
    """The schedule that the kernel writes, on memory full of rubbish."""
    schedule = launch.empty_schedule(call, cut)
    for x in (schedule.starts, schedule.firsts, schedule.tiles, schedule.lines_first):
        x.fill_(-7)
    lengths = call.q.shape[2], cut.capacity
    launch.scheduling({}, cut)(None, (schedule, *positions.spans(call), masks.device_args(call), *lengths))
    return schedule


def parts_of(call: Call, cut: launch.Cut, schedule: Any, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel for Hopper makes of a schedule: each line of tiles in parts, but for sequences that a line has
    whole. Memory that it leaves has NaN."""
    parts, part_lse, _ = launch.empty_parts(call, cut)
    parts.fill_(torch.nan)
    part_lse.fill_(torch.nan)
    starts, firsts, b = schedule.starts.tolist(), schedule.firsts.tolist(), call.layout.sequences
    ends = [start + n for start, n in zip(starts, schedule.tiles.tolist(), strict=False)]
    length = int(schedule.lines_first[cut.lines])
    whole = [x.call for x in call.sequences()]
    for line in range(cut.lines):
        place, end = line * length, min(line * length + length, starts[b])
        while place < end:
            number = next(i for i in range(b) if starts[i + 1] > place)
            stop = min(end, ends[number])
            first, last = (launch.BLOCK_K * (x + firsts[number] - starts[number]) for x in (place, stop))
            assert place < stop  # a line has no places that are free alone
            if (place, stop) == (starts[number], ends[number]):
                found, found_lse, _ = run_forward(whole[number], {}, True)
                assert found_lse is not None
                out[number], lse[number] = found[0], found_lse[0]
            else:
                at = 2 * line + (starts[number] > line * length)  # the part that begins inside of a line is its second
                write_part(cut, whole[number], (first, last), parts[at], part_lse[at])
            place = starts[number + 1]
    return parts, part_lse


def write_part(cut: launch.Cut, call: Call, keys: tuple[int, int], out: Tensor, lse: Tensor) -> None:
    """The results of one sequence's keys in a range, in tiles of 64 rows."""
    own = mask_mod(lambda b, h, q_idx, kv_idx: (kv_idx >= keys[0]) & (kv_idx < keys[1]))
    mask = own if call.mask is None else call.mask & own
    rows_out, rows_lse, _ = run_forward(call.replace(mask=mask, sink=None), {}, True)
    assert rows_lse is not None
    heads, group, s_q = 64 // cut.rows, call.group, call.q.shape[2]
    packs = -(-group // heads)
    lse.fill_(-torch.inf)
    for tile in range(cut.tiles):
        pack, block = divmod(tile, cut.blocks)
        for i in range(64):
            member, row = pack % packs * heads + i // cut.rows, block * cut.rows + i % cut.rows
            if member < group and row < s_q:
                h = pack // packs * group + member
                out[tile, i], lse[tile, i] = rows_out[0, h, row], rows_lse[0, h, row]


def merged(call: Call, cut: launch.Cut, schedule: Any) -> tuple[Tensor, Tensor]:
    out, lse = call.empty_out().fill_(torch.nan), torch.full(call.q.shape[:3], torch.nan)
    parts = parts_of(call, cut, schedule, out, lse)
    results = TensorArgs.of(out), TensorArgs.of(lse[..., None]), None
    arguments = *parts, None, *results, call.sink, positions.spans(call)[0], schedule, *call.q.shape[1:3]
    launch.merging(call, {}, cut)(None, arguments)
    return out, lse


CASES: list[tuple[list[int], tuple[int, int, int], Mask | None, int]] = [
    ([64], (16, 1, 1), None, 7),
    ([0, 0], (16, 1, 1), None, 7),
    ([1, 0, 700], (16, 1, 1), None, 1),
    ([300, 129, 128, 0, 1000, 64], (16, 1, 1), None, 40),
    ([300, 129, 128, 0, 1000, 64], (130, 2, 1), causal(), 7),
    ([300, 129, 128, 0, 1000, 1], (8, 3, 2), causal(), 40),
    ([300, 129, 128, 0, 1000, 64], (8, 3, 2), window(150, 0), 9),
    ([300, 129, 128, 0, 1000, 2], (8, 3, 2), prefix(9), 9),
]
"""Lengths, (h, s_q, h_k), mask and multiprocessors."""


@pytest.mark.sample
@pytest.mark.parametrize(("lens", "heads", "mask", "processors"), CASES, ids=str)
def test_parts_that_follow_the_schedule_merge_to_the_whole(
    lens: list[int], heads: tuple[int, int, int], mask: Mask | None, processors: int
) -> None:
    h, s_q, h_k = heads
    sink = torch.tensor([torch.inf, *torch.randn(h - 1)]) if s_q == 3 else None
    call = latent(lens, h, s_q, mask, h_k).replace(sink=sink)
    cut = launch.Cut.of(call, processors, None)
    schedule = scheduled(call, cut)
    out, lse = merged(call, cut, schedule)
    exact = run_forward(call, {}, True)
    torch.testing.assert_close(out, exact[0])
    torch.testing.assert_close(lse, exact[1])


def test_padding_has_no_sink() -> None:
    """Rows in use without keys have the LSE of the sink, rows of padding -inf; a group of rows may hold both."""
    call = latent([1000, 900], 8, 3, None, 2).replace(sink=torch.randn(8))
    cut = launch.Cut.of(call, 40, None)
    schedule, used = scheduled(call, cut), positions.spans_of(None, torch.tensor([2, 3]))
    parts, part_lse, _ = launch.empty_parts(call, cut)
    part_lse.fill_(-torch.inf)
    out, lse = call.empty_out().fill_(torch.nan), torch.full(call.q.shape[:3], torch.nan)
    results = TensorArgs.of(out), TensorArgs.of(lse[..., None]), None
    arguments = parts.fill_(torch.nan), part_lse, None, *results, call.sink, used, schedule, *call.q.shape[1:3]
    launch.merging(call, {}, cut)(None, arguments)
    assert call.sink is not None
    expected = call.sink[None, :, None].repeat(2, 1, 3)
    expected[0, :, 2] = -torch.inf
    torch.testing.assert_close(lse, expected)
    assert not out.any()


def test_lines_are_equally_long() -> None:
    call = latent([3000, 64, 0, 5000, 129], 16, 1, None)
    schedule = scheduled(call, launch.Cut.of(call, 7, None))
    assert schedule.starts.tolist() == [0, 47, 48, 49, 128, 131]
    assert schedule.firsts.tolist() == [0] * 5
    assert schedule.lines_first.tolist() == [0, 0, 0, 3, 3, 3, 3, 19]


def test_a_window_hides_the_first_tiles() -> None:
    call = latent([3000, 100], 16, 1, window(150, 0))
    schedule = scheduled(call, launch.Cut.of(call, 7, None))
    assert schedule.firsts[:2].tolist() == [(2999 - 150) // 64, 0]
    assert schedule.tiles.tolist() == [3, 2]
    assert schedule.starts.tolist() == [0, 4, 6]  # of lines of two
