"""Sums over ranks of what each has returned: the kernel, and kernels that are wrong."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.triton import rank_sums
from saccade.backends.triton.rank_sums_kernel import rank_sums_kernel

TABLE = torch.tensor([[0, -1, 2, 3, -1], [4, 0, 1, -1, -1], [-1, 3, 0, 2, -1]], dtype=torch.int32)


def sums(own, returned, table, first, stop):
    """By PyTorch, in the order of ranks."""
    total = torch.zeros(table.shape[1], *own.shape[1:], dtype=torch.promote_types(own.dtype, torch.float32))
    for i, places in enumerate(table.tolist()):
        for row, at in enumerate(places):
            if at >= 0:
                total[row] += (own if first <= i < stop else returned)[at]
    return total.to(own.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64]
)  # the interpreter rounds bfloat16 otherwise
@pytest.mark.parametrize("shape", [(2, 1, 24), (9, 2, 128)])
def test_to_the_bit(dtype, shape):
    own, returned = torch.randn(2, 5, *shape).to(dtype)
    for of_own in ((0, 1), (1, 2), (1, 3), (0, 0)):
        found = rank_sums.rank_sums(own, returned, TABLE, *of_own)
        assert torch.equal(found, sums(own, returned, TABLE, *of_own))


@pytest.mark.parametrize("wrong", [(TABLE.flip(0), 1, 2), (TABLE, 1, 3), (TABLE.clamp(min=0), 1, 2)])
def test_others_fail(wrong):
    own, returned = torch.randn(2, 5, 3, 1, 16)
    made = torch.empty(5, 3, 1, 16)
    rank_sums_kernel[(5, 1)](own, returned, wrong[0], made, 5, 48, 3, *wrong[1:], 64)
    assert not torch.equal(made, sums(own, returned, TABLE, 1, 2))


def test_no_rows():
    none = torch.empty(0, 3, 1, 16)
    assert rank_sums.rank_sums(none, none, TABLE[:, :0].contiguous(), 0, 1).shape == (0, 3, 1, 16)
