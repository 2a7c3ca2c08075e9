"""Launches of compiled kernels, for every backend that has them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton._C.libtriton import native_specialize_impl
from triton.compiler import make_backend
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import DependenciesFinder

from saccade.backends import Launches, Outputs
from saccade.backends.device import replay
from saccade.backends.device.replay import hooked
from saccade.call import Call
from saccade.layouts import Packed
from saccade.util import hardware
from saccade.util.caches import BoundedCache
from saccade.util.kept_memory import relaxed_capture

# Keys of compiled kernels that do not depend on what a process compiled before.
#
# Until 3.8 or so Triton adds a callee's global numbers to a caller's key before it has looked for them: they are
# there if another kernel has called the callee before. So the same kernel had several keys, and was compiled for
# each. Here the callee's own key comes first, as in Triton 3.9, where this changes nothing.

_update_hash: Any = DependenciesFinder._update_hash


def _of_callee_first(self: Any, func: Any) -> None:
    func.cache_key  # noqa: B018 (it finds the callee's global numbers)
    _update_hash(self, func)


def install() -> None:
    """Once in a process."""
    DependenciesFinder._update_hash = _of_callee_first


install()


# What Triton compiled, without its look-up, which costs the first launch of a plan more than all else in the call.


class CompiledKey:
    """Launches of one kernel share what was compiled **if Triton specialises their arguments alike, and their constants
    are equal numbers of one type or the same objects**."""

    def __init__(
        self, device: Any, kernel: Any, arguments: Sequence[Any], constants: Sequence[Any], options: Hashable
    ) -> None:
        self.held = kernel, *constants  # an id is the object's while that lives
        self.key = self._key(arguments, (device, options))

    def _key(self, arguments: Sequence[Any], options: Hashable) -> Hashable:
        if (backend := triton_backend()) is None:
            return None
        specialised = [native_specialize_impl(backend, x, False, True, True) for x in arguments]
        return options, *specialised, *map(_identity, self.held)

    def find(self) -> Any:
        """The compiled kernel, or None."""
        return None if self.key is None else (_compiled.get(self.key) or (None,))[0]

    def keep(self, compiled: Any) -> Any:
        if self.key is not None:
            _compiled.put(self.key, (compiled, self.held))
        return compiled


_compiled: BoundedCache[Hashable, tuple[Any, Any]] = BoundedCache(4096)


def _identity(x: Any) -> Hashable:
    """What tells a constant from others: its type and value, or which object it is."""
    kind = type(x)
    if kind is tl.constexpr:
        return kind, _identity(x.value)
    if isinstance(x, tuple):
        return kind, *map(_identity, x)
    return (kind, x) if isinstance(x, (int, str)) or x is None else id(x)


@cache
def triton_backend() -> Any:
    """What Triton compiles for; None in the interpreter, which compiles nothing."""
    return None if knobs.runtime.interpret else make_backend(cast(Any, driver.active.get_current_target()))


@dataclass
class Launch:
    """A kernel with all that every call of a Call's key shares. The first call compiles it."""

    kernel: Any
    grid: tuple[int, int, int]
    constants: tuple[Any, ...]
    """the kernel's last arguments"""
    warps: int = 4
    stages: int = 3
    least_stages: int | None = None
    """The fewest stages to try where the tables of a score do not fit shared memory beside the operands."""
    compiled: Any = None
    fuses: bool = True
    """Whether a product and a sum may become one instruction, which rounds once."""
    registers: int | None = None
    """How many a thread may have, so that a multiprocessor has more programs; None is up to the compiler."""

    def __call__(self, device: Any, arguments: tuple[Any, ...]) -> None:
        key = None
        if self.compiled is None:
            options = self.warps, self.stages, self.least_stages, self.fuses, self.registers
            key = CompiledKey(device, self.kernel, arguments, self.constants, options)
            self.compiled = key.find()
        replay.note_launch(self.compiled, self.grid, (*arguments, *self.constants))
        if self.compiled is None and key is not None:  # as always in the interpreter, which compiles nothing
            self.compiled = key.keep(self._first(arguments))
        else:
            run(self.compiled, self.grid, device, (*arguments, *self.constants))

    def _first(self, arguments: tuple[Any, ...]) -> Any:
        stages = self.stages
        while True:
            try:
                with relaxed_capture():
                    return self.kernel[self.grid](*arguments, *self.constants, **self._options(stages))
            except OutOfResources:
                if self.least_stages is None or stages <= self.least_stages:
                    raise
                stages -= 1

    def _options(self, stages: int) -> dict[str, Any]:
        more: dict[str, Any] = {} if self.fuses else {"enable_fp_fusion": False}
        if self.registers is not None:
            more["maxnreg"] = self.registers
        return {"num_warps": self.warps, "num_stages": stages, **more}


GivenLaunch = tuple[Launch, tuple[Any, ...]]
"""A Launch and its arguments."""


def cached_launch(launches: Launches, key: Any, make: Callable[[], Launch]) -> Launch:
    """The Launch that all Calls of one key share."""
    launch = launches.get(key)
    if launch is None:
        launch = launches[key] = make()
    return launch


def run(compiled: Any, grid: tuple[int, int, int], device: Any, arguments: Any) -> None:
    """`compiled[grid](*arguments)` on torch's current stream, without its look-ups, unless a profiler hooks launches.
    A launch through the jitted function costs more than all else in a small call."""
    if hooked():
        compiled[grid](*arguments)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    handles = compiled.function, compiled.packed_metadata
    compiled.run(*grid, stream, *handles, None, None, None, *arguments)


def per_row(call: Call, asked: bool) -> Tensor | None:
    """Memory for a number of each row, (b, h_q, s_q) float32, contiguous."""
    return torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device) if asked else None


def nothing_seen(x: Tensor | None) -> Tensor | None:
    """-inf for every row, in place."""
    return None if x is None else x.fill_(-torch.inf)


def without_scores(call: Call, out: Tensor, lse: Tensor | None, top: Tensor | None) -> Outputs:
    """The results of a call without keys or sequences, in their memory."""
    out = out if call.keeps_tail else out.zero_()
    return out, _lse_of_sink(call, lse), nothing_seen(top)


def _lse_of_sink(call: Call, lse: Tensor | None) -> Tensor | None:
    layout = call.layout
    if lse is None or call.sink is None or layout.has_pages:  # a cache has keys, or there is no sequence
        return nothing_seen(lse)
    lse.copy_(call.sink[:, None].expand_as(lse))
    if isinstance(layout, Packed):
        return lse.masked_fill_(~layout.rows_in_use(lse.shape[2]), -torch.inf)
    used = layout.seqused_q
    if used is not None:
        rows = torch.arange(lse.shape[2], device=lse.device)
        lse.masked_fill_(rows >= used[:, None, None], -torch.inf)
    return lse


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors there are; on a CPU, some."""
    return hardware.multiprocessors(device)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
