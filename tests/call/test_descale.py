"""8-bit operands: what they stand for, in every layout, by the oracle of what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import (
    Dense,
    Descale,
    Packed,
    Paged,
    Partial,
    Spec,
    Unsupported,
    alibi,
    attention,
    causal,
    explain,
    softcap,
    window,
)
from saccade.ops import explanation
from saccade.testing import check

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
S, B, H_Q, H_K, D = 200, 2, 4, 2, 16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def positive(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def operands(kind: torch.dtype, dtype: torch.dtype | None = None, s: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """q in another dtype, or in 8 bits as k and v are."""
    q, k, v = random(B, H_Q, s, D), random(B, H_K, s, D, seed=1), random(B, H_K, s, D, seed=2)
    return q.to(dtype or kind), k.to(kind), v.to(kind)


FORMS = {
    "none": lambda seed: None,
    "number": lambda seed: 0.5 + seed,
    "tensor": lambda seed: positive(seed=seed),
    "head": lambda seed: positive(H_K, seed=seed),
    "sequence": lambda seed: positive(B, H_K, seed=seed),
    "block": lambda seed: positive(B, H_K, 2, seed=seed),
}


def descale(form: str, q: bool) -> Descale:
    of = FORMS[form]
    return Descale(q=of(3) if q else None, k=of(4), v=of(5))


@pytest.mark.sample
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "8 bits"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_forms(backend: str, kind: str, dtype: str, form: str):
    wide = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "8 bits": None}[dtype]
    given = operands(KINDS[kind], wide)
    keywords = {"mask": causal(), "descale": descale(form, wide is None), "backend": backend}
    check(*given, **keywords).assert_ok()
    check(*given, score_mod=softcap(3.0), sink=random(H_Q), return_max_scores=True, **keywords).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("form", ["number", "sequence", "block"])
@pytest.mark.parametrize("eight", [False, True], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_layouts(backend: str, eight: bool, form: str):
    kind = torch.float8_e4m3fn
    q, k, v = operands(kind, None if eight else torch.bfloat16)
    keywords = {
        "mask": window(30, 0),
        "score_mod": alibi(positive(H_Q)),
        "descale": descale(form, eight),
        "backend": backend,
    }
    check(
        q, k, v, layout=Dense(seqused_q=torch.tensor([7, 200]), seqused_k=torch.tensor([150, 0])), **keywords
    ).assert_ok()
    check(*(x.transpose(1, 2) for x in (q, k, v)), layout=Dense("bshd", q_offset=3), **keywords).assert_ok()
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    ends = torch.tensor([0, 150, 350])
    check(*flat, layout=Packed(ends, max_seqlen_q=200), **keywords).assert_ok()
    table = torch.arange(26).view(2, 13).flip(1)
    pages = [torch.nn.functional.pad(x, (0, 0, 0, 8)).unflatten(2, (13, 16)) for x in (k, v)]
    cached = [x.permute(0, 2, 3, 1, 4).flip(1).flatten(0, 1).contiguous() for x in pages]
    for layout in (Paged(table, torch.tensor([180, 20])), Paged(table, torch.tensor([180, 20]), num_splits=1)):
        found = check(q.transpose(1, 2), *cached, layout=layout, **keywords)
        found.assert_ok()


def test_values_are_those_of_the_factors():
    """By hand, in float64."""
    q, k, v = operands(torch.float8_e4m3fn)
    of_q, of_k, of_v = positive(B, H_K, 2), positive(H_K), positive(B, H_K, 2, seed=1)
    rows = torch.arange(S) // 128
    wide = [x.double() for x in (q, k, v)]
    wide[0] *= of_q.double().repeat_interleave(2, 1)[:, :, rows, None]
    wide[1] *= of_k.double()[:, None, None]
    wide[2] *= of_v.double()[:, :, rows, None]
    k64, v64 = (x.repeat_interleave(2, 1) for x in wide[1:])
    wanted = (wide[0] @ k64.mT / D**0.5).softmax(-1) @ v64
    out = torch.empty(B, H_Q, S, D, dtype=torch.float16)
    for backend in ("cpu", "reference"):
        found = attention(q, k, v, descale=Descale(of_q, of_k, of_v), backend=backend, out=out)
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), wanted, atol=1e-3, rtol=1e-3)


def test_nan_beyond_the_keys_stays_there():
    k = torch.full((3, 8, 1, D), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    v = k.clone()
    for x in (k, v):
        x[1] = random(8, 1, D).to(x.dtype)
    layout = Paged(torch.tensor([[1, 2]]), torch.tensor([5]))
    found = attention(random(1, 1, 2, D).to(torch.bfloat16), k, v, layout=layout, descale=Descale(k=0.5, v=2.0))
    assert found.isfinite().all()


@pytest.mark.parametrize("splits", [None, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_factors_of_what_is_not_in_use(backend: str, dtype: torch.dtype, splits: int | None):
    """May be NaN: of blocks behind the last key, and of sequences without keys."""
    used = torch.tensor([100, 0, 140])
    clean = [positive(3, H_K, 3, seed=i) for i in range(2)]
    unused = torch.arange(3) >= torch.tensor([1, 0, 2])[:, None, None]
    dirty = [x.masked_fill(unused, torch.nan) for x in clean]

    def poisoned(*operands: Tensor, **keywords: Any) -> Any:
        """The oracle has the others."""
        factors = (x[:, :, : keywords["descale"].k.shape[2]] for x in dirty)
        return attention(*operands, **keywords | {"descale": Descale(None, *factors)})

    def right(q: Tensor, k: Tensor, v: Tensor, layout: Any, n: int = 3) -> None:
        descale = Descale(None, *(x[:, :, :n] for x in clean))
        options = {"layout": layout, "mask": causal(), "sink": random(H_Q), "backend": backend, "function": poisoned}
        check(q, k, v, descale=descale, return_max_scores=True, **options).assert_ok()

    k, v = (random(3, H_K, 300, D, seed=i).to(torch.float8_e4m3fn) for i in range(2))
    q = random(3, H_Q, 20, D).to(dtype)
    if splits is None:
        right(q, k, v, Dense(seqused_k=used))
        flat = [torch.cat([x[i, :, :n].transpose(0, 1) for i, n in enumerate(used.tolist())]) for x in (k, v)]
        ends = torch.tensor([0, 20, 40, 60]), torch.tensor([0, 100, 100, 240])
        right(q.transpose(1, 2).flatten(0, 1), *flat, Packed(*ends), 2)
    pages = [x[:, :, :256].transpose(1, 2).unflatten(1, (2, 128)).flatten(0, 1).contiguous() for x in (k, v)]
    table = torch.arange(6, dtype=torch.int32).view(3, 2)
    right(q[:, :, :2].transpose(1, 2), *pages, Paged(table, used, num_splits=splits))
    ends = torch.tensor([0, 5, 7, 20], dtype=torch.int32)
    right(q[0].transpose(0, 1), *pages, Paged(table, used, ends, num_splits=splits))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_mapped_over_factors(backend: str):
    """Of every form, beside queries that are mapped too or shared; each result is that of its own factors."""
    q, k, v = operands(torch.float8_e4m3fn, torch.float32)
    options = {"mask": causal(), "backend": backend}
    several = torch.stack([q, 2 * q, q.flip(2)])

    def call(x: Tensor, q: Tensor) -> Any:
        return attention(q, k, v, descale=Descale(k=x, v=2 * x), return_lse=True, **options)

    for shape in ((), (H_K,), (B, H_K), (B, H_K, 2)):
        factors = positive(3, *shape)
        for axis, queries in ((None, q), (0, several)):
            found = torch.vmap(call, (0, axis))(factors, queries)
            for i in range(3):
                own = Partial(*(x if x is None else x[i] for x in found))
                descale = Descale(k=factors[i], v=2 * factors[i])
                given = q if axis is None else several[i]
                check(given, k, v, descale=descale, function=lambda *_, own=own, **__: own, **options).assert_ok()


def test_compiled_batched_and_kept():
    """Factors are tensors of the call: others do not recompile, and cached plans do not keep them."""
    q, k, v = operands(torch.float8_e4m3fn, torch.bfloat16)
    made = torch.compile(
        lambda q, k, v, x, y: attention(q, k, v, descale=Descale(k=x, v=y), return_lse=True),
        fullgraph=True,
        backend="eager",
    )
    for seed in range(3):
        factors = positive(B, H_K, seed=seed), positive(seed=seed)
        plain = attention(q, k, v, descale=Descale(k=factors[0], v=factors[1]), return_lse=True)
        assert all(map(torch.equal, made(q, k, v, *factors), plain))
        wide = attention(q.float(), k.float() * factors[0][:, :, None, None], v.float() * factors[1])
        torch.testing.assert_close(plain.out.float(), wide, atol=2e-2, rtol=2e-2)
    stacked = [torch.stack([x, x.flip(2)]) for x in (q, k, v)]
    each = positive(2, H_K)
    batched = torch.vmap(lambda q, k, v, x: attention(q, k, v, descale=Descale(k=x)))(*stacked, each)
    for i in range(2):
        assert torch.equal(batched[i], attention(*(x[i] for x in stacked), descale=Descale(k=each[i])))
    one = Descale(k=positive(B, H_K))
    shared = torch.vmap(lambda q, k, v: attention(q, k, v, descale=one))(*stacked)
    assert torch.equal(shared[0], attention(q, k, v, descale=one))


def test_autocast_leaves_8_bits_alone():
    q, k, v = operands(torch.float8_e4m3fn, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, k, v, descale=Descale(k=0.5))
    assert torch.equal(found, attention(q.bfloat16(), k, v, descale=Descale(k=0.5)))


def test_spec():
    q, k, v = operands(torch.float8_e5m2, torch.bfloat16)
    spec = explain(q, k, v, descale=descale("block", False)).spec
    assert str(spec) == "bf16 group2 kv_fp8_e5m2 d16 dense block_scales aligned cpu"
    assert Spec.parse(str(spec)) == spec
    assert str(explain(*operands(torch.float8_e4m3fn)).spec) == "fp8_e4m3 group2 d16 dense aligned cpu"


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("lengths", [(0, 20), (20, 0), (0, 0)], ids=str)
def test_no_rows(lengths: tuple[int, int], backend: str):
    """Blocks of what has no rows: none, or of packed sequences and pages more than none. The host knows of Packed and
    Paged what it reads."""
    s_q, s_k = lengths
    q, (k, v) = random(B, H_Q, s_q, D), (random(B, H_K, s_k, D, seed=i) for i in (1, 2))
    for blocks in (0, 1):
        given = [positive(B, H_K, max(blocks, -(-s // 128)), seed=s) for s in (s_q, s_k, s_k)]
        eight = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
        descale, keywords = Descale(*given), {"mask": causal(), "backend": backend}
        dense = Descale(*(x[:, :, : -(-s // 128)] for x, s in zip(given, (s_q, s_k, s_k), strict=True)))
        check(*eight, descale=dense, **keywords).assert_ok()
        flat = [torch.nn.functional.pad(x.transpose(1, 2).flatten(0, 1), (0, 0, 0, 0, 0, 3)) for x in (q, k, v)]
        flat = [x.to(torch.float8_e4m3fn) for x in flat]
        ends = (torch.tensor([0, s, 2 * s]) for s in lengths)
        check(*flat, layout=Packed(*ends), descale=descale, **keywords).assert_ok()
        cache, table = torch.zeros(4, 16, H_K, D).to(torch.float8_e4m3fn), torch.arange(4).view(2, 2)
        layout = Paged(table, torch.tensor([s_k, 0]), cu_seqlens_q=torch.tensor([0, s_q, 2 * s_q]))
        wide = [positive(B, H_K, 1)] * 2
        check(flat[0], cache, cache, layout=layout, descale=Descale(given[0], *wide), **keywords).assert_ok()


def test_out_over_the_shift():
    """The LSE has the shift as it was given."""
    memory = random(B * H_Q * S * D)
    shift = memory[: B * H_Q * S].view(B, H_Q, S)
    given = operands(torch.float8_e4m3fn, torch.float32)
    wanted = attention(*given, descale=Descale(shift=shift), return_lse=True)
    found = attention(*given, descale=Descale(shift=shift), return_lse=True, out=memory.view(B, H_Q, S, D))
    assert torch.equal(found.lse, wanted.lse)
    assert torch.equal(found.out, wanted.out)


def run(given, dtype=None):
    return attention(*operands(torch.float8_e4m3fn, dtype), descale=given)


def gradient():
    q, k, v = operands(torch.float8_e4m3fn, torch.bfloat16)
    return attention(q.requires_grad_(), k, v)


def byte_gradient():
    q, k, v = operands(torch.float8_e4m3fn, torch.bfloat16)
    return attention(q, k, v.requires_grad_(), descale=Descale(backward="dequantized"))


def range_gradient():
    q, k, v = (x[0].transpose(0, 1) for x in operands(torch.float8_e4m3fn, torch.bfloat16))
    ends = torch.tensor([0, 100, 200])
    layout = Packed(ends, starts_k=torch.tensor([0, 50]), seqused_k=torch.tensor([100, 150]))
    return attention(q, k, v, layout=layout, descale=Descale(k=positive(2, H_K), backward="dequantized"))


def factor_gradient(name: str):
    """Of a Descale's own tensors; softmax and PyTorch's own functions would both be differentiable."""
    factor = torch.ones((B, H_Q, S) if name == "shift" else (B, H_K), requires_grad=True)
    attention(*operands(torch.float8_e4m3fn, torch.float32), descale=Descale(**{name: factor}))


E4, E5 = (operands(kind) for kind in KINDS.values())
WIDE = [x.float() for x in E4]
F32 = torch.empty(B, H_Q, S, D)
ERRORS = {
    "dtype of a factor": (lambda: Descale(k=torch.ones(2, dtype=torch.float64)), TypeError, "torch.float64 (2,)"),
    "dimensions of a factor": (lambda: Descale(k=torch.ones(1, 1, 1, 1)), ValueError, "(1, 1, 1, 1)"),
    "sparse factor": (
        lambda: Descale(k=torch.ones(2).to_sparse()),
        ValueError,
        "and dense, got a nested or sparse one",
    ),
    "word": (lambda: Descale(v="1"), TypeError, "the descale of v must be a number, got '1'"),
    "shape": (lambda: run(Descale(k=torch.ones(3))), ValueError, "n = 2 of them, got (3,): q (2, 4,"),
    "flag": (lambda: Descale(k=True), TypeError, "(b, h_k, n), got True"),
    "negative": (lambda: Descale(q=-1.0), ValueError, "the descale of q must be a positive number, from 2^-126"),
    "zero": (lambda: Descale(v=0), ValueError, "got 0"),
    "NaN": (lambda: Descale(v=float("nan")), ValueError, "got nan"),
    "beyond float32": (lambda: Descale(k=1e39), ValueError, "got 1e+39"),
    "many blocks": (lambda: run(Descale(v=torch.ones(2, 2, 4))), ValueError, "n = 2 of them, got (2, 2, 4)"),
    "few blocks": (lambda: run(Descale(v=torch.ones(2, 2, 1))), ValueError, "got (2, 2, 1)"),
    "q": (lambda: run(Descale(q=1.5), torch.float16), ValueError, "descale=Descale(q=…) is for 8-bit queries"),
    "wide keys": (lambda: attention(*WIDE, descale=Descale()), ValueError, "k torch.float32"),
    "no record": (lambda: run(0.5), TypeError, "got 0.5"),
    "mixed": (lambda: attention(*E5[:2], E4[2]), ValueError, "k and v must share"),
    "8-bit q alone": (lambda: attention(E5[0], *E4[1:]), ValueError, "8-bit q, k"),
    "device": (lambda: run(Descale(k=torch.ones((), device="meta"))), ValueError, "on q's device cpu, got meta"),
    "out": (lambda: attention(*E4, out=F32), ValueError, "out must be torch.bfloat16 or torch.float16"),
    "gradient": (gradient, Unsupported, "no gradients"),
    "gradient of bytes": (byte_gradient, Unsupported, "no gradients"),
    "backward": (lambda: Descale(backward="exact"), ValueError, "None or 'dequantized', got 'exact'"),
    "backward beside a shift": (lambda: Descale(shift=random(1), backward="dequantized"), ValueError, "no derivative"),
    "backward of ranges": (range_gradient, ValueError, "a number, () or (h_k,): q (200, 4, 16)"),
    "gradient of a factor": (lambda: factor_gradient("k"), Unsupported, "no gradients"),
    "gradient of v's": (lambda: factor_gradient("v"), Unsupported, "no gradients"),
    "gradient of the shift": (lambda: factor_gradient("shift"), Unsupported, "no gradients"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)


@pytest.mark.parametrize(
    ("spec", "backend", "words"),
    [("fp8_e4m3 d64 causal aligned sm90", "gluon", "hardly pays at d 64"),
     ("fp8_e4m3 d128 aligned sm90", "gluon", None),
     ("fp8_e4m3 d128 sm90", "triton", "have not been timed"),
     ("bf16 kv_fp8_e4m3 d128 paged sm90", "triton", "half the time"),
     ("bf16 kv_fp8_e4m3 d128 sm90", "triton", "over pages alone"),
     ("bf16 d64 sm90", "gluon", None), ("fp8_e4m3 d64 cpu", "cpu", None)],
)  # fmt: skip
def test_explain_says_where_8_bits_do_not_pay(spec: str, backend: str, words: str | None):
    told = explanation._pays(Spec.parse(spec), backend)
    assert told is None if words is None else words in str(told)
