"""Sums of the dk and dv of a group's shares: the kernel, and kernels that are wrong."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.device.records import TensorArgs
from saccade.backends.hopper.backward.epilogue import share_sums_kernel

SIZES = [(2, 3, 40, 24, 16, 4), (1, 1, 7, 8, 64, 2), (3, 2, 16, 64, 8, 1)]
"""b, h_k, s_k, d, d_v, shares"""


def summed(b, h_k, s_k, d, d_v, shares, order=None, dtype=torch.float16):
    """By the kernel, and by PyTorch in the order of shares; `order`: of the heads that the kernel is given."""
    heads = h_k * shares
    parts = [(torch.randn(b, heads, s_k, n) * torch.randn(b, heads, 1, 1).exp()).to(dtype) for n in (d, d_v)]
    made = [torch.full((b, s_k, h_k, n), torch.nan, dtype=dtype).transpose(1, 2) for n in (d, d_v)]
    given = parts if order is None else [x[:, order] for x in parts]
    rows = 16
    share_sums_kernel[(b * h_k * -(-s_k // rows), 2, 1)](
        *map(TensorArgs.of, (*given, *made)), shares, h_k, s_k, D=d, D_V=d_v, BLOCK_D=64, BLOCK_DV=64, ROWS=rows
    )
    each = [x.unflatten(1, (h_k, shares)).float() for x in parts]
    return [torch.equal(x, sum(y.unbind(2)).to(dtype)) for x, y in zip(made, each, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", SIZES)
def test_to_the_bit(sizes, dtype):
    assert all(summed(*sizes, dtype=dtype))


@pytest.mark.parametrize("order", [[0, 2, 1, 3, 4, 5], [3, 1, 2, 0, 4, 5]], ids=["another order", "others' heads"])
def test_others_fail(order):
    assert not any(summed(1, 2, 40, 64, 64, 3, order, torch.float32))
