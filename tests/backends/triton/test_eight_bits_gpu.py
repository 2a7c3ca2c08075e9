"""The Triton kernels over 8-bit keys and values: the oracle's cases, and the same numbers in 16 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, Descale, Packed, Paged, alibi, attention, causal, softcap, window
from saccade.testing import check, paged
from saccade.testing.cases import Case

pytestmark = pytest.mark.gpu

E4M3, E5M2 = KINDS = torch.float8_e4m3fn, torch.float8_e5m2
CASES = {case.name: case for case in paged.named()}


def in_bytes(case: Case, kind: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """The call of a case with its cache in 8 bits: NaN bytes wherever it is not in use. Rows at multiples of 16."""
    given = case.inputs("cuda", seed=seed)
    k, v = (x.to(kind) for x in (given.k, given.v))
    if case.d % 16 or (case.d_v or case.d) % 16:
        return given.q, paged.spaced(k), paged.spaced(v), given.keywords
    return given.q, *paged.stored(case.cache, k, v), given.keywords


def factors(form: str, b: int, h_k: int, keys: int) -> Descale:
    shape = {"number": (), "head": (h_k,), "sequence": (b, h_k), "block": (b, h_k, -(-keys // 128))}[form]
    return Descale(k=torch.rand(shape, device="cuda") + 0.5, v=torch.rand(shape, device="cuda") + 0.5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_named_cases(dtype: str, kind: torch.dtype) -> None:
    for name, case in CASES.items():
        q, k, v, keywords = in_bytes(case.replace(dtype=dtype), kind)
        layout = keywords["layout"]
        for form in ("sequence", "block"):
            scales = factors(form, layout.sequences, k.shape[2], layout.block_table.shape[1] * k.shape[1])
            report = check(q, k, v, descale=scales, backend="triton", **keywords)
            assert report.ratio <= 1, f"{name} {form}\n{report}"


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("d", "size"), [*((128, n) for n in (1, 16, 64, 128, 256)), (64, 16), (256, 32), (256, 1)])
def test_page_sizes(d: int, size: int, kind: torch.dtype) -> None:
    """Long enough for parts of the keys, in every batch size that cuts them differently; all heads of a group."""
    for b, h_q, h_k, s_q, splits in (
        (1, 32, 8, 1, 0), (3, 64, 8, 1, 0), (40, 8, 8, 2, 0), (2, 16, 2, 100, 0), (5, 16, 1, 1, 1), (2, 6, 2, 1, 3),
    ):  # fmt: skip
        case = Case("", dtype="bf16", b=b, h_q=h_q, h_k=h_k, s_q=s_q, s_k=2300, d=d, mask="causal", order="paged",
                    page_size=size, splits=splits)  # fmt: skip
        q, k, v, keywords = in_bytes(case, kind, seed=b)
        check(q, k, v, descale=factors("head", b, h_k, 2300), **keywords).assert_ok()


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_as_16_bit_pages(group: int, kind: torch.dtype) -> None:
    """Of what the bytes stand for where that is exact: 8 bits, in the same tiles."""
    for d, size in ((64, 16), (128, 64), (128, 1)):
        case = Case("", dtype="fp16", b=3, h_q=2 * group, h_k=2, s_q=1, s_k=700, d=d, mask="causal", order="paged",
                    page_size=size, splits=1)  # fmt: skip
        q, k, v, keywords = in_bytes(case, kind)
        found = attention(q, k, v, return_lse=True, backend="triton", **keywords)
        wide = attention(q, k.half(), v.half(), return_lse=True, backend="triton", **keywords)
        assert torch.equal(found.out, wide.out)
        assert torch.equal(found.lse, wide.lse)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("d", "d_v"), [(40, 24), (64, 32), (32, 64), (128, 64), (16, 128), (256, 64), (96, 256)])
def test_tiles_of_other_widths(d: int, d_v: int, kind: torch.dtype) -> None:
    """ptxas 12.8 lost the place of the values."""
    for s_q, splits, mask in ((70, 0, "causal"), (70, 1, "causal"), (300, 0, "window(99,0)"), (17, 0, "none")):
        case = Case("", dtype="bf16", b=3, h_q=8, h_k=2, s_q=s_q, s_k=400, d=d, d_v=d_v, mask=mask, order="paged",
                    page_size=64, splits=splits)  # fmt: skip
        q, k, v, keywords = in_bytes(case, kind)
        check(q, k, v, backend="triton", **keywords).assert_ok()
    q = torch.randn(2, 4, 300, d, device="cuda").bfloat16()
    k, v = (torch.randn(2, 2, 333, n, device="cuda").to(kind) for n in (d, d_v))
    for mask in (None, causal(), window(50, 0)):
        check(q, k, v, mask=mask, descale=Descale(k=0.5), backend="triton").assert_ok()


def test_large_and_small_queries() -> None:
    """Rows of bfloat16 beyond float16's range, and below it."""
    b, h_q, h_k, d = 4, 8, 2, 64
    table = torch.arange(4 * 20, device="cuda").view(4, 20).int()
    layout = Paged(table, torch.tensor([300, 1, 20, 299], device="cuda"))
    k, v = (torch.randn(80, 16, h_k, d, device="cuda").to(E4M3) for _ in range(2))
    for power in (-100, -20, 0, 20, 100):
        q = (torch.randn(b, 1, h_q, d, device="cuda") * 2.0**power).bfloat16()
        check(q, k, v, layout=layout, scale=2.0 ** -(power + 3), backend="triton").assert_ok()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("eight", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (256, 256), (40, 24), (16, 64), (192, 128)])
def test_dense_padded_and_packed(d: int, d_v: int, eight: bool, kind: torch.dtype) -> None:
    b, h_q, h_k, s_q, s_k = 2, 4, 2, 300, 333
    q = torch.randn(b, h_q, s_q, d, device="cuda").to(kind if eight else torch.bfloat16)
    k, v = torch.randn(b, h_k, s_k, d, device="cuda").to(kind), torch.randn(b, h_k, s_k, d_v, device="cuda").to(kind)
    used = torch.tensor([333, 70], device="cuda")
    ends = torch.tensor([0, 400, 600], device="cuda"), torch.tensor([0, 350, 666], device="cuda")
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    for form in ("number", "sequence", "block"):
        scales, of_packed = factors(form, b, h_k, s_k), factors(form, b, h_k, 512)
        if eight:
            scales, of_packed = (Descale(x.k, x.k, x.v) for x in (scales, of_packed))
        for options in (
            {},
            {"mask": causal(), "score_mod": softcap(5.0)},
            {"mask": window(50, 0), "sink": q.new_zeros(h_q, dtype=torch.float32)},
        ):
            check(q, k, v, descale=scales, backend="triton", **options).assert_ok()
        check(q, k, v, descale=scales, layout=Dense(seqused_k=used), backend="triton").assert_ok()
        slopes = torch.rand(h_q, device="cuda")
        packed = Packed(*ends, 512, 512)
        check(
            *flat, descale=of_packed, layout=packed, mask=causal(), score_mod=alibi(slopes), backend="triton"
        ).assert_ok()


def test_long_rows_of_ones() -> None:
    """What adds products in too few bits ends at a fraction of 1."""
    s = 1 << 17
    q, k = torch.randn(1, 1, 64, 64, device="cuda").to(E4M3), torch.randn(1, 1, s, 64, device="cuda").to(E4M3)
    out = attention(q, k, torch.ones_like(k.half()).to(E4M3), backend="triton")
    assert (out.float() - 1).abs().max() <= 2**-8


def test_8_bit_queries_over_pages() -> None:
    case = Case("", dtype="bf16", b=3, h_q=8, h_k=2, s_q=1, s_k=700, d=128, mask="causal", order="paged")
    q, k, v, keywords = in_bytes(case, E4M3)
    check(q.to(E4M3), k, v, descale=Descale(q=0.5, k=0.7, v=2.0), backend="triton", **keywords).assert_ok()


def test_a_graph_is_replayed_with_other_factors_and_lengths() -> None:
    k, v = torch.full((2, 60, 16, 2, 64), 0x7F, device="cuda", dtype=torch.uint8).view(E4M3)
    table = torch.randperm(60, device="cuda").view(3, 20).int()
    used, of_k, of_v = torch.ones(3, device="cuda").int(), *torch.ones(2, 3, 2, device="cuda")
    q = torch.randn(3, 1, 8, 64, device="cuda").bfloat16()

    def step() -> Tensor:
        return attention(q, k, v, layout=Paged(table, used), descale=Descale(k=of_k, v=of_v), backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for lengths in ([300, 1, 17], [0, 128, 320]):
        used.copy_(torch.tensor(lengths))
        for b, n in enumerate(lengths):
            for x in (k, v):
                rows = torch.full((320, 2, 64), torch.nan, device="cuda")
                rows[:n] = torch.randn(n, 2, 64, device="cuda")
                x[table[b].long()] = rows.to(E4M3).view(20, 16, 2, 64)
        of_k.uniform_(0.5, 1.5)
        of_v.uniform_(0.5, 1.5)
        graph.replay()
        assert torch.equal(found, step())
        check(q, k, v, layout=Paged(table, used), descale=Descale(k=of_k, v=of_v), backend="triton").assert_ok()


@pytest.mark.parametrize("eight", [False, True], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("d", [64, 128])
def test_the_backward_of_the_values(d: int, eight: bool) -> None:
    """Of wider queries, or of a sink beside 8-bit ones, as the 16-bit backward has it: factors are powers of two, so
    that values are what 16 bits hold."""
    b, h_q, h_k, s = 2, 4, 2, 300
    q, k, v = (torch.randn(b, h, s, d, device="cuda").to(E4M3) for h in (h_q, h_k, h_k))
    powers = [torch.randint(-2, 2, (b, h_k, 3), device="cuda").float().exp2() for _ in range(3)]
    rows = torch.arange(s, device="cuda") // 128
    wide = [
        (x.float() * y[:, :, rows, None].repeat_interleave(x.shape[1] // h_k, 1)).bfloat16()
        for x, y in zip((q, k, v), powers, strict=True)
    ]
    sink = torch.randn(h_q, device="cuda", requires_grad=True)
    query = wide[0].detach().requires_grad_(not eight)
    leaves = [sink] if eight else [query, sink]
    descale = Descale(powers[0] if eight else None, *powers[1:], backward="dequantized")
    dout = torch.randn(b, h_q, s, d, device="cuda").bfloat16()
    out = attention(q if eight else query, k, v, mask=causal(), sink=sink, descale=descale)
    found = torch.autograd.grad(out, leaves, dout)
    wanted = torch.autograd.grad(attention(query, *wide[1:], mask=causal(), sink=sink), leaves, dout)
    for x, y in zip(found, wanted, strict=True):
        assert (x - y).float().norm() <= (2**-3 if eight else 2**-6) * y.float().norm()
