"""Kernels that were compiled without a GPU are all that the first calls on one need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("typer", reason="the extra [cli]")

pytestmark = pytest.mark.gpu

CALLS = """
import torch
from saccade import attention, causal
from triton import knobs

def listen(**what):
    assert what["cache_hit"], f"compiled {what['src'].name}"
    print(what["src"].name)

knobs.compilation.listener = listen
for h in (2, 5):
    q, k, v = (torch.randn(3, h, 300, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    with torch.no_grad():
        first = attention(q, k, v, mask=causal(), scale=0.2)
    out = attention(q, k, v, mask=causal(), scale=0.2)
    want = attention(*(x.double() for x in (q, k, v)), mask=causal(), scale=0.2, backend="reference")
    for x, y in zip((first, out, *torch.autograd.grad(out, (q, k, v), q.detach())),
                    (want, want, *torch.autograd.grad(want, (q, k, v), q.detach().double())), strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0.05, atol=0.05)
"""


def test_a_process_that_compiles_nothing(tmp_path):
    from triton.backends.nvidia import driver

    from saccade.backends import configs
    from saccade.util import hardware

    device = hardware.name(torch.device("cuda", 0))
    blind = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    name = configs.gpu_name(0)
    table = name if name in configs.names() else device
    words = "warm", f"bf16 d64 causal {device}", "--out", str(tmp_path), "--gpu", table
    done = subprocess.run(
        [sys.executable, "-m", "saccade", *words], env=blind, capture_output=True, check=False, text=True
    )
    assert not done.returncode, done.stdout + done.stderr
    # Triton 3.6 has a launcher of C for each kernel: with these in the folder it needs no compiler.
    compiler = {"CC": "false"} if hasattr(driver, "make_launcher") else {}
    given = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)} | compiler
    called = subprocess.run([sys.executable, "-c", CALLS], env=given, capture_output=True, check=False, text=True)
    assert not called.returncode, called.stderr
    assert "forward_kernel" in called.stdout
    assert called.stdout.count("_kernel") >= 4
