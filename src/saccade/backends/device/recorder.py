"""What a call did, to be done again: the memory that it allocated, and its launches.

A `Recorder` watches one call. If that did nothing but allocate memory, look at it through views, and launch kernels, it
is a `Repeat`: calls of the same key have these sizes, kernels, grids and numbers, and differ in addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from saccade.backends.device.packed_launch import Encoding, PackedLaunch, Place, driver, packed
from saccade.dispatch_mode import DispatchMode

_ALIGNMENT = 512
"""Bytes between pieces of memory, as between allocations of their own."""
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.empty_like.default,
}
_VIEWS = {
    getattr(_aten, name).default
    for name in ("alias", "detach", "expand", "permute", "unsqueeze", "view", "_unsafe_view")
} | {_aten.slice.Tensor, _aten.transpose.int, _aten.select.int, _aten.squeeze.dim, _aten.as_strided.default}
_state = threading.local()


class _Result(NamedTuple):
    """A tensor that a call returns, of which it is the whole memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Repeat:
    """Does a call again for other tensors of the same key."""

    def __init__(
        self,
        device: torch.device,
        results: Sequence[_Result | None],
        workspace: int,
        launches: Sequence[PackedLaunch],
        counter: Callable[[torch.device], Tensor] | None,
    ) -> None:
        self.device, self.index, self.counter = device, device.index or 0, counter
        self.results, self.workspace, self.launches = results, workspace, launches

    def ready(self) -> bool:
        """Whether it may run: on the current device, where nothing listens to launches."""
        return torch._C._cuda_getDevice() == self.device.index and not hooked()

    def nothing(self, dtype: torch.dtype) -> Tensor:
        """An empty tensor."""
        return empty((0,), (1,), dtype, self.device)

    def __call__(self, addresses: Sequence[int]) -> list[Tensor | None]:
        """What the call returns. `addresses` are those of its operands; the operands live until it returns."""
        results: list[Tensor | None] = []
        places = [*addresses]
        for x in self.results:
            made = None if x is None else empty(x.shape, x.strides, x.dtype, self.device)
            results.append(made)
            places.append(0 if made is None else made.data_ptr())
        if self.workspace:
            space = empty((self.workspace,), (1,), torch.uint8, self.device)
            places.append(space.data_ptr())
        else:
            places.append(0)
        if self.counter is not None:
            drawn = self.counter(self.device)
            places.append(drawn.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        for launch in self.launches:
            launch(self.index, stream, places)
        return results


_guards: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_on_cuda: Any = getattr(_guards, "_empty_strided_cuda", None)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """`torch.empty_strided` on the current device, without the dispatcher where torch has it so."""
    if _on_cuda is not None and device.type == "cuda":
        return _on_cuda(shape, strides, dtype)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def hooked() -> bool:
    """Whether a hook, such as a profiler's, listens to launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Started(NamedTuple):
    """A launch that was recorded."""

    compiled: Any
    grid: tuple[int, int, int]
    arguments: Sequence[Any]
    encodings: Sequence[Encoding]


class Recorder(DispatchMode):
    """Watches a call: `with recorder: …`, in one thread."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.started: list[_Started] = []
        self.drawn: tuple[Tensor, Callable[[torch.device], Tensor]] | None = None
        self.fails = False

    def __enter__(self) -> Any:
        _state.recorder = self
        return super().__enter__()

    def __exit__(self, *of: Any) -> None:
        _state.recorder = None
        super().__exit__(*of)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif func not in _VIEWS:
            self.fails = True
        return result

    def repeat(self, operands: Sequence[Tensor], results: Sequence[Tensor | None]) -> Repeat | None:
        """What was recorded, of a call that had these operands and returned these results."""
        if self.fails or not self.started:
            return None
        device, places = operands[0].device, _Memory(operands, self.drawn)
        for x in results:
            if not places.add_result(x, self.allocated):
                return None
        places.add_workspace(self.allocated)
        launches = [packed(*x, places.find) for x in self.started]
        made = [None if x is None else _Result(tuple(x.shape), x.stride(), x.dtype) for x in results]
        counter = None if self.drawn is None else self.drawn[1]
        if None in launches:
            return None
        return Repeat(device, made, places.workspace, [x for x in launches if x is not None], counter)


def new_recorder() -> Recorder | None:
    """None where nothing is compiled, where there is no driver to be asked, and while a CUDA graph is captured, for
    which memory lies elsewhere."""
    if knobs.runtime.interpret or driver() is None or torch.cuda.is_current_stream_capturing():
        return None
    return Recorder()


class _Memory:
    """Where the tensors of a call are: operands, results, one piece of memory for all else, the counter."""

    def __init__(self, operands: Sequence[Tensor], drawn: tuple[Tensor, Any] | None) -> None:
        self.operands, self.drawn = operands, drawn
        self.results: list[Tensor | None] = []
        self.in_workspace: dict[int, tuple[Tensor, int]] = {}
        self.workspace = 0

    def add_result(self, x: Tensor | None, allocated: Sequence[Tensor]) -> bool:
        """False of a tensor that is not exactly one of the allocations."""
        self.results.append(x)
        if x is None:
            return True
        own = [y for y in allocated if _same_memory(x, y)]
        return len(own) == 1 and x.storage_offset() == 0 and x.numel() == own[0].numel() and x.dtype == own[0].dtype

    def add_workspace(self, allocated: Sequence[Tensor]) -> None:
        for x in allocated:
            if not any(y is not None and _same_memory(x, y) for y in self.results):
                self.in_workspace[_memory(x)] = x, self.workspace
                self.workspace += -(-x.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT

    def find(self, x: Tensor) -> Place | None:
        """The place of a kernel's argument."""
        same = [i for i, y in enumerate(self.operands) if y is x]
        same = same or [i for i, y in enumerate(self.operands) if _same_memory(x, y)]
        if len(same) == 1:  # of several that share memory none is known to be meant
            return same[0], x.data_ptr() - self.operands[same[0]].data_ptr()
        behind = len(self.operands)
        for i, y in enumerate(self.results):
            if y is not None and _same_memory(x, y):
                return behind + i, x.data_ptr() - y.data_ptr()
        behind += len(self.results)
        if (own := self.in_workspace.get(_memory(x))) is not None:
            return behind, own[1] + int(x.storage_offset()) * x.element_size()
        return (behind + 1, 0) if self.drawn is not None and x is self.drawn[0] else None


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return _memory(x) == _memory(y)


def current() -> Recorder | None:
    """The Recorder that watches this thread."""
    return getattr(_state, "recorder", None)


def note_launch(
    compiled: Any, grid: tuple[int, int, int], arguments: Sequence[Any], encodings: Sequence[Encoding] = ()
) -> None:
    """Tells the Recorder, if there is one, of a launch; `compiled` None: of one that compiles."""
    recorder = current()
    if recorder is not None:
        recorder.started.append(_Started(compiled, grid, arguments, encodings))
        recorder.fails |= compiled is None


def note_counter(drawn: Tensor, counter: Callable[[torch.device], Tensor]) -> None:
    """Tells it of memory that lives on: what a launch draws work from."""
    recorder = current()
    if recorder is not None:
        recorder.fails |= recorder.drawn is not None and recorder.drawn[0] is not drawn
        recorder.drawn = drawn, counter
