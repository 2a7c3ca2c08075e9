"""Rows that each rank pulls out of the others' memory, without packing: pieces of documents are contiguous.

The memory of a group's GPUs that all of them read is PyTorch's symmetric memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from saccade.distributed.exchanges import RowExchange, Segment, sums_dtype
from saccade.distributed.groups import cached_method
from saccade.distributed.sharding import Piece
from saccade.distributed.transport import Transport, group_seconds
from saccade.util.kept_memory import capturing, keep


class PeerMemory:
    """Two buffers of the same size on each rank. Copy engines read from a peer's buffer while kernels run.

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
        self._driver: Any = import_module("saccade.backends.device.replay").driver()
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
        return "ranks on ROCm: only CUDA's driver makes these copies"
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
                f"a CUDA graph cannot allocate the {size} bytes of memory for exchanges: before the capture run the "
                "forward and backward once first"
            )
        if found is not None and device.type == "cuda":
            torch.cuda.synchronize(device)  # others may free their memory when this rank takes part in the next line
        memory = keep(lambda: opened(max(1 << 20, 1 << (size - 1).bit_length()), group, device))
        _memories[group.group_name] = found = group, memory
    return found[1]


Range = tuple[int, int]
"""The first row, and how many."""


class PulledRows(RowExchange):
    """A RowExchange over symmetric memory. Each rank writes the rows that others need, all wait, and a kernel of each
    reads what it needs; back, each writes the gradients of what it had from others, and owners add up theirs as they
    read them, in the order of ranks."""

    def __init__(self, owned: Sequence[list[Piece]], needed: Sequence[list[Piece]], transport: Transport) -> None:
        super().__init__(owned, needed, transport)
        rank = transport.rank
        self.most = max(sum(piece.rows for piece in pieces) for pieces in (*owned, *needed))
        others = [i for i in range(transport.size) if i != rank]
        self.lent = united((s.source, s.rows) for i in others for s in self.sent[i])
        self.borrowed = united((s.target, s.rows) for i in others for s in self.received[i])
        self._there = RowSums(self.needed, self.received)
        back = ([Segment(target, source, n) for source, target, n in part] for part in self.sent)
        self._back = RowSums(self.rows, [*back])

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        return self._read(xs, self.lent, self._there, stage)

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        return self._read(dys, self.borrowed, self._back, stage)

    def _read(self, xs: list[Tensor], ranges: list[Range], rows: RowSums, stage: str) -> list[Tensor]:
        """Rows of all ranks, who write these."""
        xs = [x.contiguous() for x in xs]
        regions = self._write(xs, ranges, stage)
        rank, found = self.transport.rank, [regions(i) for i in range(self.transport.size)]
        ys = [rows.of([x if i == rank else of[t] for i, of in enumerate(found)]) for t, x in enumerate(xs)]
        regions.memory.read(self.transport.timeout)
        return ys

    def _write(self, xs: list[Tensor], ranges: list[Range], stage: str) -> Regions:
        """These rows of this rank, where others find them; returns when all ranks have written theirs."""
        regions = self._regions(xs, stage)
        for start, n in ranges:
            for mine, x in zip(regions(self.transport.rank), xs, strict=True):
                mine[start : start + n].copy_(x[start : start + n])
        self._barrier(regions, stage)
        return regions

    def _regions(self, xs: list[Tensor], stage: str) -> Regions:
        """Memory for an exchange of rows like these, which all ranks are in."""
        group = self.transport.begin(xs, stage)
        try:
            memory = memory_of(group, sum(map(self._size, xs)), xs[0].device)
            memory.begin(self.transport.timeout)
        except RuntimeError as error:
            raise RuntimeError(self.transport.report(stage, xs, error)) from error
        return Regions(self, memory, xs)

    def _barrier(self, regions: Regions, stage: str) -> None:
        try:
            regions.memory.barrier(self.transport.timeout)
        except RuntimeError as error:
            raise RuntimeError(self.transport.report(stage, regions.xs, error)) from error

    def _size(self, x: Tensor) -> int:
        """Bytes of a region for rows like these, which is aligned."""
        return -(-self.most * row_bytes(x) // 256) * 256


class RowSums:
    """Where the rows are that each row here is the sum of: for each rank, segments of its rows and of those here."""

    def __init__(self, rows: int, of_ranks: Sequence[list[Segment]]) -> None:
        self.rows, self.of_ranks = rows, of_ranks
        self._kept: dict[Any, Any] = {}

    def of(self, ranks: list[Tensor]) -> Tensor:
        """Of what each rank has, in their order."""
        like = ranks[0]
        if like.device.type == "cuda":
            table, layers = self.table(like.device)
            kernel: Any = import_module("saccade.backends.triton.rank_rows")
            return kernel.rank_sums([ranks[i] for i in layers], table, like)
        sums = torch.zeros(self.rows, *like.shape[1:], dtype=sums_dtype(like.dtype), device="cpu")
        for rank, segments in zip(ranks, self.of_ranks, strict=True):
            for source, target, n in segments:
                sums[target : target + n] += rank[source : source + n]
        return sums.to(like.dtype)

    @cached_method
    def table(self, device: torch.device) -> tuple[Tensor, list[int]]:
        """(layers, rows) int32: which row of a rank's is part of a sum, -1 for none, in the order of ranks; and the
        rank of each layer."""
        layers: list[Tensor] = []
        ranks: list[int] = []
        for i, segments in enumerate(self.of_ranks):
            mine: list[Tensor] = []
            for source, target, n in segments:
                _lay(mine, self.rows, target, torch.arange(source, source + n, dtype=torch.int32, device="cpu"))
            layers += mine
            ranks += [i] * len(mine)
        table = torch.stack(layers) if layers else torch.empty(0, self.rows, dtype=torch.int32, device="cpu")
        return table.to(device), ranks


def _lay(layers: list[Tensor], rows: int, first: int, slots: Tensor) -> None:
    """Into the first layer with room from row `first` on."""
    stop = first + len(slots)
    layer = next((x for x in layers if bool((x[first:stop] < 0).all())), None)
    if layer is None:
        layer = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
        layers.append(layer)
    layer[first:stop] = slots


class Regions:
    """Where a rank's rows of each tensor are in its memory, in one exchange."""

    def __init__(self, rows: PulledRows, memory: PeerMemory, xs: list[Tensor]) -> None:
        self.rows, self.memory, self.xs = rows, memory, xs
        self.starts = [*accumulate(map(rows._size, xs), initial=0)]

    def __call__(self, rank: int) -> list[Tensor]:
        of = zip(self.starts, self.xs, strict=False)
        return [self.memory.rows(rank, start, x, self.rows.most) for start, x in of]


def united(ranges: Iterable[Range]) -> list[Range]:
    """The rows that are in some of the ranges.

    >>> united([(4, 2), (0, 3), (2, 2), (9, 1)])
    [(0, 6), (9, 1)]
    """
    whole: list[Range] = []
    for start, n in sorted(ranges):
        if whole and start <= sum(whole[-1]):
            first = whole[-1][0]
            whole[-1] = first, max(sum(whole[-1]), start + n) - first
        else:
            whole.append((start, n))
    return whole
