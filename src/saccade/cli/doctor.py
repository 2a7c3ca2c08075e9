"""`saccade info` and `saccade doctor`: what is installed, what would run, and what to install."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import torch
import typer

import saccade
from saccade import Spec, Unsupported, causal
from saccade.backends import backend_module
from saccade.cli.console import Json
from saccade.ops import dispatch
from saccade.testing import accuracy
from saccade.testing.timing import described, device_name, version
from saccade.util import hardware


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
    module = backend_module(backend)
    if obstacle := module.obstacle():
        return obstacle
    words = dict.fromkeys(map(hardware.name, hardware.devices()))
    against = {word: dispatch.reasons_against(backend, module.SUPPORT.plainest(word)) for word in words}
    able = [word for word, reasons in against.items() if not reasons]
    if able:
        return "runs on " + ", ".join(able) + (", only by name" if backend not in dispatch.BACKENDS else "")
    return "; ".join(dict.fromkeys(reason for reasons in against.values() for reason in reasons))


OLDEST_TORCH = 2, 11
TORCH_WHEELS = "https://pytorch.org/get-started/locally"
OPTIONAL = {
    "nvidia-cudnn-frontend": ("cudnn", 'backend="cudnn"'),
    "matplotlib": ("demo", "pictures: Mask.plot, the demo's curves"),
    "transformers": ("transformers", 'models of transformers by attn_implementation="saccade"'),
}
"""Package -> the extra that brings it, and what it is for."""


class Finding(NamedTuple):
    mark: str
    """`ok`; `--`, something one may want; `!!`, something that does not work."""
    text: str


def doctor() -> None:
    """Prints what is installed, what would run, and what to install, one line each; computes one call on each device.

    `ok` works, `--` is optional, `!!` is to be mended. The exit code is 1 if a line begins with `!!`.
    """
    wrong = 0
    for finding in findings():
        wrong += finding.mark == "!!"
        typer.echo(f"{finding.mark}  {finding.text}")
    typer.echo(f"{wrong} to be mended" if wrong else "what is here works")
    raise typer.Exit(1 if wrong else 0)


def findings() -> Iterator[Finding]:
    yield _torch()
    for device in hardware.devices():
        yield _plan(device)
    if not torch.cuda.is_available():
        yield _no_gpu()
    yield _tool("triton", hardware.triton_version(), "pip install triton")
    yield _tool("C compiler", found_compiler(), "install gcc, or set CC")
    for package, (extra, purpose) in OPTIONAL.items():
        here = version(package)
        yield (
            Finding("ok", f"{package} {here}")
            if here
            else Finding("--", f"{package} is not installed; for {purpose}: pip install 'saccade[{extra}]'")
        )
    for device in hardware.devices():
        yield _call(device)


def _torch() -> Finding:
    text = f"saccade {saccade.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    if tuple(int(word) for word in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        return Finding("!!", f"{text}: torch must be {'.'.join(map(str, OLDEST_TORCH))} or newer: {TORCH_WHEELS}")
    return Finding("ok", text)


def _plan(device: torch.device) -> Finding:
    word = hardware.name(device)
    name = f"{device}: {device_name(device)}" + (f", {word}" if device.type != "cpu" else "")
    try:
        backend = dispatch.plan(Spec("bf16", 128, mask="causal", aligned=True, device=word)).backend
    except Unsupported as refused:
        return Finding("!!", f"{name}: " + "; ".join(str(refused).splitlines()[1:4]).replace("  ", ""))
    return Finding("ok", f"{name}: attention runs on `{backend}`")


def _no_gpu() -> Finding:
    driver = shutil.which("nvidia-smi") or next(filter(os.path.exists, ("/dev/nvidiactl", "/dev/kfd")), None)
    if driver is None:
        return Finding("--", "no GPU: torch sees none, and no driver is here")
    built = torch.version.cuda or torch.version.hip
    text = f"torch is built for {built} and sees no GPU: see its driver" if built else "this torch is built for CPUs"
    return Finding("!!", f"a GPU's driver is here ({driver}); {text}: {TORCH_WHEELS}")


def _tool(name: str, found: str | None, remedy: str) -> Finding:
    """What GPU kernels need."""
    if found:
        return Finding("ok", f"{name}: {found}")
    if torch.cuda.is_available():
        return Finding("!!", f"{name} is missing, and GPU kernels need it: {remedy}")
    return Finding("--", f"{name}: none; only GPU kernels need it")


def _call(device: torch.device) -> Finding:
    dtype = torch.bfloat16
    q, k, v = (accuracy.random((1, heads, 96, 64), dtype, device, seed) for seed, heads in enumerate((4, 2, 2)))
    try:
        report = accuracy.check(q, k, v, mask=causal())
    except Exception as problem:  # a compiler's or a driver's
        return Finding("!!", f"{device}: a small call fails: {described(problem)}")
    text = f"{device}: a small call, forward and backward, on `{report.backend}`: {report.ratio:.2f} of the tolerance"
    return Finding("ok" if report.ratio <= 1 else "!!", text)
