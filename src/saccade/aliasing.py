"""Which memory a tensor has, and whether two tensors share any: a result must not be written to an input's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def disjoint(x: Tensor, y: Tensor) -> bool:
    """Whether it is plain that no byte belongs to both.

    So it is where their address ranges do not overlap; or where, for a stride m of one of them, the ranges do not
    overlap modulo m, omitting strides that are multiples of m, as for two slices of one tensor.
    """
    if not x.numel() or not y.numel():
        return True
    a, b = _start(x), _start(y)
    if a is None or b is None or x.device != y.device:
        return x.device != y.device or x.untyped_storage()._cdata != y.untyped_storage()._cdata
    if a + _span(x) <= b or b + _span(y) <= a:
        return True
    for m in {m for _, m in (*_steps(x), *_steps(y)) if m}:
        far = (b - a) % m
        if far >= _span(x, m) and far + _span(y, m) <= m:
            return True
    return False


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


def refuse_shared(name: str, x: Tensor, inputs: Iterable[tuple[str, Tensor]]) -> None:
    """
    Raises:
        ValueError: x, which is written to, has elements that share memory with one another or with an input.
    """
    if not no_overlap(x):
        raise ValueError(
            f"{name} is written to, and elements of it share memory, or may: {tuple(x.shape)} with strides "
            f"{x.stride()}; pass a tensor that is not expanded"
        )
    for other, y in inputs:
        if not disjoint(x, y):
            raise ValueError(
                f"{name} is written to, and must not share memory with {other}: {name} {tuple(x.shape)} with strides "
                f"{x.stride()}, {other} {tuple(y.shape)} with strides {y.stride()}; pass memory of its own"
            )


def _steps(x: Tensor) -> Iterator[tuple[int, int]]:
    """Length and stride in bytes of each dimension that has more than one element."""
    size = x.element_size()
    return ((n, m * size) for n, m in zip(x.shape, x.stride(), strict=True) if n > 1)


def _span(x: Tensor, modulus: int = 0) -> int:
    """Bytes from the first element to the end of the last, omitting strides that are multiples of the modulus."""
    return x.element_size() + sum((n - 1) * m for n, m in _steps(x) if not modulus or m % modulus)


def _start(x: Tensor) -> int | None:
    """Its address; None for tensors without memory, as they are while something traces."""
    try:
        return x.data_ptr() or None
    except RuntimeError:
        return None
