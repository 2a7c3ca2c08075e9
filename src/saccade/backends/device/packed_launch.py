"""Launches whose parameters lie ready in memory: a later launch writes addresses alone, and asks CUDA's driver itself.

Triton's launcher goes over all arguments of a kernel, dozens of them, and asks the driver about every pointer. What a
kernel is called with but for addresses is the same in each repetition of a call, so here it is packed once. Memory of a
launch is used by one thread at a time: a thread takes it out of `idle`, and puts it back.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FORMATS = {
    "i1": "<i", "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u1": "<I", "u8": "<B", "u16": "<H", "u32": "<I",
    "u64": "<Q", "fp32": "<f", "f32": "<f", "fp64": "<d",
}  # fmt: skip
_MAP_BYTES, _CONFIG_BYTES, _ATTRIBUTE_BYTES, _VALUE_BYTES = 128, 56, 72, 8
_CONFIG = "<7I4xQQI"
"""CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, how many."""
_CHAINED = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
_STREAM_AT = 32
_FURTHER = 1 << 20
_INVALID_CONTEXT = 201
_MOST_SHARED = 228 << 10
"""Bytes of shared memory from which Triton's launcher sets an attribute."""

Place = tuple[int, int]
"""Which of a call's addresses, and how many bytes behind it."""


class Encoding(NamedTuple):
    """How Triton encodes a descriptor into a tensor map."""

    encode: Callable[..., Any]
    """(address, *fill) -> its object around a tensor map"""
    fill: Sequence[Any]
    shape: Sequence[int]
    strides: Sequence[int]


class Parameter(NamedTuple):
    """One parameter of a kernel."""

    value: bytes
    """as long as the parameter; of an address, or a tensor map of one, any"""
    place: Place | None = None


def packed(
    compiled: Any,
    grid: tuple[int, int, int],
    arguments: Sequence[Any],
    encodings: Sequence[Encoding],
    place: Callable[[Tensor], Place | None],
) -> PackedLaunch | None:
    """The launch of a compiled kernel with these arguments, of which tensors are found by their places; None where
    Triton's own launcher has to do it.

    Args:
        encodings: of the arguments that are descriptors, in their order.
    """
    run, metadata = compiled.run, compiled.metadata
    warps, blocks, shared = compiled.packed_metadata[:3]
    asks = (getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
    plain = type(run).__name__ == "CudaLauncher" and not any(asks)
    if not plain or blocks != 1 or shared > _MOST_SHARED or metadata.launch_cooperative_grid or driver() is None:
        return None
    parameters = [*_parameters(compiled.src.signature.values(), arguments, iter(encodings), place)]
    if None in parameters:
        return None
    sizes = *grid, 32 * warps, 1, 1, shared
    return PackedLaunch(compiled, sizes, bool(metadata.launch_pdl), [x for x in parameters if x is not None])


def _parameters(
    signature: Any, arguments: Sequence[Any], encodings: Iterator[Encoding], place: Callable[[Tensor], Place | None]
) -> Iterator[Parameter | None]:
    """Those of the compiled kernel, one by one; None for what is not known here."""
    for kind, x in zip(signature, arguments, strict=True):
        if isinstance(kind, tuple):
            yield from _parameters(kind, x, encodings, place)
        elif kind.startswith("tensordesc"):
            found, encoding = place(x.base), next(encodings, None)
            value = None if found is None or encoding is None else _tensor_map(encoding, x.base.data_ptr())
            if value is None or encoding is None:
                yield None
                return
            yield Parameter(value, found)
            yield from (Parameter(struct.pack("<i", n)) for n in encoding.shape)
            yield from (Parameter(struct.pack("<q", n)) for n in encoding.strides)
        elif kind.startswith("*"):
            found = None if x is None else place(x)
            yield None if x is not None and found is None else Parameter(bytes(_VALUE_BYTES), found)
        elif kind != "constexpr":
            # struct raises for floats beyond float32, which Triton rounds to infinity.
            x = ctypes.c_float(x).value if kind in ("fp32", "f32") else x
            yield Parameter(struct.pack(_FORMATS[kind], x)) if kind in _FORMATS else None


class PackedLaunch:
    """A launch but for its stream and its addresses."""

    def __init__(self, compiled: Any, sizes: Sequence[int], chained: bool, parameters: Sequence[Parameter]) -> None:
        self.compiled, self.sizes, self.chained = compiled, sizes, chained
        scratch = Parameter(bytes(_VALUE_BYTES))
        self.parameters = [*parameters, scratch, scratch]
        self.idle: list[_Frame] = []

    def __call__(self, device: int, stream: int, addresses: Sequence[int]) -> None:
        """On a stream of the current device. `addresses` are not changed later."""
        try:
            frame = self.idle.pop()
        except IndexError:
            frame = _Frame(self)
        error = frame.start(stream, addresses)
        if error == _INVALID_CONTEXT:  # a thread that has not used the device
            _enter(device)
            error = frame.start(stream, addresses)
        if error:
            _raise(error, self.compiled.name)
        self.idle.append(frame)


class _Frame:
    """Memory of one launch."""

    __slots__ = ("addresses", "call", "cells", "driver", "maps", "memory", "stream")

    def __init__(self, launch: PackedLaunch) -> None:
        self.driver, parameters = driver(), launch.parameters
        maps = _MAP_BYTES * sum(len(x.value) == _MAP_BYTES for x in parameters)
        pointers = maps + _CONFIG_BYTES + _ATTRIBUTE_BYTES
        values = pointers + _VALUE_BYTES * len(parameters)
        self.memory = ctypes.create_string_buffer(values + _VALUE_BYTES * len(parameters) + _MAP_BYTES)
        base = -(-ctypes.addressof(self.memory) // _MAP_BYTES) * _MAP_BYTES
        config, attribute = base + maps, base + maps + _CONFIG_BYTES
        _write(attribute, struct.pack("<iii", _CHAINED, 0, 1))
        _write(config, struct.pack(_CONFIG, *launch.sizes, 0, attribute, launch.chained))
        self.stream = ctypes.c_uint64.from_address(config + _STREAM_AT)
        self.cells: list[tuple[Any, int, int]] = []
        self.maps: list[tuple[int, int, int]] = []
        self.addresses: Sequence[int] = ()
        pointer = (ctypes.c_uint64 * len(parameters)).from_address(base + pointers)
        for i, x in enumerate(parameters):
            at = base + values + _VALUE_BYTES * i
            if len(x.value) == _MAP_BYTES and x.place is not None:
                at = base + _MAP_BYTES * len(self.maps)
                self.maps.append((at, *x.place))
            elif x.place is not None:
                self.cells.append((ctypes.c_uint64.from_address(at), *x.place))
            _write(at, x.value)
            pointer[i] = at
        function = ctypes.c_void_p(launch.compiled.function)
        self.call = ctypes.c_void_p(config), function, ctypes.c_void_p(base + pointers), None

    def start(self, stream: int, addresses: Sequence[int]) -> int:
        """The driver's error, or 0."""
        if self.addresses != addresses:
            for cell, i, offset in self.cells:
                cell.value = addresses[i] + offset
            replace = self.driver.cuTensorMapReplaceAddress
            for place, i, offset in self.maps:
                if error := replace(place, addresses[i] + offset):
                    return error
            self.addresses = addresses
        self.stream.value = stream
        return self.driver.cuLaunchKernelEx(*self.call)


@cache
def driver() -> Any:
    """CUDA's driver, or None where there is none."""
    if torch.version.hip:
        return None
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.cuTensorMapReplaceAddress.argtypes = ctypes.c_void_p, ctypes.c_void_p
        cuda.cuLaunchKernelEx.restype = ctypes.c_int
    except (OSError, AttributeError):  # CUDA 12 brought the last of these functions
        return None
    return cuda


def _tensor_map(encoding: Encoding, address: int) -> bytes | None:
    """The bytes that Triton's launcher passes to the kernel; None if replacing an address, as later launches do, gives
    others than encoding does."""
    there, elsewhere = (_bytes_of(encoding.encode(x, *encoding.fill)) for x in (address, address + _FURTHER))
    copy = ctypes.create_string_buffer(2 * _MAP_BYTES)
    place = -(-ctypes.addressof(copy) // _MAP_BYTES) * _MAP_BYTES
    ctypes.memmove(place, elsewhere, _MAP_BYTES)
    same = not driver().cuTensorMapReplaceAddress(place, address) and ctypes.string_at(place, _MAP_BYTES) == there
    return there if same and there != elsewhere else None


def _bytes_of(x: Any) -> bytes:
    """The tensor map in Triton's object, which ends with it."""
    return ctypes.string_at(id(x) + type(x).__basicsize__ - _MAP_BYTES, _MAP_BYTES)


def _write(address: int, value: bytes) -> None:
    ctypes.memmove(address, value, len(value))


def _enter(device: int) -> None:
    """Makes the device's context the thread's, as Triton's launcher does."""
    cuda, number, context = driver(), ctypes.c_int(), ctypes.c_void_p()
    cuda.cuDeviceGet(ctypes.byref(number), device)
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    cuda.cuCtxSetCurrent(context)


def _raise(error: int, of: str) -> None:
    told = ctypes.c_char_p()
    driver().cuGetErrorString(error, ctypes.byref(told))
    raise RuntimeError(f"CUDA refused {of}: {(told.value or b'unknown error').decode()} ({error})")
