"""Vectors of lengths and offsets: their errors, and what is counted from them."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import is_fake


def check_vector(name: str, x: object, shape: str) -> None:
    if not isinstance(x, Tensor) or x.dim() != 1 or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be an int32 or int64 tensor of shape {shape}, got {described(x)}")


def check_offsets(name: str, offsets: list[int], t: int) -> list[int]:
    """The lengths of the sequences."""
    lengths = [stop - start for start, stop in pairwise(offsets)]
    if offsets[0] != 0 or min(lengths, default=0) < 0 or offsets[-1] > t:
        raise ValueError(
            f"{name} must begin at 0, never decrease, and not end beyond the tensor's {t} rows, "
            f"got {shortened(offsets)}"
        )
    return lengths


def has_values(x: Tensor) -> bool:
    """Whether the numbers of a tensor can be read at all; those that vmap maps over are many at once."""
    return not is_fake(x) and x.device.type != "meta" and not _is_mapped(x)


def _is_mapped(x: Tensor) -> bool:
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False


def same_vector(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are one vector, as far as the host knows without reading it."""
    if a is None or b is None:
        return a is b
    return a is b or ((a.data_ptr(), a.dtype, a.shape) == (b.data_ptr(), b.dtype, b.shape) and a.stride() == b.stride())


def shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 12 else f"[{', '.join(map(str, numbers[:12]))}, …]"


def described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
