"""The attention function of transformers under a plan: documents end to end and batches, as in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from saccade import causal, window
from saccade.distributed import plan
from saccade.integrations.transformers import StructuredMask, attention_forward

EQUAL = 1e-12  # in float64, what sums in another order differ by
HERE = str(Path(__file__))
LENGTHS = [37, 5, 18, 1, 44]
LAYER = SimpleNamespace(is_causal=True, layer_idx=0)


def layer_of(q, k, v, **keywords):
    return attention_forward(LAYER, q, k, v, keywords.pop("mask", None), scaling=0.3, softcap=9.0, **keywords)[0]


def worst(group, dense, sliding_window):
    """The largest difference of out and of dq, dk, dv."""
    torch.manual_seed(5)
    shape = (2, 61) if dense else (1, sum(LENGTHS))
    mask = causal() if sliding_window is None else window(sliding_window - 1, 0)
    made = plan(shape if dense else LENGTHS, group, mask=mask)
    whole = [torch.randn(shape[0], h, shape[1], 16, dtype=torch.float64).requires_grad_() for h in (4, 2, 2)]
    mine = [made.shard(x, 2).detach().requires_grad_() for x in whole]
    ids = made.position_ids[None]  # of which transformers makes a mask that the plan replaces
    theirs = StructuredMask(causal(), (shape[0], 1, made.rows, made.rows), False)
    out = layer_of(*mine, mask=theirs, sliding_window=sliding_window, context=made, position_ids=ids)
    offsets = torch.tensor([0, *(LENGTHS if not dense else [61])]).cumsum(0).int()
    if dense:
        one = layer_of(*whole, sliding_window=sliding_window)
    else:
        one = layer_of(*whole, sliding_window=sliding_window, cu_seq_lens_q=offsets)
    out.square().sum().backward()
    one.square().sum().backward()
    pairs = [(out, one, 1), *((x.grad, y.grad, 2) for x, y in zip(mine, whole, strict=True))]
    return max(float((x - made.shard(y, dim)).abs().max()) for x, y, dim in pairs)


@pytest.mark.parametrize("dense", [False, True], ids=["documents", "batch"])
@pytest.mark.parametrize("sliding_window", [None, 9])
def test_layers_over_ranks(pool, dense, sliding_window):
    assert max(pool.run((HERE, "worst"), 3, dense, sliding_window)) <= EQUAL


def test_what_does_not_go_together():
    made = plan([8, 4], 2, mask=causal())
    q = torch.randn(1, 2, 6, 16)
    for keywords, words in (
        ({"cu_seq_lens_q": torch.tensor([0, 6])}, "context and cu_seq_lens_q do not go together"),
        ({"position_bias": torch.zeros(1, 2, 6, 6)}, "context and position_bias do not go together"),
        ({"mask": torch.ones(1, 1, 6, 6, dtype=torch.bool)}, "context and an attention_mask do not go together"),
        ({"mask": StructuredMask(causal(), (1, 1, 6, 6), True)}, "context and an attention_mask do not go together"),
    ):
        with pytest.raises(ValueError, match=words):
            layer_of(q, q, q, context=made, **keywords)
