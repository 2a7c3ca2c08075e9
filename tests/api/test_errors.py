"""What a wrong call says: the kind of error, and the shapes, dtypes, devices or names that are wrong."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade import (  # fmt: skip
    Dense,
    Descale,
    Packed,
    Paged,
    Unsupported,
    alibi,
    attention,
    bias,
    causal,
    compose,
    documents,
    explain,
    mask_mod,
    prefix,
    relative_bias,
    softcap,
    t5_bias,
    temperature,
    window,
)
from saccade.compat.cudnn import score_callback
from saccade.util import memory_layout


def plan(*call: Any, **keywords: Any) -> Any:
    """Which backend runs it, or the error that says why none does."""
    return explain(*call, **keywords).plan


Q, K, V = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
K8 = K.to(torch.float8_e4m3fn)
SHAPES = "q (2, 4, 6, 8), k (2, 2, 6, 8), v (2, 2, 6, 8) in order bhsd"


def int_(*shape):
    return torch.zeros(shape, dtype=torch.int64)


SHORT = torch.randn(5)
PACKED = Packed(torch.tensor([0, 4, 6]), torch.tensor([0, 5, 7]), 4, 5)


def packed():
    return torch.randn(6, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)


def paged(flat=False, **given):
    """A call of three queries of two heads over two pages of four keys."""
    layout = Paged(torch.tensor([[0, 1]]), torch.tensor([5]), torch.tensor([0, 3]) if flat else None)
    q = torch.randn(4, 2, 4) if flat else torch.randn(1, 3, 2, 4)
    return attention(q, torch.randn(4, 4, 2, 4), torch.randn(4, 4, 2, 4), layout=layout, **given)


def add(graph, score, tensors):
    return graph.add(a=score, b=tensors["t"])


VALUE_ERRORS = {
    "three dimensions": (lambda: attention(Q[0], K, V), "q (4, 6, 8), k (2, 2, 6, 8)"),
    "five dimensions": (lambda: attention(Q, K, V[None]), "v (1, 2, 2, 6, 8)"),
    "batch": (lambda: attention(Q[:1], K, V), "q (1, 4, 6, 8), k (2, 2, 6, 8)"),
    "batch of v": (lambda: attention(Q, K, V[:1]), "v (1, 2, 6, 8)"),
    "head dim": (lambda: attention(Q[..., :4], K, V), "q (2, 4, 6, 4), k (2, 2, 6, 8)"),
    "length of v": (lambda: attention(Q, K, V[:, :, :3]), "k (2, 2, 6, 8), v (2, 2, 3, 8)"),
    "heads of v": (lambda: attention(Q, K, V[:, :1]), "v (2, 1, 6, 8)"),
    "group": (lambda: attention(Q[:, :3], K, V), "got 3 and 2: q (2, 3, 6, 8)"),
    "no key heads": (lambda: attention(Q, K[:, :0], V[:, :0]), "got 4 and 0"),
    "no query heads": (lambda: attention(Q[:, :0], K, V), "got 0 and 2"),
    "no head dim": (lambda: attention(Q[..., :0], K[..., :0], V), "q (2, 4, 6, 0)"),
    "no head dim of v": (lambda: attention(Q, K, V[..., :0]), "v (2, 2, 6, 0)"),
    "order": (lambda: attention(Q, K, V, layout=Dense("sbhd")), "in order sbhd"),
    "dtypes": (lambda: attention(Q, K.half(), V), "q torch.float32, k torch.float16, v torch.float32"),
    "integers": (lambda: attention(Q.int(), K.int(), V.int()), "torch.int32"),
    "complex": (lambda: attention(Q.cfloat(), K.cfloat(), V.cfloat()), "torch.complex64"),
    "devices": (lambda: attention(Q, K.to("meta"), V), "cpu, meta, cpu"),
    "sink shape": (lambda: attention(Q, K, V, sink=torch.zeros(2)), f"torch.float32 (2,): {SHAPES}"),
    "sink dtype": (lambda: attention(Q, K, V, sink=int_(4)), f"torch.int64 (4,): {SHAPES}"),
    "sink sparse": (lambda: attention(Q, K, V, sink=torch.zeros(4).to_sparse()), "got torch.sparse_coo"),
    "sink device": (lambda: attention(Q, K, V, sink=torch.zeros(4, device="meta")), "got meta"),
    "used shape": (
        lambda: attention(Q, K, V, layout=Dense(seqused_k=int_(3))),
        f"must have shape (2,), got (3,): {SHAPES}",
    ),
    "used device": (lambda: attention(Q, K, V, layout=Dense(seqused_q=int_(2).to("meta"))), "got meta"),
    "used too long": (lambda: attention(Q, K, V, layout=Dense(seqused_k=int_(2) + 7)), "in [0, 6], got [7, 7]"),
    "used negative": (lambda: attention(Q, K, V, layout=Dense(seqused_q=int_(2) - 1)), "in [0, 6], got [-1, -1]"),
    "ids shape": (lambda: attention(Q, K, V, mask=documents(int_(2, 5))), f"ids (2, 5): {SHAPES}"),
    "ids batch": (lambda: attention(Q, K, V, mask=documents(int_(3, 6)) & causal()), "ids (3, 6)"),
    "ids and lengths": (lambda: attention(Q[:, :, :5], K, V, mask=documents(int_(2, 5))), "q (2, 4, 5, 8)"),
    "prefix shape": (lambda: attention(Q, K, V, mask=prefix(int_(3))), f"must have shape (2,), got (3,): {SHAPES}"),
    "mask device": (lambda: attention(Q, K, V, mask=prefix(int_(2).to("meta"))), "got meta"),
    "dropout": (lambda: attention(Q, K, V, dropout_p=1.5), "got 1.5"),
    "backend": (lambda: attention(Q, K, V, backend="fastest"), "'fastest'"),
    "bias": (lambda: attention(Q, K, V, score_mod=bias(torch.randn(3, 5, 9, 9))), "(2, 4, 6, 6), got (3, 5, 9, 9)"),
    "a part of a composed one": (
        lambda: attention(Q, K, V, score_mod=compose(softcap(2.0), compose(bias(torch.randn(3, 6, 6))))),
        "bias must broadcast to (b, h_q, s_q, s_k) = (2, 4, 6, 6), got (3, 6, 6): q (2, 4, 6, 8), k (2, 2, 6, 8)",
    ),
    "padded bias": (
        lambda: attention(Q, K, V, score_mod=bias(torch.randn(6, 5)), layout=Dense(seqused_k=int_(2))),
        "got (6, 5)",
    ),
    "packed bias": (
        lambda: attention(*packed(), score_mod=bias(torch.randn(3, 6)), layout=PACKED),
        "(2, 4, 4, 5), or more rows and keys, got (3, 6)",
    ),
    "slopes": (lambda: attention(Q, K, V, score_mod=alibi(torch.ones(2))), "each query head, h_q = 4, got (2,)"),
    "one slope": (lambda: attention(Q, K, V, score_mod=alibi(torch.ones(1))), "h_q = 4, got (1,)"),
    "temperatures": (lambda: attention(Q, K, V, score_mod=temperature(torch.ones(5))), "h_q = 4, got (5,)"),
    "relative table": (lambda: attention(Q, K, V, score_mod=relative_bias(torch.ones(3, 5))), "h_q = 4, got (3, 5)"),
    "empty table": (lambda: relative_bias(torch.ones(0, 5)), "got torch.float32 (0, 5)"),
    "t5 table": (lambda: attention(Q, K, V, score_mod=t5_bias(torch.ones(32, 2))), "h_q = 4, got (32, 2)"),
    "t5 distances": (lambda: t5_bias(torch.ones(32, 2), max_distance=8), "above 8, the distances that have a bucket"),
    "slopes of integers": (lambda: alibi(int_(4)), "of floats, got torch.int64 (4,)"),
    "callback's tensor": (
        lambda: attention(Q, K, V, score_mod=score_callback(add, None, {"t": torch.randn(1, 3, 6, 6)})),
        "callback's tensor must broadcast to (b, h_q, s_q, s_k) = (2, 4, 6, 6), got (1, 3, 6, 6)",
    ),
    "function of keys": (
        lambda: attention(Q, K, V, score_mod=lambda score, b, h, q_idx, kv_idx: score + SHORT[kv_idx]),
        "reads a tensor (5,) at kv_idx in dimension 0, and the call has (b, h_q, s_q, s_k) = (2, 4, 6, 6)",
    ),
    "function of packed heads": (
        lambda: attention(*packed(), score_mod=lambda score, b, h, *_: score + SHORT[:3][h], layout=PACKED),
        "reads a tensor (3,) at h",
    ),
    "function of distances": (
        lambda: attention(Q, K, V, score_mod=lambda score, b, h, i, j: score + SHORT[(i - j).abs()]),
        "index 5 is out of bounds for dimension 0 with size 5: score(lambda) with (5,); q (2, 4, 6, 8)",
    ),
    "mask function of keys": (
        lambda: attention(Q, K, V, mask=mask_mod(lambda b, h, i, j: SHORT[j] > 0) & causal()),
        "lambda reads a tensor (5,) at kv_idx",
    ),
    "mask function of distances": (
        lambda: attention(Q, K, V, mask=mask_mod(lambda b, h, i, j: SHORT[(i - j).abs()] > 0)),
        "is read out of range",
    ),
    "paged mask": (lambda: paged(mask=torch.ones(3, 5, 3, 8).bool()), "got (3, 5, 3, 8)"),
    "paged mask of fewer keys": (lambda: paged(mask=torch.ones(3, 7).bool()), "(1, 2, 3, 8)"),
    "paged bias": (lambda: paged(score_mod=bias(torch.ones(2, 3, 7))), "(1, 2, 8, 8), or more"),
    "paged rows end to end": (
        lambda: paged(flat=True, mask=torch.ones(2, 8).bool()),
        "(sequences, h_q, queries, keys) = (1, 2, 3, 8)",
    ),
    "an integer of 65 bits": (
        lambda: attention(Q, K, V, score_mod=lambda score, *_, n=1 << 63: score + n),
        "have 64 bits, from -2^63 to 2^63 - 1, got 9223372036854775808",
    ),
    "an integer of 65 bits in a mask": (lambda: mask_mod(lambda b, h, i, j, n=-(1 << 70): i > n), "have 64 bits"),
    "scale with a gradient": (
        lambda: attention(Q, K, V, scale=torch.nn.Parameter(torch.tensor(0.5))),
        "multiply q by it, attention(q * scale, …, scale=1.0), or pass score_mod=lambda score",
    ),
    "scale of every head": (lambda: attention(Q, K, V, scale=torch.ones(4)), "one number, got torch.float32 (4,)"),
    "cap": (lambda: softcap(0.0), "got 0.0"),
    "infinite cap": (lambda: softcap(float("inf")), "got inf"),
}

TYPE_ERRORS = {
    "sink number": (lambda: attention(Q, K, V, sink=1.0), f"1.0: {SHAPES}"),
    "bias of numbers": (lambda: bias(3.0), "broadcasts to (b, h_q, s_q, s_k), got float"),
    "slopes of numbers": (lambda: alibi([0.5, 0.25]), "got list"),
    "cap in words": (lambda: softcap("50"), "'50'"),
    "array": (lambda: attention(Q.numpy(), K, V), "ndarray"),
    "missing": (lambda: attention(Q, K, None), "NoneType"),
    "no backend": (lambda: attention(Q, K, V, backend=None), "backend must be a name"),
    "float mask": (lambda: attention(Q, K, V, mask=torch.ones(6, 6)), "torch.float32 (6, 6)"),
    "score_mod": (lambda: attention(Q, K, V, score_mod=3.0), "3.0"),
    "mask name": (lambda: attention(Q, K, V, mask="causal"), "str"),
    "layout name": (lambda: attention(Q, K, V, layout="bshd"), "'bshd'"),
    "scale in words": (lambda: attention(Q, K, V, scale="0.125"), "scale must be a number, got '0.125'"),
    "complex scale": (lambda: attention(Q, K, V, scale=1j), "1j"),
    "scale of a list": (lambda: attention(Q, K, V, scale=[0.1]), "got list"),
    "a Spec's text beside others": (lambda: plan("bf16 d64 cpu", mask=causal()), "a Spec's text alone"),
    "keyword of plan": (lambda: plan(Q, K, V, is_causal=True), "is_causal"),
    "keyword of explain": (lambda: explain(Q, K, V, maks=None), "maks"),
}

UNSUPPORTED = {
    "8-bit keys of a GPU's backend": (lambda: plan("bf16 kv_fp8_e4m3 d64 cpu", backend="gluon"), "gluon: runs on sm90"),
    "gradients over 8-bit keys": (
        lambda: attention(Q.clone().requires_grad_(), K8, K8),
        "attention over 8-bit k and v has no gradients: call it inside torch.no_grad(); pass Descale(…, backward='",
    ),
    "gradients of a factor": (
        lambda: attention(Q, K8, K8, descale=Descale(k=torch.ones(2, requires_grad=True), backward="dequantized")),
        "pass descale.k torch.float32",
    ),
    "gradients of 8-bit keys": (
        lambda: attention(Q, K8.clone().requires_grad_(), K8, backend="reference"),
        "got q torch.float32",
    ),
    "a GPU's backend": (lambda: attention(Q, K, V, backend="triton"), "triton: "),
    "a GPU's Spec": (lambda: plan("bf16 d128 sm90", backend="cpu"), "cpu: runs on cpu, not on sm90"),
    "no device of ours": (lambda: plan(*(x.to("meta") for x in (Q, K, V))), "not on meta"),
    "too wide": (lambda: plan("bf16 d513 sm90", backend="triton"), "up to 512, not 513"),
    "an older GPU": (lambda: plan("bf16 d64 aligned sm80", backend="gluon"), "gluon: runs on sm90, not on sm80"),
    "a newer GPU": (lambda: plan("bf16 d64 aligned sm100", backend="gluon"), "gluon: runs on sm90, not on sm100"),
    "fp32 on Hopper": (
        lambda: plan("fp32 d64 aligned sm90", backend="gluon"),
        "gluon: takes fp16, bf16, fp8_e4m3, fp8_e5m2, not fp32",
    ),
    "odd head dims": (
        lambda: plan("bf16 d64/60 sm90", backend="gluon"),
        "gluon: takes head dims that are multiples of 8, not 64 and 60",
    ),
    "too wide for bulk copies": (lambda: plan("bf16 d264 aligned sm90", backend="gluon"), "up to 256, not 264"),
    "rows that are not aligned": (
        lambda: plan("bf16 d64 sm90", backend="gluon"),
        "gluon: takes aligned rows: pointers and strides of q, k and v at multiples of 16 bytes",
    ),
}


@pytest.mark.parametrize("name", VALUE_ERRORS)
def test_value_errors(name):
    call, words = VALUE_ERRORS[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        call()


def test_out_that_shares_memory():
    """Nothing is written before all of it is refused; slices of one tensor that do not meet are taken."""
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    table = torch.randn(1, 2, 8, 4)
    bytes_ = torch.zeros(1 * 2 * 8 * 4 * 4, dtype=torch.bool)
    shared = {
        "q": (lambda out: attention(out, k, v, out=out), q),
        "k": (lambda out: attention(q, out, v, out=out), k),
        "v": (lambda out: attention(q, k, out, mask=window(2, 1), out=out), v),
        "itself": (lambda out: attention(q, k, v, out=out[:, :1].expand(-1, 2, -1, -1)), torch.randn(1, 2, 8, 4)),
        "a tensor of the mask": (
            lambda out: attention(q, k, v, mask=bytes_.view(1, 2, 8, 16)[..., :8], out=out),
            bytes_.view(torch.float32).view(1, 2, 8, 4),
        ),
        "a tensor of the score_mod": (lambda out: attention(q, k, v, score_mod=bias(out[..., :1]), out=out), table),
        "sink": (lambda out: attention(q, k, v, sink=out[0, :, 0, 0], out=out), table),
    }
    for name, (call, x) in shared.items():
        before = x.clone()
        with torch.no_grad(), pytest.raises(ValueError, match=r"out is written to.*(1, 2, 8, 4)"):
            call(x)
        assert torch.equal(x, before), name


def test_out_between_other_rows():
    q, k, v = (torch.randn(2, 6, 3, 8) for _ in range(3))
    wanted, layout = attention(q, k, v, layout=Dense("bshd")), Dense("bshd")
    heads, columns = torch.full((2, 6, 12, 8), torch.nan), torch.full((2, 6, 3, 32), torch.nan)
    for whole, cut in (
        (heads, lambda x, i: x[:, :, 3 * i : 3 * i + 3]),
        (columns, lambda x, i: x[..., 8 * i :][..., :8]),
    ):
        for i, x in enumerate((q, k, v)):
            cut(whole, i).copy_(x)
        three = [cut(whole, i) for i in range(3)]
        out = attention(*three, layout=layout, out=cut(whole, 3))
        assert torch.equal(out, wanted)
        for i, x in enumerate((q, k, v)):
            assert torch.equal(cut(whole, i), x)


@given(st.data())
def test_memory_that_is_apart(data):
    """`apart` and `once` never claim what is not so."""

    def view(name):
        n = data.draw(st.integers(1, 3), name)
        shape = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n), name)
        strides = data.draw(st.lists(st.integers(0, 12), min_size=n, max_size=n), name)
        return torch.as_strided(base, shape, strides, data.draw(st.integers(0, 40), name))

    def places(x):
        return torch.as_strided(torch.arange(200), x.shape, x.stride(), x.storage_offset()).flatten().tolist()

    base = torch.zeros(200)
    x, y = view("x"), view("y")
    assert not memory_layout.disjoint(x, y) or not set(places(x)) & set(places(y))
    assert not memory_layout.no_overlap(x) or len(set(places(x))) == x.numel()


def test_slices_between_one_another_are_disjoint():
    """Keys and values of one cache, in pages that are padded to any number of bytes."""
    cache = torch.empty(9 * 2088).as_strided((9, 2, 16, 64), (2088, 1024, 64, 1))
    k, v = cache[..., :32], cache[..., 32:]
    assert memory_layout.disjoint(k, v)
    assert memory_layout.disjoint(v, k)
    assert not memory_layout.disjoint(cache[..., :33], v)
    assert memory_layout.disjoint(cache[:, 0], cache[:, 1])


@pytest.mark.parametrize("name", TYPE_ERRORS)
def test_type_errors(name):
    call, words = TYPE_ERRORS[name]
    with pytest.raises(TypeError, match=re.escape(words)):
        call()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported(name):
    call, words = UNSUPPORTED[name]
    with pytest.raises(Unsupported, match=re.escape(words)):
        call()


def test_unsupported_is_not_implemented():
    assert issubclass(Unsupported, NotImplementedError)


def test_every_backend_gives_a_reason():
    with pytest.raises(Unsupported) as raised:
        plan("fp32 d64 max_scores sm70")
    lines = str(raised.value).splitlines()
    assert lines[0] == "no backend runs fp32 d64 dense max_scores sm70"
    assert [line.split(":")[0].strip() for line in lines[1:-1]] == ["gluon", "triton", "cpu"]
    assert lines[-1].startswith('  backend="reference" runs it')


def test_explain_names_what_runs():
    told = explain(Q, K, V, mask=causal(), score_mod=softcap(3.0))
    assert told.backend == "cpu"
    assert str(told).startswith("fp32 group2 d8 dense causal softcap")
    assert told.reasons["cpu"] == []
    assert told.reasons["triton"]
    assert told.reasons["gluon"] == ["runs on sm90, not on cpu", "takes fp16, bf16, fp8_e4m3, fp8_e5m2, not fp32"]
    assert explain("fp32 d64 sm70").backend is None
    assert explain(Q, K, V, backend="reference").backend == "reference"


def test_scales_that_are_numbers():
    wanted = attention(Q, K, V, scale=0.5)
    for scale in (
        torch.tensor(0.5),
        torch.tensor([0.5], dtype=torch.float64),
        np.float32(0.5),
        np.array(0.5),
        Fraction(1, 2),
    ):
        assert torch.equal(attention(Q, K, V, scale=scale), wanted)
    learned = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    with torch.no_grad():
        assert torch.equal(attention(Q, K, V, scale=learned), wanted)
    # What the error says works.
    q, k, v = Q.double(), K.double(), V.double()
    gradients = [
        torch.autograd.grad(call().sum(), learned)[0]
        for call in (
            lambda: attention(q * learned, k, v, scale=1.0),
            lambda: attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score * learned, scale=1.0),
        )
    ]
    torch.testing.assert_close(*gradients)


def test_the_same_with_gradients():
    """Errors come from the call, not from the backward."""
    q = Q.clone().requires_grad_()
    with pytest.raises(ValueError, match=re.escape("q (2, 4, 6, 8)")):
        attention(q, K[:1], V)
    with pytest.raises(ValueError, match="fastest"):
        attention(q, K, V, backend="fastest")
