"""Gluon from Triton 3.6 to 3.9 under one set of names, and the PTX that it has no names for."""

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
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# A record of values with methods: private until 3.8.
aggregate: Any = getattr(gluon, "aggregate", None) or tl_core._aggregate
# Bulk copies between global and shared memory: renamed in 3.8, the old names raise in 3.9.
tma_load: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store: Any = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# Programmatic dependent launch: a kernel starts when all programs of the one before it have said so, and reads what
# that one wrote behind the wait.
start_next, wait_for_last = gdc_launch_dependents, gdc_wait


@gl_core.builtin
def tma_reduce_add(desc, coord, src, _semantic=None):
    """Adds a tile of shared memory to global memory, in bulk: without a public name until 3.8."""
    place = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, place, src.handle)


# Where all warps of a group meet: renamed in 3.7.
thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier


# A view of shared memory under another shape: a private method until 3.9.
_PRIVATE_VIEW = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def view(tile, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The bytes of `tile`, and of what follows it, as a tile of another shape and layout."""
    if _PRIVATE_VIEW:
        return tile._reinterpret(tile.dtype, SHAPE, LAYOUT)
    else:
        return tile.reinterpret(tile.dtype, SHAPE, LAYOUT)


@gluon.constexpr_function
def _barrier_text(kind, threads):
    return f"bar.{kind} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def barrier_sync(number, THREADS: gl.constexpr):
    """Waits at a named barrier for all of its THREADS."""
    text: gl.constexpr = _barrier_text("sync", THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def barrier_arrive(number, THREADS: gl.constexpr):
    """Counts this group in at a named barrier, without a wait."""
    text: gl.constexpr = _barrier_text("arrive", THREADS)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _pack_text(dtype):
    kind = {"bf16": "bf16x2", "fp16": "f16x2"}[str(dtype)]
    return f"cvt.rn.{kind}.f32 $0, $2, $1;"


@gluon.jit
def pack_pairs(x, DTYPE: gl.constexpr):
    """float32 [M, N] as int32 [M, N / 2], two 16-bit numbers in each: what stays in a register over loops."""
    text: gl.constexpr = _pack_text(DTYPE)
    even, odd = gl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(text, "=r,f,f", [even, odd], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def unpack_pairs(x, DTYPE: gl.constexpr):
    """The inverse of pack_pairs: [M, N] in DTYPE."""
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [x], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return gl.join(even, odd).reshape([x.shape[0], x.shape[1] * 2]).to(DTYPE, bitcast=True)


@gluon.jit
def fast_log2(x):
    """To 22 bits, in one instruction."""
    return gl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def opaque(number):
    """An int32 of which the compiler knows nothing: of one that grows with a loop it keeps every sum with a constant,
    each in a register of its own."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def uniform(number):
    """An int32 that all threads have, as one that ptxas knows to be the same in a warp: of what gl.min and gl.max make
    in Triton 3.9 it knows nothing, and a loop that such a number bounds has no uniform registers."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;",
        "=r,r",
        [gl.to_tensor(number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.constexpr_function
def _count_text(order):
    return (
        "{ .reg .pred chosen; bar.warp.sync 0xffffffff; elect.sync _|chosen, 0xffffffff; mov.b32 $0, 0; "
        f"@chosen atom.global.{order}.gpu.add.u32 $0, [$1], 1; redux.sync.or.b32 $0, $0, 0xffffffff; }}"
    )


@gluon.jit
def count_up(counter, ORDER: gl.constexpr):
    """Adds 1 to an int32 in global memory and returns what it was, to all of one warp.

    gl.atomic_add hands its result round by way of shared memory, in a place that something else may have had
    (docs/findings/gluon.md).
    """
    text: gl.constexpr = _count_text(ORDER)
    address = counter.to(gl.int64, bitcast=True)
    return gl.inline_asm_elementwise(text, "=&r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_until(counter, number):
    """Waits until an int32 in global memory is `number` or more; all that was written before the count is seen after
    it, by bulk copies too.

    Sequences that overlap, by offsets that are broken, may wait for who never comes: so after 2^22 looks, some seconds,
    the count is taken for reached, by all.
    """
    text: gl.constexpr = (
        "{ .reg .pred early; .reg .u32 left; mov.u32 left, 0x400000; "
        "again: ld.global.acquire.gpu.s32 $0, [$1]; setp.lt.s32 early, $0, $2; sub.u32 left, left, 1; "
        "setp.ne.and.u32 early, left, 0, early; @early bra again; "
        "setp.eq.u32 early, left, 0; @early st.global.s32 [$1], 0x3fffffff; fence.proxy.async; }"
    )
    address = counter.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(text, "=&r,l,r", [address, number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _written_text(but):
    return f"cp.async.bulk.wait_group {but}; mov.u32 $0, 0;"


@gluon.jit
def wait_until_written(BUT: gl.constexpr):
    """Waits until this warp's bulk copies to global memory are there, all but the last BUT; tma.store_wait stops at
    their reads."""
    text: gl.constexpr = _written_text(BUT)
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def add_one(counter):
    """Adds 1 to an int32 in global memory, once for a warp, and waits for nothing."""
    text: gl.constexpr = (
        "{ .reg .pred chosen; bar.warp.sync 0xffffffff; elect.sync _|chosen, 0xffffffff; "
        "@chosen red.global.relaxed.gpu.add.u32 [$1], 1; mov.b32 $0, 0; }"
    )
    address = counter.to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(text, "=r,l", [address], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def fence_memory():
    """What this thread has written to global memory is there for all before anything that it does next."""
    text: gl.constexpr = "fence.acq_rel.gpu; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(text, "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1)


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
