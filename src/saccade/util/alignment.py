"""Where tensors lie, as kernels want to know it."""

from __future__ import annotations

from torch import Tensor

ALIGNMENT = 16
"""Bytes: what a bulk copy wants of pointers and strides, and the most that one load takes."""


def address(x: Tensor) -> int:
    """0 for tensors without memory, as they are inside torch.func transforms."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0
