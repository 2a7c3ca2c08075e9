"""flash-attn's dense functions: each argument by what it means in saccade's own words, against the oracle."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, alibi, attention, causal, compose, softcap, window
from saccade.call.partial import Partial
from saccade.compat.flash_attn import call, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from saccade.scores import ScoreMod
from saccade.testing import check
from saccade.testing.cases import Case

BSHD = Dense("bshd")


def drawn(device, **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=2, h_q=4, h_k=2, d=16, order="bshd")
    return case.replace(**{"s_q": 33, "s_k": 50, **changes}).inputs(device)


def checked(made, function, given, **meaning):
    """The face, called with the arguments `given`, is the oracle's call of this meaning."""

    def face(q, k, v, *, return_lse=False, **keywords):
        result = function(q, k, v, return_attn_probs=return_lse, **given)
        return Partial(*result[:2]) if return_lse else result

    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=face, layout=BSHD, **meaning).assert_ok()


def slopes(shape, device="cpu"):
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(device) * 0.3


def distances(slopes, off):
    """ALiBi as flash-attn defines it: `-slope |i + off - j|`."""
    return ScoreMod(
        lambda score, b, h, q_idx, kv_idx, slopes: (
            score - (slopes[h] if slopes.dim() == 1 else slopes[b, h]) * (q_idx + off - kv_idx).abs()
        ),
        slopes,
    )


VISIBLE = [
    ({}, None),
    ({"causal": True}, causal()),
    ({"window_size": (-1, 0)}, causal()),
    ({"window_size": (9, 0)}, window(9, 0)),
    ({"window_size": (9, 4)}, window(9, 4)),
    ({"window_size": (9, 4), "causal": True}, window(9, 0)),
    ({"window_size": (9, -1)}, window(9, None)),
    ({"window_size": (-7, 5)}, window(None, 5)),
    ({"window_size": [0, 0]}, window(0, 0)),
    ({"window_size": torch.tensor([9, 4])}, window(9, 4)),
    ({"window_size": torch.tensor([9, -1]), "causal": True}, window(9, 0)),
    ({"window_size": (-3, -2), "causal": True}, causal()),
]


@pytest.mark.parametrize(("given", "mask"), VISIBLE, ids=str)
@pytest.mark.parametrize("lengths", [(33, 50), (50, 33), (1, 40)], ids=str)
def test_masks(given, mask, lengths, device):
    made = drawn(device, s_q=lengths[0], s_k=lengths[1])
    checked(made, flash_attn_func, given, mask=mask)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("d", [8, 40, 59])
def test_heads(heads, d, device):
    made = drawn(device, h_q=heads[0], h_k=heads[1], d=d)
    checked(made, flash_attn_func, {"causal": True, "softmax_scale": 0.3}, mask=causal(), scale=0.3)


@pytest.mark.sample
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (9, 4)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("lengths", [(33, 50), (50, 33)], ids=str)
def test_alibi(shape, given, lengths, device):
    """Also as LSE: a bias that is equal in a row leaves out as it is."""
    made, slope = drawn(device, s_q=lengths[0], s_k=lengths[1]), slopes(shape, device)
    mod = distances(slope, lengths[1] - lengths[0])
    mask = causal() if "causal" in given else window(9, 4) if "window_size" in given else None
    mod = compose(softcap(5.0), mod) if "softcap" in given else mod
    checked(made, flash_attn_func, {"alibi_slopes": slope, **given}, mask=mask, score_mod=mod)


def test_alibi_has_a_gradient():
    """Under a causal mask the distance has one sign."""
    made, slope = drawn("cpu", s_q=33, s_k=33), slopes(4)
    gradients = []
    for given in ({"alibi_slopes": slope.clone().requires_grad_()}, {}):
        wanted = slope.clone().requires_grad_()
        if given:
            flash_attn_func(made.q, made.k, made.v, causal=True, **given).sum().backward()
            gradients.append(given["alibi_slopes"].grad)
        else:
            attention(made.q, made.k, made.v, mask=causal(), score_mod=alibi(wanted), layout=BSHD).sum().backward()
            gradients.append(wanted.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("given", [{}, {"causal": True}], ids=str)
def test_softcap(given, device):
    made = drawn(device)
    checked(made, flash_attn_func, {"softcap": 3.0, **given}, score_mod=softcap(3.0), mask=causal() if given else None)


@pytest.mark.parametrize("off", [0.0, -1.0, 0])
def test_softcap_off(off):
    made = drawn("cpu")
    assert torch.equal(flash_attn_func(made.q, made.k, made.v, softcap=off), flash_attn_func(made.q, made.k, made.v))


@pytest.mark.parametrize("given", [{}, {"softcap": 3.0}], ids=str)
def test_dropout(given, device):
    """Forward and backward draw what attention draws."""
    made, found = drawn(device), []
    for face in (True, False):
        q, k, v = (x.clone().requires_grad_() for x in (made.q, made.k, made.v))
        torch.manual_seed(1)
        if face:
            out = flash_attn_func(q, k, v, 0.2, **given)
        else:
            out = attention(q, k, v, dropout_p=0.2, score_mod=softcap(3.0) if given else None, layout=BSHD)
        out.backward(made.dout)
        found.append((out, q.grad, k.grad, v.grad))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("given", [{}, {"causal": True, "window_size": (9, 0)}], ids=str)
def test_qkvpacked(given, device):
    made = drawn(device, h_k=4, s_q=40, s_k=40)

    def face(q, k, v, **options):
        return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)

    checked(made, face, given, mask=window(9, 0) if given else None)


@pytest.mark.parametrize("given", [{}, {"causal": True}], ids=str)
def test_kvpacked(given, device):
    def face(q, k, v, **options):
        return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)

    checked(drawn(device), face, given, mask=causal() if given else None)


def test_results():
    """Shapes and dtypes; the third one is empty, as it is upstream without dropout."""
    made = drawn("cpu")
    out, lse, probabilities = flash_attn_func(made.q, made.k, made.v, return_attn_probs=True)
    assert out.shape == made.q.shape
    assert (lse.shape, lse.dtype) == ((2, 4, 33), torch.float32)
    assert (probabilities.shape, probabilities.dtype) == ((0,), made.q.dtype)
    assert isinstance(flash_attn_func(made.q, made.k, made.v), torch.Tensor)


def test_out_has_the_memory_order_of_q():
    made = drawn("cpu")
    assert flash_attn_func(made.q.contiguous(), made.k, made.v).is_contiguous()
    qkv = torch.randn(2, 33, 3, 4, 16)
    assert flash_attn_qkvpacked_func(qkv).is_contiguous()


def test_a_row_without_keys():
    made = drawn("cpu", s_q=50, s_k=33)
    out, lse, _ = flash_attn_func(made.q, made.k, made.v, causal=True, return_attn_probs=True)
    assert not out[:, :17].any()
    assert (lse[..., :17] == -torch.inf).all()


def test_deterministic(monkeypatch):
    """True is asked for; False follows torch, as everywhere in saccade."""
    made, seen = drawn("cpu"), []

    def watched(*operands, **given):
        seen.append(given["deterministic"])
        return attention(*operands, **given)

    monkeypatch.setattr(call, "attention", watched)
    for deterministic in (True, False):
        flash_attn_func(made.q, made.k, made.v, deterministic=deterministic)
    assert seen == [True, None]


WRONG = [
    ({"dropout_p": 0.1, "return_attn_probs": True}, NotImplementedError, "return_attn_probs with dropout"),
    ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\)"),
    ({"window_size": 5}, TypeError, r"window_size is \(left, right\), got 5"),
    ({"window_size": (5, 0, 1)}, TypeError, "window_size"),
    ({"window_size": (2.5, 0)}, TypeError, "window_size must be an integer, got 2.5"),
    ({"window_size": torch.tensor([2.5, 0])}, TypeError, "window_size must be an integer, got 2.5"),
    ({"window_size": torch.zeros(2).numpy()}, TypeError, r"window_size is \(left, right\), got"),
    ({"window_size": torch.zeros(3).int()}, TypeError, r"window_size is \(left, right\), got torch.int32 \(3,\)"),
    ({"causal": "yes"}, TypeError, "causal must be True or False"),
    ({"softcap": float("inf")}, ValueError, "finite cap"),
    ({"softcap": float("nan")}, ValueError, "finite cap"),
    ({"softcap": "5"}, TypeError, "softcap must be a number"),
    ({"alibi_slopes": torch.ones(3)}, ValueError, r"alibi_slopes must be floats \(4,\) or \(2, 4\), got .*\(3,\)"),
    ({"alibi_slopes": torch.ones(3, 4)}, ValueError, "alibi_slopes"),
    ({"alibi_slopes": torch.ones(4, dtype=torch.int32)}, ValueError, "alibi_slopes must be floats"),
    ({"alibi_slopes": [0.5] * 4}, TypeError, "alibi_slopes must be a tensor"),
    ({"return_attn_probs": 3.5}, TypeError, "return_attn_probs must be True or False"),
]


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_calls(given, error, message):
    made = drawn("cpu")
    with pytest.raises(error, match=message):
        flash_attn_func(made.q, made.k, made.v, **given)


def test_wrong_operands():
    made = drawn("cpu")
    with pytest.raises(ValueError, match=r"qkv must be \(b, s, 3, h, d\), got \(2, 33, 4, 16\)"):
        flash_attn_qkvpacked_func(made.q)
    with pytest.raises(ValueError, match=r"kv must be \(b, s_k, 2, h_k, d\), got"):
        flash_attn_kvpacked_func(made.q, torch.randn(2, 50, 3, 2, 16))
    with pytest.raises(TypeError, match="qkv must be a tensor, got list"):
        flash_attn_qkvpacked_func([made.q] * 3)
    with pytest.raises(ValueError, match="one batch size"):
        flash_attn_func(made.q[:1], made.k, made.v)
    with pytest.raises(TypeError, match=r"must be tensors|must be a tensor"):
        flash_attn_func(None, made.k, made.v)
    with pytest.raises(TypeError, match=r"must be tensors|must be a tensor"):
        flash_attn_func(None, made.k, made.v, alibi_slopes=slopes(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "given", [{"causal": True}, {"window_size": (5, 3), "softcap": 4.0}, {"alibi_slopes": slopes(4)}], ids=str
)
def test_compiled(given, device):
    """In one graph, forward and backward; other lengths compile once more, and no more."""
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for s in (33, 40, 47):
        made, found = drawn(device, s_q=s, s_k=s), []
        for function in (compiled, flash_attn_func):
            q, k, v = (x.clone().requires_grad_() for x in (made.q, made.k, made.v))
            out = function(q, k, v, **given)
            out.backward(made.dout)
            found.append((out, q.grad, k.grad, v.grad))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
