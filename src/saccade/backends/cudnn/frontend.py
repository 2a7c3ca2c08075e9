"""NVIDIA's Python frontend of cuDNN: a package that only this backend needs. The first call imports it."""

from __future__ import annotations

import contextlib
import threading
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


def installed() -> bool:
    return find_spec("cudnn") is not None


@cache
def frontend() -> Any:
    """The module `cudnn`."""
    return import_module("cudnn")


_handles = threading.local()
"""Of this thread, by device: a handle holds the stream of one caller, and is not safe for two threads."""


def handle_of(device: torch.device) -> Any:
    """This thread's handle for the current device, on torch's current stream."""
    cudnn, handles = frontend(), _handles.__dict__
    handle = handles.get(str(device))
    if handle is None:
        handle = handles[str(device)] = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A handle is created for the current device."""
    if device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
