"""Bulk copies and products of warpgroups: asynchronous, so that they happen at some time until they are waited for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

from tests.emulator.barriers import mbarrier_at
from tests.emulator.memory import SharedTile, check_fenced, check_read, check_write, fence, write_plainly
from tests.emulator.scheduler import AsyncOperation, EmulatorError, Race, machine, this_partition
from tests.emulator.values import OF_TORCH, Array, Tensor, ValueType, decoded, encoded, raw_type


class Descriptor:
    """A tensor in global memory as bulk copies see it, in boxes."""

    def __init__(self, x: Any) -> None:
        self.base, self.layout = x.base, x.layout
        self.shape, self.strides, self.block_shape = tuple(x.shape), tuple(x.strides), tuple(x.block_shape)
        self.dtype = OF_TORCH[x.base.dtype]
        self.block_type = self.type = ValueType(self.dtype, self.block_shape)
        size = x.base.element_size()
        last = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))
        end = x.base.untyped_storage().data_ptr() + x.base.untyped_storage().nbytes()
        if 0 not in self.shape and x.base.data_ptr() + (last + 1) * size > end:
            raise EmulatorError(f"a descriptor {self.shape} by {self.strides} reaches beyond its tensor")
        if x.base.data_ptr() % 16 or any(stride * size % 16 for stride in self.strides[:-1]) or self.strides[-1] != 1:
            raise EmulatorError(f"bulk copies take rows at multiples of 16 bytes, not strides {self.strides}")
        if any(n > 256 for n in self.block_shape[:-1]):
            raise EmulatorError(f"a box has 256 rows at most in a dimension, not {self.block_shape}")
        bits = torch.as_strided(x.base, self.shape, self.strides).view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]
        )
        self.memory = bits.numpy().view(raw_type(self.dtype))

    def box(self, corner: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Which part of a box is inside of the tensor: there, and in the box."""
        if len(corner) != len(self.shape):
            raise TypeError(f"{len(corner)} coordinates for a tensor of {len(self.shape)} dimensions")
        there, inside = [], []
        for start, length, block in zip(map(operator.index, corner), self.shape, self.block_shape, strict=True):
            low, high = max(start, 0), max(min(start + block, length), start, 0)
            there.append(slice(low, high))
            inside.append(slice(low - start, high - start))
        return tuple(there), tuple(inside)

    def check(self, tile: SharedTile) -> None:
        if tile.dtype != self.dtype or tile.places.size != np.prod(self.block_shape):
            raise TypeError(f"a box {self.dtype} {self.block_shape} goes to its like, not {tile.dtype} {tile.shape}")
        if tile.layout.swizzle_byte_width != self.layout.swizzle_byte_width:
            raise EmulatorError(f"a box in {self.layout} goes to a tile in {tile.layout}")
        if tile.places.min() % (8 * self.layout.swizzle_byte_width or 16):
            raise EmulatorError(f"a box goes to byte {tile.places.min()} of an allocation, which it may not begin at")

    def read(self, corner: Any) -> Array:
        made = np.zeros(self.block_shape, raw_type(self.dtype))
        there, inside = self.box(corner)
        made[inside] = self.memory[there]
        return made


def async_load(
    desc: Descriptor, coord: Any, barrier: SharedTile, result: SharedTile, pred: Any = True, **_: Any
) -> None:
    if not pred:
        return
    desc.check(result)
    landing, corner = mbarrier_at(barrier), tuple(map(operator.index, coord))

    def land() -> None:
        check_write(result, operation)
        result.put(desc.read(corner).reshape(result.shape))
        result.memory.unfenced[result.places] = 0
        landing.land(result.bytes)

    what = f"a bulk copy of {this_partition()} from {corner}"
    operation = AsyncOperation(this_partition(), what, land, writes=(result,))
    check_write(result, operation)
    machine().switch()


class _Store:
    """A bulk copy out of shared memory: when it is done with it, and when it has arrived."""

    def __init__(self, read: AsyncOperation) -> None:
        self.read = read
        self.written: AsyncOperation | None = None
        self.waited = False

    def arrived(self) -> bool:
        return self.written is not None and self.written.done


def _send(desc: Descriptor, coord: Any, src: SharedTile, put: Any) -> None:
    desc.check(src)
    corner, task = tuple(map(operator.index, coord)), this_partition()
    what = f"a bulk copy of {task} to {corner}"

    def read() -> None:
        check_read(src, operation)
        raw = src.raw().reshape(desc.block_shape)
        there, inside = desc.box(corner)

        def write() -> None:
            put(desc, there, raw[inside])

        store.written = AsyncOperation(task, what, write)

    check_fenced(src, what)
    operation = AsyncOperation(task, what, read, reads=(src,))
    store = _Store(operation)
    task.stores.append(store)
    machine().switch()


def async_store(desc: Descriptor, coord: Any, src: SharedTile, **_: Any) -> None:
    def put(desc: Descriptor, there: Any, raw: Array) -> None:
        desc.memory[there] = raw

    _send(desc, coord, src, put)


def reduce_add(desc: Descriptor, coord: Any, src: SharedTile, **_: Any) -> None:
    def put(desc: Descriptor, there: Any, raw: Array) -> None:
        sums = decoded(desc.memory[there], desc.dtype) + decoded(raw, desc.dtype)
        desc.memory[there] = encoded(sums, desc.dtype)

    _send(desc, coord, src, put)


def store_wait(pendings: Any = 0) -> None:
    """Until all but the last copies of this partition have read shared memory."""
    _wait_for_stores(int(pendings), lambda x: x.read.done, "its bulk copies' reads")


def wait_until_written(but: int) -> None:
    """Until all but the last copies of this partition are in global memory."""
    _wait_for_stores(but, _Store.arrived, "its bulk copies' arrival")


def _wait_for_stores(but: int, done: Callable[[_Store], bool], what: str) -> None:
    partition = this_partition()
    waited = partition.stores[: max(len(partition.stores) - but, 0)]
    machine().wait(lambda: all(map(done, waited)), what)
    for x in waited:
        x.waited = True
    partition.stores = [x for x in partition.stores if not (x.waited and x.arrived())]


def fence_async_shared(cluster: bool = False) -> None:
    fence(this_partition())


class Accumulator:
    """A product under way. Nothing but a wait, or a product that adds to it, may use it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.dtype = shape, tl.float32
        self.type = ValueType(tl.float32, shape)
        self.data: Array = None
        self.operation: AsyncOperation | None = None


def warpgroup_mma(
    a: Any, b: SharedTile, acc: Any, *, use_acc: Any = True, precision: Any = None, max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:  # fmt: skip
    """acc + a b, in float32."""
    alike = a.dtype == b.dtype or a.dtype.primitive_bitwidth == b.dtype.primitive_bitwidth == 8
    if not alike or a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != tuple(acc.shape):
        raise TypeError(f"no product of {a.dtype} {a.shape} and {b.dtype} {b.shape} for sums of {acc.shape}")
    task = this_partition()
    made, what = Accumulator(tuple(acc.shape)), f"a product of {task}"
    tiles = tuple(x for x in (a, b) if isinstance(x, SharedTile))
    use_acc = bool(use_acc)

    def compute() -> None:
        for tile in tiles:
            check_read(tile, operation)
        x, y = (decoded(x.raw(), x.dtype) if isinstance(x, SharedTile) else x.data for x in (a, b))
        product = np.matmul(x, y, dtype=np.float32)
        made.data = acc.data + product if use_acc else product

    for tile in tiles:
        check_fenced(tile, what)
    after = task.products[-1] if task.products else None
    operation = AsyncOperation(task, what, compute, reads=tiles, after=after)
    for tile in tiles:
        check_read(tile, operation)
    made.operation = operation
    task.products.append(operation)
    machine().switch()
    return made if is_async else warpgroup_mma_wait(0, [made])


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    task = this_partition()
    waited = [*task.products][: max(len(task.products) - int(num_outstanding), 0)]
    machine().wait(lambda: all(x.done for x in waited), "its products")
    for _ in waited:
        task.products.popleft()
    found = []
    for x in deps:
        if isinstance(x, Accumulator):
            if x.operation in task.products:
                raise Race(f"{task} takes a product that warpgroup_mma_wait({num_outstanding}) does not wait for")
            x = Tensor(x.data, tl.float32)
        found.append(x)
    return found[0] if len(found) == 1 else tuple(found)


def copy_async(smem: SharedTile, pointer: Tensor, mask: Any = None, **_: Any) -> None:
    """Copies of 16 bytes by each thread; zeros where the mask is not."""
    memory = machine().memory
    mask = None if mask is None else np.broadcast_to(mask.data, smem.shape)
    what = f"a copy of {this_partition()}"

    def land() -> None:
        check_write(smem, operation)
        zero = np.zeros((), np.float32 if smem.dtype.is_floating() else np.int64)
        found = memory.load(pointer, mask, None if mask is None else zero.astype(np.float32))
        smem.put(encoded(np.broadcast_to(found.data, smem.shape), smem.dtype))
        write_plainly(smem, task)

    task = this_partition()
    operation = AsyncOperation(task, what, land, writes=(smem,))
    check_write(smem, operation)
    task.copies.append(operation)
    machine().switch()


def copies_arrive(barrier: SharedTile, increment_count: bool = True) -> None:
    """Each thread of the partition arrives when its copies have landed."""
    if increment_count:
        raise NotImplementedError("arrivals of copies that count themselves in")
    task, landing = this_partition(), mbarrier_at(barrier)
    copies = [x for x in task.copies if not x.done]
    task.copies = []
    operation = AsyncOperation(task, f"an arrival of copies of {task}", lambda: landing.arrive(32 * task.warps))
    operation.ready = lambda: all(x.done for x in copies)
    machine().switch()
