"""Launches of kernels that take descriptors of bulk copies.

Triton encodes a kernel's descriptors of bulk copies in Python, going over all arguments for it: a third of what a small
call costs the host. Here later launches encode them from what the first one knew, and Triton's launcher gets them as
it would from its own wrapper (notes/gluon.md).
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from saccade.backends.device import replay
from saccade.backends.device.launch import CompiledKey, run
from saccade.backends.device.replay import Encoding, hooked
from saccade.backends.hopper import shim
from saccade.call import strides
from saccade.util.kept_memory import capturing, keep, relaxed_capture

ELEMENTS = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int32: gl.int32,
}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


@dataclass
class TMALaunch:
    """A kernel whose first arguments are descriptors, with all that is the same in each call of a Call's key. The
    first call compiles it."""

    kernel: Any
    grid: tuple[int, int, int]
    shapes: Sequence[dict[str, Any]]
    """Descriptors but for their pointers."""
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    """The kernel's last parameters, in their order."""
    options: dict[str, Any]
    compiled: Any = None
    encoded: _EncodedLaunch | None = None
    """None where Triton's launcher is not built as it was when this was written."""

    def __call__(self, device: Any, operands: Sequence[Tensor], arguments: Sequence[Any], *scale: float) -> None:
        """Starts the kernel on the current stream: the descriptors' tensors, what comes before the numbers, and what
        comes after them."""
        constants = self.constants.values()
        if self.compiled is None and not self._found(device, operands, arguments, *scale):
            return
        if replay.current() is not None:
            self._note(operands, arguments, *scale)
        if self.encoded is None or hooked():
            run(self.compiled, self.grid, device, (*self._arguments(operands, arguments, *scale), *constants))
        else:
            descriptors = self.encoded.descriptors(operands)
            run(self.encoded, self.grid, device, (*descriptors, *arguments, *self.numbers, *scale, *constants))

    def _found(self, device: Any, operands: Sequence[Tensor], arguments: Sequence[Any], *scale: float) -> bool:
        """Whether another launch compiled the kernel; otherwise this one compiles and starts it."""
        given = self._arguments(operands, arguments, *scale)
        key = CompiledKey(device, self.kernel, given, [*self.constants.values()], tuple(self.options.items()))
        if (compiled := key.find()) is not None:
            self.keep(compiled)
            return True
        if replay.current() is not None:
            self._note(operands, arguments, *scale)
        with relaxed_capture():
            self.keep(key.keep(self.kernel[self.grid](*given, **self.constants, **self.options)))
        return False

    def keep(self, compiled: Any) -> None:
        """Makes later calls run the compiled kernel."""
        self.compiled = compiled
        self.encoded = _EncodedLaunch.of(compiled, self.shapes) if self.shapes else None

    def _note(self, operands: Sequence[Tensor], arguments: Sequence[Any], *scale: float) -> None:
        """Tells a LaunchRecorder of the launch."""
        given = *self._arguments(operands, arguments, *scale), *self.constants.values()
        encodings = []
        if (encoded := self.encoded) is not None:
            fills = zip(encoded.fills, self.shapes, strict=True)
            encodings = [Encoding(encoded.encode, fill, x["shape"], x["strides"]) for (fill, _), x in fills]
        replay.note_launch(self.compiled, self.grid, given, encodings)

    def _arguments(self, operands: Sequence[Tensor], arguments: Sequence[Any], *scale: float) -> tuple[Any, ...]:
        return *map(_descriptor, operands, self.shapes), *arguments, *self.numbers, *scale


@dataclass(frozen=True)
class _EncodedLaunch:
    """What `run` needs of a compiled kernel, whose launcher takes encoded descriptors."""

    run: Any
    function: Any
    packed_metadata: Any
    encode: Callable[..., Any]
    fills: tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]
    """For each descriptor what `encode` takes after the pointer, and the numbers that follow it."""

    @staticmethod
    def of(compiled: Any, shapes: Sequence[dict[str, Any]]) -> _EncodedLaunch | None:
        unwrapped = shim.unwrapped(compiled.run)
        if unwrapped is None:
            return None
        launch, metadata, encode, element = unwrapped
        fills = tuple(
            (
                (x["swizzle"], x["elem_size"], element[x["elem_type"]], x["block_size"], *shape_and_strides, 0),
                (*shape_and_strides[0], *shape_and_strides[1]),
            )
            for x, shape in zip(metadata, shapes, strict=True)
            for shape_and_strides in [(shape["shape"], shape["strides"])]
        )
        bare = copy.copy(compiled.run)
        bare.launch = launch
        return _EncodedLaunch(bare, compiled.function, compiled.packed_metadata, encode, fills)

    def descriptors(self, operands: Sequence[Tensor]) -> list[Any]:
        arguments: list[Any] = []
        for x, (fill, numbers) in zip(operands, self.fills, strict=True):
            arguments.append(self.encode(x.data_ptr(), *fill))
            arguments += numbers
        return arguments


def _descriptor(x: Tensor, shape: dict[str, Any]) -> TensorDescriptor:
    """A TensorDescriptor without its checks, which every launch would repeat."""
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(shape, base=x, padding="zero", round_f32_to_tf32=False)
    return descriptor


def shape_of(x: Tensor, block: Sequence[int], group: int | None = None) -> dict[str, Any]:
    """All of x's descriptor but its pointer.

    Args:
        group: query heads of a key head, of a tensor (b, h_q, s, d) that is copied as (b, h_k, group, s, d).
    """
    shape, steps, layout = [*x.shape], x.stride(), _layout_of(tuple(block), x.dtype)
    if group is not None:  # without that view, which costs a first call more than all else here
        shape[1:2], steps = [shape[1] // group, group], (steps[0], steps[1] * group, *steps[1:])
    found = strides(shape, steps, x.element_size())
    return {"shape": shape, "strides": found, "block_shape": list(block), "layout": layout}


@cache
def _layout_of(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a tile lies in shared memory; Triton takes 40 us to say so."""
    return gl.NVMMASharedLayout.get_default_for(list(block), ELEMENTS[dtype])


_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Two zeros for one launch on the current stream. Every launch leaves zeros, and those of one stream follow one
    another, so they share; a graph, which may be replayed on any stream, has its own."""
    if capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    drawn = _counters.get(key)
    if drawn is None:
        drawn = _counters[key] = keep(lambda: torch.zeros(2, dtype=torch.int32, device=device))
    replay.note_counter(drawn, counter)
    return drawn
