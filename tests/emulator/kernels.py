"""Kernels as Python functions: the same code, with names of Triton that mean the emulator's."""

from __future__ import annotations

import builtins
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper as nvidia_hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.runtime.jit import ConstexprFunction, JITFunction

from saccade.backends.hopper import shim
from tests.emulator import barriers, hopper
from tests.emulator.language import GLUON, TRITON, Namespace, numbers
from tests.emulator.values import OF_TORCH, Tensor, tensor


def _nothing(*_: Any, **__: Any) -> None:
    """What orders one thread with others of its partition, or one launch with the next: here they are anyway."""


_MBARRIER = Namespace(
    MBarrierLayout=nvidia_hopper.mbarrier.MBarrierLayout, init=barriers.init, wait=barriers.wait,
    arrive=barriers.arrive, expect=barriers.expect, invalidate=_nothing,
)  # fmt: skip
_TMA = Namespace(async_load=hopper.async_load, async_store=hopper.async_store, store_wait=hopper.store_wait)
_COPIES = Namespace(async_load=hopper.copy_async, mbarrier_arrive=hopper.copies_arrive)
_MODULES = {
    tl: TRITON, tl.core: TRITON, gl: GLUON, nvidia_hopper.mbarrier: _MBARRIER, nvidia_hopper.tma: _TMA,
    async_copy: _COPIES, triton: Namespace(language=TRITON, cdiv=TRITON.cdiv),
    gluon: Namespace(language=GLUON),
}  # fmt: skip
_FUNCTIONS = {
    nvidia_hopper.warpgroup_mma: hopper.warpgroup_mma,
    nvidia_hopper.warpgroup_mma_wait: hopper.warpgroup_mma_wait,
    nvidia_hopper.fence_async_shared: hopper.fence_async_shared,
    shim.tma_load: hopper.async_load,
    shim.tma_store: hopper.async_store,
    shim.tma_reduce_add: hopper.reduce_add,
    shim.copy_async: hopper.copy_async,
    shim.thread_barrier: _nothing,
    shim.start_next: _nothing,
    shim.wait_for_last: _nothing,
}
_RECORD_BASE = tl.core.base_value


class _Module:
    """A module whose functions are translated."""

    def __init__(self, module: types.ModuleType, translate: Translator) -> None:
        self.module, self.translate = module, translate

    def __getattr__(self, name: str) -> Any:
        return self.translate(getattr(self.module, name))


class Translator:
    """Each function, class and module of globals, translated once."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}
        self.kept: list[Any] = []
        self.globals: dict[int, dict[str, Any]] = {}

    def __call__(self, x: Any) -> Any:
        if isinstance(x, tl.constexpr):
            return self(x.value)
        if isinstance(x, types.ModuleType):
            return _MODULES.get(x) or _Module(x, self)
        if isinstance(x, tuple) and not isinstance(x, type):
            made = [self(part) for part in x]
            return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
        if isinstance(x, JITFunction):
            return self._once(x, self._function)
        if isinstance(x, ConstexprFunction):
            return self._once(x, self._constexpr_function)
        if isinstance(x, type) and issubclass(x, _RECORD_BASE) and hasattr(x, "__triton_aggregate__"):
            return self._once(x, self._record)
        if getattr(x, "__triton_builtin__", False) and callable(x) and not isinstance(x, type):
            found = _FUNCTIONS.get(x)
            if found is None:
                raise NotImplementedError(f"the emulator has no {x.__name__}")
            return found
        return x

    def _once(self, x: Any, translate: Callable[[Any], Any]) -> Any:
        if id(x) not in self.known:
            self.kept.append(x)
            translate(x)
        return self.known[id(x)]

    def _function(self, jitted: Any) -> None:
        f = jitted.fn
        names = self.globals.setdefault(id(f.__globals__), {"__builtins__": builtins, "range": numbers})
        self.kept.append(f.__globals__)
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        made = types.FunctionType(f.__code__, names, f.__name__, None, cells or None)
        made.__kwdefaults__ = f.__kwdefaults__
        self.known[id(jitted)] = made
        made.__defaults__ = tuple(map(self, f.__defaults__)) if f.__defaults__ else None
        for cell, old in zip(cells, f.__closure__ or (), strict=True):
            cell.cell_contents = self(old.cell_contents)
        for name in _names(f.__code__):
            if name in f.__globals__ and name not in names:
                names[name] = None  # recursion ends here
                names[name] = self(f.__globals__[name])

    def _constexpr_function(self, x: Any) -> None:
        f = x.fn

        def call(*args: Any, **kwargs: Any) -> Any:
            return self(f(*args, **kwargs))

        self.known[id(x)] = call

    def _record(self, cls: Any) -> None:
        fields = tuple(getattr(cls, "__aggregate_fields__", None) or cls.__annotations__)

        def __init__(record: Any, *values: Any) -> None:
            for name, value in zip(fields, values, strict=True):
                object.__setattr__(record, name, value)

        def __setattr__(record: Any, name: str, value: Any) -> None:
            raise AttributeError(f"{cls.__name__} is not to be changed")

        made = type(cls.__name__, (), {"__init__": __init__, "__setattr__": __setattr__, "__slots__": fields})
        self.known[id(cls)] = made
        for name, member in vars(cls).items():
            if isinstance(member, (JITFunction, ConstexprFunction)):
                setattr(made, name, self(member))

    def argument(self, x: Any) -> Any:
        """What a kernel gets for an argument of a launch."""
        if isinstance(x, torch.Tensor):
            return Tensor(np.asarray(x.data_ptr(), np.int64), tl.pointer_type(OF_TORCH[x.dtype]))
        if isinstance(x, (bool, int, float)):
            return tensor(x)
        if isinstance(x, tuple) and not isinstance(x, type):
            made = [self.argument(part) for part in x]
            return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
        if hasattr(x, "block_shape") and hasattr(x, "base"):
            return hopper.Descriptor(x)
        return self(x)


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            found |= _names(x)
    return found


def tensors_in(arguments: Any) -> list[torch.Tensor]:
    """All tensors of a launch."""
    found: list[torch.Tensor] = []
    for x in arguments:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, tuple):
            found += tensors_in(x)
        elif isinstance(getattr(x, "base", None), torch.Tensor):
            found.append(x.base)
    return found
