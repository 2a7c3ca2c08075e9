"""From saccade's launches to the emulator: what needs CUDA, replaced."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from saccade.backends import configs
from saccade.backends import hopper as gluon
from saccade.backends.device import launch
from saccade.backends.hopper import tma_launch
from saccade.ops import dispatch
from saccade.util import hardware
from tests.emulator.kernels import Translator, tensors_in
from tests.emulator.memory import GlobalMemory
from tests.emulator.scheduler import Machine

OLDEST = 3, 9
"""The Triton by whose names records keep their fields."""


class Emulation:
    """What launches share: a seed for each, and functions that are translated."""

    def __init__(self, seed: int, processors: int) -> None:
        self.random, self.processors = random.Random(seed), processors
        self.translate = Translator()
        self.launches = 0

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: Any, options: dict[str, Any]) -> None:
        """Runs a kernel."""
        names = kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount]
        given = {**dict(zip(names, arguments, strict=False)), **{x: y for x, y in options.items() if x in names}}
        memory = GlobalMemory(tensors_in(given.values()))
        machine = Machine(self.random.getrandbits(32), self.processors, memory)
        function = self.translate(kernel)
        values = {name: self.translate.argument(x) for name, x in given.items()}
        self.launches += 1
        machine.run((*grid, 1, 1)[:3], options.get("num_warps", 4), lambda: function(**values))


class Compiled:
    """What stands for a compiled kernel: later launches go by its `run`."""

    function = packed_metadata = None

    def __init__(self, emulation: Emulation, kernel: Any, options: dict[str, Any]) -> None:
        self.emulation, self.kernel = emulation, kernel
        names = kernel.fn.__code__.co_varnames[: kernel.fn.__code__.co_argcount]
        self.options = {name: x for name, x in options.items() if name not in names}

    def run(self, x: int, y: int, z: int, stream: Any, *rest: Any) -> None:
        self.emulation.launch(self.kernel, (x, y, z), rest[5:], self.options)


@contextlib.contextmanager
def emulated(seed: int = 0, processors: int = 3) -> Iterator[Emulation]:
    """Lets `gluon` run on tensors of the CPU, as on a GPU of so many processors. Whoever runs next, and when copies
    happen, depends on the seed alone."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < OLDEST:
        raise RuntimeError(f"the emulator needs Triton {OLDEST[0]}.{OLDEST[1]}, got {triton.__version__}")
    emulation = Emulation(seed, processors)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        grid = grid(options) if callable(grid) else grid
        emulation.launch(self, grid, args, options)
        return Compiled(emulation, self, options)

    replaced = [
        (JITFunction, "run", run),
        (gluon, "obstacle", lambda: None),
        (hardware, "name", lambda device: "sm90"),
        (hardware, "present", lambda word: word == "sm90"),
        (hardware, "multiprocessors", lambda device: processors),
        (hardware, "shared_bytes", lambda device: 232_448),
        (configs, "gpu_of", lambda device: "h200"),
        (launch, "triton_backend", lambda: None),  # so that nothing outlives the emulation
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ]
    _forget()
    try:
        with contextlib.ExitStack() as stack:
            for owner, name, value in replaced:
                stack.enter_context(mock.patch.object(owner, name, value))
            stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True, return_value=0))
            yield emulation
    finally:
        _forget()


def _forget() -> None:
    """Plans keep what was compiled, and a launch that failed leaves counters that are not zero."""
    tma_launch._counters.clear()
    dispatch.plan.cache_clear()
    dispatch._plans.clear()
