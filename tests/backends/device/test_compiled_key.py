"""Launches share a compiled kernel only where Triton would take the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from saccade.backends.device import launch  # noqa: E402
from saccade.backends.device.launch import CompiledKey  # noqa: E402

BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class Record(NamedTuple):
    ptr: Any
    size: Any
    flag: Any


class Shape(NamedTuple):
    rows: Any
    even: Any


def taken(x, n, record, SHAPE: tl.constexpr, LAST: tl.constexpr):
    pass


kernel: Any = JITFunction(taken)


@pytest.fixture(autouse=True)
def for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "triton_backend", lambda: BACKEND)


def given() -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Arguments and constants of launches."""
    memory = torch.zeros(64)
    tensors = memory, memory[1:], memory.half(), memory.to(torch.float8_e4m3fn), None
    numbers = 1, 16, 17, 1 << 33, True, 1.0, None
    records = [Record(x, n, f) for x in (memory, memory[1:]) for n in (1, 48, 7) for f in map(tl.constexpr, (1, True))]
    constants = [
        (Shape(tl.constexpr(n), tl.constexpr(e)), last) for n in (1, 64) for e in (1, True) for last in (4, None)
    ]
    for x, n in product(tensors, numbers):
        yield (x, n, records[0]), constants[0]
    for record, constant in product(records, constants):
        yield (memory, 16, record), constant


def triton_key(arguments: tuple[Any, ...], constants: tuple[Any, ...]) -> Any:
    """What Triton looks a compiled kernel up by."""
    binder = create_function_from_signature(kernel.signature, kernel.params, BACKEND)
    _, specialised, _ = binder(*arguments, *constants, debug=False)
    return tuple(specialised)


def test_one_key_is_one_kernel_of_triton() -> None:
    found: dict[Any, Any] = {}
    for arguments, constants in given():
        key = CompiledKey(0, kernel, arguments, constants, ("options",)).key
        assert key is not None
        assert found.setdefault(key, triton_key(arguments, constants)) == triton_key(arguments, constants)
    assert len(found) > 60


def test_a_kernel_is_found_by_other_tensors_and_by_no_other_device_or_options() -> None:
    def key(x: torch.Tensor, n: int, device: int = 0, options: Any = 4, shape: Any = None) -> CompiledKey:
        return CompiledKey(device, kernel, (x, n, None), (shape,), options)

    shape = object()
    first = key(torch.zeros(64), 33, shape=shape)
    assert first.find() is None
    compiled = first.keep(object())
    assert key(torch.ones(8, 8), 35, shape=shape).find() is compiled
    for other in (key(torch.zeros(64), 33, device=1, shape=shape), key(torch.zeros(64), 33, options=8, shape=shape),
                  key(torch.zeros(64), 33, shape=object()), key(torch.zeros(64), 32, shape=shape)):  # fmt: skip
        assert other.find() is None
