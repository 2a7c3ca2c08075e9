"""What this folder runs is the Triton kernels, forward and backward."""

from __future__ import annotations

import torch

from saccade import explain
from saccade.call import Call
from saccade.ops.dispatch import plan_of


def test_gradients_are_the_kernels_own():
    x = torch.randn(1, 2, 20, 16)
    call = Call(x, x, x)
    assert plan_of(call, "triton").backend == plan_of(call, "triton", gradient=True).backend == "triton"
    assert explain("fp32 d64 cpu", backend="triton").plan.backend == "triton"
