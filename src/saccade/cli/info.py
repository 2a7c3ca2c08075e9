"""`saccade info`: versions, devices, and the backends that can run on them."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import import_module

import torch
import typer

import saccade
from saccade import dispatch, hardware
from saccade.bench.machine import device_name
from saccade.cli.options import Json


def info(as_json: Json = False) -> None:
    """Prints versions, devices, the C compiler, and for each backend whether it can run here, or why not."""
    tool, backends = {"C compiler": compiler()}, {name: runs(name) for name in dispatch.NAMES}
    if as_json:
        known = {"versions": dict(versions()), "devices": dict(devices()), **tool, "backends": backends}
        typer.echo(json.dumps(known))
        return
    lines = dict(versions()) | dict(devices()) | tool | {f"backend {name}": text for name, text in backends.items()}
    width = max(map(len, lines)) + 2
    for name, text in lines.items():
        typer.echo(f"{name:{width}}{text}")


def versions() -> Iterator[tuple[str, str]]:
    yield "saccade", saccade.__version__
    yield "torch", torch.__version__
    yield "triton", hardware.triton_version() or "not installed"
    yield "python", platform.python_version()


def devices() -> Iterator[tuple[str, str]]:
    """Each device, and its word in a Spec."""
    yield "cpu", f"{device_name(torch.device('cpu'))}, bf16 products: {hardware.cpu_bf16()}"
    for device in hardware.devices()[1:]:
        properties = torch.cuda.get_device_properties(device)
        yield str(device), f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, {hardware.name(device)}"


def compiler() -> str:
    """The compiler that Triton builds its launchers with."""
    return found_compiler() or "none: Triton cannot build its launchers; install gcc, or set CC"


def found_compiler() -> str | None:
    """$CC, then gcc, then clang."""
    return next(
        (path for name in (os.environ.get("CC"), "gcc", "clang") if name and (path := shutil.which(name))), None
    )


def runs(backend: str) -> str:
    """`runs on cpu`, or for each device the reason against it."""
    module = import_module(f"saccade.backends.{backend}")
    if obstacle := module.obstacle():
        return obstacle
    words = dict.fromkeys(map(hardware.name, hardware.devices()))
    against = {word: dispatch.reasons_against(backend, module.SUPPORT.plainest(word)) for word in words}
    able = [word for word, reasons in against.items() if not reasons]
    if able:
        return "runs on " + ", ".join(able) + (", only by name" if backend not in dispatch.BACKENDS else "")
    return "; ".join(dict.fromkeys(reason for reasons in against.values() for reason in reasons))
