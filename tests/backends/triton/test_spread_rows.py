"""Keys and values to all the places that a table names: the adjoint of sums over ranks."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.triton import rank_rows
from saccade.backends.triton.rank_rows import spread_rows_kernel

TABLE = torch.tensor([[4, -1, 0, 6, 1], [-1, -1, 5, 2, -1], [0, 1, -1, -1, 2]], dtype=torch.int32)
HEADS = 3


def operands(d, d_v, dtype=torch.float32):
    """Keys, values, and targets of which two are one."""
    here, there = (torch.full((rows, HEADS, d + d_v), -9.0, dtype=dtype) for rows in (7, 5))
    return torch.randn(5, HEADS, d).to(dtype), torch.randn(5, HEADS, d_v).to(dtype), [here, here, there]


def wanted(keys, values, table, targets):
    found = [y.clone() for y in (targets[0], targets[2])]
    for i, rows in enumerate(table.tolist()):
        for row, at in enumerate(rows):
            if at >= 0:
                found[i == 2][at] = torch.cat((keys[row], values[row]), -1)
    return found


def equal(targets, right):
    return all(torch.equal(a, b) for a, b in zip((targets[0], targets[2]), right, strict=True))


@pytest.mark.parametrize(("d", "d_v"), [(16, 16), (24, 24), (256, 256), (48, 24), (20, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_where_the_table_says(d, d_v, dtype):
    """And nothing else is written."""
    keys, values, targets = operands(d, d_v, dtype)
    right = wanted(keys, values, TABLE, targets)
    rank_rows.spread_rows(keys, values, targets, TABLE)
    assert equal(targets, right)
    back = rank_rows.rank_sums([targets[0]], TABLE[:1], torch.cat((keys, values), -1))
    assert torch.equal(back[[0, 2, 3, 4], :, :d], keys[[0, 2, 3, 4]])


WRONG = {
    "rows": (TABLE.roll(1, 1).contiguous(), False),
    "without -1": (TABLE.clamp(min=0), False),
    "values first": (TABLE, True),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_calls_are_noticed(wrong):
    keys, values, targets = operands(16, 32)
    right = wanted(keys, values, TABLE, targets)
    table, values_first = WRONG[wrong]
    sides = (values, keys) if values_first else (keys, values)
    widths = [x.shape[2] for x in sides]
    spread_rows_kernel[(5, 1, 2)](*sides, tuple(targets), table, 5, HEADS, *widths, 3, 128, 1)
    assert not equal(targets, right)


def test_no_rows():
    keys, values, targets = operands(16, 16)
    rank_rows.spread_rows(keys[:0], values[:0], targets, TABLE[:, :0].contiguous())
    assert all(bool((y == -9).all()) for y in targets)
