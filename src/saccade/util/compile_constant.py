"""Functions that `torch.compile` runs while it compiles, and whose results are constants."""

from __future__ import annotations

import ctypes
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def compile_constant(fn: F) -> F:
    """`torch.compiler.assume_constant_result` by the mark that it sets: the decorator itself would import the compiler,
    which takes as long as torch, for people who compile nothing."""
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn


@compile_constant
def exports() -> bool:
    """Whether torch.export traces. Of torch 2.11 Dynamo says that it always does."""
    return torch.compiler.is_exporting()


def standing_for(fn: Any) -> Any:
    """A constant that stands for a callable that exists outside of the compiled region. Functions are constants; of
    other objects torch 2.11 knows none, but their addresses, and compiles anew for others.

    >>> callable_of(standing_for(standing_for)) is standing_for, callable_of(standing_for(len)) is len
    (True, True)
    """
    if fn is None or isinstance(fn, (types.FunctionType, functools.partial)):
        return fn
    if isinstance(fn, types.MethodType):
        return fn.__func__, id(fn.__self__)
    return id(fn)


def callable_of(standing: Any) -> Any:
    """What `standing_for` was given, which has to be alive."""
    if isinstance(standing, int):
        return ctypes.cast(standing, ctypes.py_object).value
    if isinstance(standing, tuple):
        return types.MethodType(standing[0], ctypes.cast(standing[1], ctypes.py_object).value)
    return standing


@compile_constant
def word_of(function: Any) -> str:
    """The name of one of torch's functions."""
    return function.__name__
