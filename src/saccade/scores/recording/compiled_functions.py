"""`torch.autograd.Function` in functions of the score that Dynamo follows: what autograd_functions.py does, in a graph.

Dynamo makes a graph of its own of a Function's forward, in which our symbols lose their derivative. So it is told to
follow `applied` in its place where an argument is a symbol.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from saccade.scores.recording.autograd_functions import NOT_GIVEN, applying, inside_function, steps_of
from saccade.scores.recording.compile_constant import compile_constant
from saccade.scores.recording.tape import Refused

_followed: list[Callable[..., Any]] = []
_STEPS = ("forward", "backward", "setup_context")


@compile_constant
def follow_functions(kind: type, applied: Callable[..., Any]) -> None:
    """Dynamo, which runs this while it compiles, follows `applied(name, forward, backward, setup_context, *args)` for
    Functions of arguments of this class from now on."""
    if _followed:
        return
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    variables: Any = AutogradFunctionVariable
    plain = variables.call_apply

    @functools.wraps(plain)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not any(_is_of(kind, x) for x in args):
            with inside_function():
                return plain(self, tx, args, kwargs)
        given = [VariableTracker.build(tx, self.fn_cls.__name__)]
        for name, step in zip(_STEPS, steps_of(self.fn_cls), strict=True):
            source = AttrSource(self.source, name) if self.source and step else None
            given.append(VariableTracker.build(tx, step, source=source))
        return VariableTracker.build(tx, applied).call_function(tx, [*given, *args], {})

    variables.call_apply = call_apply
    _followed.append(plain)


def _is_of(kind: type, x: Any) -> bool:
    try:
        return issubclass(x.python_type(), kind)
    except (NotImplementedError, TypeError):  # Dynamo's variables of no class
        return False


@compile_constant
def check_outside_of_functions() -> None:
    """
    Raises:
        Refused: a Function computes with symbols that are not among its arguments.
    """
    if applying():
        raise Refused(NOT_GIVEN)
