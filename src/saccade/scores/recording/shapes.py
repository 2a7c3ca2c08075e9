"""Shapes of values."""

from __future__ import annotations

from collections.abc import Sequence


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """What `torch.broadcast_shapes` returns, which imports sympy.

    >>> broadcast_shape((3, 1), (4,), ())
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    sizes = [{*column} - {1} or {1} for column in columns]
    if any(len(size) > 1 for size in sizes):
        raise RuntimeError(f"shapes {', '.join(str(tuple(x)) for x in shapes)} do not broadcast")
    return tuple(size.pop() for size in sizes)
