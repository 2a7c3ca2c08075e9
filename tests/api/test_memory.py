"""Memory grows with the length, not with its square."""

from __future__ import annotations

import pytest

PEAK = """
import resource, torch
from saccade import attention, causal, window
torch.set_num_threads(2)
s, h, d = 8192, 8, 64
dtype, mask, backward = torch.{dtype}, {mask}, {backward}

def call(s):
    q, k, v = (torch.randn(1, h, s, d).to(dtype).requires_grad_(backward) for _ in range(3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    out = attention(q, k, v, mask=mask)
    results = out.numel() * out.element_size()
    if backward:
        out.backward(torch.ones_like(out))
        results *= 5
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024 - results

call(1024)  # libraries and thread pools are loaded once
print(call(s) / (h * s * s * dtype.itemsize))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mask", "backward", "share"),
    [
        ("bfloat16", "causal()", False, 1 / 20),
        ("float32", "window(256, 0)", False, 1 / 20),
        ("bfloat16", "causal()", True, 1 / 5),  # plain PyTorch holds four
    ],
)
def test_beside_the_results_a_small_share_of_one_score_matrix(dtype, mask, backward, share, fresh_process):
    assert float(fresh_process(PEAK.format(dtype=dtype, mask=mask, backward=backward))) < share
