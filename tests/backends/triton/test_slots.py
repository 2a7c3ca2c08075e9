"""Rows that list slots, in the portable kernel."""

from __future__ import annotations

import pytest
import torch

from saccade import Paged, attention
from tests.layouts.test_slots import H_Q, S_Q, B, D, N, caches, gathered, slots, without_the_others


@pytest.mark.parametrize("form", ["apart", "beside", "latent"])
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
def test_against_the_oracle(end_to_end, form):
    """What no slot names may be NaN: in the first row too, which is the nearest one to -1."""
    k, v = caches(form, d_v=D if form == "beside" else 8 if form == "latent" else 24)
    table, used = slots(B * S_Q), torch.randint(0, N + 1, (B * S_Q,))
    used[1] = 0
    if form == "apart":
        table = without_the_others(k, v, table)
    q, sink = torch.randn(B * S_Q, H_Q, D), torch.randn(H_Q)
    wanted = gathered(q, k, v, table, used, sink)
    if end_to_end:
        layout = Paged(slots=table, seqused_k=used, cu_seqlens_q=torch.tensor([0, 2, B * S_Q]).int())
        out, lse = attention(q, k, v, layout=layout, sink=sink, return_lse=True, backend="triton")
        found = out, lse.T
    else:
        layout = Paged(slots=table.view(B, S_Q, N), seqused_k=used.view(B, S_Q))
        out, lse = attention(q.view(B, S_Q, H_Q, D), k, v, layout=layout, sink=sink, return_lse=True, backend="triton")
        found = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)
