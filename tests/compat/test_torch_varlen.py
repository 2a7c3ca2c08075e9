"""`torch.nn.attention.varlen` by saccade: its signatures, and results like the oracle's."""

from __future__ import annotations

import inspect

import pytest
import torch

from saccade import Paged, Unsupported, attention, causal
from saccade.compat import torch_varlen
from saccade.compat.torch_varlen import AuxRequest, varlen_attn, varlen_attn_out
from saccade.testing import check
from saccade.testing.cases import Case


@pytest.fixture
def made(device):
    dtype = "fp16" if device == "cuda" else "fp32"
    return Case("", dtype=dtype, b=4, h_q=4, h_k=2, s_q=60, s_k=60, d=16, order="thd").inputs(device)


def arguments(made):
    layout = made.keywords["layout"]
    return layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k


def face(q, k, v, *, layout, mask=None, return_lse=False, backend=None, window_size=(-1, -1), is_causal=False):
    offsets = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k
    aux = AuxRequest(lse=True) if return_lse else None
    return varlen_attn(
        q,
        k,
        v,
        *offsets,
        is_causal,
        return_aux=aux,
        window_size=window_size,
        enable_gqa=True,
        seqused_k=layout.seqused_k,
    )


@pytest.mark.parametrize(
    ("mask", "given"),
    [
        (None, {}),
        ("causal", {"window_size": (-1, 0)}),
        ("causal", {"is_causal": True}),
        ("window(9,0)", {"window_size": (9, 0)}),
        ("window(5,3)", {"window_size": (5, 3)}),
        ("window(None,7)", {"window_size": (-1, 7)}),
    ],
)
def test_against_the_oracle(mask, given, device):
    case = Case("", b=4, h_q=4, s_q=60, s_k=60, d=16, order="thd", mask=mask or "none", used="k")
    made = case.replace(dtype="fp16" if device == "cuda" else "fp32").inputs(device)

    def function(*tensors, **keywords):
        return face(*tensors, **keywords, **given)

    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=function, **made.keywords).assert_ok()


def test_out(made):
    out = torch.empty_like(made.q)
    found = varlen_attn_out(
        out, made.q, made.k, made.v, *arguments(made), enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    assert found[0] is out
    wanted = varlen_attn(made.q, made.k, made.v, *arguments(made), enable_gqa=True)
    assert torch.equal(out, wanted)
    with pytest.raises(RuntimeError, match="no gradient"):
        varlen_attn_out(out, made.q.requires_grad_(), made.k, made.v, *arguments(made), enable_gqa=True)


def test_out_is_written_in_place(made, monkeypatch):
    """Between canaries, as the slice of a larger tensor, of another dtype, and where q is."""
    wanted = varlen_attn(made.q, made.k, made.v, *arguments(made), enable_gqa=True)
    q, shape = made.q.clone(), made.q.shape
    held = torch.full((shape[0] + 2, shape[1], shape[2] + 3), 7.0, dtype=q.dtype, device=q.device)
    buffers = {
        "plain": (torch.empty_like(q), True),
        "slice": (held[1:-1, :, : shape[2]], True),
        "dtype": (torch.empty_like(q, dtype=torch.float64), False),
        "strides": (torch.empty(shape[0], shape[2], shape[1], dtype=q.dtype, device=q.device).mT, False),
        "q itself": (q, False),
    }
    targets = []

    def watched(*tensors, **given):
        targets.append(given["out"])
        return attention(*tensors, **given)

    monkeypatch.setattr(torch_varlen, "attention", watched)
    for name, (out, direct) in buffers.items():
        aux = AuxRequest(lse=True) if name == "slice" else None
        found = varlen_attn_out(out, q, made.k, made.v, *arguments(made), enable_gqa=True, return_aux=aux)
        assert (found if aux is None else found[0]) is out
        assert targets.pop() is (out if direct else None), name
        assert torch.equal(out.to(wanted.dtype), wanted), name
    assert (held[[0, -1]] == 7).all()
    assert (held[..., shape[2] :] == 7).all()
    for wrong in (held, torch.empty_like(wanted, dtype=torch.int32)):
        with pytest.raises(ValueError, match="out must be"):
            varlen_attn_out(wrong, made.q, made.k, made.v, *arguments(made), enable_gqa=True)


def test_wrong_calls(made):
    cu_q, cu_k, max_q, max_k = arguments(made)
    tensors = made.q, made.k, made.v
    with pytest.raises(ValueError, match="enable_gqa"):
        varlen_attn(*tensors, cu_q, cu_k, max_q, max_k)
    with pytest.raises(ValueError, match="scale must be above 0"):
        varlen_attn(*tensors, cu_q, cu_k, max_q, max_k, scale=-1.0, enable_gqa=True)
    with pytest.raises(ValueError, match="block_table"):
        varlen_attn(*tensors, cu_q, None, max_q, max_k, enable_gqa=True)
    with pytest.raises(ValueError, match="not both"):
        varlen_attn(*tensors, cu_q, cu_k, max_q, max_k, True, window_size=(3, 0), enable_gqa=True)
    with pytest.raises(ValueError, match="seqused_k or cu_seq_k"):
        varlen_attn(*tensors, cu_q, None, max_q, max_k, enable_gqa=True, block_table=cu_q[None])


def test_a_block_table():
    """Lengths by seqused_k or by offsets; gradients are refused."""
    offsets, q = torch.tensor([0, 1, 4, 4]), torch.randn(4, 4, 16)
    k, v = torch.randn(9, 8, 2, 16), torch.randn(9, 8, 2, 16)
    table, used = torch.arange(9, dtype=torch.int32).view(3, 3), torch.tensor([20, 3, 0])
    given = {"window_size": (-1, 0), "enable_gqa": True, "block_table": table, "return_aux": AuxRequest(lse=True)}
    found = varlen_attn(q, k, v, offsets, None, 3, 24, seqused_k=used, **given)
    again = varlen_attn(q, k, v, offsets, torch.tensor([0, 20, 23, 23]), 3, 24, num_splits=2, **given)
    wanted = attention(q, k, v, mask=causal(), layout=Paged(table, used, offsets), return_lse=True)
    for results in (found, again):
        assert all(torch.equal(x, y) for x, y in zip(results, wanted, strict=True))
    with pytest.raises(Unsupported, match="paged cache has no gradients"):
        varlen_attn(q.requires_grad_(), k, v, offsets, None, 3, 24, seqused_k=used, **given)


@pytest.mark.parametrize("name", torch_varlen.__all__)
def test_takes_what_torch_takes(name):
    theirs = inspect.signature(getattr(pytest.importorskip("torch.nn.attention.varlen"), name, None) or (lambda: None))
    ours = inspect.signature(getattr(torch_varlen, name))
    for parameter in theirs.parameters:
        assert parameter in ours.parameters
