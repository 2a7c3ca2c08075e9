"""The Triton kernels under Triton's interpreter, on CPU tensors. `make test` runs this folder in a process of its own,
with TRITON_INTERPRET=1, which Triton reads when it is imported; without it there is nothing to collect here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["*"]


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
