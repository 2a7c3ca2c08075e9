"""Vectors of lengths and offsets: their errors, what they are made from, and what is counted from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

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


def offsets_of_lengths(
    name: str, lengths: Sequence[int] | Tensor, device: torch.device | str | None
) -> tuple[Tensor, int | None]:
    """The offsets (b + 1), and the longest length, unless a tensor holds it."""
    if isinstance(lengths, Tensor):
        check_vector(name, lengths, "(b,)")
        if device is not None:
            lengths = lengths.to(device, non_blocking=True)
        return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0)), None
    numbers = list(lengths) if isinstance(lengths, Sequence) else None
    if numbers is None or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        got = repr(lengths) if numbers is None else shortened(numbers)
        raise ValueError(f"{name} must be integers from 0 on, or an integer tensor of shape (b,), got {got}")
    ends = [*accumulate(numbers, initial=0)]
    dtype = torch.int32 if ends[-1] < 1 << 31 else torch.int64
    device = torch.get_default_device() if device is None else device
    # A copy that does not wait for what the device still has to do.
    offsets = torch.tensor(ends, dtype=dtype, device="cpu").to(device, non_blocking=True)
    return offsets, max(numbers, default=0)


def offsets_of_position_ids(ids: Tensor, max_sequences: int | None) -> Tensor:
    """int32 (b + 1): where the sequences of `ids` begin, and empty ones after them."""
    if not isinstance(ids, Tensor) or ids.dim() not in (1, 2) or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be an int32 or int64 tensor of shape (t,) or (b, s), got {described(ids)}")
    if max_sequences is not None and (
        isinstance(max_sequences, bool) or not isinstance(max_sequences, (int, torch.SymInt)) or max_sequences < 1
    ):
        raise ValueError(f"max_sequences must be an integer from 1 on, or None, got {max_sequences!r}")
    starts = ids == 0
    starts[..., :1] = True
    numbers = starts.flatten().cumsum(0)  # of each token its sequence, from 1 on
    if max_sequences is None or (ids.device.type == "cpu" and not torch.compiler.is_compiling() and has_values(ids)):
        count = int(numbers[-1]) if numbers.numel() else 0
        if max_sequences is not None and count > max_sequences:
            raise ValueError(
                f"the ids {tuple(ids.shape)} begin {count} sequences, and max_sequences is {max_sequences}"
            )
        max_sequences = count if max_sequences is None else max_sequences
    wanted = torch.arange(1, max_sequences + 2, device=ids.device)
    return torch.searchsorted(numbers, wanted, out_int32=True)
