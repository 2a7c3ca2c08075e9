"""`saccade info`: versions, devices, and the backends that can run on them."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import import_module

import torch
from rich.console import Console
from rich.table import Table

import saccade
from saccade import dispatch, hardware
from saccade.bench.machine import device_name, version


def info() -> None:
    """Prints versions, devices, the C compiler, and for each backend whether it can run here, or why not."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in (*versions(), *devices(), ("C compiler", compiler())):
        table.add_row(name, value)
    for name in dispatch.NAMES:
        table.add_row(f"backend {name}", runs(name))
    Console(soft_wrap=True).print(table, markup=False)


def versions() -> Iterator[tuple[str, str]]:
    yield "saccade", saccade.__version__
    yield "torch", torch.__version__
    yield "triton", version("triton") or "not installed"
    yield "python", platform.python_version()


def devices() -> Iterator[tuple[str, str]]:
    """Each device, and its word in a Spec."""
    yield "cpu", f"{device_name(torch.device('cpu'))}, bf16 products: {hardware.cpu_bf16()}"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        word = hardware.name(torch.device("cuda", index))
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {word}"


def compiler() -> str:
    """The compiler that Triton builds its launchers with: $CC, then gcc, then clang."""
    for name in (os.environ.get("CC"), "gcc", "clang"):
        if name and (path := shutil.which(name)):
            return path
    return "none: Triton cannot build its launchers; install gcc, or set CC"


def runs(backend: str) -> str:
    """`runs on cpu`, or for each device the reason against it."""
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
