"""Intervals that tensors hold: the table that leads from keys to rows."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, alibi, interval
from saccade.backends.device import block_lists
from saccade.call import Call
from saccade.masks import TILE
from saccade.testing.accuracy import check

H_Q, H_K, D = 2, 1, 16


def bounds(shape, keys, monotone=False):
    start = torch.randint(-5, keys, shape)
    stop = start + torch.randint(-10, keys, shape)
    return (start.sort(-1).values, stop.sort(-1).values) if monotone else (start, stop)


def tiles_of_rows(start, stop, rows, keys):
    """For each tile of keys in use which tiles of rows meet it, and which of those see all of it."""
    start, stop = start[:rows].clamp(min=0), stop[:rows].clamp(max=keys)
    for first in range(0, keys, TILE):
        last = min(first + TILE, keys)
        meets, holds = [], []
        for i in range(0, rows, TILE):
            lo, hi = start[i : i + TILE], stop[i : i + TILE]
            seeing = hi > lo
            meets.append(bool(seeing.any()) and int(lo[seeing].min()) < last and int(hi[seeing].max()) > first)
            holds.append(bool((seeing & (lo <= first) & (hi >= last)).all()))
        yield meets, holds


def verify(entry, meets, holds):
    first, end, core, core_end = (n // TILE for n in entry.tolist())
    visited = [i for i, meeting in enumerate(meets) if meeting]
    assert (first, end) == (visited[0], visited[-1] + 1) if visited else end <= first
    if core < core_end:  # the first run of tiles that need no mask
        assert all(holds[core:core_end])
        assert not any(holds[:core])
        assert core_end == len(holds) or not holds[core_end]
    else:
        assert not any(holds)


def verify_rows(found, start, stop, rows, keys):
    """Each row's keys; rows that see nothing have none."""
    lo, hi = start[:rows].clamp(min=0), stop[:rows].clamp(max=keys)
    seeing = hi > lo
    torch.testing.assert_close(found[:, :rows], torch.where(seeing, torch.stack([lo, hi]), 0).int())


@pytest.mark.parametrize("block_q", [16, 128])
@pytest.mark.parametrize("monotone", [False, True], ids=["any", "ordered"])
@pytest.mark.parametrize("seed", range(4))
def test_visits(seed, monotone, block_q):
    torch.manual_seed(seed)
    b, s_q, s_k = 3, 130 + seed * 37, 200 + seed * 11
    start, stop = bounds((b, s_q), s_k, monotone)
    rows, keys = torch.tensor([s_q, 70, 0]), torch.tensor([s_k, 99, s_k])
    q, k = torch.empty(b, H_Q, s_q, 8), torch.empty(b, H_K, s_k, 8)
    call = Call.of_views(q, k, k, Dense("bhsd", rows, keys), mask=interval(start, stop))
    visits = block_lists.device_args(call, {}, block_q, 64, by_keys=True).data[1]
    table = visits.table
    found = torch.stack([visits.lo, visits.hi])[:, :-block_q].view(2, b, -1)
    for i in range(b):
        verify_rows(found[:, i], start[i], stop[i], int(rows[i]), int(keys[i]))
        wanted = tiles_of_rows(start[i], stop[i], int(rows[i]), int(keys[i]))
        for entry, tiles in zip(table[i], wanted, strict=False):
            verify(entry, *tiles)


@pytest.mark.parametrize("seed", range(4))
def test_visits_of_packed_sequences(seed):
    torch.manual_seed(seed)
    lengths = torch.randint(0, 150, (5,)), torch.randint(0, 200, (5,))
    ends_q, ends_k = (torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in lengths)
    t_q, t_k = int(ends_q[-1]) + 7, int(ends_k[-1]) + 5
    start, stop = bounds((t_q,), 200)
    q, k = torch.empty(1, H_Q, t_q, 8), torch.empty(1, H_K, t_k, 8)
    call = Call.of_views(q, k, k, Packed(ends_q, ends_k, 150, 200), mask=interval(start, stop))
    visits = block_lists.device_args(call, {}, 128, 64, by_keys=True).data[1]
    table, found = visits.table[0], torch.stack([visits.lo, visits.hi])
    for i, (rows, keys) in enumerate(zip(*(x.tolist() for x in lengths), strict=True)):
        own = slice(int(ends_q[i]), int(ends_q[i + 1]))
        verify_rows(found[:, (int(ends_q[i]) // 128 + i) * 128 :], start[own], stop[own], rows, keys)
        first = int(ends_k[i]) // TILE + i
        for entry, tiles in zip(table[first:], tiles_of_rows(start[own], stop[own], rows, keys), strict=False):
            verify(entry, *tiles)


def test_steep_linear_scores_of_keys_far_from_the_row():
    """Sums of a large number that grows with the key and of one that takes it away again would lose bits."""
    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 4, n, 64).half() for n in (300, 400, 400))
    start = torch.randint(-5, 400, (1, 300))
    mask = interval(start, start + torch.randint(-10, 400, (1, 300)))
    check(q, k, v, mask=mask, score_mod=alibi(30 * torch.rand(4)), backend="triton", backward=False).assert_ok()
