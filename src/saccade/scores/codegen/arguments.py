"""The arguments of an operation, each of which whatever writes the operation must take."""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false

from __future__ import annotations

from typing import Any

from torch import fx

from saccade.scores.recording.tape import Refused
from saccade.scores.recording.trace import name_of

_FORM = frozenset(("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"))
"""What says which tensor holds a result; the graph has its dtype besides."""


class Arguments:
    """What an operation of aten is given beyond its defaults. What nobody took is refused, so that no argument is
    ignored."""

    def __init__(self, node: fx.Node) -> None:
        self.name = name_of(node)
        self.schema = node.target._schema.arguments
        named = dict(zip((x.name for x in self.schema), node.args, strict=False)) | dict(node.kwargs)
        defaults = {x.name: x.default_value for x in self.schema if x.has_default_value()}
        self.given = {name: x for name, x in named.items() if name not in defaults or x is not defaults[name]}
        self.left = {name: x for name, x in self.given.items() if name not in defaults or x != defaults[name]}

    def first(self, count: int) -> list[Any]:
        """The first of them, as many as there are or were meant to be; None where one is left out."""
        names = [x.name for x in self.schema if not x.kwarg_only][:count]
        while names and names[-1] not in self.given:
            names.pop()
        return [self.option(name, None) for name in names]

    def option(self, name: str, default: Any) -> Any:
        self.left.pop(name, None)
        return self.given.get(name, default)

    def form(self) -> None:
        """Takes what says no more than which tensor holds the result."""
        self.left = {name: x for name, x in self.left.items() if name not in _FORM}

    def end(self) -> None:
        """
        Raises:
            Refused: something is left.
        """
        if self.left:
            more = ", ".join(f"{name}={x}" for name, x in self.left.items())
            raise Refused(f"{self.name} with {more} has no device form; write it with other operations")
