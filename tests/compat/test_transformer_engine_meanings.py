"""What TransformerEngine's words mean is kept: the same call means the same, and another one never what was kept."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch

from saccade import Dense, Packed, attention, causal, window
from saccade.compat.transformer_engine import DotProductAttention, module
from saccade.ops.dispatch import Unsupported

H, D = 4, 8


@pytest.fixture(autouse=True)
def meanings(monkeypatch):
    """None are kept from other tests."""
    kept = module.BoundedCache(64)
    monkeypatch.setattr(module, "_MEANINGS", kept)
    return kept


def core(order="bshd", kind="causal", **options):
    return DotProductAttention(H, D, qkv_format=order, attn_mask_type=kind, **options)


def operands(s_q=6, s_k=6, h=H):
    return [torch.randn(2, s, n, D) for s, n in ((s_q, H), (s_k, h), (s_k, h))]


def offsets(*ends):
    return torch.tensor([0, *ends], dtype=torch.int32)


CALLS = [
    (s_q, s_k, {"attn_mask_type": kind, **more})
    for (s_q, s_k), kind, more in itertools.product(
        [(6, 6), (4, 6), (6, 4)],
        [None, "causal", "no_mask", "causal_bottom_right"],
        [{}, {"bottom_right_diagonal": True}, {"bottom_right_diagonal": False}, {"checkpoint_core_attention": True}],
    )
]


@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0)}, {"softcap": 5.0}], ids=str)
def test_as_if_nothing_was_kept(meanings, options):
    """Calls in any order, each twice, beside modules that never called before."""
    made = core(**options)
    for s_q, s_k, words in CALLS * 2:
        q, k, v = operands(s_q, s_k)
        found = made(q, k, v, **words)
        meanings.clear()
        fresh = core(**options)(q, k, v, **words)
        assert torch.equal(found, fresh), (s_q, s_k, words)
        made(q, k, v, **words)
    kept = made(q, k, v, **words)
    assert (meanings.info().hits > 0) == ("softcap" not in options)
    assert torch.equal(kept, fresh)


def test_a_call_is_looked_up(meanings):
    made = core()
    for _ in range(3):
        q, k, v = operands()
        made(q, k, v)
    assert meanings.info()[:2] == (2, 1)


def test_modules_do_not_share_what_they_differ_in():
    q, k, v = operands()
    plain, windowed = core()(q, k, v), core(window_size=[2, 0])(q, k, v)
    assert not torch.equal(plain, windowed)
    wanted = attention(q, k, v, mask=window(2, 0), layout=Dense("bshd"))
    assert torch.equal(windowed, wanted.flatten(-2))


def test_lengths_are_of_each_call(meanings):
    made = core("thd", "padding_causal")
    q, k, v = (torch.randn(10, H, D) for _ in range(3))
    for ends in ((3, 10), (7, 10), (5, 9)):
        cu = offsets(*ends)
        found = made(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=10, max_seqlen_kv=10)
        wanted = attention(q, k, v, mask=causal(), layout=Packed(cu))
        assert torch.equal(found, wanted.flatten(-2))
    assert meanings.info().hits == 2
    apart = made(q, k, v, cu_seqlens_q=offsets(3, 10), cu_seqlens_kv=offsets(3, 10))
    wanted = attention(q, k, v, mask=causal(), layout=Packed(offsets(3, 10)))
    torch.testing.assert_close(apart, wanted.flatten(-2))


def test_no_tensor_of_a_call_is_kept_alive():
    made, (q, k, v), cu = core("thd", "padding_causal"), (torch.randn(10, H, D) for _ in range(3)), offsets(3, 10)
    alive = [weakref.ref(x) for x in (q, cu)]
    for _ in range(2):
        made(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
    del q, cu
    gc.collect()
    assert [x() for x in alive] == [None, None]


def test_offsets_of_a_padded_batch_are_of_each_call():
    made = core(kind="padding")
    q, k, v = operands()
    for lengths in ((6, 2), (3, 6)):
        cu = offsets(lengths[0], sum(lengths))
        out = made(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        for i, n in enumerate(lengths):
            assert not out[i, n:].any()
            assert out[i, :n].abs().sum(-1).all()


WRONG = [
    ({"bottom_right_diagonal": "True"}, TypeError, "bottom_right_diagonal"),
    ({"checkpoint_core_attention": 2.0}, TypeError, "checkpoint_core_attention"),
    ({"attn_mask_type": "diagonal"}, ValueError, "attn_mask_type is one of"),
    ({"qkv_format": "thd"}, ValueError, "wants tensors of 3 dimensions"),
    ({"fp8_output": True}, Unsupported, "FP8"),
    ({"core_attention_bias_type": "alibis"}, ValueError, "core_attention_bias_type is one of"),
]


@pytest.mark.parametrize(("words", "error", "text"), WRONG, ids=str)
def test_a_wrong_call_after_a_right_one(words, error, text):
    """Whose words are equal, or nearly."""
    made = core()
    q, k, v = operands()
    for right in ({}, {"bottom_right_diagonal": True}, {"checkpoint_core_attention": False}):
        made(q, k, v, **right)
    for _ in range(2):
        with pytest.raises(error, match=text):
            made(q, k, v, **words)


def test_wrong_tensors_after_right_ones():
    made = core("thd", "padding_causal")
    q, k, v = (torch.randn(10, H, D) for _ in range(3))
    cu, lengths = offsets(3, 10), {"max_seqlen_q": 10, "max_seqlen_kv": 10}
    made(q, k, v, cu_seqlens_q=cu, cu_seqlens_kv=cu, **lengths)
    for given in (
        {"cu_seqlens_q": cu.float(), "cu_seqlens_kv": cu},
        {"cu_seqlens_q": cu[:2], "cu_seqlens_kv": cu},
        {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": 4.0},
        {"cu_seqlens_q": cu, "cu_seqlens_kv": cu, "max_seqlen_q": -1},
        {"cu_seqlens_q": cu},
        {},
    ):
        with pytest.raises((ValueError, TypeError)):
            made(q, k, v, **lengths | given)
    with pytest.raises(ValueError, match="keys and values must have 4 heads"):
        made(q, k[:, :2], v[:, :2], cu_seqlens_q=cu, cu_seqlens_kv=cu, **lengths)
