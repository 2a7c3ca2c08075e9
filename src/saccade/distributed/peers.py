"""Memory of a group's GPUs that all of them read: PyTorch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


class PeerMemory:
    """A buffer of as many bytes on each rank. Copies out of a peer's run on copy engines, beside kernels."""

    def __init__(self, size: int, group: Any, device: torch.device) -> None:
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        self.size, self.device = size, device
        self.local: Tensor = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self.local, group)
        ranks, own = group.size(), group.rank()
        self._buffers = [
            self.local if i == own else self._handle.get_buffer(i, (size,), torch.uint8) for i in range(ranks)
        ]
        self._last: Any = None

    def rows(self, rank: int, like: Tensor, n: int) -> Tensor:
        """The first n rows of what a rank has written, in the form of another tensor's rows."""
        size = n * row_bytes(like)
        return self._buffers[rank][:size].view(like.dtype).view(n, *like.shape[1:])

    def begin(self) -> None:
        """After what was done before with this memory, on whichever stream."""
        if self._last is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).wait_event(self._last)

    def barrier(self) -> None:
        """Of all ranks' devices, on the current streams."""
        self._handle.barrier(channel=0)

    def end(self) -> None:
        """After it, ranks may write again."""
        self.barrier()
        if not torch.cuda.is_current_stream_capturing():
            self._last = torch.cuda.current_stream(self.device).record_event()


def row_bytes(x: Tensor) -> int:
    return x.element_size() * x.shape[1:].numel()


def reachable(device: str) -> bool:
    """Whether a device's memory may be in its peers' reach."""
    return device.startswith("cuda")


_memories: dict[str, tuple[Any, PeerMemory]] = {}

opened: Callable[..., PeerMemory] = PeerMemory


def memory_of(group: Any, size: int, device: torch.device) -> PeerMemory:
    """The group's memory, of at least so many bytes. It grows by a collective: size is equal on all ranks."""
    found = _memories.get(group.group_name)
    if found is None or found[0] is not group or found[1].size < size:
        memory = opened(max(1 << 20, 1 << (size - 1).bit_length()), group, device)
        _memories[group.group_name] = found = group, memory
    return found[1]
