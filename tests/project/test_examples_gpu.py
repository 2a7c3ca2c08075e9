"""What the examples do on a GPU."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[2]


def test_a_step_waits_for_nothing(monkeypatch):
    """Neither the device for the host nor, but for tokens of the step before, the host for the device."""
    example = runpy.run_path(str(FOLDER / "examples" / "serve_decode.py"))
    torch.manual_seed(0)
    model, prefix = example["Model"]().to("cuda", torch.bfloat16), list(range(50))
    requests = [example["Request"]([*prefix, i], 20) for i in range(3)]
    with torch.no_grad():
        server = example["Server"](model, 4, 60, prefix, torch.device("cuda"))
        server.admit(list(requests))
        for _ in range(4):
            server.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                server._decode()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        while server.running:
            server.step()
    assert all(len(x.said) == 20 for x in requests)


def test_steps_leave_no_gaps(tmp_path):
    """In a trace of steps: within a step the device has work again within microseconds. Between two steps of so small a
    model it may wait for the host."""
    example = runpy.run_path(str(FOLDER / "examples" / "serve_decode.py"))
    torch.manual_seed(0)
    model = example["Model"]().to("cuda", torch.bfloat16)
    example["trace_steps"](model, 8, list(range(50)), str(tmp_path / "trace.json"))
    steps = runpy.run_path(str(FOLDER / "docs" / "draw_steps.py"))["Steps"].of(
        json.loads((tmp_path / "trace.json").read_text())
    )
    assert len(steps.launches) == 6
    assert steps.gaps()[-6] < 50, steps.gaps()
