"""Launches of a kernel that ran before, on tensors of the same shapes.

Triton encodes a kernel's descriptors of bulk copies in Python, going over all arguments for it: a third of what a small
call costs the host. Here they are encoded from what is known since the first launch, and Triton's launcher gets them as
it would from its own wrapper (docs/findings/gluon.md).
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from saccade.backends.device.launch import hooked, run
from saccade.backends.gluon import shim

ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
LEAST_SCALE = 1e-6
"""Below, numbers that are divided by the scale may leave float32."""


@dataclass(frozen=True)
class CachedLaunch:
    """A compiled kernel whose first arguments are descriptors, and what no launch changes."""

    compiled: Any
    grid: tuple[int, int, int]
    shapes: Sequence[dict[str, Any]]
    """Of the descriptors: all but their pointers."""
    fixed: tuple[Any, ...]
    """The last arguments."""
    lean: _Lean | None
    """None where Triton's launcher is not built as it was when this was written."""

    @staticmethod
    def of(
        compiled: Any, grid: tuple[int, int, int], shapes: Sequence[dict[str, Any]], fixed: Sequence[Any]
    ) -> CachedLaunch:
        return CachedLaunch(compiled, grid, shapes, tuple(fixed), _Lean.of(compiled, shapes) if shapes else None)

    def __call__(self, device: int, operands: Sequence[Tensor], rest: Sequence[Any]) -> None:
        """Starts it on the current stream: the descriptors' tensors, and the arguments behind them."""
        lean = self.lean
        if lean is None or hooked():
            descriptors = map(descriptor, operands, self.shapes)
            run(self.compiled, self.grid, device, (*descriptors, *rest, *self.fixed))
        else:
            run(lean, self.grid, device, (*lean.encoded(operands), *rest, *self.fixed))


@dataclass(frozen=True)
class _Lean:
    """What `run` needs of a compiled kernel, whose launcher takes encoded descriptors."""

    run: Any
    function: Any
    packed_metadata: Any
    encode: Callable[..., Any]
    fills: tuple[tuple[tuple[Any, ...], tuple[int, ...]], ...]
    """For each descriptor what `encode` takes behind the pointer, and the numbers that follow it."""

    @staticmethod
    def of(compiled: Any, shapes: Sequence[dict[str, Any]]) -> _Lean | None:
        found = shim.unwrapped(compiled.run)
        if found is None:
            return None
        launch, metadata, encode, element = found
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
        return _Lean(bare, compiled.function, compiled.packed_metadata, encode, fills)

    def encoded(self, operands: Sequence[Tensor]) -> list[Any]:
        found: list[Any] = []
        for x, (fill, numbers) in zip(operands, self.fills, strict=True):
            found.append(self.encode(x.data_ptr(), *fill))
            found += numbers
        return found


def descriptor(x: Tensor, shape: dict[str, Any]) -> TensorDescriptor:
    """A TensorDescriptor of a shape that was checked when it was first used."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(shape, base=x, padding="zero", round_f32_to_tf32=False)
    return made


def shape_of(x: Tensor, block: Sequence[int]) -> dict[str, Any]:
    """All of x's descriptor but its pointer."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), ELEMENTS[x.dtype])
    return {"shape": list(x.shape), "strides": list(x.stride()), "block_shape": list(block), "layout": layout}


_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Two zeros for one launch on the current stream. Every launch leaves zeros, and those of one stream follow one
    another, so they share; a graph, which may be replayed on any stream, has its own."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]


def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
