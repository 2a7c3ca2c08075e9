"""Gluon of Triton 3.6 to 3.9 under one set of names."""

# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import triton
import triton.language.core as tl_core
from triton._C.libtriton import ir
from triton.backends.nvidia import driver as nvidia_driver
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core as gl_core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

Value: Any = tl_core.base_value
"""The type of an aggregate's field that may hold anything: a tensor, a record, a constexpr such as None."""
_aggregate: Any = getattr(gluon, "aggregate", None) or tl_core._aggregate  # private until 3.8


def aggregate(cls: type) -> Any:
    """A record of values with methods, whose constructor takes the fields in order; until 3.9 it had to be written."""
    names = tuple(cls.__annotations__)

    def init(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, Value) else gl.constexpr(value))

    if "__init__" not in cls.__dict__:
        init.__triton_builtin__ = True
        cls.__init__ = init
    return _aggregate(cls)


# Bulk copies between global and shared memory: renamed in 3.8, the old names raise in 3.9.
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Copies of 16 bytes by each thread.
copy_async: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


# Programmatic dependent launch: a kernel starts when all programs of the one before it have said so, and reads what
# that one wrote behind the wait.
start_next, wait_for_last = gdc_launch_dependents, gdc_wait


@gl_core.builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Adds a tile of shared memory to global memory, in bulk: without a public name until 3.8."""
    offset = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, offset, src.handle)


# Where all warps of a group meet: renamed in 3.7.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier


# A view of shared memory under another shape: a private method until 3.9.
_PRIVATE_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def view(tile, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr = None):
    """The bytes of `tile`, and of what follows it, as a tile of another shape and layout, and of another dtype."""
    KIND: gl.constexpr = tile.dtype if DTYPE is None else DTYPE
    if _PRIVATE_VIEW:
        return tile._reinterpret(KIND, SHAPE, LAYOUT)
    else:
        return tile.reinterpret(KIND, SHAPE, LAYOUT)


def unwrapped(run: Any) -> tuple[Any, list[dict[str, Any]], Any, Any] | None:
    """Of a compiled kernel's launcher the function that takes encoded descriptors, what it wants to know of each, the
    function that encodes one, and the driver's numbers of element types; None if it is built otherwise."""
    inner = getattr(run, "launch", None)
    names = getattr(getattr(inner, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(inner, "__closure__", None) or (), strict=False))
    if not {"launcher", "tensordesc_meta"} <= cells.keys():
        return None
    metadata = cells["tensordesc_meta"].cell_contents
    plain = all(x is not None and not x["fp4_padded"] and not x.get("is_im2col", False) for x in metadata)
    utils = triton.runtime.driver.active.utils
    encode = getattr(utils, "fill_tma_descriptor", None) or getattr(utils, "fill_tma_descriptor_tiled", None)
    numbers = getattr(nvidia_driver, "TMA_DTYPE_DEVICE_TO_HOST", None)
    if not plain or encode is None or numbers is None:
        return None
    return cells["launcher"].cell_contents, metadata, encode, numbers
