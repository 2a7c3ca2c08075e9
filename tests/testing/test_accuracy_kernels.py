"""Wrong kernels fail by the tolerance, in every dtype; the same kernel without a fault stays far below it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from saccade import Partial, attention
from saccade.testing import check
from saccade.testing.cases import Case

DTYPES = ["fp16", "bf16", "fp32", "fp64"]
ROWS, KEYS, STAGES = 128, 64, 2
"""A tile of the kernel below, and how many of keys its ring has."""
PASSES = 0.8
"""What right results stay under, so that a ratio of 1 is no matter of luck."""


class _Kernel(torch.autograd.Function):
    """Causal attention as a fused kernel computes it, P and ds rounded to the inputs' dtype, and with a fault."""

    @staticmethod
    def forward(ctx, q, k, v, fault):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        off = k.shape[2] - q.shape[2] + {"one key too many": 1, "one key too few": -1}.get(fault, 0)
        ctx.seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(off)
        ctx.scale, ctx.fault = q.shape[3] ** -0.5 * (1.02 if fault == "scale 2 % off" else 1), fault
        keys, values = (_stale(x) if fault == f"a stale stage of {name}" else x for name, x in (("k", k), ("v", v)))
        score = (q.to(wide) @ keys.to(wide).mT * ctx.scale).masked_fill(~ctx.seen, -math.inf)
        top = score.amax(-1, keepdim=True).clamp(min=-1e30)
        p = (score - top).exp()
        total = p.sum(-1, keepdim=True)
        lse = (top + total.log())[..., 0] + (0.03 if fault == "LSE + 0.03" else 0)
        p = _eight_bits(p) if fault == "P of 8 bits" else p.to(q.dtype)
        out = (p.to(wide) @ values.to(wide) / total.clamp(min=1e-30)).to(q.dtype)
        if fault == "out 1 % too large":
            out = (out.to(wide) * 1.01).to(q.dtype)
        if fault == "a dropped tile of rows":
            out[:, :, -ROWS:] = 0
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *given, lse = ctx.saved_tensors
        dtype, fault = given[0].dtype, ctx.fault
        q, k, v, out, dout = (x.to(lse.dtype) for x in (*given, dout))
        score = (q @ k.mT * ctx.scale).masked_fill(~ctx.seen, -math.inf)
        p = (score - lse[..., None]).nan_to_num(-math.inf).exp()
        delta = (dout * out).sum(-1, keepdim=True) - dlse[..., None]
        ds = p * (dout @ v.mT - delta)
        ds = _eight_bits(ds) if fault == "ds of 8 bits" else ds.to(dtype)
        p, ds = p.to(dtype).to(lse.dtype), ds.to(lse.dtype)
        found = ds @ k * ctx.scale, ds.mT @ q * ctx.scale, p.mT @ dout
        larger = 1.01 if fault == "gradients 1 % too large" else 1.0
        return *((x * larger).to(dtype) for x in found), None


def _stale(x: Tensor) -> Tensor:
    """One tile of keys is what the ring held before."""
    x = x.clone()
    late = slice(STAGES * KEYS, (STAGES + 1) * KEYS)
    x[:, :, late] = x[:, :, :KEYS]
    return x


def _eight_bits(x: Tensor) -> Tensor:
    unit = x.abs().amax() / 256
    return (x / unit).to(torch.float8_e4m3fn).to(x.dtype) * unit


WRONG = {
    "P of 8 bits": {"out"},
    "ds of 8 bits": {"dq", "dk"},
    "scale 2 % off": {"out", "lse", "dq", "dk"},
    "LSE + 0.03": {"lse", "dq", "dk", "dv"},
    "one key too many": {"out", "lse", "dq", "dk", "dv"},
    "one key too few": {"out", "lse", "dq", "dk", "dv"},
    "a dropped tile of rows": {"out", "dq"},
    "a stale stage of k": {"out", "lse"},
    "a stale stage of v": {"out"},
    "out 1 % too large": {"out"},
    "gradients 1 % too large": {"dq", "dk", "dv"},
}


def ratios(fault: str | None, dtype: str, s_q: int, s_k: int) -> dict[str, float]:
    made = Case("", b=1, h_q=2, h_k=2, s_q=s_q, s_k=s_k, d=64, mask="causal", dtype=dtype).inputs()

    def function(q, k, v, *, return_lse=False, **_):
        found = Partial(*_Kernel.apply(q, k, v, fault))
        return found if return_lse else found.out

    return check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=function, **made.keywords).ratios


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(70, 70), (300, 300), (200, 900)], ids=str)
def test_the_kernel_without_a_fault_passes(dtype, lengths):
    assert max(ratios(None, dtype, *lengths).values()) <= PASSES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", WRONG)
def test_wrong_kernels_fail(fault, dtype):
    found = ratios(fault, dtype, 300, 300)
    assert {name for name, ratio in found.items() if ratio > 1} >= WRONG[fault], found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_late_rows_that_are_small_beside_the_first_ones_are_looked_at(dtype):
    """At s = 2048 the last rows' gradients are some hundredths of the first ones'."""
    s = 2048
    made = Case("", b=1, h_q=1, h_k=1, s_q=s, s_k=s, d=64, mask="causal", dtype=dtype).inputs()

    def zeroed(x: Tensor) -> Tensor:
        return torch.cat([x[:, :, :-256], torch.zeros_like(x[:, :, -256:])], dim=2)

    def function(q, k, v, *, return_lse=False, **keywords):
        leaves = []
        for x in (q, k, v):
            leaf = x.clone()  # not the caller's own, whose other hooks would see zeros
            if leaf.requires_grad:
                leaf.register_hook(zeroed)
            leaves.append(leaf)
        out, lse = attention(*leaves, return_lse=True, **keywords)
        return Partial(zeroed(out), lse) if return_lse else zeroed(out)

    found = check(made.q, made.k, made.v, dout=made.dout, function=function, **made.keywords).ratios
    assert {name for name, ratio in found.items() if ratio > 1} == {"out", "dq", "dk", "dv"}, found
