"""Measures the memory of a call over the length: `python -m benchmarks.memory`.

A causal window of 1024 by saccade, by SDPA with the mask as a tensor of booleans, and written out: the most that
forward and backward need beyond operands, result and gradients. On a machine with a GPU it is the GPU's memory, on
another that of a process of its own. The rows go to tables/<gpu>/memory.jsonl; docs/figures/draw_speed.py draws them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from benchmarks.harness.machine import Run, folder
from saccade import attention, window
from saccade.call.spec import TORCH_DTYPES
from saccade.testing import accuracy

TABLES = Path(__file__).parent / "tables"


class Setting(NamedTuple):
    """What is measured on a device."""

    dtype: str
    lengths: dict[str, int]
    """Up to which length."""

    @property
    def call(self) -> str:
        return f"{self.dtype}, 8 heads, d 64, window(1023,0), forward and backward"

    def kept(self, s: int) -> int:
        """Bytes of q, k, v, out and their gradients."""
        return 8 * 8 * s * 64 * TORCH_DTYPES[self.dtype].itemsize


SETTINGS = {
    "cpu": Setting("fp32", {"saccade": 16384, "SDPA": 16384, "plain": 8192}),
    "cuda": Setting("bf16", {"saccade": 65536, "SDPA": 65536, "plain": 32768}),
}


def call(what: str, setting: Setting, device: str, s: int) -> None:
    q, k, v = (
        torch.randn(1, 8, s, 64, dtype=TORCH_DTYPES[setting.dtype], device=device, requires_grad=True) for _ in range(3)
    )
    if what == "saccade":
        out = attention(q, k, v, mask=window(1023, 0))
    else:
        seen = torch.ones(s, s, dtype=torch.bool, device=device).tril_().triu_(-1023)
        if what == "SDPA":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            out = (q @ k.mT / 8).masked_fill(~seen, -torch.inf).softmax(-1) @ v
    out.backward(torch.ones_like(out))


def most(what: str, device: str, s: int) -> float:
    """Bytes that one call needs at most; on a CPU a call has a process of its own, which its allocator grows once."""
    setting = SETTINGS[device]
    call(what, setting, device, 128)  # loads libraries and kernels
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(what, setting, device, s)
        return torch.cuda.max_memory_allocated() - before - setting.kept(s)
    torch.set_num_threads(2)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    call(what, setting, device, s)
    return resident("VmHWM") - before - setting.kept(s)


def resident(name: str) -> int:
    """Bytes of this process in memory: now, or the most so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def measure() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place, setting = torch.device(device), SETTINGS[device]
    run = asdict(Run.now(place))
    q = torch.randn(1, 8, 2048, 64, dtype=TORCH_DTYPES[setting.dtype], device=device)
    accuracy.check(q, q, q, mask=window(1023, 0)).assert_ok()
    rows = []
    for what, longest in setting.lengths.items():
        for s in (1024 << i for i in range(7)):
            if s > longest:
                break
            words = [sys.executable, "-m", "benchmarks.memory", what, str(s)]
            bytes = most(what, device, s) if device == "cuda" else float(subprocess.check_output(words, text=True))
            rows.append({"what": what, "s": s, "mib": round(max(bytes, 0) / 2**20, 1), "call": setting.call} | run)
            print({name: rows[-1][name] for name in ("what", "s", "mib")})
    file = TABLES / folder(place) / "memory.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) == 3:  # of this process's own measurement
        print(most(sys.argv[1], "cpu", int(sys.argv[2])))
    elif len(sys.argv) == 1:
        measure()
    else:
        sys.exit("python -m benchmarks.memory takes no arguments")
