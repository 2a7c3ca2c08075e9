"""Aggregates: values that kernels build on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.language import core

# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false


def _aggregate(fields: Any) -> Any:
    names = tuple(fields.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, core.base_value) else core.constexpr(value))

    __init__.__triton_builtin__ = True  # what Triton's hash of a kernel's source passes over
    fields.__init__ = __init__
    fields.__annotations__ = dict.fromkeys(names, object)
    return core._aggregate(fields)


# A class of annotated fields becomes a type of device code, whose constructor takes one argument for each field:
# tensors, constexprs, records, aggregates, or None. Unlike a NamedTuple it may be assigned to a variable: Triton would
# make tensors of a NamedTuple's constexprs. Triton 3.6 generates no `__init__`, and does not know `Any`.
aggregate: Any = dataclass if knobs.runtime.interpret else _aggregate
