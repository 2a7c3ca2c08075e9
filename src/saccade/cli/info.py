"""`saccade info`: what is installed, what this machine has, and which backends can run on it."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import import_module, metadata

import torch
from rich.console import Console
from rich.table import Table

import saccade
from saccade import dispatch, hardware


def info() -> None:
    """Versions, devices, the C compiler, and which backends can run here and why not."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (*versions(), *devices(), ("C compiler", compiler())):
        table.add_row(name, value)
    for name in dispatch.NAMES:
        table.add_row(f"backend {name}", runs(name))
    Console(soft_wrap=True).print(table, markup=False)


def versions() -> Iterator[tuple[str, str]]:
    yield "saccade", saccade.__version__
    yield "torch", torch.__version__
    try:
        yield "triton", metadata.version("triton")
    except metadata.PackageNotFoundError:
        yield "triton", "not installed"
    yield "python", platform.python_version()


def devices() -> Iterator[tuple[str, str]]:
    """Each device beside the word that a Spec has for it."""
    yield "cpu", f"{_processor()}, {torch.get_num_threads()} threads, bf16 products: {hardware.cpu_bf16()}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        word = hardware.name(torch.device("cuda", index))
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {word}"


def compiler() -> str:
    """The compiler that Triton would build its launchers with: $CC, then gcc, then clang."""
    for name in (os.environ.get("CC"), "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return "none: Triton cannot build its launchers; install gcc, or set CC"


def runs(backend: str) -> str:
    """`runs on cpu`, or for each device of this machine why not."""
    module = import_module(f"saccade.backends.{backend}")
    if obstacle := module.obstacle():
        return obstacle
    words = dict.fromkeys(hardware.name(device) for device in _present())
    against = {word: dispatch.reasons_against(backend, module.SUPPORT.plainest(word)) for word in words}
    able = [word for word, reasons in against.items() if not reasons]
    if able:
        return "runs on " + ", ".join(able) + (", only by name" if backend not in dispatch.BACKENDS else "")
    return "; ".join(dict.fromkeys(reason for reasons in against.values() for reason in reasons))


def _present() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
