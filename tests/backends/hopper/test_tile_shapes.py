"""Tiles that lie alike in shared memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from saccade.backends.device.arguments import SWIZZLED, TileShape
from saccade.call import Call


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("d", "d_v"), [(75, 1), (1, 75), (40, 24), (64, 32), (128, 64), (192, 16), (256, 20), (512, 8)]
)
def test_tiles_of_two_widths_have_one_order(d: int, d_v: int, dtype: torch.dtype) -> None:
    """ptxas 12.8 loses the place of one otherwise."""
    q, k, v = (torch.zeros(1, 2, 3, n).to(dtype) for n in (d, d, d_v))
    shape = TileShape.of(Call(q, k, v), 64, 64)
    of_k, of_v = shape.BLOCK_D.value, shape.BLOCK_DV.value
    assert of_k >= d
    assert of_v >= d_v
    assert of_k == of_v or min(of_k, of_v) * dtype.itemsize >= SWIZZLED
