"""Global and shared memory: what is read was written, in time, and inside of a tensor or tile."""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon.language import NVMMASharedLayout

from tests.emulator.scheduler import (
    AsyncOperation,
    EmulatorError,
    GridProgram,
    Partition,
    Race,
    this_partition,
)
from tests.emulator.values import Array, Tensor, bytes_of, decoded, encoded, raw_type, sizes


class GlobalMemory:
    """The tensors of a launch, found by address."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors if x.numel()}
        self.starts = sorted(storages)
        self.storages = [storages[start] for start in self.starts]
        self.bytes = [torch.empty(0, dtype=torch.uint8).set_(x).numpy() for x in self.storages]

    def find(self, address: Array, size: int, dtype: Any) -> tuple[Array, Array]:
        """The memory that holds all of these addresses, as elements, and their places in it."""
        low, high = int(address.min()), int(address.max()) + size
        i = bisect.bisect_right(self.starts, low) - 1
        if i < 0 or high > self.starts[i] + len(self.bytes[i]):
            raise EmulatorError(f"{this_partition()} uses memory outside of every tensor: [{low:#x}, {high:#x})")
        if ((address - self.starts[i]) % size).any():
            raise EmulatorError(f"{this_partition()} uses memory between elements of {dtype}")
        whole = self.bytes[i][: len(self.bytes[i]) // size * size]
        return whole.view(raw_type(dtype)), (address - self.starts[i]) // size

    def load(self, pointer: Tensor, mask: Array | None, other: Array | None) -> Tensor:
        """What is there, `other` where the mask is not, and without it anything."""
        dtype = pointer.dtype.element_ty
        address, shape = pointer.data, pointer.data.shape
        if mask is None:
            memory, place = self.find(address, bytes_of(dtype), dtype)
            return Tensor(decoded(memory[place], dtype), dtype)
        shape = np.broadcast_shapes(shape, mask.shape)
        address, mask = np.broadcast_to(address, shape), np.broadcast_to(mask, shape)
        raw = np.full(shape, ~raw_type(dtype)(0)) if other is None else None
        if raw is None:
            raw = np.array(np.broadcast_to(encoded(other, dtype), shape))
        if mask.any():
            memory, place = self.find(address[mask], bytes_of(dtype), dtype)
            raw[mask] = memory[place]
        return Tensor(decoded(raw, dtype), dtype)

    def store(self, pointer: Tensor, value: Array, mask: Array | None) -> None:
        dtype = pointer.dtype.element_ty
        shapes = [pointer.data.shape, value.shape] + ([] if mask is None else [mask.shape])
        shape = np.broadcast_shapes(*shapes)
        address, raw = np.broadcast_to(pointer.data, shape), np.broadcast_to(encoded(value, dtype), shape)
        if mask is not None:
            mask = np.broadcast_to(mask, shape)
            if not mask.any():
                return
            address, raw = address[mask], raw[mask]
        memory, place = self.find(address, bytes_of(dtype), dtype)
        memory[place] = raw

    def update(self, pointer: Tensor, value: Array, mask: Array | None, f: Any) -> Tensor:
        """Atomic: f(what is there, value) element by element; returns what was there."""
        dtype = pointer.dtype.element_ty
        shape = np.broadcast_shapes(pointer.data.shape, value.shape)
        address, value = np.broadcast_to(pointer.data, shape), np.broadcast_to(value, shape)
        mask = np.ones(shape, bool) if mask is None else np.broadcast_to(mask, shape)
        old = np.zeros(shape, value.dtype)
        if mask.any():
            memory, place = self.find(address[mask], bytes_of(dtype), dtype)
            numbers = memory.view(value.dtype)
            old[mask] = numbers[place]
            f.at(numbers, place, value[mask])
        return Tensor(old, dtype)


def _poison(dtype: Any) -> int:
    """The byte of what nobody has written: NaN, or a large integer."""
    return 0xFF if dtype.is_floating() else 0x5A


class SharedMemory:
    """One allocation. What was never written is NaN, or a large integer; elements that were written without a fence
    since have the time of that."""

    def __init__(self, size: int, dtype: Any) -> None:
        self.size = size
        self.bytes = np.full(-(-size // 8) * 8, _poison(dtype), np.uint8)
        self.unfenced = np.zeros(size, np.int64)


@lru_cache(maxsize=4096)
def places_of(shape: tuple[int, ...], layout: Any, size: int) -> Array:
    """The byte at which each element of a tile, or of an array of them, begins."""
    rank = getattr(layout, "rank", None)
    if not isinstance(layout, NVMMASharedLayout) or not layout.swizzle_byte_width:
        return np.arange(math.prod(shape)).reshape(shape) * size
    if layout.transposed or layout.element_bitwidth != 8 * size or rank not in (len(shape), len(shape) - 1):
        raise NotImplementedError(f"tiles {shape} of {size} bytes in {layout}")
    tile, width = shape[len(shape) - rank :], layout.swizzle_byte_width
    rows, columns = math.prod(tile[:-1]), tile[-1]
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :] * size
    # Stripes of columns lie one after the other, and in eight rows of 128 bytes pieces of 16 change places.
    byte = column // width * (rows * width) + row * width + column % width
    byte ^= (byte >> 7 & (width // 16 - 1)) << 4
    many = shape[0] if len(shape) > rank else 1
    first = np.arange(many)[:, None, None] * (rows * columns * size)
    found = (first + byte).reshape(shape)
    found.flags.writeable = False
    return found


class SharedTile:
    """A view of shared memory."""

    def __init__(self, memory: SharedMemory, places: Array, dtype: Any, layout: Any) -> None:
        self.memory, self.places, self.dtype, self.layout = memory, places, dtype, layout

    @staticmethod
    def allocate(dtype: Any, shape: Any, layout: Any, value: Tensor | None = None) -> SharedTile:
        places = places_of(sizes((shape,)), layout, bytes_of(dtype))
        memory = SharedMemory(int(places.max()) + bytes_of(dtype), dtype)
        this_partition().program.memories.append(memory)
        tile = SharedTile(memory, places, dtype, layout)
        if value is not None:
            tile.store(value)
        return tile

    @property
    def shape(self) -> tuple[int, ...]:
        return self.places.shape

    @property
    def type(self) -> SharedTile:
        return self

    @property
    def bytes(self) -> int:
        return self.places.size * bytes_of(self.dtype)

    def _view(self, places: Array) -> SharedTile:
        return SharedTile(self.memory, places, self.dtype, self.layout)

    def index(self, i: Any) -> SharedTile:
        if not 0 <= (i := operator.index(i)) < self.shape[0]:
            raise EmulatorError(f"{this_partition()} takes tile {i} of {self.shape[0]}")
        return self._view(self.places[i])

    def slice(self, start: Any, length: Any, dim: Any = 0) -> SharedTile:
        start, length, dim = map(operator.index, (start, length, dim))
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise EmulatorError(f"{this_partition()} slices [{start}, {start + length}) of {self.shape[dim]}")
        return self._view(self.places[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, *dims: Any) -> SharedTile:
        return self._view(self.places.transpose(sizes(dims)))

    def reshape(self, *shape: Any) -> SharedTile:
        return self._view(self.places.reshape(sizes(shape)))

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> SharedTile:
        first = int(self.places.min())
        places = first + places_of(sizes((shape,)), layout, bytes_of(dtype))
        if places.max() + bytes_of(dtype) > self.memory.size:
            raise EmulatorError(f"{this_partition()} views shared memory beyond its end as {shape}")
        if first % (8 * getattr(layout, "swizzle_byte_width", 0) or 1):
            raise EmulatorError(
                f"{this_partition()} views a tile at byte {first}, which swizzled tiles do not begin at"
            )
        return SharedTile(self.memory, places, dtype, layout)

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Tensor:
        """What is there, or anything while an asynchronous operation writes it: a kernel may read what it does not
        use."""
        raw = self.raw()
        if writer_of(self) is not None:
            raw = np.full_like(raw, _poison(self.dtype) * (~raw_type(self.dtype)(0) // 0xFF))
        return Tensor(decoded(raw, self.dtype), self.dtype)

    def store(self, value: Any) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(f"a tile {self.dtype} {self.shape} takes its like, not {value.dtype} {value.shape}")
        check_write(self)
        self.put(encoded(value.data, self.dtype))
        write_plainly(self, this_partition())

    def raw(self) -> Array:
        return self.memory.bytes.view(raw_type(self.dtype))[self.places // bytes_of(self.dtype)]

    def put(self, raw: Array) -> None:
        self.memory.bytes.view(raw_type(self.dtype))[self.places // bytes_of(self.dtype)] = raw

    def overlaps(self, other: SharedTile) -> bool:
        if self.memory is not other.memory:
            return False
        if self.places.max() < other.places.min() or other.places.max() < self.places.min():
            return False
        touched = np.zeros(len(self.memory.bytes) + 8, bool)
        for i in range(bytes_of(self.dtype)):
            touched[self.places + i] = True
        return bool(touched[other.places].any())


def write_plainly(tile: SharedTile, task: Partition) -> None:
    """Notes what threads have written, which asynchronous operations see behind a fence: the writer's, or their own."""
    task.program.time += 1
    tile.memory.unfenced[tile.places] = task.program.time
    task.unfenced.append(tile)


def fence(task: Partition) -> None:
    """Asynchronous operations see what the partition has written, and its own all that is written before them."""
    for tile in task.unfenced:
        tile.memory.unfenced[tile.places] = 0
    task.unfenced.clear()
    task.fenced = task.program.time


def check_fenced(tile: SharedTile, what: str) -> None:
    """Raises where an asynchronous operation reads what was written without a fence since."""
    if (tile.memory.unfenced[tile.places] > this_partition().fenced).any():
        raise Race(f"{what} reads shared memory that was written without a fence_async_shared since")


def writer_of(
    tile: SharedTile, program: GridProgram | None = None, but: AsyncOperation | None = None
) -> AsyncOperation | None:
    """What is writing some of a tile."""
    operations = (program or this_partition().program).operations
    return next((x for x in operations if x is not but and any(tile.overlaps(other) for other in x.writes)), None)


def check_read(tile: SharedTile, reader: AsyncOperation) -> None:
    """Raises where something asynchronous writes what `reader` reads."""
    if (x := writer_of(tile, reader.task.program, reader)) is not None:
        raise Race(f"{reader.what} reads a tile {tile.shape} while {x.what} writes it")


def check_write(tile: SharedTile, writer: AsyncOperation | None = None) -> None:
    """Raises where something asynchronous uses what `writer`, or this partition, writes."""
    program = writer.task.program if writer else this_partition().program
    for x in program.operations:
        for use, tiles in (("reads", x.reads), ("writes", x.writes)):
            if x is not writer and any(tile.overlaps(other) for other in tiles):
                who = writer.what if writer else this_partition()
                raise Race(f"{who} writes a tile {tile.shape} while {x.what} {use} it")
