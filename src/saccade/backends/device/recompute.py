"""Launches of kernels that compute the weights of a call once more."""

from __future__ import annotations

from typing import Any

import torch

from saccade.backends.device import block_d
from saccade.backends.device.arguments import TileShape, tile_grid
from saccade.backends.device.launch import Launch
from saccade.call import Call


def recompute_launch(kernel: Any, call: Call, *constants: Any) -> Launch:
    """Of a kernel that computes the weights once more."""
    blocks = recompute_blocks(call)
    warps = 4 if _widest(call) <= 64 and call.dropout is None else 8
    shape = TileShape.of(call, *blocks)
    return Launch(kernel, tile_grid(call, *blocks), (*constants, shape), warps, 2)


def recompute_blocks(call: Call) -> tuple[int, int]:
    """BLOCK_Q, at most BLOCK_K, and BLOCK_K."""
    size = 32 if call.q.dtype == torch.float32 else 64
    widest = _widest(call)
    size = size if widest <= 128 else size // 2 if widest <= 256 else 16
    return size, size


def _widest(call: Call) -> int:
    return max(block_d(call.q.shape[3]), block_d(call.v.shape[3]))
