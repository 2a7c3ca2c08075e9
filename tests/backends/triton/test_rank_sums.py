"""Sums over ranks of what each has returned: the kernel, and kernels that are wrong."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.triton import rank_rows
from saccade.backends.triton.rank_rows import rank_sums_kernel

TABLE = torch.tensor([[0, -1, 2, 3, -1], [4, 0, 1, -1, -1], [-1, 3, 0, 2, -1]], dtype=torch.int32)


def sums(parts, table):
    """By PyTorch, in the order of ranks."""
    like = parts[0]
    total = torch.zeros(table.shape[1], *like.shape[1:], dtype=torch.promote_types(like.dtype, torch.float32))
    for part, places in zip(parts, table.tolist(), strict=True):
        for row, at in enumerate(places):
            if at >= 0:
                total[row] += part[at]
    return total.to(like.dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.float64]
)  # the interpreter rounds bfloat16 otherwise
@pytest.mark.parametrize("shape", [(2, 1, 24), (9, 2, 128)])
def test_to_the_bit(dtype, shape):
    a, b, c = torch.randn(3, 5, *shape).to(dtype)
    for parts in ([a, b, c], [a, a, b], [c, c, c]):
        assert torch.equal(rank_rows.rank_sums(parts, TABLE, a), sums(parts, TABLE))


@pytest.mark.parametrize("wrong", [(TABLE.flip(0), (0, 1, 2)), (TABLE, (1, 0, 2)), (TABLE.clamp(min=0), (0, 1, 2))])
def test_others_fail(wrong):
    parts = [*torch.randn(3, 5, 3, 1, 16)]
    made = torch.empty(5, 3, 1, 16)
    rank_sums_kernel[(5, 1)](tuple(parts[i] for i in wrong[1]), wrong[0], made, 5, 48, 3, 64)
    assert not torch.equal(made, sums(parts, TABLE))


def test_no_rows():
    none = torch.empty(0, 3, 1, 16)
    assert rank_rows.rank_sums([none] * 3, TABLE[:, :0].contiguous(), none).shape == (0, 3, 1, 16)
