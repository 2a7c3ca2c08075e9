"""Launches of a kernel that ran before, on tensors of the same shapes.

Triton encodes a kernel's descriptors of bulk copies in Python, going over all arguments for it: a third of what a small
call costs the host. Here they are encoded from what is known since the first launch, and Triton's launcher gets them as
it would from its own wrapper (docs/findings/gluon.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from saccade.backends.device.launch import hooked, run
from saccade.backends.gluon import shim


@dataclass(frozen=True)
class Relaunch:
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
    ) -> Relaunch:
        return Relaunch(compiled, grid, shapes, tuple(fixed), _Lean.of(compiled, shapes) if shapes else None)

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
