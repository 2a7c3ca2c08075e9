"""The processors of this machine and their features."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch


@cache
def name(device: torch.device) -> str:
    """The word that a Spec has for a device: `cpu`, `sm90`, `gfx942`, or torch's own name of the device type."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def devices() -> list[torch.device]:
    """The CPU, and every GPU that torch sees."""
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]


NVIDIA = (70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
"""Compute capabilities that exist."""


def known(word: str) -> bool:
    """False of a GPU of NVIDIA's that did not exist when this was written.

    >>> known("sm90"), known("sm999"), known("gfx942")
    (True, False, True)
    """
    return not word.startswith("sm") or int(word[2:]) in NVIDIA


@cache
def present(word: str) -> bool:
    """Whether this machine has such a device; those that no backend names are not asked for."""
    return not re.fullmatch(r"sm\d+|gfx\w+", word) or word in map(name, devices())


@cache
def has_e4m3(device: torch.device) -> bool:
    """Whether Triton reads and multiplies float8_e4m3fn there: not before sm89."""
    word = name(device)
    return not word.startswith("sm") or int(word[2:]) >= 89


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program may have on an NVIDIA GPU."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors there are; on a CPU, some."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


@cache
def triton_obstacle() -> str | None:
    """Why Triton's kernels cannot run on this machine, or None."""
    if find_spec("triton") is None:
        return "triton is not installed"
    return None if torch.cuda.is_available() else "needs a GPU, and torch sees none"


@cache
def triton_version() -> str | None:
    """The version of the triton that an import finds, before which PYTHONPATH may put another than is installed."""
    return None if find_spec("triton") is None else import_module("triton").__version__


@cache
def cpu_bf16() -> str:
    """How this CPU multiplies bfloat16 matrices: `amx` tiles, `avx512_bf16` dot products, or `none` in hardware."""
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return "amx"
    if getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "avx512_bf16"
    return "none"
