"""Writes of a function to memory that was there before it ran: refused before they happen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from saccade.scores.recording.tape import Refused
from saccade.util.imports import DispatchMode

_NEW = (torch.ops.aten.lift_fresh.default,)
"""Operations that return their argument, which torch has just made."""


class WritesRefused(DispatchMode):
    """Calls of torch that may write to tensors made in here, and to no others.

    A tensor is made in here where an operation returns it and, by its schema, it is no view of an argument. All
    writes of torch's operations are in their schemas, whatever the user calls them by."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        """Storages, which stay alive, so that no other has their address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            named = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
            for argument in func._schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self._check(func, named.get(argument.name))
        result = func(*args, **kwargs)
        if func in _NEW or not any(x.alias_info for x in func._schema.returns):
            for x in tree_leaves(result):
                if isinstance(x, Tensor) and x.layout == torch.strided:
                    storage = x.untyped_storage()
                    self.made[storage._cdata] = storage
        return result

    def _check(self, func: Any, written: Any) -> None:
        for x in tree_leaves(written):
            if isinstance(x, Tensor) and (x.layout != torch.strided or x.untyped_storage()._cdata not in self.made):
                raise Refused(written_text(func.overloadpacket.__name__, f"{x.dtype} {tuple(x.shape)}"))


def written_text(name: str, how: str) -> str:
    return (
        f"{name} writes to a captured tensor, {how}, and a function of the score changes nothing: write before the "
        "call of attention, or compute a new tensor, such as table = table + 1"
    )
