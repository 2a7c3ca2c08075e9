"""From sums to gradients of captured tensors: the kernel against PyTorch, to the bit, and numbers that are wrong."""

from __future__ import annotations

import math

import pytest
import torch

from saccade.backends.device.captured_gradients import results_kernel
from saccade.backends.device.records import runtime_int


def found(sums, dtype, top=None, room=0):
    made = torch.empty(sums.shape, dtype=dtype)
    results_kernel[(-(-sums.numel() // 64),)](made, sums, top, runtime_int(room), sums.numel(), BLOCK=64)
    return made


def bits_of(top):
    return torch.tensor([top]).view(torch.int32)


def unit_of(top, room):
    return torch.ldexp(torch.ones(()), (room - torch.frexp(torch.tensor(top)).exponent).clamp(-120, 120))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_sums_in_another_dtype(dtype):
    sums = torch.randn(3, 50) * 10 ** torch.randint(-9, 9, (3, 50))
    sums[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    assert torch.equal(found(sums, dtype).nan_to_num(7), sums.to(dtype).nan_to_num(7))


@pytest.mark.parametrize("room", [20, 47, 62])
@pytest.mark.parametrize("top", [1e-37, 1e-30, 0.37, 1.0, 2.0, 5e20, 3e38])
def test_integers(top, room):
    """Multiples of 1 / unit, with which values up to the top stay below 2^room."""
    sums, unit = torch.randint(-(1 << 61), 1 << 61, (77,)), unit_of(top, room)
    assert torch.equal(found(sums, torch.float32, bits_of(top), room), (sums.double() / unit).float())
    assert top * unit.item() < 2.0**room


@pytest.mark.parametrize(("top", "room"), [(0.37, 46), (0.37, 48), (0.74, 47)])
def test_others_fail(top, room):
    sums = torch.randint(1 << 50, 1 << 61, (77,))
    right = (sums.double() / unit_of(0.37, 47)).float()
    assert not torch.isclose(found(sums, torch.float32, bits_of(top), room), right).any()


@pytest.mark.parametrize("top", [math.inf, math.nan])
def test_what_has_no_integer_is_nan(top):
    assert found(torch.arange(5), torch.float32, bits_of(top), 40).isnan().all()
