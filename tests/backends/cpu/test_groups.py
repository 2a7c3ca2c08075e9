"""Calls of more heads or batch rows than one group of tiles holds, whose tiles of block sparsity all groups share."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal, mask_mod

MASKS = {
    "complement": lambda s_q, s_k: ~causal(),
    "predicate": lambda s_q, s_k: mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 == 0),
    "tensor": lambda s_q, s_k: torch.rand(s_q, s_k) < 0.5,
}


@pytest.mark.sample
@pytest.mark.parametrize("shape", [(1, 4, 700, 900), (2, 2, 1024, 1024), (8, 1, 513, 513)], ids=str)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("what", ["b", "h", "dropout"])
def test_indices_of_each_group(shape, name, what):
    b, h, s_q, s_k = shape
    q, k, v = (torch.randn(b, h, s, 8, dtype=torch.float64, requires_grad=True) for s in (s_q, s_k, s_k))
    table = torch.randn(8, dtype=torch.float64, requires_grad=True)
    mask = MASKS[name](s_q, s_k)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[b if what == "b" else h] * (kv_idx % 7)

    keywords = {"dropout_p": 0.3} if what == "dropout" else {"score_mod": score_mod}
    dout, results = torch.randn(b, h, s_q, 8, dtype=torch.float64), []
    for backend in ("cpu", "reference"):
        torch.manual_seed(0)
        out, lse = attention(q, k, v, mask=mask, backend=backend, return_lse=True, **keywords)
        leaves = (q, k, v) if what == "dropout" else (q, k, v, table)
        results.append((out, lse, *torch.autograd.grad(out, leaves, dout)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
