"""Numbers of device code, as they are on the device."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import numpy as np
import triton.language as tl

from tests.emulator.language import TRITON
from tests.emulator.values import Tensor, tensor


def floats(*x: float, dtype: object = tl.float32) -> Tensor:
    return Tensor(np.array(x, np.float32), tl.float32).to(dtype)


def test_integers_divide_towards_zero_and_wrap() -> None:
    a, b = tensor(-7), tensor(2)
    assert (int(a // b), int(a % b), int(a // -2), int(a >> 1)) == (-3, -1, 3, -4)
    with np.errstate(over="ignore"):
        assert int(tensor(2**31 - 1) + 1) == -(2**31)
        assert int(tensor(2**31 - 1).to(tl.int64) + 1) == 2**31
    assert int(TRITON.umulhi(tensor(0xFFFFFFFF, tl.uint32), tensor(0xFFFFFFFF, tl.uint32))) == 0xFFFFFFFE


def test_dtypes_of_results() -> None:
    i, j, x, y = tensor(1), tensor(1).to(tl.int64), floats(1.0), floats(1.0, dtype=tl.bfloat16)
    kinds = [z.dtype for z in (i + 1, i + j, i + 0.5, i / 2, x * y, y * 2.0, i < j, i * x)]
    assert kinds == [tl.int32, tl.int64, tl.float32, tl.float32, tl.float32, tl.bfloat16, tl.int1, tl.float32]


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float8e4nv", "float8e5"])
def test_narrow_floats_round_as_torch_s(kind: str) -> None:
    names = {"float8e4nv": torch.float8_e4m3fn, "float8e5": torch.float8_e5m2}
    x = torch.randn(1000) * 10
    found = Tensor(x.numpy(), tl.float32).to(getattr(tl, kind))
    expected = x.to(names.get(kind) or getattr(torch, kind))
    assert np.array_equal(found.data, expected.float().numpy())
    bits = found.to(tl.int16 if found.dtype.primitive_bitwidth == 16 else tl.int8, bitcast=True)
    assert np.array_equal(bits.data, expected.view(torch.int16 if bits.dtype == tl.int16 else torch.int8).numpy())
    assert np.array_equal(bits.to(found.dtype, bitcast=True).data, found.data)


def test_maxima_leave_nan_out() -> None:
    x = floats(1.0, float("nan"), 3.0)
    assert float(TRITON.max(x, 0).data) == 3.0
    assert float(TRITON.maximum(x, 2.0).data[1]) == 2.0
    assert np.isnan(TRITON.maximum(x, 2.0, propagate_nan=tl.PropagateNan.ALL).data[1])
    assert floats(1e9).to(tl.float8e4nv).data[0] == 448.0
