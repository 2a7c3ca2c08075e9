"""The runner itself, on a file of our own in the manner of another library's tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run.py")

TESTS = """
import pytest
import torch
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func
from flash_attn.layers.rotary import apply_rotary_emb

SEEN = []


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(8, 8), (8, 64), (9, 9000)])
@pytest.mark.parametrize("causal", [False, True])
def test_drawn(seqlen_q, seqlen_k, causal):
    assert seqlen_k < 9000
    q, k = (torch.randn(1, s, 2, 8, device="cuda") for s in (seqlen_q, seqlen_k))
    assert flash_attn_func(q, k, k, causal=causal).shape == q.shape
    assert torch.cuda.get_device_capability('cuda') == (9, 0)


def test_dropped():
    x, p, offsets = torch.randn(30, 3, 2, 8, device="cuda"), 0.4, torch.tensor([0, 9, 30], device="cuda")
    torch.manual_seed(3)
    out, lse, signed = flash_attn_varlen_qkvpacked_func(x, offsets, 21, p, causal=True, return_attn_probs=True)
    assert lse.shape == (2, 30) and signed.shape == (2, 2, 21, 21)
    assert (signed < 0).any() and torch.allclose(signed[1].abs().sum(-1), torch.ones(2, 21))
    kept = signed[1].clamp(min=0) / (1 - p)
    assert torch.allclose(kept @ x[9:, 2].transpose(0, 1), out[9:].transpose(0, 1), atol=1e-5)
    assert normalize_flash_attn_S(signed, None) is signed
    torch.manual_seed(3)
    torch.rand(1)


def normalize_flash_attn_S(*_):
    raise AssertionError("replaced")


def test_rotated():
    x, angle = torch.randn(2, 5, 3, 8, device="cuda"), torch.rand(20, 4, device="cuda")
    shift = torch.tensor([2, 9], device="cuda")
    for interleaved in (False, True):
        out = apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved, seqlen_offsets=shift)
        pairs = [(0, 1), (2, 3)] if interleaved else [(0, 4), (1, 5)]
        for number, (a, b) in enumerate(pairs):
            turn = torch.polar(torch.ones(()), angle[9 + 3, number])
            wanted = torch.complex(x[1, 3, 0, a], x[1, 3, 0, b]) * turn
            assert torch.allclose(torch.complex(out[1, 3, 0, a], out[1, 3, 0, b]), wanted, atol=1e-6)
"""

ROTARY = """
from flash_attn.ops.triton.rotary import apply_rotary


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0):
    return apply_rotary(x, cos, sin, seqlen_offsets, interleaved=interleaved)
"""


@pytest.fixture
def checkout(tmp_path):
    for name, text in {"tests/test_flash_attn.py": TESTS, "flash_attn/layers/rotary.py": ROTARY}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def ran(*arguments):
    found = subprocess.run([sys.executable, RUN, *map(str, arguments)], capture_output=True, text=True, check=False)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.rare
def test_a_sample_of_cases(checkout):
    """Two of the four short ones of test_drawn, others for another seed."""
    sample = "flash-attn-2", checkout, "--sample", 2, "--longest", 100, "-v"
    status, text = ran(*sample)
    assert status == 0, text
    assert " 4 passed" in text
    drawn, others = (
        set(re.findall(r"test_drawn\[.*?\]", found)) for found in (text, ran(*sample, "--seed", 4, "--co")[1])
    )
    assert len(drawn) == len(others) == 2
    assert drawn != others


def test_a_checkout_without_the_files(tmp_path):
    status, text = ran("flash-attn-3", tmp_path)
    assert status == 2
    assert "flash-attn-3 needs hopper/test_flash_attn.py" in text
