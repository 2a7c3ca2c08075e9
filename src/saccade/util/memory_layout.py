"""How tensors lie in memory: alignment, and whether two tensors share any."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

# Where tensors lie, as kernels want to know it.

ALIGNMENT = 16
"""Bytes: what a bulk copy wants of pointers and strides, and the most that one load takes."""


def address(x: Tensor) -> int:
    """0 for tensors without memory, as they are inside torch.func transforms."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


# Which memory a tensor has, and whether two tensors share any: a result must not be written to an input's memory.


def disjoint(x: Tensor, y: Tensor) -> bool:
    """Whether it is plain that no byte belongs to both.

    So it is where their address ranges do not overlap; or where, for a stride m of one of them, what lies below m of
    both fits into m bytes, and is plainly disjoint, as for two slices of one tensor.
    """
    if not x.numel() or not y.numel():
        return True
    a, b = _start(x), _start(y)
    if a is None or b is None or x.device != y.device:
        return x.device != y.device or x.untyped_storage()._cdata != y.untyped_storage()._cdata
    return _apart(b - a, (x.element_size(), y.element_size()), list(_steps(x)), list(_steps(y)))


_Steps = list[tuple[int, int]]
"""Length and stride in bytes of each dimension that has more than one element."""


def _apart(far: int, size: tuple[int, int], x: _Steps, y: _Steps) -> bool:
    """Whether y is disjoint from x, which begins `far` bytes before it; `size` has the bytes of an element of each."""
    if far >= _span(size[0], x) or -far >= _span(size[1], y):
        return True
    for m in sorted({m for _, m in x + y if m}):
        below_x, below_y = _below(m, x), _below(m, y)
        ends = _span(size[0], below_x), _span(size[1], below_y)
        for rest in (far % m, far % m - m):
            # Two addresses that are equal modulo m, and both of m bytes that follow one another, are equal.
            fits = max(ends[0], rest + ends[1]) - min(0, rest) <= m
            if fits and _apart(rest, size, below_x, below_y):
                return True
    return False


def _span(size: int, steps: _Steps) -> int:
    """Bytes from the first element to the end of the last."""
    return size + sum([(n - 1) * m for n, m in steps])


def _below(modulus: int, steps: _Steps) -> _Steps:
    """Without strides that are multiples of the modulus."""
    return [(n, m) for n, m in steps if m % modulus]


def no_overlap(x: Tensor) -> bool:
    """Whether it is plain that every element has memory of its own: each stride is beyond all that lies below it."""
    if not x.numel():
        return True
    below = x.element_size()
    for n, stride in sorted(_steps(x), key=lambda step: step[1]):
        if stride < below:
            return False
        below += (n - 1) * stride
    return True


def negated(x: Tensor) -> bool:
    """Whether memory holds a tensor's numbers with the other sign; torch.compile, which cannot ask, has none such."""
    return not torch.compiler.is_compiling() and x.is_neg()


def refuse_shared(
    name: str, x: Tensor, inputs: Iterable[tuple[str, Tensor]], instead: str = "pass memory of its own"
) -> None:
    """Raises ValueError if elements of x, which is written to, share memory with one another or with an input."""
    if not no_overlap(x):
        raise ValueError(
            f"{name} is written to, and elements of it share memory, or may: {tuple(x.shape)} with strides "
            f"{x.stride()}; pass a tensor that is not expanded"
        )
    for other, y in inputs:
        if not disjoint(x, y):
            raise ValueError(
                f"{name} is written to, and must not share memory with {other}: {name} {tuple(x.shape)} with strides "
                f"{x.stride()}, {other} {tuple(y.shape)} with strides {y.stride()}; {instead}"
            )


def _steps(x: Tensor) -> Iterator[tuple[int, int]]:
    """Length and stride in bytes of each dimension that has more than one element."""
    size = x.element_size()
    return ((n, m * size) for n, m in zip(x.shape, x.stride(), strict=True) if n > 1)


def _start(x: Tensor) -> int | None:
    """The tensor's address; None for tensors without memory, as while something traces."""
    try:
        return x.data_ptr() or None
    except RuntimeError:
        return None
