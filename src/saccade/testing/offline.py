"""Tasks in processes of their own, of which one may die without taking the others with it."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch

from saccade.backends import configs
from saccade.util import hardware

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Died:
    """In place of the result of a task whose process ended before it, as LLVM ends one by `abort`."""

    def __str__(self) -> str:
        return "its process died; what it printed last may say why"


def in_processes(
    function: Callable[[Task], Result], tasks: Iterable[Task], count: int, *, fresh: bool = False
) -> Iterator[tuple[Task, Result | Died]]:
    """Each task with its result, in order; what a task raises is raised here. `count` processes run at once. fresh:
    every task has a new one."""
    # An executor whose process dies gives up all its tasks, and does not say which was at fault: each has one process.
    executors: SimpleQueue[ProcessPoolExecutor] = SimpleQueue()
    for _ in range(count):
        executors.put(_executor())

    def run(task: Task) -> Result | Died:
        executor, used_up = executors.get(), fresh
        try:
            return executor.submit(function, task).result()
        except BrokenProcessPool:
            used_up = True
            return Died()
        finally:
            if used_up:
                executor.shutdown()
                executor = _executor()
            executors.put(executor)

    todo = list(tasks)
    try:
        with ThreadPoolExecutor(count) as threads:
            try:
                yield from zip(todo, threads.map(run, todo), strict=True)
            finally:
                threads.shutdown(cancel_futures=True)
    finally:
        for _ in range(count):
            executors.get().shutdown()


def _executor() -> ProcessPoolExecutor:
    """Its process starts with its first task."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


# Compiling for a GPU that this machine does not have: a driver of Triton that names it, and launches nothing.
#
# `stand_in` is for a process of its own: from then on tensors of the CPU count as that GPU's, backends prepare their
# launches for it, Triton compiles them into its cache, and nothing runs.


SHARED_LIMIT = 232_448
"""Bytes of shared memory for one program on sm_90."""
PROCESSORS = 132
"""Multiprocessors of the GPU that is stood in for: of an H100, and of an H200."""
_TABLES = {"sm90": "h200"}


class NamedTarget:
    """What Triton asks a driver for before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class NoLaunch(NamedTarget):
    """What it asks for to launch: here nothing is loaded, and a launch does nothing."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        shared = {80: 163 << 10, 87: 163 << 10, 90: SHARED_LIMIT, 100: SHARED_LIMIT}.get(capability, 99 << 10)
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (0, 0, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": shared, "multiprocessor_count": PROCESSORS},
        )
        self.launcher_cls = self.launcher

    def launcher(self, source: Any, metadata: Any) -> Any:
        """What runs a kernel. Triton 3.6 compiles one for each kernel, which a cache has to hold."""
        build_launcher(source, metadata)
        return lambda *arguments: None


def capability_of(device: str) -> int:
    """Raises ValueError for a word that is no NVIDIA GPU's, and for a GPU that this version does not know: LLVM ends a
    process that compiles for what it does not know either.

    >>> capability_of("sm90")
    90
    """
    if not (found := re.fullmatch(r"sm(\d+)", device)):
        raise ValueError(f"kernels are compiled for NVIDIA GPUs, named as in sm90, not for {device!r}")
    if not hardware.known(device):
        known = ", ".join(f"sm{capability}" for capability in hardware.NVIDIA)
        raise ValueError(f"no GPU that this version knows is {device}; it knows {known}")
    return int(found[1])


def stand_in(device: str, gpu: str = "") -> None:
    """Makes this process compile for a device, such as `sm90`, and launch nothing. gpu: the name of the GPU in the
    tables of tile configs; default: that of the one that was measured."""
    from triton.runtime import driver

    table = gpu or _TABLES.get(device, device)
    target: Any = NoLaunch(capability_of(device))
    driver.set_active(target)
    hardware.name = lambda device: f"sm{target.capability}"
    hardware.present = lambda word: False  # no backend asks whether it could run here
    hardware.multiprocessors = lambda device: PROCESSORS
    hardware.shared_bytes = lambda device: target.utils.get_device_properties(0)["max_shared_mem"]
    configs.gpu_of = lambda device: table
    torch.cuda.is_current_stream_capturing = lambda: False
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def build_launcher(source: Any, metadata: Any) -> None:
    """Compiles what Triton 3.6 launches a kernel by, and its link to the driver, into the cache, and loads neither.
    They refer to CUDA's library, which a machine without a GPU lacks: `cuda_library` stands in for it. Raises OSError,
    subprocess.SubprocessError or RuntimeError if there is no C compiler, or it fails."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import build

    if not hasattr(nvidia, "make_launcher"):  # later ones have one launcher for all kernels
        return
    anything = SimpleNamespace(
        launch=None, PyCUtensorMap=None, load_binary=None, get_device_properties=None,
        cuOccupancyMaxActiveClusters=None, set_printf_fifo_size=None, fill_tma_descriptor=None,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(nvidia, "library_dirs", return_value=[nvidia.libdevice_dir, folder]),
        mock.patch.object(build, "_load_module_from_path", return_value=anything),
    ):
        cuda_library(folder)
        if not hasattr(nvidia.CudaUtils, "instance"):
            nvidia.CudaUtils()
        nvidia.CudaLauncher(source, metadata)


def cuda_library(folder: str) -> Path:
    """Makes a library by the name of CUDA's driver, whose functions do nothing. It has all of them: many linkers drop a
    library of which nothing is used, and what they link could not be loaded where the driver is. Raises OSError or
    subprocess.SubprocessError if there is no C compiler, or it fails."""
    from triton.backends.nvidia import driver as nvidia

    header = next(path for path in (Path(x, "cuda.h") for x in nvidia.include_dirs) if path.is_file())
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header.read_text(errors="replace"))))
    source, library = Path(folder, "cuda.c"), Path(folder, "libcuda.so.1")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    compiler = os.environ.get("CC", "cc")
    options = "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)
    subprocess.run([compiler, *options, str(source)], check=True, capture_output=True)
    return library
