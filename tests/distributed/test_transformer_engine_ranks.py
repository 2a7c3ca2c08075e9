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


def worst_of_sequences(group, lengths, padding, settings):
    """The same for sequences end to end, with rows of NaN after each; offsets are those of whole sequences."""
    rank, ranks = group.rank(), group.size()
    torch.manual_seed(5)
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    starts = torch.tensor([0, *(n + more for n, more in zip(lengths, padding, strict=True))]).cumsum(0).int()
    used = torch.zeros(int(starts[-1]), 1, 1, dtype=torch.bool)
    for start, n in zip(starts.tolist(), lengths, strict=False):
        used[start : start + n] = True
    whole = [torch.randn(len(used), h, 16, dtype=torch.float64).where(used, torch.nan) for h in (4, 2, 2)]
    whole = [x.requires_grad_() for x in whole]
    given = {"cu_seqlens_q": cu, "cu_seqlens_kv": cu.clone()}
    if any(padding):
        given |= {"cu_seqlens_q_padded": starts, "cu_seqlens_kv_padded": starts}

    def own(x):
        return torch.cat([chunks(part, "sbhd", rank, ranks) for part in x.split(starts.diff().tolist())])

    mine = [own(x).detach().requires_grad_() for x in whole]
    core = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="thd", **settings)
    one = core(*whole, **given)
    core.set_context_parallel_group(group, None, None, "all_gather")
    found = []
    for _ in range(2):
        out = core(*mine, **given)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), mine)])
    one.sum().backward()
    pairs = [*zip(found[1], [one, *(x.grad for x in whole)], strict=True)]
    return max(float((x - own(y)).abs().max()) for x, y in pairs), all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("padding", "settings"),
    [
        ((0, 0, 0), {"attn_mask_type": "padding_causal"}),
        ((0, 0, 0), {"attn_mask_type": "padding", "softcap": 5.0}),
        ((5, 1, 9), {"attn_mask_type": "padding_causal", "window_size": (7, 0)}),
        ((5, 1, 9), {"attn_mask_type": "padding_causal", "softmax_type": "off-by-one"}),
    ],
)
def test_chunks_of_sequences_end_to_end(pool, padding, settings):
    lengths = [n - more for n, more in zip((12, 6, 30), padding, strict=True)]
    for worst, repeated in pool.run((HERE, "worst_of_sequences"), 3, lengths, padding, settings):
        assert worst <= EQUAL
        assert repeated


def refusals(group):
    told = []
    core = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", cp_group=group)
    q, k, v = operands("bshd")
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    lengths, others, odd = (torch.tensor(x, dtype=torch.int32) for x in ([0, 48, 192], [0, 40, 192], [0, 47, 192]))
    ends = {"qkv_format": "thd", "attn_mask_type": "padding", "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}
    padded = {"cu_seqlens_q_padded": lengths, "cu_seqlens_kv_padded": lengths}
    for x, keywords in (
        ((q, k[:, :20], v[:, :20]), {}),
        (rows, ends | {"cu_seqlens_kv": others}),
        (rows, ends | padded | {"cu_seqlens_q": others, "cu_seqlens_kv": others}),
        (rows, ends | {"cu_seqlens_q": odd, "cu_seqlens_kv": odd}),
        ([x[:90] for x in rows], ends),
        ((q, k, v), {"core_attention_bias_type": "alibi"}),
    ):
        with pytest.raises((Unsupported, ValueError)) as raised:
            core(*x, **keywords)
        told.append(str(raised.value))
    core.return_max_logit = True
    with pytest.raises(Unsupported) as raised:
        core(q, k, v)
    return [*told, str(raised.value)]


def test_what_is_refused(pool):
    for told in pool.run((HERE, "refusals"), 2):
        for text, words in zip(
            told,
            (
                "of 2 ranks: calls must be self-attention",
                "cu_seqlens_q and cu_seqlens_kv must be equal",
                "needs a causal mask, so that no row sees padding",
                "of 2 ranks: each sequence must divide into 4 equal chunks",
                "with 192 rows in all a rank has 96, got q (90, 4, 16)",
                "biases and score functions are not",
                "return_max_logit is not",
            ),
            strict=True,
        ):
            assert "over a cp_group" in text
            assert words in text


def test_ways_to_exchange():
    core = DotProductAttention(4, 16)
    with pytest.raises(ValueError, match=r"cp_comm_type is one of p2p, all_gather, a2a, a2a\+p2p, got 'ring'"):
        core.set_context_parallel_group(object(), None, None, "ring")
