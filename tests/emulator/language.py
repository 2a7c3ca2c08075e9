"""The functions of triton.language and Gluon that kernels call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gluon_language

from tests.emulator import inline_asm
from tests.emulator.memory import SharedTile
from tests.emulator.scheduler import Partition, machine, this_partition
from tests.emulator.values import (
    ANY_LAYOUT,
    STORED,
    Tensor,
    calculate,
    pair,
    rounded,
    sizes,
    tensor,
)


class Namespace(SimpleNamespace):
    """A module of device code, which says what it lacks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"the emulator has no {name}")


# Programs


def program_id(axis: Any = 0) -> Tensor:
    x, y, _ = machine().grid
    number = this_partition().program.number
    return tensor((number % x, number // x % y, number // (x * y))[int(axis)])


def num_programs(axis: Any = 0) -> Tensor:
    return tensor(machine().grid[int(axis)])


def numbers(*bounds: Any, **_: Any) -> Iterator[Tensor]:
    """A loop's numbers, which are values of the device."""
    return map(tensor, range(*map(int, bounds)))


def static_numbers(*bounds: Any) -> range:
    return range(*map(int, bounds))


def warp_specialize(functions: Any, worker_num_warps: Any, worker_num_regs: Any = None) -> Any:
    """Runs the first function here and the others beside it, and returns when all are done."""
    parent, workers = this_partition(), []
    for i, ((f, args), warps) in enumerate(zip(functions[1:], worker_num_warps, strict=True)):
        name = f"partition {i + 1} ({getattr(f, '__name__', f)})"
        worker = Partition(parent.program, name, int(warps), lambda f=f, args=args: f(*args))
        workers.append(worker)
        machine().start(worker)
    first, args = functions[0]
    made = first(*args)
    machine().wait(lambda: all(x.done for x in workers), "the other partitions")
    return made


# Memory


def load(pointer: Any, mask: Any = None, other: Any = None, **_: Any) -> Tensor:
    found = None if other is None else tensor(other).to(pointer.dtype.element_ty).data
    return machine().memory.load(pointer, None if mask is None else tensor(mask).data, found)


def store(pointer: Any, value: Any, mask: Any = None, **_: Any) -> None:
    value = tensor(value).to(pointer.dtype.element_ty).data
    machine().memory.store(pointer, value, None if mask is None else tensor(mask).data)


def _atomic(f: Any) -> Callable[..., Tensor]:
    def update(pointer: Any, value: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Tensor:
        machine().switch()
        value = tensor(value).to(pointer.dtype.element_ty).data
        return machine().memory.update(pointer, value, None if mask is None else tensor(mask).data, f)

    return update


# Making values


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    return Tensor(np.arange(int(start), int(end), dtype=np.int32), tl.int32)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    value = tensor(value).to(dtype).data
    return Tensor(np.full(sizes((shape,)), value, STORED[dtype]), dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype)


def zeros_like(x: Tensor) -> Tensor:
    return Tensor(np.zeros_like(x.data), x.dtype)


def same(x: Any, *_: Any, **__: Any) -> Any:
    """What changes no value."""
    return x


# Shapes


def broadcast_to(x: Any, *shape: Any) -> Tensor:
    x = tensor(x)
    return Tensor(np.broadcast_to(x.data, sizes(shape)), x.dtype)


def broadcast(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    x, y = tensor(x), tensor(y)
    a, b = np.broadcast_arrays(x.data, y.data)
    return Tensor(a, x.dtype), Tensor(b, y.dtype)


def expand_dims(x: Tensor, axis: Any) -> Tensor:
    return Tensor(np.expand_dims(x.data, int(axis)), x.dtype)


def join(a: Any, b: Any) -> Tensor:
    x, y, dtype = pair(a, b)
    return Tensor(np.stack(np.broadcast_arrays(x, y), -1), dtype)


def trans(x: Any, *dims: Any) -> Any:
    return x.permute(*(dims or reversed(range(len(x.shape)))))


def gather(x: Tensor, index: Tensor, axis: Any) -> Tensor:
    return Tensor(np.take_along_axis(x.data, index.data.astype(np.int64), int(axis)), x.dtype)


# Arithmetic


def where(condition: Any, x: Any, y: Any) -> Tensor:
    if isinstance(x, Tensor) and x.dtype.is_ptr():
        return Tensor(np.where(tensor(condition).data, x.data, y.data), x.dtype)
    a, b, dtype = pair(x, y)
    return Tensor(np.where(tensor(condition).data, a, b), dtype)


def _extreme(number: Any, any_nan: Any) -> Callable[..., Tensor]:
    def either(x: Any, y: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Tensor:
        f = any_nan if propagate_nan == tl.PropagateNan.ALL else number
        return calculate(f, x, y)

    return either


def cdiv(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


def _function(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def apply(x: Any) -> Tensor:
        x = tensor(x)
        x = x if x.dtype.is_floating() else x.to(tl.float32)
        return Tensor(rounded(f(x.data), x.dtype), x.dtype)

    return apply


_erf = np.vectorize(math.erf, otypes=[np.float32])


def fma(x: Any, y: Any, z: Any) -> Tensor:
    """x y + z, rounded once."""
    x, y, z = tensor(x), tensor(y), tensor(z)
    made = x.data.astype(np.float64) * y.data + z.data
    return Tensor(made.astype(np.float32), tl.float32)


def umulhi(x: Any, y: Any) -> Tensor:
    a, b, dtype = pair(x, y)
    if dtype.primitive_bitwidth != 32:
        raise NotImplementedError(f"umulhi of {dtype}")
    product = a.astype(np.uint32).astype(np.uint64) * b.astype(np.uint32).astype(np.uint64)
    return Tensor((product >> np.uint64(32)).astype(STORED[dtype]), dtype)


def dot(
    a: Tensor, b: Tensor, acc: Any = None, input_precision: Any = None, out_dtype: Any = tl.float32, **_: Any
) -> Any:
    made = np.matmul(a.data, b.data, dtype=np.float32)
    return Tensor(made if acc is None else made + acc.data, tl.float32)


def abs_(x: Any) -> Tensor:
    return abs(tensor(x))


# Reductions


def _reduction(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def reduced(x: Any, axis: Any = None, keep_dims: Any = False) -> Tensor:
        dtype = x.dtype
        if f is np.add.reduce and not dtype.is_floating() and dtype.primitive_bitwidth < 32:
            dtype = tl.int32
        made = f(x.data, axis=None if axis is None else int(axis), dtype=STORED[dtype], keepdims=bool(keep_dims))
        return Tensor(rounded(np.asarray(made), dtype) if dtype.is_floating() else np.asarray(made), dtype)

    return reduced


def reduce(x: Tensor, axis: Any, combine: Callable[[Any, Any], Any]) -> Tensor:
    parts = [Tensor(part, x.dtype) for part in np.moveaxis(x.data, int(axis), 0)]
    made = parts[0]
    for part in parts[1:]:
        made = combine(made, part)
    return made


def cumsum(x: Tensor, axis: Any = 0) -> Tensor:
    dtype = x.dtype if x.dtype.is_floating() or x.dtype.primitive_bitwidth >= 32 else tl.int32
    return Tensor(np.cumsum(x.data, int(axis), dtype=STORED[dtype]), dtype)


def cast(x: Any, dtype: Any, bitcast: Any = False) -> Tensor:
    return tensor(x).to(dtype, bitcast=bool(bitcast))


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


_DTYPES = {
    name: getattr(tl, name)
    for name in (
        "int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16",
        "float32", "float64", "float8e4nv", "float8e5", "pointer_type", "PropagateNan",
    )
}  # fmt: skip

_COMMON = {
    "program_id": program_id, "num_programs": num_programs, "range": numbers, "static_range": static_numbers,
    "load": load, "store": store, "atomic_add": _atomic(np.add), "atomic_max": _atomic(np.maximum),
    "atomic_or": _atomic(np.bitwise_or),
    "arange": arange, "full": full, "zeros": zeros, "zeros_like": zeros_like, "to_tensor": tensor,
    "broadcast_to": broadcast_to, "broadcast": broadcast, "expand_dims": expand_dims, "join": join,
    "split": Tensor.split, "reshape": Tensor.reshape, "permute": Tensor.permute, "trans": trans, "gather": gather,
    "where": where, "maximum": _extreme(np.fmax, np.maximum), "minimum": _extreme(np.fmin, np.minimum),
    "cdiv": cdiv, "exp": _function(np.exp), "exp2": _function(np.exp2), "log": _function(np.log),
    "log2": _function(np.log2), "sqrt": _function(np.sqrt), "sqrt_rn": _function(np.sqrt),
    "rsqrt": _function(lambda x: 1 / np.sqrt(x)),
    "sin": _function(np.sin), "cos": _function(np.cos), "floor": _function(np.floor), "ceil": _function(np.ceil),
    "erf": _function(_erf), "abs": abs_, "fma": fma, "div_rn": lambda x, y: tensor(x) / y, "umulhi": umulhi,
    "dot": dot, "sum": _reduction(np.add.reduce), "max": _reduction(np.fmax.reduce),
    "min": _reduction(np.fmin.reduce), "reduce": reduce, "cumsum": cumsum, "cast": cast,
    "static_assert": static_assert, "multiple_of": same, "max_contiguous": same, "constexpr": same,
    "inline_asm_elementwise": inline_asm.elementwise, "tensor": None, **_DTYPES,
}  # fmt: skip
TRITON = Namespace(**_COMMON, debug_barrier=lambda: None)
TRITON.math = TRITON

_LAYOUTS = "BlockedLayout", "SliceLayout", "DotOperandLayout", "NVMMADistributedLayout"
GLUON = Namespace(
    **_COMMON,
    **dict.fromkeys(_LAYOUTS, lambda *_, **__: ANY_LAYOUT),
    NVMMASharedLayout=gluon_language.NVMMASharedLayout,
    SwizzledSharedLayout=gluon_language.SwizzledSharedLayout,
    allocate_shared_memory=SharedTile.allocate,
    convert_layout=same,
    num_warps=lambda: this_partition().warps,
    shared_memory_descriptor=None,
    warp_specialize=warp_specialize,
)
