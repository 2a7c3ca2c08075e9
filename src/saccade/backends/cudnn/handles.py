"""cuDNN's handles: one for each thread and device, on the stream that is current."""

from __future__ import annotations

import threading
from typing import Any

import torch

from saccade.backends.cudnn.frontend import frontend

_handles = threading.local()
"""Of this thread, by device. A handle holds the stream of one caller, and is not safe for two threads."""


def handle(device: torch.device) -> Any:
    """The handle of this thread for a device, which is the current one, on torch's current stream."""
    cudnn = frontend()
    mine = _handles.__dict__
    found = mine.get(str(device))
    if found is None:
        found = mine[str(device)] = cudnn.create_handle()
    cudnn.set_stream(handle=found, stream=torch.cuda.current_stream(device).cuda_stream)
    return found
