"""Memory that outlives a call, and what may not happen while a CUDA graph is captured.

**Memory that outlives a call is the library's own**: `keep` makes it in a thread of its own, where no pool, capture,
mode or transform of the caller applies. What belongs to one capture is not kept: the graph makes it in each replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED"""


def capturing() -> bool:
    """Whether a CUDA graph captures the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread load kernels and allocate memory while any thread captures a graph, which CUDA forbids else."""
    if torch.version.hip or not torch.cuda.is_initialized():
        yield
        return
    exchange, mode = _exchange(), ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Without the caller's modes, transforms and gradients."""
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()
    with torch._C._DisableFuncTorch(), modes, torch.inference_mode(False), torch.no_grad():
        yield


def keep(make: Callable[[], T]) -> T:
    """The result of `make`, whose tensors any later call may use.

    Torch routes the allocations of a thread, or of a stream that is captured, to a pool that others may take back. So
    where CUDA is in use a new thread calls `make`: on the caller's stream, or, while that is captured, on another one,
    which the host waits for.
    """
    if not torch.cuda.is_initialized():
        with apart():
            return make()
    stream = torch.cuda.Stream() if capturing() else torch.cuda.current_stream()
    waits = stream != torch.cuda.current_stream()

    def made() -> T:
        with relaxed_capture(), torch.no_grad(), torch.cuda.stream(stream):
            result = make()
            if waits:
                stream.synchronize()
            return result

    return in_thread(made, "saccade makes what it keeps")


def in_thread(make: Callable[[], T], name: str) -> T:
    """What `make` returns or raises in a thread of its own, which has no mode, transform or context of the caller."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(make())
        except BaseException as error:
            errors.append(error)

    thread: Any = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
