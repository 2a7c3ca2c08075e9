"""Memory of a group's GPUs that all of them read: PyTorch's symmetric memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from saccade.kept_memory import capturing, keep


class PeerMemory:
    """A buffer of as many bytes on each rank, twice. Copies out of a peer's run on copy engines, beside kernels.

    Exchanges take turns at the two halves: a rank that has passed the barrier of one exchange knows that all have
    copied what the one before wrote, whose half the next one writes. So an exchange has one barrier. Those in a CUDA
    graph, which may be replayed after any other, begin and end with one more.
    """

    def __init__(self, size: int, group: Any, device: torch.device) -> None:
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        self.size, self.device = size, device
        self.local: Tensor = symmetric.empty(2 * size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self.local, group)
        ranks, own = group.size(), group.rank()
        self._buffers = [
            self.local if i == own else self._handle.get_buffer(i, (2 * size,), torch.uint8) for i in range(ranks)
        ]
        self._half = 0
        self._met: Any = None
        self._copied: Any = None
        self._patience = group_seconds(group, device)
        with torch.cuda.device(device):
            self._copies = torch.cuda.Stream(device)
        self._driver: Any = import_module("saccade.backends.device.packed_launch").driver()
        self._copying = ctypes.c_void_p(self._copies.cuda_stream)

    def rows(self, rank: int, start: int, like: Tensor, n: int) -> Tensor:
        """n rows in the form of another tensor's, from the byte `start` on, of what a rank writes in this exchange."""
        start += self._half * self.size
        return self._buffers[rank][start : start + n * row_bytes(like)].view(like.dtype).view(n, *like.shape[1:])

    def begin(self, seconds: float | None = None) -> None:
        """Before a rank writes for an exchange."""
        self._half ^= 1
        if capturing():
            self.barrier(seconds)
        elif self._met is not None:
            torch.cuda.current_stream(self.device).wait_event(self._met)

    def barrier(self, seconds: float | None = None) -> None:
        """Of all ranks' devices, on the current streams, when what was copied before has come. A device that waits
        longer stops, with words of its rank."""
        stream = torch.cuda.current_stream(self.device)
        if self._copied is not None and not capturing():
            stream.wait_event(self._copied)
        self._handle.barrier(channel=0, timeout_ms=max(1, int(1000 * (seconds or self._patience))))
        if not capturing():
            self._met = stream.record_event()

    def copied(self, copies: Callable[[], None]) -> Any:
        """Copies, on a stream of their own, after what is on the current one: an event for `end`."""
        self._copies.wait_event(torch.cuda.current_stream(self.device).record_event())
        try:
            with torch.cuda.stream(self._copies):
                copies()
        except BaseException:  # the memory that they write, which goes back now, is used again after them
            self.end(self._copies.record_event())
            raise
        return self._copies.record_event()

    def copy(self, target: int, source: int, lines: int, width: int, pitch: int) -> None:
        """Copies lines of `width` bytes, which lie `pitch` apart, from address to address, by a copy engine, whatever
        kernels run: of a part of each row PyTorch would start one, which waits for multiprocessors. In `copied`."""
        if width == pitch:
            error = self._driver.cuMemcpyAsync(
                ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(lines * width), self._copying
            )
        else:
            numbers = _Lines(width=width, height=lines)
            numbers.source_type = numbers.target_type = _UNIFIED
            numbers.source_device, numbers.target_device = source, target
            numbers.source_pitch = numbers.target_pitch = pitch
            error = self._driver.cuMemcpy2DAsync_v2(ctypes.byref(numbers), self._copying)
        if error:
            raise RuntimeError(f"CUDA's driver does not copy {lines} lines of {width} bytes: error {error}")

    def tells(self) -> bool:
        """Whether `tell` may be called: CUDA graphs take no writes of streams."""
        return not capturing()

    def tell(self, x: Tensor, number: int) -> None:
        """Writes an int32 behind the copies before. In `copied`."""
        symmetric: Any = import_module("torch._C._distributed_c10d")._SymmetricMemory
        symmetric.stream_write_value32(x.view(torch.uint32), 0, number)

    def end(self, event: Any) -> None:
        """After these copies."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def read(self, seconds: float | None = None) -> None:
        """After kernels on the current stream that have read what others wrote."""
        if capturing():
            self.barrier(seconds)
        else:
            self._copied = torch.cuda.current_stream(self.device).record_event()


def group_seconds(group: Any, device: torch.device) -> float:
    """A group's own timeout."""
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return 600.0


def row_bytes(x: Tensor) -> int:
    return x.element_size() * x.shape[1:].numel()


def reachable(device: str) -> bool:
    """Whether a device's memory may be in its peers' reach."""
    return device.startswith("cuda")


def obstacle(group_name: str, device: str) -> str | None:
    """Why memory of a group's ranks is not known to be in reach of one another, or None: equal on equal hosts."""
    if not group_name or not reachable(device):
        return f"ranks on {device}" if group_name else "ranks without processes"
    if torch.version.hip:
        return "ranks on ROCm: copies are asked of CUDA's driver"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    if not local:
        return "LOCAL_WORLD_SIZE, of torchrun, does not say which ranks share a host"
    group = distributed_c10d._resolve_process_group(group_name)  # pyright: ignore[reportPrivateImportUsage, reportArgumentType]
    hosts = {rank // local for rank in distributed_c10d.get_process_group_ranks(group)}
    if len(hosts) > 1:
        return f"ranks on {len(hosts)} hosts"
    return _devices_apart(torch.device(device), local)


def _devices_apart(device: torch.device, local: int) -> str | None:
    count = torch.cuda.device_count()
    if count < local:
        return f"a process sees {count} GPU{'s' * (count > 1)} of {local}"
    apart = [i for i in range(local) if i != device.index and not torch.cuda.can_device_access_peer(device.index, i)]
    return f"{device} does not reach the memory of GPU {apart[0]}" if apart else None


class _Lines(ctypes.Structure):
    """CUDA_MEMCPY2D: source and target, each x, y, the type of memory, addresses by type, bytes from line to line."""

    _fields_ = [
        (f"{side}_{name}", ctypes.c_int if name == "type" else ctypes.c_size_t)
        for side in ("source", "target")
        for name in ("x", "y", "type", "host", "device", "array", "pitch")
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


_UNIFIED = 4
"""CU_MEMORYTYPE_UNIFIED"""


_memories: dict[str, tuple[Any, PeerMemory]] = {}

opened: Callable[..., PeerMemory] = PeerMemory


def memory_of(group: Any, size: int, device: torch.device) -> PeerMemory:
    """The group's memory, of at least so many bytes. It grows by a collective: size is equal on all ranks."""
    found = _memories.get(group.group_name)
    if found is None or found[0] is not group or found[1].size < size:
        if device.type == "cuda" and capturing():
            raise RuntimeError(
                f"memory of {size} bytes for exchanges is made by a call before a CUDA graph captures one: run the "
                "forward and backward once first"
            )
        if found is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # others may free their memory when this rank takes part in the next line
        memory = keep(lambda: opened(max(1 << 20, 1 << (size - 1).bit_length()), group, device))
        _memories[group.group_name] = found = group, memory
    return found[1]
