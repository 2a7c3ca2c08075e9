"""A kernel's key is that of the kernel, whatever was compiled before it."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from triton.runtime.jit import JITFunction  # noqa: E402

from saccade.backends.device import launch  # noqa: E402

WIDTH = tl.constexpr(4)


def callee(x):
    return x + WIDTH


def caller(x):
    return shared(x)


shared = None


@pytest.mark.parametrize("installs", [1, 2])
def test_a_key_does_not_depend_on_what_was_asked_before(installs, monkeypatch):
    for _ in range(installs):
        launch.install()
    keys = []
    for callee_first in (False, True):
        monkeypatch.setitem(globals(), "shared", JITFunction(callee))
        outer = JITFunction(caller)
        if callee_first:
            assert globals()["shared"].cache_key
        keys.append(outer.cache_key)
    assert keys[0] == keys[1]


def test_another_number_is_another_key(monkeypatch):
    keys = set()
    for width in (4, 8):
        monkeypatch.setitem(globals(), "WIDTH", tl.constexpr(width))
        monkeypatch.setitem(globals(), "shared", JITFunction(callee))
        keys.add(JITFunction(caller).cache_key)
    assert len(keys) == 2
