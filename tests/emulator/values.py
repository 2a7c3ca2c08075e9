"""Values of device code: arrays with the dtypes and the arithmetic of Triton, whatever their layout."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl

Array = Any
"""A numpy array or scalar."""


class AnyLayout:
    """What stands for every layout of registers: which thread has a value changes none."""

    @property
    def parent(self) -> AnyLayout:
        return self


ANY_LAYOUT = AnyLayout()

STORED = {
    tl.int1: np.bool_, tl.int8: np.int8, tl.int16: np.int16, tl.int32: np.int32, tl.int64: np.int64,
    tl.uint8: np.uint8, tl.uint16: np.uint16, tl.uint32: np.uint32, tl.uint64: np.uint64,
    tl.float16: np.float32, tl.bfloat16: np.float32, tl.float32: np.float32, tl.float64: np.float64,
    tl.float8e4nv: np.float32, tl.float8e5: np.float32,
}  # fmt: skip
"""How numpy keeps a dtype: narrow floats as float32 that they represent."""
NARROW = {
    tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}  # fmt: skip
OF_TORCH = {
    torch.bool: tl.int1, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64,
    torch.uint8: tl.uint8, torch.uint16: tl.uint16, torch.uint32: tl.uint32, torch.uint64: tl.uint64,
    torch.float32: tl.float32, torch.float64: tl.float64, **{kind: dtype for dtype, kind in NARROW.items()},
}  # fmt: skip
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bytes_of(dtype: Any) -> int:
    return max(dtype.primitive_bitwidth // 8, 1)


def raw_type(dtype: Any) -> Any:
    """The unsigned integers that hold a dtype's bits."""
    return _RAW[8 if dtype.is_ptr() else bytes_of(dtype)]


def rounded(x: Array, dtype: Any) -> Array:
    """Floats as a dtype has them; 8 bits end at their largest number, as on the device."""
    if dtype not in NARROW:
        return x.astype(STORED[dtype])
    if dtype in _LARGEST:
        x = np.clip(x, -_LARGEST[dtype], _LARGEST[dtype])
    x = np.asarray(x, np.float32)
    return torch.tensor(x).to(NARROW[dtype]).float().numpy()


def encoded(x: Array, dtype: Any) -> Array:
    """The bits of numbers."""
    x = np.ascontiguousarray(x).reshape(np.shape(x))
    if dtype in NARROW:
        kind = torch.uint8 if dtype in _LARGEST else torch.int16
        return torch.tensor(x).to(NARROW[dtype]).view(kind).numpy().view(raw_type(dtype))
    return x.view(raw_type(dtype))


def decoded(raw: Array, dtype: Any) -> Array:
    """The numbers of bits."""
    raw = np.ascontiguousarray(raw).reshape(np.shape(raw))
    if dtype == tl.bfloat16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == tl.float16:
        return raw.view(np.float16).astype(np.float32)
    if dtype in NARROW:
        return torch.tensor(raw).view(NARROW[dtype]).float().numpy()
    return raw.view(STORED[dtype])


class ValueType:
    """What a kernel asks of a value's type."""

    def __init__(self, dtype: Any, shape: tuple[int, ...]) -> None:
        self.scalar = self.element_ty = dtype
        self.shape = shape
        self.layout = ANY_LAYOUT


def quotient(x: Array, y: Array) -> Array:
    """Integers divided towards zero; anything, by zero."""
    if x.dtype.kind == "u":
        return np.where(y == 0, 0, x // np.where(y == 0, 1, y)).astype(x.dtype)
    safe = np.where(y == 0, 1, y)
    floor = x // safe
    return (floor + ((floor < 0) & (floor * safe != x))).astype(x.dtype)


def remainder(x: Array, y: Array) -> Array:
    return np.fmod(x, y) if x.dtype.kind == "f" else (x - quotient(x, y) * y).astype(x.dtype)


def _operator(f: Callable[[Array, Array], Array], turned: bool = False) -> Callable[[Any, Any], Tensor]:
    return lambda self, other: calculate(f, other, self) if turned else calculate(f, self, other)


def _comparison(f: Callable[[Array, Array], Array]) -> Callable[[Any, Any], Any]:
    return lambda self, other: compare(f, self, other)


class Tensor:
    """A value of device code; one without dimensions is a scalar."""

    __slots__ = ("data", "dtype")
    __array_ufunc__ = None
    __hash__: Any = None

    def __init__(self, data: Array, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    def __repr__(self) -> str:
        return f"Tensor({self.data!r}, {self.dtype})"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def type(self) -> ValueType:
        return ValueType(self.dtype, self.data.shape)

    def __bool__(self) -> bool:
        if self.data.size != 1:
            raise TypeError(f"a branch takes one number, not a tensor of {self.shape}")
        return bool(self.data)

    def __index__(self) -> int:
        if self.dtype.is_floating() or self.data.size != 1:
            raise TypeError(f"{self.dtype} of {self.shape} is no index")
        return int(self.data)

    def __getitem__(self, index: Any) -> Tensor:
        for i in index if isinstance(index, tuple) else (index,):
            if i is not None and i != slice(None):
                raise TypeError(f"device code indexes by None and : alone, not by {index}")
        return Tensor(self.data[index], self.dtype)

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Tensor:
        if dtype == self.dtype:
            return self
        if bitcast:
            if dtype.is_ptr() or self.dtype.is_ptr():  # which is an int64
                return Tensor(self.data.view(np.int64), dtype)
            if raw_type(dtype) != raw_type(self.dtype):
                raise TypeError(f"{self.dtype} and {dtype} have different sizes")
            return Tensor(decoded(encoded(self.data, self.dtype), dtype), dtype)
        return Tensor(converted(self.data, self.dtype, dtype), dtype)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.data.reshape(sizes(shape)), self.dtype)

    def permute(self, *dims: Any) -> Tensor:
        return Tensor(self.data.transpose(sizes(dims)), self.dtype)

    trans = permute

    def split(self) -> tuple[Tensor, Tensor]:
        if self.shape[-1] != 2:
            raise TypeError(f"split takes a last dimension of 2, not a tensor of {self.shape}")
        return Tensor(self.data[..., 0], self.dtype), Tensor(self.data[..., 1], self.dtype)

    @property
    def T(self) -> Tensor:
        return Tensor(self.data.T, self.dtype)

    def __add__(self, other: Any) -> Any:
        if self.dtype.is_ptr():
            return moved(self, other, 1)
        return calculate(np.add, self, other)

    def __radd__(self, other: Any) -> Any:
        return moved(self, other, 1) if self.dtype.is_ptr() else calculate(np.add, other, self)

    def __sub__(self, other: Any) -> Any:
        return moved(self, other, -1) if self.dtype.is_ptr() else calculate(np.subtract, self, other)

    __rsub__ = _operator(np.subtract, turned=True)

    def __truediv__(self, other: Any) -> Tensor:
        return divided(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return divided(other, self)

    __mul__, __rmul__ = _operator(np.multiply), _operator(np.multiply, turned=True)
    __floordiv__, __rfloordiv__ = _operator(quotient), _operator(quotient, turned=True)
    __mod__, __rmod__ = _operator(remainder), _operator(remainder, turned=True)
    __and__, __rand__ = _operator(np.bitwise_and), _operator(np.bitwise_and, turned=True)
    __or__, __ror__ = _operator(np.bitwise_or), _operator(np.bitwise_or, turned=True)
    __xor__, __rxor__ = _operator(np.bitwise_xor), _operator(np.bitwise_xor, turned=True)
    __lshift__, __rlshift__ = _operator(np.left_shift), _operator(np.left_shift, turned=True)
    __rshift__, __rrshift__ = _operator(np.right_shift), _operator(np.right_shift, turned=True)
    __lt__ = _comparison(np.less)
    __le__ = _comparison(np.less_equal)
    __gt__ = _comparison(np.greater)
    __ge__ = _comparison(np.greater_equal)
    __eq__ = _comparison(np.equal)
    __ne__ = _comparison(np.not_equal)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype)

    def __abs__(self) -> Tensor:
        return Tensor(np.abs(self.data), self.dtype)


def sizes(shape: Any) -> tuple[int, ...]:
    """Sizes that were given one by one or as one list."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = shape[0]
    return tuple(map(operator.index, shape))


def converted(x: Array, old: Any, new: Any) -> Array:
    if new.is_floating():
        return rounded(x if old.is_floating() else x.astype(np.float64).astype(np.float32), new)
    if new == tl.int1:
        return x != 0
    if old.is_floating():
        limits = np.iinfo(STORED[new])
        x = np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), limits.min, limits.max)
        return np.where(x >= limits.max, limits.max, x.astype(STORED[new])).astype(STORED[new])
    return x.astype(np.int64 if new.is_ptr() else STORED[new])


def tensor(x: Any, dtype: Any = None) -> Tensor:
    """A value of device code from a Python number or a Tensor."""
    if not isinstance(x, Tensor):
        x = Tensor(*_number(x, None))
    return x if dtype is None else x.to(dtype)


def _number(x: Any, beside: Any) -> tuple[Array, Any]:
    """A Python number as an array and a dtype: that of the tensor beside it where that is of its kind, or of a wider
    one."""
    if isinstance(x, (bool, np.bool_)):
        return (np.asarray(x), tl.int1) if beside is None else (np.asarray(x).astype(STORED[beside]), beside)
    if isinstance(x, (int, np.integer)):
        if beside is None or beside == tl.int1:
            beside = tl.int32 if -(1 << 31) <= x < 1 << 31 else tl.uint32 if 0 <= x < 1 << 32 else tl.int64
        if beside.is_floating():
            return np.asarray(float(x)).astype(np.float32), beside
        size = beside.primitive_bitwidth
        return np.asarray(int(x) & ((1 << size) - 1), _RAW[size // 8]).view(STORED[beside]), beside
    if isinstance(x, float):
        if beside is None or not beside.is_floating():
            beside = tl.float32
        return rounded(np.asarray(x, np.float64 if beside == tl.float64 else np.float32), beside), beside
    raise TypeError(f"{x!r} is no value of device code")


def moved(pointer: Tensor, by: Any, sign: int) -> Any:
    """A pointer, so many elements further."""
    if isinstance(by, Tensor) and by.dtype.is_ptr():
        raise TypeError("differences of pointers are not emulated")
    by = tensor(by).data.astype(np.int64)
    return Tensor(pointer.data + sign * by * bytes_of(pointer.dtype.element_ty), pointer.dtype)


_RANKS = {tl.float8e5: 0, tl.float8e4nv: 0, tl.float16: 1, tl.bfloat16: 1, tl.float32: 2, tl.float64: 3}


def common_dtype(a: Any, b: Any) -> Any:
    """What two tensors are computed in."""
    if a == b:
        return a
    if a.is_floating() or b.is_floating():
        if not b.is_floating() or not a.is_floating():
            return a if a.is_floating() else b
        if _RANKS[a] == _RANKS[b]:
            return tl.float32
        return a if _RANKS[a] > _RANKS[b] else b
    if a.primitive_bitwidth != b.primitive_bitwidth:
        return a if a.primitive_bitwidth > b.primitive_bitwidth else b
    return a if a.is_int_unsigned() else b


def pair(a: Any, b: Any) -> tuple[Array, Array, Any]:
    """Two operands in one dtype."""
    if not isinstance(a, Tensor):
        if not isinstance(b, Tensor):
            a = tensor(a)
        else:
            data, dtype = _number(a, b.dtype)
            a = Tensor(data, dtype)
    if not isinstance(b, Tensor):
        data, dtype = _number(b, a.dtype)
        b = Tensor(data, dtype)
    if a.dtype == b.dtype:
        return a.data, b.data, a.dtype
    if a.dtype.is_ptr() or b.dtype.is_ptr():
        raise TypeError(f"{a.dtype} and {b.dtype} do not go together")
    dtype = common_dtype(a.dtype, b.dtype)
    return a.to(dtype).data, b.to(dtype).data, dtype


def calculate(f: Callable[[Array, Array], Array], a: Any, b: Any) -> Tensor:
    """f(a, b), rounded to the operands' dtype."""
    x, y, dtype = pair(a, b)
    made = f(x, y)
    if dtype in NARROW:
        made = rounded(made, dtype)
    elif made.dtype != STORED[dtype]:
        made = made.astype(STORED[dtype])
    return Tensor(made, dtype)


def compare(f: Callable[[Array, Array], Array], a: Any, b: Any) -> Tensor:
    x, y, _ = pair(a, b)
    return Tensor(f(x, y), tl.int1)


def divided(a: Any, b: Any) -> Tensor:
    x, y, dtype = pair(a, b)
    if not dtype.is_floating():
        x, y, dtype = x.astype(np.float32), y.astype(np.float32), tl.float32
    return Tensor(rounded(x / y, dtype) if dtype in NARROW else x / y, dtype)
