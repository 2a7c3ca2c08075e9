"""Shared prefixes by the kernels over pages: rows of all sequences as rows of one, with an end and a place for each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade import Paged, alibi, causal, explain, interval, mask_mod, prefix, softcap, window
from saccade.testing import check

B, H_Q, H_K, D, SIZE, SHARED = 3, 4, 2, 16, 16, 4
PREFIX = SHARED * SIZE
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(),
    "window": window(40, 2),
    "prefixes": prefix(torch.tensor([3, 70, 0])),
    "interval": causal() & interval(torch.tensor([[1], [PREFIX + 2], [3]]), None),
    "predicate": causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 0),
}


@pytest.mark.sample
@pytest.mark.parametrize("rows", [None, (1, 4, 0)], ids=["batch", "end to end"])
@pytest.mark.parametrize("mask", MASKS)
def test_is_the_plain_call(mask: str, rows: tuple[int, ...] | None) -> None:
    """One sequence ends inside of the prefix, whose unused keys are NaN nowhere else."""
    order = torch.randperm(SHARED + 2 * B)
    table = torch.cat([order[:SHARED].expand(B, -1), order[SHARED:].view(B, 2)], 1).int()
    k, v = torch.randn(2, len(order), SIZE, H_K, D).half()
    offsets = None if rows is None else torch.tensor([0, *rows]).cumsum(0).int()
    q = torch.randn(*((B, 2) if rows is None else (7,)), H_Q, D).half()
    layout = Paged(table, torch.tensor([PREFIX + 20, 30, PREFIX + 1]).int(), offsets, shared_pages=SHARED)
    score = {"causal": alibi(torch.rand(H_Q)), "window": softcap(5.0)}.get(mask)
    keywords: dict[str, Any] = {"layout": layout, "mask": MASKS[mask], "score_mod": score, "backend": "triton"}
    assert "triton reads the first 4 pages once" in str(explain(q, k, v, **keywords).shared)
    check(q, k, v, sink=torch.randn(H_Q), return_max_scores=True, **keywords).assert_ok()
