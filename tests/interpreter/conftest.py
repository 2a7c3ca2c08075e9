"""The Triton kernels under Triton's interpreter, on CPU tensors. `make test` runs this folder in a process of its own,
with TRITON_INTERPRET=1, which Triton reads when it is imported; without it there is nothing to collect here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]


@pytest.fixture(autouse=True, scope="session")
def _sparing() -> Iterator[None]:
    """The interpreter without two thirds of its work, which changes nothing: it rebinds the names of triton.language in
    every call of a device function, where once in a launch does, and it computes for every sum and product of integers
    whether it overflows, and then asserts that only in its debug mode."""
    import triton.language as tl
    from triton.runtime import interpreter

    rebind, bound = interpreter._patch_lang, set[str]()

    def rebound(fn: Any) -> Any:
        seen = {x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core}
        if bound and seen <= bound:  # inside a launch, whose own scope restores the names
            return None
        launch, scope = not bound, rebind(fn)
        bound.update(seen)
        if launch:
            restore = scope.restore
            scope.restore = lambda: (bound.clear(), restore())
        return scope

    options = interpreter.interpreter_builder.options
    assert not options.debug
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", rebound)
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the backend take CPU tensors, which only the interpreter can read."""
    from saccade import dispatch
    from saccade.backends import triton

    for name in ("SUPPORT", "GRADIENT"):  # without the second another backend's backward would be tested
        monkeypatch.setattr(triton, name, replace(getattr(triton, name), devices=("cpu",)))
    monkeypatch.setattr(triton, "obstacle", lambda: None)
    dispatch.plan.cache_clear()
    dispatch._plans.clear()
    yield
    dispatch.plan.cache_clear()
    dispatch._plans.clear()
