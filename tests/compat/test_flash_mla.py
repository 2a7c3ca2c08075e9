"""FlashMLA's functions: results by their definitions, with FlashMLA's conventions."""

from __future__ import annotations

import pytest
import torch

from saccade.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

D, D_V, H, TOPK = 48, 32, 5, 12


def defined(q, rows, slots, scale, sink):
    """out (rows, h, d_v), largest scores and lse (rows, h), in float64, of rows (n, d) of a cache."""
    outs, tops, lses = [], [], []
    for row, named in zip(q.double(), slots.tolist(), strict=True):
        keys = rows[[n for n in named if 0 <= n < len(rows)]].double()
        score = row @ keys.T * scale
        lse = score.logsumexp(-1)
        p = (score - lse.nan_to_num(neginf=0)[:, None]).exp()
        share = torch.where(
            lse == -torch.inf, 0, lse.exp() / (lse.exp() + (0 if sink is None else sink.double().exp()))
        )
        outs.append(p @ keys[:, :D_V] * share[:, None])
        tops.append(score.amax(-1) if len(keys) else torch.full_like(lse, -torch.inf))
        lses.append(torch.where(lse == -torch.inf, torch.inf, lse))
    return torch.stack(outs), torch.stack(tops), torch.stack(lses)


def drawn(*rows, known):
    """Slots that differ, and numbers that are none in any place."""
    slots = torch.rand(*rows, known).argsort(-1)[..., :TOPK]
    far = torch.tensor([-1, -5, known, (1 << 31) - 1])[torch.randint(0, 4, slots.shape)]
    return torch.where(torch.rand(slots.shape) < 0.2, far, slots).int()


SINKS = {"none": None, "some": torch.randn(H), "ends": torch.tensor([-torch.inf, torch.inf, 0.0, 3.0, -3.0])}


@pytest.mark.parametrize("sink", SINKS)
def test_sparse_prefill(sink):
    q, kv, indices = torch.randn(7, H, D), torch.randn(40, 1, D), drawn(7, known=40)
    length = torch.tensor([12, 0, 5, 1, 12, 3, 7], dtype=torch.int32)
    cut = torch.where(torch.arange(TOPK) < length[:, None], indices, -1)
    found = flash_mla_sparse_fwd(q, kv, indices[:, None], 0.2, D_V, SINKS[sink], length)
    for x, y in zip(found, defined(q, kv[:, 0], cut, 0.2, SINKS[sink]), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-5)
    assert bool((found[2][1] == torch.inf).all())
    assert not found[0][1].any()


def test_decoding():
    cache, extra = torch.randn(6, 8, 1, D), torch.randn(3, 4, 1, D)
    q, scheduled = torch.randn(2, 3, H, D), get_mla_metadata()
    indices, further = drawn(2, 3, known=48), drawn(2, 3, known=12)
    sink, length = torch.randn(H), torch.tensor([9, 4], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, D_V, *scheduled, indices=indices, attn_sink=sink, topk_length=length,
        extra_k_cache=extra, extra_indices_in_kvcache=further,
    )  # fmt: skip
    cut = torch.where(torch.arange(TOPK) < length[:, None, None], indices, -1).long()
    cut = torch.where((cut >= 0) & (cut < 48), cut, -1)
    others = further.long()
    both = torch.cat([cut, torch.where((others >= 0) & (others < 12), others + 48, -1)], -1).flatten(0, 1)
    rows = torch.cat([cache.flatten(0, 2), extra.flatten(0, 2)])
    wanted, _, wanted_lse = defined(q.flatten(0, 1), rows, both, D**-0.5, sink)
    torch.testing.assert_close(out.flatten(0, 1).double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.transpose(1, 2).flatten(0, 1).double(), wanted_lse, rtol=1e-4, atol=1e-5)


def test_dense_decoding():
    cache, table, used = torch.randn(6, 8, 1, D), torch.tensor([[4, 0], [2, 5]]), torch.tensor([13, 0])
    q = torch.randn(2, 2, H, D)
    out, lse = flash_mla_with_kvcache(q, cache, table, used, D_V, causal=True)
    slots = torch.full((2, 2, 16), -1)
    for i in range(2):
        keys = 13 - 1 + i
        slots[0, i, :keys] = (table[0].repeat_interleave(8) * 8 + torch.arange(16) % 8)[:keys]
    wanted, _, wanted_lse = defined(q.flatten(0, 1), cache.flatten(0, 2), slots.flatten(0, 1), D**-0.5, None)
    torch.testing.assert_close(out.flatten(0, 1).double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.transpose(1, 2).flatten(0, 1).double(), wanted_lse, rtol=1e-4, atol=1e-5)


def test_wrong_calls():
    q, cache, indices = torch.randn(2, 1, H, D), torch.randn(6, 8, 1, D), torch.zeros(2, 1, 4).int()
    with pytest.raises(ValueError, match="not with causal=True"):
        flash_mla_with_kvcache(q, cache, None, None, D_V, causal=True, indices=indices)
    with pytest.raises(ValueError, match="go together"):
        flash_mla_with_kvcache(q, cache, None, None, D_V, indices=indices, extra_k_cache=cache)
    with pytest.raises(ValueError, match="needs block_table and cache_seqlens, or indices"):
        flash_mla_with_kvcache(q, cache, None, None, D_V)
    with pytest.raises(ValueError, match=r"kv must be \(s_kv, 1, d\)"):
        flash_mla_sparse_fwd(q[:, 0], torch.randn(9, 2, D), indices, 1.0)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"d_v": 9}, "d_v must be at most the 8 columns of a row, got 9"),
        ({"d_v": -1}, "d_v must be an integer from 1 on"),
        ({"attn_sink": torch.zeros(1)}, r"attn_sink must be \(4,\)"),
        ({"attn_sink": torch.zeros(3, 1)}, r"attn_sink must be \(4,\)"),
        ({"topk_length": torch.zeros(2).int()}, r"topk_length must be int32 or int64 \(3,\)"),
        ({"topk_length": torch.zeros(3)}, r"topk_length must be int32 or int64 \(3,\).* got torch.float32"),
        (
            {"topk_length": torch.full((3,), 6)},
            r"topk_length must be from 0 to the 5 slots .* \[6, 6, 6\]",
        ),
        (
            {"indices": torch.zeros(2, 1, 5).int()},
            r"indices must be int32 or int64 \(3, 5\).* got .*\(2, 5\)",
        ),
        ({"indices": torch.zeros(3, 1, 5)}, "indices must be int32 or int64 .* got torch.float32"),
        ({"kv": torch.randn(9, 1, 7)}, r"kv must have rows of 8 torch.float32 .* got rows of 7"),
        ({"kv": torch.randn(9, 1, 8).half()}, "kv must have rows of 8 torch.float32 .* got rows of 8 torch.float16"),
        ({"q": torch.randn(3, 8)}, r"q must be \(s_q, h_q, d\), got \(3, 8\)"),
    ],
)
def test_what_does_not_fit_a_prompt(given, error):
    indices = torch.arange(5).expand(3, 1, 5).int()
    call = {"q": torch.randn(3, 4, 8), "kv": torch.randn(9, 1, 8), "indices": indices, "sm_scale": 1.0, "d_v": 6}
    with pytest.raises(ValueError, match=error):
        flash_mla_sparse_fwd(**call | given)


LISTS = torch.zeros(2, 1, 3).int()
EXTRA = {"indices": LISTS, "extra_k_cache": torch.randn(1, 4, 1, 8), "extra_indices_in_kvcache": LISTS}


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"topk_length": torch.ones(2).int()}, "topk_length counts slots that are listed"),
        ({"extra_topk_length": torch.ones(2).int()}, "extra_topk_length counts slots that are listed"),
        ({"indices": LISTS, "topk_length": torch.ones(1).int()}, r"topk_length must be int32 or int64 \(2,\)"),
        ({"indices": LISTS, "topk_length": torch.ones(2)}, r"topk_length must be .*got torch.float32 \(2,\)"),
        (
            {"indices": LISTS, "topk_length": torch.full((2,), 4)},
            "topk_length must be from 0 to the 3 slots",
        ),
        ({"indices": LISTS[:1]}, r"indices must be int32 or int64 \(2, 1, 3\).* got torch.int32 \(1, 1, 3\)"),
        ({"indices": LISTS.float()}, "indices must be .* got torch.float32"),
        (EXTRA | {"extra_k_cache": torch.randn(1, 4, 1, 7)}, "extra_k_cache must have rows of 8"),
        (EXTRA | {"extra_indices_in_kvcache": LISTS[:1]}, "extra_indices_in_kvcache must be int32 or int64"),
        (
            EXTRA | {"extra_topk_length": torch.full((2,), 4)},
            "extra_topk_length must be from 0 to the 3 slots",
        ),
        ({"block_table": torch.zeros(3, 1).int()}, r"block_table must be int32 or int64 \(2, 1\)"),
        ({"block_table": torch.zeros(2, 1)}, "block_table must be .* got torch.float32"),
        ({"cache_seqlens": torch.ones(3).int()}, r"cache_seqlens must be int32 or int64 \(2,\)"),
        (
            {"cache_seqlens": torch.full((2,), 5)},
            r"cache_seqlens must be from 0 to the 4 rows of 1 pages of 4, got \[5, 5",
        ),
        ({"q": torch.randn(2, 4, 8)}, r"q must be \(b, s_q, h_q, d\)"),
    ],
)
def test_what_does_not_fit_decoding(given, error):
    call = {
        "q": torch.randn(2, 1, 4, 8), "k_cache": torch.randn(1, 4, 1, 8), "block_table": torch.zeros(2, 1).int(),
        "cache_seqlens": torch.ones(2).int(), "head_dim_v": 8,
    }  # fmt: skip
    with pytest.raises(ValueError, match=error):
        flash_mla_with_kvcache(**call | given)


def test_lengths_in_compiled_code():
    """Which the host cannot read there."""

    def prompt(q, kv, indices, used):
        return flash_mla_sparse_fwd(q, kv, indices, 0.1, 32, None, used)

    q, kv, used = torch.randn(3, 4, 48), torch.randn(9, 1, 48), torch.tensor([1, 2, 0], dtype=torch.int32)
    indices = torch.tensor([0, 8], dtype=torch.int32).expand(3, 1, 2)
    found = torch.compile(prompt, fullgraph=True, backend="aot_eager")(q, kv, indices, used)
    for one, other in zip(found, prompt(q, kv, indices, used), strict=True):
        torch.testing.assert_close(one, other)
