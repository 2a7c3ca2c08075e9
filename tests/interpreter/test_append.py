"""The kernel that writes new rows into a cache against the PyTorch operations that do."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.cpu import append as operations
from saccade.backends.triton import append as launches
from saccade.layouts import Paged
from saccade.pages import Append, Rotary


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
