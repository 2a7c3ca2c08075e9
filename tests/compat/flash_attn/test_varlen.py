"""flash-attn's functions of packed sequences: each argument by what it means in saccade's words, against the oracle."""

from __future__ import annotations

import pytest
import torch

from saccade import Packed, Paged, Unsupported, attention, causal, compose, softcap, window
from saccade.call.partial import Partial
from saccade.compat.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from saccade.scores import ScoreMod
from saccade.testing import check
from saccade.testing.cases import Case


def drawn(device, **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=4, h_q=4, h_k=2, d=16, order="thd", tail=3)
    return case.replace(**{"s_q": 40, "s_k": 60, **changes}).inputs(device)


def lengths(made):
    layout = made.keywords["layout"]
    return layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k


def checked(made, function, given, **meaning):
    def face(q, k, v, *, return_lse=False, **keywords):
        result = function(q, k, v, return_attn_probs=return_lse, **given)
        return Partial(*result[:2]) if return_lse else result

    layout = made.keywords["layout"]
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=face, layout=layout, **meaning).assert_ok()


def varlen(made):
    def face(q, k, v, **given):
        return flash_attn_varlen_func(q, k, v, *lengths(made), **given)

    return face


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        ({}, {}),
        ({"causal": True}, {"mask": causal()}),
        ({"causal": True, "softmax_scale": 0.2}, {"mask": causal(), "scale": 0.2}),
        ({"window_size": (9, 4)}, {"mask": window(9, 4)}),
        ({"window_size": (7, 0), "softcap": 3.0}, {"mask": window(7, 0), "score_mod": softcap(3.0)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(40, 60), (60, 40), (1, 60)], ids=str)
def test_masks(given, meaning, sizes, device):
    made = drawn(device, s_q=sizes[0], s_k=sizes[1])
    checked(made, varlen(made), given, **meaning)


@pytest.mark.sample
@pytest.mark.parametrize("shape", [(4,), (4, 4)], ids=str)
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("same", [False, True], ids=["cross", "self"])
def test_alibi(shape, given, same, device):
    """The diagonal of each sequence ends in its own bottom right corner."""
    made = drawn(device, s_q=50, s_k=50 if same else 60)
    cu_q, cu_k = lengths(made)[:2]
    slopes = torch.rand(shape, generator=torch.Generator().manual_seed(3)).to(device) * 0.3
    off = cu_k.diff() - cu_q.diff()

    def biased(score, b, h, q_idx, kv_idx, slopes, off):
        return score - (slopes[h] if slopes.dim() == 1 else slopes[b, h]) * (q_idx + off[b] - kv_idx).abs()

    mod = ScoreMod(biased, slopes, off)
    mod = compose(softcap(3.0), mod) if "softcap" in given else mod
    mask = causal() if "causal" in given else None
    checked(made, varlen(made), {"alibi_slopes": slopes, **given}, mask=mask, score_mod=mod)


@pytest.mark.parametrize("given", [{}, {"causal": True}], ids=str)
def test_qkvpacked(given, device):
    made = drawn(device, h_k=4, s_q=50, s_k=50)
    cu, _, longest, _ = lengths(made)

    def face(q, k, v, **options):
        return flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), cu, longest, **options)

    checked(made, face, given, mask=causal() if given else None)


def test_kvpacked(device):
    made = drawn(device)

    def face(q, k, v, **options):
        return flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lengths(made), **options)

    checked(made, face, {"causal": True}, mask=causal())


def test_no_keys_and_no_queries():
    """Empty sequences on either side, as upstream's tests have them."""
    cu_q, cu_k = torch.tensor([0, 3, 3, 8]).int(), torch.tensor([0, 0, 5, 12]).int()
    q, k, v = torch.randn(8, 2, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 7, causal=True, return_attn_probs=True)
    assert not out[:3].any()
    assert (lse[:, :3] == -torch.inf).all()
    assert torch.equal(out[3:], attention(q[3:], k[5:], v[5:], mask=causal(), layout=one(5, 7)))


def one(s_q, s_k):
    return Packed(torch.tensor([0, s_q]), torch.tensor([0, s_k]), s_q, s_k)


@pytest.mark.parametrize("bound", [lambda n: n, torch.tensor, lambda n: torch.tensor([n], dtype=torch.int32)])
def test_bounds(bound):
    """Integers, or tensors of one as transformers passes them."""
    made = drawn("cpu")
    cu_q, cu_k, longest_q, longest_k = lengths(made)
    found = flash_attn_varlen_func(made.q, made.k, made.v, cu_q, cu_k, bound(longest_q), bound(longest_k))
    assert torch.equal(found, flash_attn_varlen_func(made.q, made.k, made.v, *lengths(made)))


def test_numpy_bounds():
    numpy = pytest.importorskip("numpy")
    made = drawn("cpu")
    cu_q, cu_k, longest_q, longest_k = lengths(made)
    longest = numpy.int64(longest_q), numpy.int32(longest_k)
    found = flash_attn_varlen_func(made.q, made.k, made.v, cu_q, cu_k, *longest)
    assert torch.equal(found, flash_attn_varlen_func(made.q, made.k, made.v, *lengths(made)))


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"causal": True, "window_size": (20, 0)}], ids=str)
def test_block_table(given, device):
    """The lengths of the keys are those of cu_seqlens_k."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    cu_q, used = torch.tensor([0, 1, 4, 4], device=device), torch.tensor([20, 3, 9], device=device)
    cu_k = torch.nn.functional.pad(used.cumsum(0), (1, 0))
    q = torch.randn(4, 4, 16, device=device, dtype=dtype)
    k, v = torch.randn(2, 9, 8, 2, 16, device=device, dtype=dtype)
    table = torch.randperm(9, device=device).int().view(3, 3)
    out, lse, _ = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 3, 20, block_table=table, return_attn_probs=True, **given)
    mask = window(20, 0) if "window_size" in given else causal() if given else None
    wanted = attention(q, k, v, mask=mask, layout=Paged(table, used, cu_q), return_lse=True)
    assert torch.equal(out, wanted.out)
    assert torch.equal(lse, wanted.lse)
    found = flash_attn_varlen_func(q.requires_grad_(), k, v, cu_q, cu_k, 3, 20, block_table=table, **given)
    assert torch.equal(found, out)
    with pytest.raises(Unsupported, match="a cache of keys has no gradients"):
        found.sum().backward()


def test_wrong_calls():
    made = drawn("cpu")
    cu_q, cu_k, longest_q, longest_k = lengths(made)
    tensors = made.q, made.k, made.v
    with pytest.raises(ValueError, match="one shape"):
        flash_attn_varlen_func(*tensors, cu_q[:-1], cu_k, longest_q, longest_k)
    with pytest.raises(TypeError, match="cu_seqlens_k must be a tensor, got NoneType"):
        flash_attn_varlen_func(*tensors, cu_q, None, longest_q, longest_k)
    with pytest.raises(ValueError, match="cu_seqlens_q must be an int32 or int64 tensor"):
        flash_attn_varlen_func(*tensors, cu_q.float(), cu_k, longest_q, longest_k)
    with pytest.raises(TypeError, match=r"max_seqlen_q must be an integer, got 40\.5"):
        flash_attn_varlen_func(*tensors, cu_q, cu_k, 40.5, longest_k)
    with pytest.raises(NotImplementedError, match="S_dmask"):
        flash_attn_varlen_func(*tensors, *lengths(made), dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match=r"alibi_slopes must be floats \(4,\) or \(4, 4\)"):
        flash_attn_varlen_func(*tensors, *lengths(made), alibi_slopes=torch.ones(5))
    with pytest.raises(ValueError, match=r"qkv must be \(t, 3, h, d\)"):
        flash_attn_varlen_qkvpacked_func(made.q, cu_q, longest_q)
    with pytest.raises(ValueError, match=r"kv must be \(t_k, 2, h_k, d\)"):
        flash_attn_varlen_kvpacked_func(made.q, made.k, *lengths(made))
    with pytest.raises(TypeError, match="cu_seqlens_k must be a tensor"):
        flash_attn_varlen_func(*tensors, cu_q, None, 3, 3, block_table=cu_q[None])


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"causal": True}, {"alibi_slopes": torch.full((4,), 0.1)}], ids=str)
def test_compiled(given, device):
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager", dynamic=True)
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    for s in (40, 50):
        made, found = drawn(device, s_q=s), []
        for function in (compiled, flash_attn_varlen_func):
            q, k, v = (x.clone().requires_grad_() for x in (made.q, made.k, made.v))
            out = function(q, k, v, *lengths(made), **given)
            out.backward(made.dout)
            found.append((out, q.grad, k.grad, v.grad))
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
