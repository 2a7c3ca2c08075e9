"""What offsets of packed sequences are made from: lengths, and position ids that begin anew."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from saccade.layouts.offsets import check_vector, described, has_values, shortened


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
        told = repr(lengths) if numbers is None else shortened(numbers)
        raise ValueError(f"{name} must be integers from 0 on, or an integer tensor of shape (b,), got {told}")
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
