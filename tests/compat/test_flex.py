"""The face of FlexAttention beside PyTorch's own."""

from __future__ import annotations

import pytest
import torch

from saccade.compat import flex
from saccade.testing.accuracy import check

torch_flex = pytest.importorskip("torch.nn.attention.flex_attention")

S = 200
IDS = torch.tensor([0] * 100 + [1] * 57 + [2] * 43)
SLOPES = torch.randn(4)


@pytest.fixture(autouse=True)
def _plain_torch(monkeypatch):
    """Torch's formula, uncompiled."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def by_head(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & ((q_idx >= kv_idx) | (h == b))


def plain(b, h, q_idx, kv_idx):
    return (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)


def tilted(score, b, h, q_idx, kv_idx):
    return score + SLOPES[h] * (kv_idx - q_idx)


def operands(h_k=2, b_k=2):
    return torch.randn(2, 4, S, 16), torch.randn(b_k, h_k, S, 16), torch.randn(b_k, h_k, S, 24)


FORMS = [(by_head, 2, 4, 128), (plain, None, None, 64), (plain, 2, None, (128, 64)), (plain, 1, 4, 32)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join([form[0].__name__, *map(str, form[1:])]))
@pytest.mark.parametrize("maker", [flex.create_block_mask, torch_flex.create_block_mask], ids=["ours", "torch"])
def test_against_torch(form, maker):
    fn, b, h, size = form
    q, k, v = operands()
    ours = maker(fn, b, h, S, S, device="cpu", BLOCK_SIZE=size)
    theirs = torch_flex.create_block_mask(fn, b, h, S, S, device="cpu", BLOCK_SIZE=size)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    out = flex.flex_attention(q, k, v, tilted, ours, enable_gqa=True)
    torch.testing.assert_close(out, torch_flex.flex_attention(q, k, v, tilted, theirs, enable_gqa=True))


def test_whole_blocks_need_not_be_apart():
    more = {"device": "cpu", "separate_full_blocks": False}
    made = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, **more)
    assert made.full_kv_num_blocks is None
    assert made.kv_num_blocks.tolist() == [[[1, 2, 3, 4]]]


def test_aux():
    q, k, v = operands()
    made = flex.create_block_mask(by_head, 2, 4, S, S, device="cpu")
    out, aux = flex.flex_attention(q, k, v, None, made, enable_gqa=True, return_aux=flex.AuxRequest(True, True))
    i = torch.arange(S)
    seen = by_head(torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None], i[:, None], i)
    scores = torch.where(seen, q @ k.repeat_interleave(2, 1).mT / 4, -torch.inf)
    torch.testing.assert_close(aux.max_scores, scores.amax(-1))
    torch.testing.assert_close(aux.lse, scores.logsumexp(-1))
    assert torch.equal(out, flex.flex_attention(q, k, v, None, made, enable_gqa=True, return_lse=True)[0])
    assert flex.flex_attention(q, k, v, enable_gqa=True, return_aux=flex.AuxRequest())[1] == (None, None)


def test_backward_on_the_cpu():
    """Which torch's own has not."""

    def face(q, k, v, *, mask, score_mod, return_lse=False, backend=None):
        return flex.flex_attention(q, k, v, score_mod, mask, return_lse=return_lse, enable_gqa=True)

    made = flex.create_block_mask(by_head, 2, 4, S, S, device="cpu")
    check(*operands(), mask=made, score_mod=tilted, function=face, dlse=torch.randn(2, 4, S)).assert_ok()


def test_one_row_of_keys():
    q, k, v = operands(4, 1)
    made = flex.create_block_mask(plain, 2, None, S, S, device="cpu")
    wide = [x.expand(2, -1, -1, -1) for x in (k, v)]
    torch.testing.assert_close(flex.flex_attention(q, k, v, None, made), flex.flex_attention(q, *wide, None, made))


def test_errors():
    q, k, v = operands()
    with pytest.raises(ValueError, match="enable_gqa=True"):
        flex.flex_attention(q, k, v)
    with pytest.raises(ValueError, match="one row of keys"):
        flex.flex_attention(q, k[:1], v[:1], enable_gqa=True)
    with pytest.raises(ValueError, match="deprecated"):
        flex.flex_attention(q, q, q, return_lse=True, return_aux=flex.AuxRequest())
    with pytest.raises(NotImplementedError, match="4-dimensional"):
        flex.flex_attention(q[0], k[0], v[0])
