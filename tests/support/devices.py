"""Where tests run kernels: on the CPU, in Triton's interpreter, in the emulator of Hopper, on a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from saccade.testing.cases import Case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it where it is imported, so one process has the interpreter or all the rest."""


def _emulates() -> bool:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return False
    return tuple(map(int, triton.split(".")[:2])) >= (3, 9) and not INTERPRETED


EMULATES = _emulates()
"""The emulator needs Triton 3.9, which compiles nothing for it."""


@dataclass(frozen=True)
class Device:
    """A backend, where it runs, and a problem of a size that suits it: more than one tile, of which some are ragged."""

    name: str
    backend: str
    type: str
    """PyTorch's word for the device."""
    dtypes: tuple[torch.dtype, ...]
    """All that the backend takes; the first one is the default."""
    head_dims: tuple[int, ...]
    d: int
    b: int
    h_q: int
    h_k: int
    s_q: int
    s_k: int

    def __str__(self) -> str:
        return self.name if self.d == self.head_dims[0] else f"{self.name}-d{self.d}"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.type).to(dtype or self.dtypes[0])

    def operands(self, dtype: torch.dtype | None = None, **sizes: int) -> list[Tensor]:
        """q, k, v of shape (b, h, s, d)."""
        x = replace(self, **sizes)
        shapes = ((x.b, h, s, x.d) for h, s in ((x.h_q, x.s_q), (x.h_k, x.s_k), (x.h_k, x.s_k)))
        return [self.randn(*shape, dtype=dtype) for shape in shapes]

    def case(self, dtype: int = 0, **changes: Any) -> Case:
        """A problem of these sizes, in one of the dtypes, which take turns."""
        sizes = {x: getattr(self, x) for x in ("b", "h_q", "h_k", "s_q", "s_k", "d")}
        word = WORDS[self.dtypes[dtype % len(self.dtypes)]]
        return Case("", word, **sizes).replace(**{"d_v": changes.get("d", self.d), **changes})

    def lse_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if dtype == torch.float64 else torch.float32

    def moved(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Keywords whose tensors are there."""
        return {name: x.to(self.type) if isinstance(x, Tensor) else x for name, x in keywords.items()}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Lets the backend run there."""
        if self.name == "emulator":
            from saccade.backends import hopper
            from saccade.backends.hopper.forward import config
            from tests.emulator import emulated

            few = mock.patch.multiple(hopper, LEAST_ITEMS=1, LEAST_ROWS=1), mock.patch.object(config, "LEAST_KEYS", 128)
            with emulated(), few[0], few[1]:  # pages of few rows too, in parts
                yield
        elif self.name == "interpreter":
            from saccade.backends.triton import paged

            with mock.patch.multiple(paged, LEAST_TILES=1, multiprocessors=lambda device: 7):  # many parts of few keys
                yield
        elif self.backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("needs a Hopper GPU (sm_90)")
        else:
            yield


F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
WORDS = {F16: "fp16", BF16: "bf16", F32: "fp32", F64: "fp64"}
CPU = Device("cpu", "cpu", "cpu", (F32, F16, BF16, F64), (16,), 16, 1, 2, 1, 70, 90)
INTERPRETER = Device("interpreter", "triton", "cpu", (F32,), (16,), 16, 1, 2, 1, 45, 60)
EMULATOR = Device("emulator", "gluon", "cpu", (BF16,), (64, 128, 256), 64, 1, 2, 1, 70, 90)
GLUON = Device("gluon", "gluon", "cuda", (BF16, F16), (64, 128, 256), 64, 2, 4, 2, 300, 333)
TRITON = Device("triton", "triton", "cuda", (BF16, F16, F32), (64, 128, 256), 64, 2, 4, 2, 300, 333)


def _params(*devices: Device) -> list[Any]:
    """Those that this process has."""
    here = {"interpreter": INTERPRETED, "emulator": EMULATES}
    return [
        pytest.param(x, id=str(x), marks=pytest.mark.gpu if x.type == "cuda" else ())
        for x in devices
        if here.get(x.name, not INTERPRETED)
    ]


DEVICES = CPU, INTERPRETER, EMULATOR, GLUON, TRITON
KERNELS = DEVICES[1:]


def on(*devices: Device) -> pytest.MarkDecorator:
    """Lets a test's `device` be these alone."""
    return pytest.mark.parametrize("device", _params(*devices), indirect=True)


def every_head_dim(*devices: Device) -> pytest.MarkDecorator:
    """Each `device`, all by default, once for each head dim that has kernels of its own."""
    return on(*(replace(x, d=d) for x in devices or DEVICES for d in x.head_dims))
