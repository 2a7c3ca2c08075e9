"""TransformerEngine's face over a cp_group: chunks as its loaders lay them, results as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from saccade import Unsupported
from saccade.compat.transformer_engine import DotProductAttention

EQUAL = 1e-12  # in float64, what sums in another order differ by
HERE = str(Path(__file__))


def operands(order, s=48):
    torch.manual_seed(5)
    shape = {"bshd": (2, s), "sbhd": (s, 2)}[order]
    return [torch.randn(*shape, h, 16, dtype=torch.float64) for h in (4, 2, 2)]


def chunks(x, order, rank, ranks):
    parts = x.chunk(2 * ranks, order.index("s"))
    return torch.cat([parts[rank], parts[2 * ranks - 1 - rank]], order.index("s"))


def worst(group, order, settings):
    """The largest difference of out and of dq, dk, dv."""
    rank, ranks = group.rank(), group.size()
    whole = [x.requires_grad_() for x in operands(order)]
    mine = [chunks(x, order, rank, ranks).detach().requires_grad_() for x in whole]
    core = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format=order, **settings)
    one = core(*whole)
    core.set_context_parallel_group(group, list(range(ranks)), None, "p2p")
    out = core(*mine)
    out.sum().backward()
    one.sum().backward()
    pairs = [(out, one), *((x.grad, y.grad) for x, y in zip(mine, whole, strict=True))]
    return max(float((x - chunks(y, order, rank, ranks)).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("order", ["bshd", "sbhd"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"attn_mask_type": "no_mask"}, {"window_size": (7, 0)}, {"softcap": 5.0, "softmax_type": "off-by-one"}],
    ids=str,
)
def test_chunks_of_sequences(pool, order, settings):
    assert max(pool.run((HERE, "worst"), 3, order, settings)) <= EQUAL


def refusals(group):
    told = []
    core = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", cp_group=group)
    q, k, v = operands("bshd")
    lengths = torch.tensor([0, 48, 96], dtype=torch.int32)
    ends = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    for x, keywords in (
        ((q, k[:, :20], v[:, :20]), {}),
        ((q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)), ends),
        ((q, k, v), {"core_attention_bias_type": "alibi"}),
    ):
        with pytest.raises(Unsupported) as raised:
            core(*x, **keywords)
        told.append(str(raised.value))
    core.return_max_logit = True
    with pytest.raises(Unsupported) as raised:
        core(q, k, v)
    return [*told, str(raised.value)]


def test_what_is_refused(pool):
    for told in pool.run((HERE, "refusals"), 2):
        for text, words in zip(
            told, ("self-attention", "self-attention", "no biases", "no return_max_logit"), strict=True
        ):
            assert "over a cp_group of 2 ranks" in text
            assert words in text
