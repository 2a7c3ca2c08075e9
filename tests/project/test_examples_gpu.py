"""What the examples do on a GPU."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

FOLDER = Path(__file__).parents[2]
LONG = 40_000_000
"""Cycles of a step, 20 ms: longer than a host takes for one beside other work."""


@pytest.mark.parametrize("drafts", [True, False])
def test_a_step_waits_for_nothing(drafts):
    """The device waits for the host in no step, and the host for the device only where it reads earlier tokens."""
    example = runpy.run_path(str(FOLDER / "examples" / "serve_decode.py"))
    torch.manual_seed(0)
    model, prefix = example["Model"]().to("cuda", torch.bfloat16), list(range(50))
    requests = [example["Request"]([*prefix, i], 60) for i in range(5)]
    with torch.no_grad():
        server = example["Server"](model, 4, 80, prefix, torch.device("cuda"), drafts)
        for request in requests[:3]:
            server.submit(request)
        for _ in range(4):
            server.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                server._provide()
                server._show_table()
                server._decode()
            server.submit(requests[3])  # which reads its prompt beside the others
            server._admit()
            server._provide()
            server._show_table()
            server._mixed()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        server.submit(requests[4])
        while server.waiting or server.running:
            server.step()
    assert all(len(x.said) == 60 for x in requests)


def test_steps_leave_no_gaps(tmp_path):
    """In a trace of steps each graph is launched before the device needs it, as none waits for the step before."""
    example = runpy.run_path(str(FOLDER / "examples" / "serve_decode.py"))

    class LongModel(example["Model"]):
        def forward(self, *given):
            torch.cuda._sleep(LONG)
            return super().forward(*given)

    torch.manual_seed(0)
    model = LongModel().to("cuda", torch.bfloat16)
    example["trace_steps"](model, 32, list(range(50)), str(tmp_path / "trace.json"))
    steps = runpy.run_path(str(FOLDER / "docs" / "figures" / "draw_steps.py"))["Steps"].of(
        json.loads((tmp_path / "trace.json").read_text())
    )
    assert len(steps.launches) == 8
    assert min(steps.leads()) > 0, steps.leads()
