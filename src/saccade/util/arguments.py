"""The errors of this package that torch and Python lack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Unsupported(NotImplementedError):
    """No backend, or not the one that was named, runs this call; the message holds one line of reason for each."""

    __module__ = "saccade"  # as users import it


# Arguments that are not of the type that they should be: refused by name, before anything is done with them.


_USUAL = {bool, type(None)}
PLAIN = {Tensor, torch.nn.Parameter}
"""The classes of tensors whose operations are torch's own."""
_PLAIN = {*PLAIN, type(None)}
_FLAGS = (bool, type(None), torch.SymBool)
LEAST_FLOAT32, MOST_FLOAT32 = 2.0**-126, torch.finfo(torch.float32).max
"""Kernels take numbers as float32: the smallest positive one that no device flushes to zero, and the largest one."""


def tensors(**named: Any) -> None:
    """Raises TypeError if not all are tensors."""
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {describe(x)}")


def refusal(x: Any, text: str) -> Exception:
    """The error of a wrong tensor, or of what should be one."""
    return ValueError(text) if isinstance(x, Tensor) else TypeError(text)


def operands(q: Any, k: Any, v: Any) -> None:
    """Raises TypeError if not all are tensors, and ValueError for sparse ones, or others without strides."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        raise TypeError(f"q, k and v must be tensors, got {', '.join(type(x).__name__ for x in (q, k, v))}")
    if not q.layout == k.layout == v.layout == torch.strided:
        got = f"{q.layout} {tuple(q.shape)}, {k.layout} {tuple(k.shape)}, {v.layout} {tuple(v.shape)}"
        raise ValueError(f"q, k and v must be dense tensors, such as x.to_dense(), or all three jagged ones, got {got}")


def flags(**named: Any) -> None:
    """Raises TypeError if not all are true or false."""
    if set(map(type, named.values())) <= _USUAL:  # in the hot path of small calls
        return
    for name, x in named.items():
        if not isinstance(x, _FLAGS) and type(x).__name__ not in ("bool", "bool_"):  # numpy's
            raise TypeError(f"{name} must be True or False, got {describe(x)}")


def integer(name: str, x: Any, least: int | None = 0, otherwise: str = "") -> int:
    """An integer, of other libraries too; `otherwise` says what else the caller takes. Raises TypeError for what is no
    integer, and ValueError for one below the least."""
    if isinstance(x, (bool, Tensor)) or not hasattr(type(x), "__index__"):
        raise TypeError(f"{name} must be an integer{otherwise}, got {describe(x)}")
    if type(x).__module__ == "numpy" and getattr(x, "ndim", 0):
        raise TypeError(f"{name} must be an integer{otherwise}, got a numpy array {x.shape}")
    if least is not None and x < least:
        raise ValueError(f"{name} must be an integer from {least} on{otherwise}, got {x}")
    return cast(int, x if isinstance(x, (int, torch.SymInt)) else x.__index__())  # numpy's


def number(name: str, x: Any, otherwise: str = "") -> float:
    """A number, or a tensor of one that needs no gradient. Raises TypeError for what is no number, as True and False,
    and ValueError for several, or one that needs a gradient; `otherwise` says what to do then."""
    if isinstance(x, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(x, bool):
        try:
            return float(x)
        except OverflowError:
            raise ValueError(f"{name} must be a number that a float holds, got one beyond 1.8e308") from None
    if isinstance(x, bool) or str(getattr(x, "dtype", "")) in ("bool", "torch.bool"):
        raise TypeError(f"{name} must be a number, got {describe(x)}")
    if isinstance(x, Tensor):
        if x.numel() != 1 or x.is_complex():
            raise ValueError(f"{name} must be one number, got {describe(x)}")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require a gradient{otherwise}; or pass {name}.detach()")
        if x.is_meta:
            raise ValueError(f"{name} must be a number with a value, got a tensor on meta")
    elif isinstance(x, (str, bytes, complex)) or not hasattr(type(x), "__float__") or getattr(x, "size", 1) != 1:
        raise TypeError(f"{name} must be a number, got {describe(x)}")
    return float(x)


# Not `n in (1, m)`, which Dynamo answers with False where n is a number and m a symbol that equals it.


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a shape has one element, or as many as the other, in each of the other's last dimensions."""
    last = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(n == 1 or n == m for n, m in zip(shape, last, strict=True))


def is_one_of(shape: Sequence[int], *shapes: Sequence[int]) -> bool:
    return any(len(x) == len(shape) and all(n == m for n, m in zip(shape, x, strict=True)) for x in shapes)


def device_of(device: Any) -> torch.device | None:
    """Raises ValueError for what is no device of torch."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as wrong:
        raise ValueError(f"device must be one of torch's, such as 'cpu', got {describe(device)}") from wrong


def of_torch(name: str, x: Any) -> bool:
    """Whether it is an object of torch's class of this name, which is not imported to find out."""
    return any(cls.__name__ == name and cls.__module__.startswith("torch.") for cls in type(x).__mro__)


def has_dtensor(*xs: Any) -> bool:
    """Whether one of them is a DTensor. In the path of small calls."""
    return not set(map(type, xs)) <= _PLAIN and any(of_torch("DTensor", x) for x in xs)


def describe(x: Any) -> str:
    """A description of a value for errors."""
    if isinstance(x, Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    return repr(x) if isinstance(x, (bool, int, float, complex, str, bytes)) else type(x).__name__


def watched() -> bool:
    """Whether a compiler, mode or transform may look at what a call does, or change what operations do."""
    return torch.compiler.is_compiling() or watched_in_eager()  # in this order, as torch.compile follows this code


def watched_in_eager() -> bool:
    """The same where torch.compile is known not to run."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or getattr(forward_ad, "_current_level", 0) >= 0
        or torch._C._get_tracing_state() is not None
    )
