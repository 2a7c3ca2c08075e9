"""What `torch.compile` runs while it compiles, and whose result it takes for a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def compile_constant(fn: F) -> F:
    """`torch.compiler.assume_constant_result` by the mark that it sets: it would import the compiler, which takes as
    long as torch itself, for people who compile nothing."""
    fn._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return fn
