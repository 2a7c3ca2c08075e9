"""Rows to all the places that a table names: the adjoint of sums over ranks."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.triton import rank_sums, spread_rows
from saccade.backends.triton.spread_rows_kernel import spread_rows_kernel

TABLE = torch.tensor([[4, -1, 0, 6, 1], [-1, -1, 5, 2, -1], [0, 1, -1, -1, 2]], dtype=torch.int32)


def targets(d, dtype=torch.float32):
    here = torch.full((7, 3, 1, d), -9.0, dtype=dtype)
    return [here, here, torch.full((5, 3, 1, d), -9.0, dtype=dtype)]


def wanted(x, table, places):
    found = [y.clone() for y in (places[0], places[2])]
    for i, rows in enumerate(table.tolist()):
        for row, at in enumerate(rows):
            if at >= 0:
                found[i == 2][at] = x[row]
    return found


@pytest.mark.parametrize("d", [16, 24, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_where_the_table_says(d, dtype):
    """And nothing else is written."""
    x, places = torch.randn(5, 3, 1, d).to(dtype), targets(d, dtype)
    right = wanted(x, TABLE, places)
    spread_rows.spread_rows(x, places, TABLE)
    assert all(torch.equal(a, b) for a, b in zip((places[0], places[2]), right, strict=True))
    assert torch.equal(rank_sums.rank_sums([places[0]], TABLE[:1], x)[[0, 2, 3, 4]], x[[0, 2, 3, 4]])


@pytest.mark.parametrize("wrong", [TABLE.roll(1, 1), TABLE.clamp(min=0)], ids=["order", "without -1"])
def test_wrong_tables_are_noticed(wrong):
    x, places = torch.randn(5, 3, 1, 16), targets(16)
    right = wanted(x, TABLE, places)
    spread_rows_kernel[(5, 1)](x, tuple(places), wrong.contiguous(), 5, 48, 3, 64, 1)
    assert not all(torch.equal(a, b) for a, b in zip((places[0], places[2]), right, strict=True))


def test_no_rows():
    spread_rows.spread_rows(torch.empty(0, 3, 1, 16), targets(16), TABLE[:, :0].contiguous())
