"""Attributes that are computed once, when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class lazily(Generic[T]):
    """`functools.cached_property` without the lock that it has before Python 3.12: all objects share that lock, and a
    child that is forked while it is held waits for ever. Two threads may compute an attribute; both get the same value.

    >>> class Circle:
    ...     r = 2.0
    ...     @lazily
    ...     def area(self) -> float:
    ...         return 3.14 * self.r**2
    >>> circle = Circle()
    >>> circle.area, circle.area is circle.area
    (12.56, True)
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, owner: None, kind: Any = None) -> lazily[T]: ...

    @overload
    def __get__(self, owner: object, kind: Any = None) -> T: ...

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        return owner.__dict__.setdefault(self.name, self.function(owner))
