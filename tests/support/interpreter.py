"""The Triton kernels under Triton's interpreter, on CPU tensors: fixtures of every test where TRITON_INTERPRET=1."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True, scope="session")
def interpreter_spares_work() -> Iterator[None]:
    """The interpreter without most of its work, which changes nothing: it rebinds the names of triton.language in
    every call of a device function, where once in a launch does; it computes for every sum and product of integers
    whether it overflows, and then asserts that only in its debug mode; and it makes types and shapes anew for each
    value. The garbage of a few programs is collected together."""
    import triton.language as tl
    from triton.runtime import interpreter

    rebind, bound = interpreter._patch_lang, set[str]()
    names = dict[int, tuple[Any, set[str]]]()

    def rebound(fn: Any) -> Any:
        scope = fn.__globals__
        if id(scope) not in names:  # with the scope, so that none that comes later has its number
            names[id(scope)] = scope, {x.__name__ for x in scope.values() if x is tl or x is tl.core}
        seen = names[id(scope)][1]
        if bound and seen <= bound:  # inside a launch, whose own scope restores the names
            return None
        launch, patched = not bound, rebind(fn)
        bound.update(seen)
        if launch:
            restore = patched.restore

            def restored() -> None:
                bound.clear()
                restore()

            patched.restore = restored
        return patched

    options, thresholds = interpreter.interpreter_builder.options, gc.get_threshold()
    assert not options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", rebound)
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        patch.setattr(interpreter, "_get_np_dtype", numpy_dtypes(interpreter._get_np_dtype))
        patch.setattr(tl.core.block_type, "__init__", made_once(tl.core.block_type.__init__))
        patch.setattr(tl.core.tensor, "__init__", shaped_once(tl.core.tensor.__init__))
        gc.set_threshold(100_000, 20, 100)
        yield
        gc.set_threshold(*thresholds)


def numpy_dtypes(made: Any) -> Any:
    kept: dict[str, Any] = {}

    def kept_dtype(x: Any) -> Any:
        name = x.scalar.name
        if name not in kept:
            kept[name] = made(x)
        return kept[name]

    return kept_dtype


def made_once(init: Any) -> Any:
    """block_type(element_ty, shape), of whose equal ones one is made."""
    kept: dict[Any, dict[str, Any]] = {}

    def kept_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = id(element_ty), *(x if type(x) is int else x.value for x in shape)  # alive: what is kept has it
        if key not in kept:
            init(self, element_ty, shape)
            kept[key] = self.__dict__
        self.__dict__ = kept[key]

    return kept_init


def shaped_once(init: Any) -> Any:
    """tensor(handle, type): a type has the shape of its tensors."""

    def kept_init(self: Any, handle: Any, type: Any) -> None:
        if "of_tensors" in type.__dict__:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = type.of_tensors
        else:
            init(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype

    return kept_init


@pytest.fixture(autouse=True, scope="module")
def addresses_are_inside() -> Iterator[None]:
    with addresses_checked():
        yield


@contextlib.contextmanager
def addresses_checked() -> Iterator[None]:
    """Whatever a program reads and writes lies in the memory of its launch's arguments, or the launch fails."""
    from triton.runtime import interpreter

    memory = list[tuple[int, int]]()
    arguments, native = interpreter.GridExecutor._init_args_hst, interpreter._interpreter

    def spans(x: Any) -> Iterator[tuple[int, int]]:
        if isinstance(x, tuple):
            for y in x:
                yield from spans(y)
        elif hasattr(x, "data_ptr"):
            storage = interpreter._unwrap_tensor(x).untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes()

    def given(self: Any, positional: Any, named: Any) -> Any:
        hosted = arguments(self, positional, named)
        memory[:] = {*spans(tuple(hosted[0])), *spans(tuple(hosted[1].values()))}
        return hosted

    def verify(pointers: Any, mask: Any, size: int) -> None:
        at = pointers[mask.astype(bool)].astype("int64")
        if at.size and not any(start <= at.min() and at.max() + size <= end for start, end in memory):
            inside = np.any([(start <= at) & (at + size <= end) for start, end in memory], axis=0)
            assert inside.all(), f"{(~inside).sum()} of {at.size} elements lie outside of the launch's arguments"

    class Native:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
            verify(pointers, mask, dtype.itemsize)
            return native.load(pointers, mask, other, dtype)

        def store(self, pointers: Any, value: Any, mask: Any) -> None:
            verify(pointers, mask, value.dtype.itemsize)
            native.store(pointers, value, mask)

        def atomic_rmw(self, kind: Any, pointers: Any, value: Any, mask: Any, order: Any) -> Any:
            verify(pointers, mask, value.dtype.itemsize)
            return native.atomic_rmw(kind, pointers, value, mask, order)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "_init_args_hst", given)
        patch.setattr(interpreter, "_interpreter", Native())
        yield


@pytest.fixture(autouse=True)
def triton_takes_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the backend take CPU tensors, which only the interpreter can read."""
    from saccade.backends import triton
    from saccade.ops import dispatch

    for name in ("SUPPORT", "GRADIENT"):  # without the second another backend's backward would be tested
        monkeypatch.setattr(triton, name, replace(getattr(triton, name), devices=("cpu",)))
    monkeypatch.setattr(triton, "obstacle", lambda: None)
    dispatch.plan.cache_clear()
    dispatch._plans.clear()
    yield
    dispatch.plan.cache_clear()
    dispatch._plans.clear()
