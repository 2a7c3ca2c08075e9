"""What a plan makes once, and what torch.compile meets of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

from saccade.scores.recording.compile_constant import callable_of, compile_constant
from saccade.util.kept_memory import keep

Method = TypeVar("Method", bound=Callable[..., Any])


def once(make: Method) -> Method:
    """A method of a plan, or of an exchange, that runs once for its arguments."""
    name = make.__name__

    def kept(self: Any, *arguments: Any) -> Any:
        if (key := (name, *arguments)) not in self._kept:
            if torch.compiler.is_dynamo_compiling():
                raise RuntimeError(
                    f"torch.compile is the first to need {name}{arguments} of {self!r}: give plan(…, heads=(h_q, h_k)) "
                    "or call what is compiled once without it"
                )
            self._kept[key] = keep(lambda: make(self, *arguments))
        return self._kept[key]

    return wraps(make)(kept)  # pyright: ignore[reportReturnType]


@compile_constant
def constant(address: int, name: str, *arguments: Any) -> Any:
    """What a plan's method returns; where torch.compile is the first to need it, while that compiles."""
    return getattr(callable_of(address), name)(*arguments)
