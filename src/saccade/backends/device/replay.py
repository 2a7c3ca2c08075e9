"""What a call did, to be done again: the memory that it allocated, and its launches.

A `LaunchRecorder` watches one call. If that did nothing but allocate memory, look at it through views, fill it, and
launch kernels, it becomes a `Replay`: calls of the same key (`ops/replay.py`) have these sizes, kernels, grids and
numbers, and differ in addresses.

Triton's launcher goes over all arguments of a kernel, dozens of them, and asks the driver about every pointer. A Replay
packs the parameters of each kernel once. Later it writes addresses alone, and asks CUDA's driver itself. Launches whose
parameters lie alike share memory, used by one thread at a time: a thread takes it out of `idle`, and puts it back.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from saccade.util.imports import DispatchMode

_FORMATS = {
    "i1": "i4x", "i8": "b7x", "i16": "h6x", "i32": "i4x", "i64": "q", "u1": "I4x", "u8": "B7x", "u16": "H6x",
    "u32": "I4x", "u64": "Q", "fp32": "f4x", "f32": "f4x", "fp64": "d",
}  # fmt: skip
"""How a kernel's parameter lies in its 8 bytes."""
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

Slot = tuple[int, int]
"""Which of a call's addresses, and how many bytes behind it."""


class Replay:
    """Does a call again for other tensors of the same key."""

    def __init__(
        self, device: torch.device, results: Sequence[_Result | None], workspace: int,
        early: Sequence[PackedLaunch | Fill], launches: Sequence[PackedLaunch | Fill],
        counter: Callable[[torch.device], Tensor] | None, kept: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.device, self.index, self.counter = device, device.index or 0, counter
        self.results, self.workspace, self.early, self.launches = results, workspace, early, launches
        self.kept, self.kept_at = kept, [x.data_ptr() for x in kept]
        self.stream = torch._C._cuda_getCurrentRawStream(self.index) if kept else None
        self.static: Any = None
        """See `saccade.ops.replay`."""

    def ready(self) -> bool:
        """Whether it may run: on the current device, where nothing listens to launches; and where it reads what an
        earlier call computed, on that one's stream."""
        if torch._C._cuda_getDevice() != self.device.index or hooked():
            return False
        return self.stream is None or torch._C._cuda_getCurrentRawStream(self.index) == self.stream

    def __call__(self, addresses: Sequence[int]) -> list[Tensor | None]:
        """What the call returns; None for a result that is an operand. `addresses` are those of its operands; the
        operands live until it returns."""
        space = empty((self.workspace,), (1,), torch.uint8, self.device) if self.workspace else None
        drawn = None if self.counter is None else self.counter(self.device)
        slots = [*addresses, 0 if space is None else space.data_ptr(), 0 if drawn is None else drawn.data_ptr()]
        slots += self.kept_at
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        for launch in self.early:  # the device works while the host allocates the rest
            launch(self.index, stream, slots)
        results: list[Tensor | None] = []
        slots = [*slots]  # launches keep the list that they get
        for x in self.results:
            made = None if x is None else empty(x.shape, x.strides, x.dtype, self.device)
            results.append(made)
            slots.append(0 if made is None else made.data_ptr())
        for launch in self.launches:
            launch(self.index, stream, slots)
        return results

    def nothing(self) -> Tensor:
        """An empty tensor of the dtype that `per_row` has."""
        return empty((0,), (1,), torch.float32, self.device)


class _Result(NamedTuple):
    """A tensor that a call returns, of which it is the whole memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_on_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty_strided` on the current device, without the dispatcher where torch has it so."""
    if _on_cuda is not None and device.type == "cuda":
        return _on_cuda(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def empty_strided(
    shape: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """`torch.empty_strided`. A LaunchRecorder is told of it, as its mode would cost more than all else here."""
    recorder, index = current(), device.index
    if recorder is None or _on_cuda is None or index is None or index != torch._C._cuda_getDevice():
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    recorder.allocated.append(made := _on_cuda(shape, strides, dtype))
    return made


def hooked() -> bool:
    """Whether a hook, such as a profiler's, listens to launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# Recording launches.

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.empty_like.default,
}
_VIEWS = {
    getattr(_aten, name).default
    for name in ("alias", "detach", "expand", "permute", "unsqueeze", "view", "_unsafe_view", "t")
} | {
    _aten.slice.Tensor, _aten.transpose.int, _aten.select.int, _aten.squeeze.dim, _aten.as_strided.default,
    _aten.view.dtype, _aten.split.Tensor, _aten.unbind.int,
}  # fmt: skip
_ZEROS = {_aten.zeros.default, _aten.new_zeros.default, _aten.zeros_like.default, _aten.zero_.default}
_FILLS = {_aten.full.default: 1, _aten.new_full.default: 2, _aten.full_like.default: 1, _aten.fill_.Scalar: 1}
"""Where their arguments have the number."""
_state = threading.local()


class _Started(NamedTuple):
    """A launch that was recorded."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: Sequence[Any]
    encodings: Sequence[Encoding]


class LaunchRecorder(DispatchMode):
    """Watches a call: `with recorder: …`, in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.started: list[_Started | tuple[Tensor, Any]] = []
        """launches, and tensors with the number that fills them"""
        self.drawn: tuple[Tensor, Callable[[torch.device], Tensor]] | None = None
        self.kept: list[Tensor] = []
        self.obstacle: str | None = None
        """What the call did besides."""
        self.compiles = False

    def __enter__(self) -> Any:
        _state.recorder = self
        return super().__enter__()

    def __exit__(self, *of: Any) -> None:
        _state.recorder = None
        super().__exit__(*of)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        fills = func in _ZEROS or func in _FILLS
        if func in _ALLOCATIONS or (fills and not func._schema.is_mutable):
            self.allocated.append(result)
        if fills:
            self.started.append((result, args[_FILLS[func]] if func in _FILLS else 0))
        elif func not in _ALLOCATIONS and func not in _VIEWS:
            self.obstacle = self.obstacle or str(func)
        return result

    def replay(self, operands: Sequence[Tensor], results: Sequence[Tensor | None]) -> Replay | None:
        """What was recorded, of a call that had these operands and returned these results."""
        if self.obstacle or self.compiles or not self.started:
            return None
        device, slots = operands[0].device, _Memory(operands, self.drawn, self.kept)
        for x in results:
            if not slots.add_result(x, self.allocated):
                self.obstacle = "a result that is a part of a piece of memory"
                return None
        slots.add_workspace(self.allocated)
        early: list[PackedLaunch | Fill] = []  # those before the first that reads or writes a result
        launches: list[PackedLaunch | Fill] = []
        for x in self.started:
            if not isinstance(x, _Started) and not x[0].numel():
                continue
            launch = packed(*x, slots.find) if isinstance(x, _Started) else Fill.of(*x, slots.find)
            if launch is None:
                self.obstacle = f"a launch that cannot be packed: {getattr(x[0], 'name', x[0].__class__)}"
                return None
            (launches if slots.results_begun else early).append(launch)
        made = [None if x is None else _Result(tuple(x.shape), x.stride(), x.dtype) for x in slots.results]
        counter = None if self.drawn is None else self.drawn[1]
        return Replay(device, made, slots.workspace, early, launches, counter, self.kept)


def new_launch_recorder() -> LaunchRecorder | None:
    """None where nothing is compiled, where there is no driver to be asked, and while a CUDA graph is captured, for
    which memory lies elsewhere."""
    if knobs.runtime.interpret or driver() is None or torch.cuda.is_current_stream_capturing():
        return None
    return LaunchRecorder()


def current() -> LaunchRecorder | None:
    """The LaunchRecorder that watches this thread."""
    return getattr(_state, "recorder", None)


def note_launch(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], encodings: Sequence[Encoding] = ()
) -> None:
    """Tells the LaunchRecorder, if there is one, of a launch; `compiled` None: of one that compiles."""
    recorder = current()
    if recorder is not None:
        recorder.started.append(_Started(compiled, grid, arguments, encodings))
        recorder.compiles |= compiled is None


def note_counter(drawn: Tensor, counter: Callable[[torch.device], Tensor]) -> None:
    """Tells it of memory that lives on: what a launch draws work from."""
    recorder = current()
    if recorder is not None:
        if recorder.drawn is not None and recorder.drawn[0] is not drawn:
            recorder.obstacle = recorder.obstacle or "two counters"
        recorder.drawn = drawn, counter


def note_kept(*tensors: Tensor) -> None:
    """Tells it of memory that lives on: what was computed of the call's key alone, on this stream."""
    recorder = current()
    if recorder is not None:
        recorder.kept += tensors


_ALIGNMENT = 512
"""Bytes between pieces of memory, as between allocations of their own."""


class _Memory:
    """Where the tensors of a call are: operands, one piece of memory for all that is not returned, the counter, what
    lives on, results."""

    def __init__(self, operands: Sequence[Tensor], drawn: tuple[Tensor, Any] | None, kept: Sequence[Tensor]) -> None:
        self.operands, self.drawn, self.kept = operands, drawn, kept
        self.memory = [*map(_memory, operands)]
        self.results: list[Tensor | None] = []
        """None where the call returns nothing, or an operand"""
        self.in_workspace: dict[int, tuple[Tensor, int]] = {}
        self.workspace = 0
        self.results_begun = False
        """Whether a result was looked for."""

    def add_result(self, x: Tensor | None, allocated: Sequence[Tensor]) -> bool:
        """False of a tensor that is neither an operand nor exactly one of the allocations."""
        if x is None or any(_same_memory(x, y) for y in self.operands):
            self.results.append(None)
            return x is None or any(_same_elements(x, y) for y in self.operands)
        self.results.append(x)
        own = [y for y in allocated if _same_memory(x, y)]
        return len(own) == 1 and x.storage_offset() == 0 and x.numel() == own[0].numel() and x.dtype == own[0].dtype

    def add_workspace(self, allocated: Sequence[Tensor]) -> None:
        for x in allocated:
            if not any(y is not None and _same_memory(x, y) for y in self.results):
                self.in_workspace[_memory(x)] = x, self.workspace
                self.workspace += -(-x.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT

    def find(self, x: Tensor) -> Slot | None:
        """The place of a kernel's argument; None where it is not known, or may be in one operand or another."""
        memory = _memory(x)
        near = [i for i, y in enumerate(self.memory) if y == memory]
        if own := [i for i in near if _is_within(x, self.operands[i])]:  # a key holds which operands have one address
            starts = {self.operands[i].data_ptr() for i in own}
            return (own[0], x.data_ptr() - starts.pop()) if len(starts) == 1 else None
        behind = len(self.operands)
        if (mine := self.in_workspace.get(memory)) is not None:
            return behind, mine[1] + int(x.storage_offset()) * x.element_size()
        if self.drawn is not None and x is self.drawn[0]:
            return behind + 1, 0
        for i, y in enumerate([*self.kept, *self.results], behind + 2):
            if y is not None and _same_memory(x, y):
                self.results_begun |= i >= behind + 2 + len(self.kept)
                return i, x.data_ptr() - y.data_ptr()
        return None


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return _memory(x) == _memory(y)


def _same_elements(x: Tensor, y: Tensor) -> bool:
    """Of tensors in one piece of memory."""
    return x.data_ptr() == y.data_ptr() and x.numel() == y.numel() and sorted(x.stride()) == sorted(y.stride())


def _is_within(x: Tensor, y: Tensor) -> bool:
    """Whether x begins at an element of y, which lies in the same memory."""
    far = x.data_ptr() - y.data_ptr()
    if not far:
        return True
    for n, stride in sorted(zip(y.shape, y.stride(), strict=True), key=lambda step: -step[1]):
        step = stride * y.element_size()
        if step > 0 and far > 0:
            far -= min(far // step, n - 1) * step
    return 0 <= far < y.element_size()


# Launches.


class Encoding(NamedTuple):
    """How Triton encodes a descriptor into a tensor map."""

    encode: Callable[..., Any]
    """(address, *fill) -> its object around a tensor map"""
    fill: Sequence[Any]
    shape: Sequence[int]
    strides: Sequence[int]


def packed(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], encodings: Sequence[Encoding],
    slot: Callable[[Tensor], Slot | None],
) -> PackedLaunch | None:  # fmt: skip
    """The launch of a compiled kernel with these arguments, of which tensors are found by their places; None where
    Triton's own launcher has to do it. encodings: of the arguments that are descriptors, in their order."""
    run, metadata = compiled.run, compiled.metadata
    warps, blocks, shared = compiled.packed_metadata[:3]
    asks = (getattr(run, name, 0) for name in ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
    plain = type(run).__name__ == "CudaLauncher" and not any(asks)
    if not plain or blocks != 1 or shared > _MOST_SHARED or metadata.launch_cooperative_grid or driver() is None:
        return None
    formats: list[str] = []
    values: list[Any] = []
    cells: list[tuple[int, Slot]] = []
    maps: list[tuple[int, bytes, Slot]] = []
    described = iter(encodings)
    for kind, x in _leaves(compiled.src.signature.values(), arguments):
        at, form = len(values), _FORMATS.get(kind)
        if form is not None:  # struct raises for floats beyond float32, which Triton rounds to infinity
            formats.append(form)
            values.append(ctypes.c_float(x).value if form == "f4x" else x)
        elif kind.startswith("*"):
            formats.append("Q")
            values.append(0)
            if x is not None:
                if (found := slot(x)) is None:
                    return None
                cells.append((at, found))
        elif kind.startswith("tensordesc"):
            found, encoding = slot(x.base), next(described, None)
            there = None if found is None or encoding is None else _tensor_map(encoding, x.base.data_ptr())
            if found is None or encoding is None or there is None:
                return None
            maps.append((at, there, found))
            formats += "Q", *["i4x"] * len(encoding.shape), *["q"] * len(encoding.strides)
            values += 0, *encoding.shape, *encoding.strides
        else:
            return None
    lies = struct.pack(f"<{''.join(formats)}16x", *values)  # two pieces of scratch come last
    sizes = *grid, 32 * warps, 1, 1, shared
    return PackedLaunch(compiled, sizes, bool(metadata.launch_pdl), lies, cells, maps)


def _leaves(signature: Iterable[Any], arguments: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The arguments that a compiled kernel has parameters for, each with its kind."""
    for kind, x in zip(signature, arguments, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(kind, tuple):
            yield from _leaves(kind, x)
        else:
            yield kind, x


class PackedLaunch:
    """A launch but for its stream and its addresses."""

    def __init__(
        self, compiled: Any, sizes: Sequence[int], chained: bool, values: bytes, cells: Sequence[tuple[int, Slot]],
        maps: Sequence[tuple[int, bytes, Slot]],
    ) -> None:  # fmt: skip
        """values: the parameters, 8 bytes each; of an address, or a tensor map of one, any. cells: which of them are
        addresses, and of what. maps: the same for tensor maps, with their bytes."""
        self.compiled, self.sizes, self.chained = compiled, sizes, chained
        self.values, self.maps = values, b"".join([x for _, x, _ in maps])
        self.cells = [(at, *found) for at, found in cells]
        self.moved = [(_MAP_BYTES * i, *found) for i, (*_, found) in enumerate(maps)]
        form = len(values), *[at for at, *_ in maps]
        self.form, self.idle = form, _idle.setdefault(form, [])

    def __call__(self, device: int, stream: int, addresses: Sequence[int]) -> None:
        """On a stream of the current device. `addresses` are not changed later."""
        try:
            frame = self.idle.pop()
        except IndexError:
            frame = _Frame(*self.form)
        error = frame.start(self, stream, addresses)
        if error == _INVALID_CONTEXT:  # a thread that has not used the device
            _enter(device)
            error = frame.start(self, stream, addresses)
        if error:
            _raise(error, self.compiled.name)
        self.idle.append(frame)


class Fill(NamedTuple):
    """Sets bytes: what `zeros` and `fill_` do."""

    slot: Slot
    pattern: int
    width: int
    """Bytes of the pattern: 1, 2 or 4"""
    elements: int

    @staticmethod
    def of(x: Tensor, number: Any, slot: Callable[[Tensor], Slot | None]) -> Fill | None:
        """None for what is no whole piece of memory, and for numbers of more than 4 bytes that are not 0."""
        found, size = slot(x), x.element_size()
        dense = x.numel() == 1 + sum((n - 1) * m for n, m in zip(x.shape, x.stride(), strict=True))
        if found is None or driver() is None or not x.numel() or not dense or isinstance(number, Tensor):
            return None
        value = torch.full((1,), number, dtype=x.dtype, device="cpu").view(torch.uint8).numpy().tobytes()
        if not any(value):
            return Fill(found, 0, 1, x.numel() * size)
        return Fill(found, int.from_bytes(value, "little"), size, x.numel()) if size in (1, 2, 4) else None

    def __call__(self, device: int, stream: int, addresses: Sequence[int]) -> None:
        fill = {1: driver().cuMemsetD8Async, 2: driver().cuMemsetD16Async, 4: driver().cuMemsetD32Async}[self.width]
        arguments = (
            ctypes.c_void_p(addresses[self.slot[0]] + self.slot[1]),
            self.pattern,
            ctypes.c_size_t(self.elements),
        )
        error = fill(*arguments, ctypes.c_void_p(stream))
        if error == _INVALID_CONTEXT:
            _enter(device)
            error = fill(*arguments, ctypes.c_void_p(stream))
        if error:
            _raise(error, "a fill")


class _Frame:
    """Memory of one launch at a time, for all whose parameters lie alike: many bytes, of which some are tensor maps."""

    __slots__ = ("addresses", "base", "call", "config", "driver", "launch", "memory", "stream", "words")

    def __init__(self, size: int, *maps: int) -> None:
        self.driver: Any = None
        self.launch: PackedLaunch | None = None
        count = size // _VALUE_BYTES
        config = _MAP_BYTES * len(maps)
        pointers = config + _CONFIG_BYTES + _ATTRIBUTE_BYTES
        self.memory = ctypes.create_string_buffer(pointers + 2 * size + _MAP_BYTES)
        self.base = base = -(-ctypes.addressof(self.memory) // _MAP_BYTES) * _MAP_BYTES
        self.config = base + config
        _write(self.config + _CONFIG_BYTES, struct.pack("<iii", _CHAINED, 0, 1))
        self.stream = ctypes.c_uint64.from_address(self.config + _STREAM_AT)
        pointer, self.words = ((ctypes.c_uint64 * count).from_address(base + x) for x in (pointers, pointers + size))
        values = ctypes.addressof(self.words)
        pointer[:] = range(values, values + size, _VALUE_BYTES)
        for i, at in enumerate(maps):
            pointer[at] = base + _MAP_BYTES * i
        self.call: Any = None
        self.addresses: Sequence[int] | None = None

    def _load(self, launch: PackedLaunch) -> None:
        """Writes all of a launch but its stream and addresses."""
        config, attribute = self.config, self.config + _CONFIG_BYTES
        _write(self.base, launch.maps)
        _write(config, struct.pack(_CONFIG, *launch.sizes, 0, attribute, launch.chained))
        _write(ctypes.addressof(self.words), launch.values)
        function, parameters = ctypes.c_void_p(launch.compiled.function), attribute + _ATTRIBUTE_BYTES
        self.call = ctypes.c_void_p(config), function, ctypes.c_void_p(parameters), None
        self.driver, self.launch, self.addresses = driver(), launch, None

    def start(self, launch: PackedLaunch, stream: int, addresses: Sequence[int]) -> int:
        """The driver's error, or 0."""
        if self.launch is not launch:
            self._load(launch)
        if self.addresses != addresses:
            words, base = self.words, self.base
            for at, i, offset in launch.cells:
                words[at] = addresses[i] + offset
            replace = self.driver.cuTensorMapReplaceAddress
            for at, i, offset in launch.moved:
                if error := replace(base + at, addresses[i] + offset):
                    return error
            self.addresses = addresses
        self.stream.value = stream
        return self.driver.cuLaunchKernelEx(*self.call)


_idle: dict[tuple[int, ...], list[_Frame]] = {}
"""Frames that no launch uses now, by how parameters lie: few, as kernels are."""


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
    slot = -(-ctypes.addressof(copy) // _MAP_BYTES) * _MAP_BYTES
    ctypes.memmove(slot, elsewhere, _MAP_BYTES)
    same = not driver().cuTensorMapReplaceAddress(slot, address) and ctypes.string_at(slot, _MAP_BYTES) == there
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
    text = ctypes.c_char_p()
    driver().cuGetErrorString(error, ctypes.byref(text))
    raise RuntimeError(f"CUDA refused {of}: {(text.value or b'unknown error').decode()} ({error})")
