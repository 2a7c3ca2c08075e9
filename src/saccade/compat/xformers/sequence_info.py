"""How one dimension of a tensor is divided among sequences: xformers' records of starts and lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor


@dataclass
class SequenceInfo:
    """Sequences end to end: `seqstart = [0, n_0, n_0 + n_1, …]`, on a device and as numbers."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int], *, device: Any = None) -> SequenceInfo:
        lengths = list(seqlens)
        starts = [0, *accumulate(lengths)]
        return SequenceInfo(_vector(starts, device), max(lengths, default=-1), min(lengths, default=-1), starts)

    def to(self, device: Any) -> Self:
        moved = {x.name: getattr(self, x.name) for x in fields(self)}
        moved = {name: x.to(device, non_blocking=True) for name, x in moved.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def intervals(self) -> Iterator[tuple[int, int]]:
        """The rows of each sequence."""
        yield from pairwise(self.seqstart_py)

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """x (1, t, …) as one (batch_size, s, …) for each entry of batch_sizes, whose sequences have one length.

        Raises:
            ValueError: another t.
        """
        if x.shape[0] != 1 or x.shape[1] != self.seqstart_py[-1]:
            raise ValueError(f"a tensor of these sequences is (1, {self.seqstart_py[-1]}, …), got {tuple(x.shape)}")
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else list(batch_sizes)
        ends = [self.seqstart_py[n] for n in (0, *accumulate(sizes))]
        parts = x.split([b - a for a, b in pairwise(ends)], dim=1)
        return [part.reshape(n, part.shape[1] // n, *x.shape[2:]) for n, part in zip(sizes, parts, strict=True)]


@dataclass
class PaddedSequenceInfo(SequenceInfo):
    """Blocks of `padding` rows, of which the first `seqlen[i]` are in use."""

    seqlen: Tensor
    seqlen_py: Sequence[int]
    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens: Sequence[int], padding: int, *, device: Any = None) -> PaddedSequenceInfo:
        """
        Raises:
            ValueError: a length beyond the padding.
        """
        lengths = list(seqlens)
        if any(n > padding for n in lengths):
            raise ValueError(f"lengths must be at most the padding {padding}, got {lengths}")
        starts = [i * padding for i in range(len(lengths) + 1)]
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        used = _vector(lengths, device)
        return PaddedSequenceInfo(_vector(starts, device), longest, shortest, starts, used, lengths, padding)

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length


@dataclass
class GappySequenceInfo(SequenceInfo):
    """`seqlen[i]` rows from `seqstart[i]` on, anywhere; the last start is the dimension's length. Of pages, each
    sequence has its own: `seqstart[i]` is its first row in use, and `seqlen[i]` the one after its last."""

    seqlen: Tensor
    seqlen_py: Sequence[int]

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Any = None
    ) -> GappySequenceInfo:
        """
        Raises:
            ValueError: not one start for each length, and, without pages, the dimension's length.
        """
        starts, lengths = list(seqstarts), list(seqlens)
        if len(starts) != len(lengths) + (not paged):
            last = "" if paged else " and the length of the keys' dimension at the end"
            raise ValueError(f"there must be a start for each length{last}, got starts {starts}, lengths {lengths}")
        longest, shortest = max(lengths, default=0), min(lengths, default=0)
        if paged:
            lengths = [start + n for start, n in zip(starts, lengths, strict=True)]
            starts.append(-1)
        return GappySequenceInfo(_vector(starts, device), longest, shortest, starts, _vector(lengths, device), lengths)

    def intervals(self) -> Iterator[tuple[int, int]]:
        for start, length in zip(self.seqstart_py, self.seqlen_py, strict=False):
            yield start, start + length


def usual_device(device: Any) -> Any:
    """A device, or where there is none the one that xformers takes: a GPU if there is any."""
    return device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"


def _vector(numbers: list[int], device: Any) -> Tensor:
    vector, device = torch.tensor(numbers, dtype=torch.int32, device="cpu"), torch.device(usual_device(device))
    return vector.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else vector.to(device)
