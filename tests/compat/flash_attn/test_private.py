"""The functions below autograd, composed as ring and Ulysses libraries compose them."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, attention, causal, interval, softcap
from saccade.call.partial import Partial
from saccade.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from saccade.compat.flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from saccade.testing import check
from saccade.testing.cases import Case

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window_size": (9, 0)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": torch.tensor([0.3, 0.1, 0.05, 0.2])},
}


def drawn(device="cpu", **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=2, h_q=4, h_k=2, d=16, s_q=40, s_k=40)
    return case.replace(**changes).inputs(device)


def settled(given, device, d=16):
    """The private functions' arguments, in their order."""
    left, right = given.get("window_size", (-1, -1))
    slopes = given.get("alibi_slopes")
    slopes = None if slopes is None else slopes.to(device)
    return d**-0.5, given.get("causal", False), left, right, given.get("softcap", 0.0), slopes


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("name", OPTIONS)
def test_forward_and_backward(name, dropout_p, device):
    """The same bits as the public function's."""
    made, options = drawn(device, order="bshd"), settled(OPTIONS[name], device)
    torch.manual_seed(1)
    out, lse, probabilities, state = _flash_attn_forward(made.q, made.k, made.v, dropout_p, *options, False)
    assert (probabilities.numel(), state.shape, state.dtype) == (0, (2,), torch.int64)
    gradients = [torch.full_like(x, torch.nan) for x in (made.q, made.k, made.v)]
    saved = made.dout, made.q, made.k, made.v, out, lse
    assert _flash_attn_backward(*saved, *gradients, dropout_p, *options, False, rng_state=state) is None

    q, k, v = (x.clone().requires_grad_() for x in (made.q, made.k, made.v))
    given = OPTIONS[name] | ({"alibi_slopes": options[-1]} if name == "alibi" else {})
    torch.manual_seed(1)
    wanted = flash_attn_func(q, k, v, dropout_p, **given)
    wanted.backward(made.dout)
    for found, x in zip((out, *gradients), (wanted, q.grad, k.grad, v.grad), strict=True):
        assert torch.equal(found, x)


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed(name, dropout_p, device):
    made, options = drawn(device, order="thd", b=3), settled(OPTIONS[name], device)
    layout = made.keywords["layout"]
    lengths = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k
    torch.manual_seed(1)
    out, lse, _, state = _flash_attn_varlen_forward(made.q, made.k, made.v, *lengths, dropout_p, *options)
    gradients = [torch.full_like(x, torch.nan) for x in (made.q, made.k, made.v)]
    saved = made.dout, made.q, made.k, made.v, out, lse
    _flash_attn_varlen_backward(*saved, *gradients, *lengths, dropout_p, *options, True, state)

    q, k, v = (x.clone().requires_grad_() for x in (made.q, made.k, made.v))
    given = OPTIONS[name] | ({"alibi_slopes": options[-1]} if name == "alibi" else {})
    torch.manual_seed(1)
    wanted = flash_attn_varlen_func(q, k, v, *lengths, dropout_p, deterministic=True, **given)
    wanted.backward(made.dout)
    for found, x in zip((out, *gradients), (wanted, q.grad, k.grad, v.grad), strict=True):
        assert torch.equal(found, x)


class Ring(torch.autograd.Function):
    """Causal attention of one process whose keys come in two chunks, as a ring's: each chunk's rows take their own keys
    causally, and the second one's rows the first one's keys besides. Results are merged by their LSEs, as sigmoids."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        half, terms = q.shape[1] // 2, (scale, True, -1, -1, 0.0, None, False)
        before = (scale, False, -1, -1, 0.0, None, False)
        (q0, q1), (k0, k1), (v0, v1) = (x.split(half, 1) for x in (q, k, v))
        first, lse0, *_ = _flash_attn_forward(q0, k0, v0, 0.0, *terms)
        second, lse1, *_ = _flash_attn_forward(q1, k1, v1, 0.0, *terms)
        far, lse_far, *_ = _flash_attn_forward(q1, k0, v0, 0.0, *before)
        weight = torch.sigmoid(lse_far - lse1).transpose(1, 2)[..., None]
        second = (second.float() - weight * (second.float() - far.float())).to(q.dtype)
        lse1 = lse1 - torch.nn.functional.logsigmoid(lse1 - lse_far)
        ctx.save_for_backward(q, k, v, first, second, lse0, lse1)
        ctx.scale = scale
        return torch.cat([first, second], 1), torch.cat([lse0, lse1], 2)

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, first, second, lse0, lse1 = ctx.saved_tensors
        half = q.shape[1] // 2
        (q0, q1), (k0, k1), (v0, v1), (dout0, dout1) = (x.split(half, 1) for x in (q, k, v, dout))
        dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for rows, keys, is_causal in ((0, 0, True), (1, 1, True), (1, 0, False)):
            at_rows, at_keys = (slice(i * half, (i + 1) * half) for i in (rows, keys))
            saved = ((dout0, q0, first, lse0), (dout1, q1, second, lse1))[rows]
            buffers = [torch.empty_like(x) for x in (q0, k0, v0)]
            _flash_attn_backward(
                saved[0], saved[1], (k0, k1)[keys], (v0, v1)[keys], saved[2], saved[3], *buffers, 0.0, ctx.scale,
                is_causal, -1, -1, 0.0, None, False, rng_state=None,
            )  # fmt: skip
            for total, part, at in zip((dq, dk, dv), buffers, (at_rows, at_keys, at_keys), strict=True):
                total[:, at] += part
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None


def test_a_ring(device):
    """Each backward takes the merged out and LSE."""
    made = drawn(device, order="bshd", s_q=64, s_k=64, dtype="fp32")

    def ring(q, k, v, *, return_lse=False, **keywords):
        out, lse = Ring.apply(q, k, v, 0.25)
        return Partial(out, lse) if return_lse else out

    check(
        made.q, made.k, made.v, dout=made.dout, function=ring, mask=causal(), scale=0.25, layout=Dense("bshd")
    ).assert_ok()


class HalvesOfKeys(torch.autograd.Function):
    """One forward, and a backward for each half of the keys, with the out and LSE of them all."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, scale, False, -1, -1, 5.0, None, False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        dk, dv, parts = torch.empty_like(k), torch.empty_like(v), []
        for at in (slice(0, 24), slice(24, None)):
            parts.append(torch.empty_like(q, dtype=torch.float32))
            views = parts[-1], dk[:, at], dv[:, at]
            options = 0.0, ctx.scale, False, -1, -1, 5.0, None, False
            _flash_attn_backward(dout, q, k[:, at], v[:, at], out, lse, *views, *options)
        return sum(parts).to(q.dtype), dk, dv, None


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_backward_of_some_keys(dtype, device):
    """Gradients go into views of a larger tensor, and of another dtype."""
    made = drawn(device, order="bshd", s_q=64, s_k=64, dtype=dtype)

    def halves(q, k, v, *, return_lse=False, **keywords):
        out, lse = HalvesOfKeys.apply(q, k, v, 0.25)
        return Partial(out, lse) if return_lse else out

    meaning = {"scale": 0.25, "score_mod": softcap(5.0), "layout": Dense("bshd")}
    check(made.q, made.k, made.v, dout=made.dout, function=halves, **meaning).assert_ok()


@pytest.mark.parametrize("with_used", [False, True])
def test_padding_at_the_left_and_lengths(with_used, device):
    made = drawn(device, order="thd", b=3, s_q=40, s_k=60)
    layout = made.keywords["layout"]
    lengths = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k
    keys = layout.cu_seqlens_k.diff()
    left, used = (keys // 4).int(), (keys - keys // 3).int() if with_used else None
    options = 0.0, None, True, -1, -1, 0.0, None, False, None, left, used
    out, lse, *_ = _flash_attn_varlen_forward(made.q, made.k, made.v, *lengths, *options)
    mask = interval(left[:, None], None) & causal()
    wanted = attention(made.q, made.k, made.v, mask=mask, layout=Packed(*lengths, seqused_k=used), return_lse=True)
    assert torch.equal(out, wanted.out)
    assert torch.equal(lse, wanted.lse)


def wrong_calls():
    made = drawn(order="bshd")
    q, k, v, dout = made.q, made.k, made.v, made.dout
    out, lse, *_ = _flash_attn_forward(q, k, v, 0.0, 0.25, True, -1, -1, 0.0, None, False)
    right = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse}
    right |= {"dq": q.clone(), "dk": k.clone(), "dv": v.clone(), "dropout_p": 0.0, "softmax_scale": 0.25}
    right |= {"causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    return right | {"deterministic": False}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda x: {"dout": x["dout"][:, 1:]}, r"dout must be torch.float32 \(2, 40, 4, 16\) on cpu, got"),
        (lambda x: {"out": x["out"].double()}, r"out must be torch.float32 .* got torch.float64"),
        (lambda x: {"softmax_lse": x["softmax_lse"].mT}, r"softmax_lse must be torch.float32 \(2, 4, 40\)"),
        (lambda x: {"dk": x["dq"]}, r"dk must be \(2, 40, 2, 16\) on cpu, got .*\(2, 40, 4, 16\)"),
        (lambda x: {"dropout_p": 0.1}, "needs the rng_state that its forward returned"),
    ],
)
def test_wrong_backward_calls(wrong, message):
    right = wrong_calls()
    _flash_attn_backward(**right)
    with pytest.raises(ValueError, match=message):
        _flash_attn_backward(**right | wrong(right))


def test_gradients_that_nobody_keeps():
    right = wrong_calls()
    _flash_attn_backward(**right)
    again = _flash_attn_backward(**right | {"dq": None, "dv": None, "dk": (dk := right["dk"].clone().zero_())})
    assert again is None
    assert torch.equal(dk, right["dk"])


def test_probabilities_are_refused():
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(NotImplementedError, match="S_dmask"):
        _flash_attn_forward(x, x, x, 0.1, 0.25, True, -1, -1, 0.0, None, True)
    assert _flash_attn_forward(x, x, x, 0.0, 0.25, True, -1, -1, 0.0, None, True)[2].numel() == 0
