"""Vectors of lengths and offsets: what is wrong with them, and how errors quote them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def check_vector(name: str, x: object, shape: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be an int32 or int64 tensor of shape {shape}, got {described(x)}")


def check_offsets(name: str, found: list[int], t: int) -> list[int]:
    """The lengths of the sequences."""
    lengths = [stop - start for start, stop in pairwise(found)]
    if found[0] != 0 or min(lengths, default=0) < 0 or found[-1] > t:
        raise ValueError(
            f"{name} must begin at 0, never decrease, and end at most at the {t} rows that there are, "
            f"got {shortened(found)}"
        )
    return lengths


def shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:12]))}, …]"


def described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
