"""The kernel that writes new rows into a cache against the PyTorch operations that do."""

from __future__ import annotations

import pytest
import torch

from saccade.backends import Append, Rotary
from saccade.backends.cpu import append as operations
from saccade.backends.triton import append as launches
from saccade.layouts import Paged


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [None, [0, 0, 5, 9]], ids=str)
def test_against_operations(offsets, interleaved):
    table = torch.tensor([[3, 0, 7], [5, -1, 1 << 30], [1, 2, 6]], dtype=torch.int32)
    layout = Paged(table, torch.tensor([3, 2, 11]), None if offsets is None else torch.tensor(offsets))
    caches = torch.randn(9, 4, 3, 20).split([12, 8], dim=-1)
    copies = [x.clone() for x in caches]
    shape = (3, 4) if offsets is None else (10,)
    new = torch.randn(*shape, 3, 12), torch.randn(*shape, 3, 8)
    angles = torch.randn(9, 4)
    rotary = Rotary(angles.cos(), angles.sin(), interleaved)
    operations.append(Append(*caches, *new, layout, rotary))
    launches.append(Append(*copies, *new, layout, rotary))
    for one, other in zip(caches, copies, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("used", "offsets"),
    [
        ([-1, 2, -(1 << 31)], None),
        ([3, 12, 99], None),
        ([3, 2, 1], [1, 3, 4, 6]),
        ([3, 2, 1], [-2, 3, 4, 6]),
        ([3, 2, 1], [0, 5, 3, 6]),
        ([3, 2, 1], [0, 1 << 33, 3, 6]),
        ([(1 << 40) + 1, 2, 1], [0, 2, 4, 99]),
    ],
    ids=str,
)
def test_broken_numbers_are_left_out(used, offsets):
    """A row is written where lengths and offsets place it, and nowhere else; where they decrease, some are not."""
    size, width = 4, 3
    table = torch.arange(9, dtype=torch.int32).view(3, width)
    layout = Paged(table, torch.tensor(used), None if offsets is None else torch.tensor(offsets))
    shape = (3, 2) if offsets is None else (6,)
    new = torch.arange(1, 7).float().view(*shape, 1, 1)
    caches = torch.zeros(9, size, 1, 1), torch.zeros(9, size, 1, 1)
    launches.append(Append(*caches, new, new, layout, None))
    wanted = torch.zeros(9, size)
    for token in range(6):
        if offsets is None:
            b, i = divmod(token, 2)
        else:
            owners = [b for b in range(3) if 0 <= offsets[b] <= token < offsets[b + 1]]
            if not owners:
                continue
            b = owners[0]
            i = token - offsets[b]
        if used[b] >= 0 and used[b] + i < width * size:
            position = used[b] + i
            wanted[table[b, position // size], position % size] = token + 1
    for cache in caches:
        found = cache[:, :, 0, 0]
        if offsets is not None and sorted(offsets) != offsets:
            wanted = torch.where(found == 0, 0, wanted)
        assert torch.equal(found, wanted)
