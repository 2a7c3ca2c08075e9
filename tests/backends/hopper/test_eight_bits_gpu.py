"""8-bit q, k and v on Hopper: head dims, masks, scores, layouts, factors, and rows so long that sums would be lost."""

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
    attention,
    causal,
    documents,
    explain,
    mask_mod,
    softcap,
    window,
)
from saccade.testing.accuracy import check

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EDGES = {"full": None, "causal": causal()}
edges = pytest.mark.parametrize("mask", EDGES.values(), ids=EDGES)
NAN = 0x7F


def operands(
    b: int, heads: tuple[int, int], lengths: tuple[int, int], d: int, d_v: int = 0, dtype: torch.dtype = E4M3
) -> tuple[Tensor, Tensor, Tensor]:
    (h_q, h_k), (s_q, s_k) = heads, lengths
    shapes = (b, h_q, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d_v or d)
    q, k, v = (torch.randn(shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v


def numbers(*shape: int) -> Tensor:
    """Factors from 0.5 to 1.5."""
    return torch.rand(shape, device="cuda") + 0.5


def with_lse(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **keywords: Any) -> Any:
    """`attention` by the kernel that also gives the LSE: one less to compile."""
    found = attention(q, k, v, return_lse=True, **keywords)
    return found if return_lse else found.out


def right(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> None:
    """The forward is within the tolerance, and it is this backend's."""
    check(q, k, v, backend="gluon", function=with_lse, return_max_scores=True, **keywords).assert_ok()


@edges
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (80, 80)])
def test_head_dims(d: int, d_v: int, mask: Any):
    right(*operands(1, (4, 2), (300, 700), d, d_v), mask=mask)


@edges
@pytest.mark.parametrize("lengths", [(1, 1), (37, 53), (128, 128), (1000, 1000), (700, 129)])
def test_lengths_that_no_tile_divides(lengths: tuple[int, int], mask: Any):
    right(*operands(2, (4, 2), lengths, 128), mask=mask)


def test_heads_that_share_a_tile():
    right(*operands(2, (16, 2), (16, 700), 128))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("form", ["number", "all", "heads", "sequences", "blocks"])
def test_factors(form: str, d: int):
    b, h_k, s = 3, 2, 500
    factor = {
        "number": lambda: 0.25, "all": numbers, "heads": lambda: numbers(h_k),
        "sequences": lambda: numbers(b, h_k), "blocks": lambda: numbers(b, h_k, 4),
    }[form]  # fmt: skip
    right(*operands(b, (4, h_k), (s, s), d), descale=Descale(factor(), factor(), factor()), mask=causal())


def test_one_operand_by_blocks():
    q, k, v = operands(2, (4, 2), (300, 500), 128)
    for descale in (Descale(q=numbers(2, 2, 3)), Descale(k=numbers(2, 2, 4)), Descale(v=numbers(2, 2, 4))):
        right(q, k, v, descale=descale)


def test_factors_that_are_tiny_or_zero():
    q, k, v = operands(1, (2, 2), (300, 300), 128)
    right(q, k, v, descale=Descale(1e-6, 1e-6, 1e-3))
    zero = torch.zeros((), device="cuda")
    out = attention(q, k, v, descale=Descale(k=zero), backend="gluon", mask=causal()).float()
    mean = v.float().cumsum(2) / torch.arange(1, 301, device="cuda")[:, None]
    assert (out - mean).abs().max() <= 2**-7 * mean.abs().max()


def test_e5m2():
    for d in (64, 128):
        right(*operands(1, (4, 2), (300, 700), d, dtype=E5M2), descale=Descale(numbers(2), numbers(2), numbers(2)))


@edges
def test_results_in_float16(mask: Any):
    q, k, v = operands(1, (4, 2), (300, 700), 128)
    right(q, k, v, mask=mask, out=torch.empty(q.shape, device="cuda", dtype=torch.float16))


@pytest.mark.parametrize("kind", ["left", "both", "documents", "predicate"])
def test_masks(kind: str):
    mask = {
        "left": lambda: window(100, 0), "both": lambda: window(50, 20),
        "documents": lambda: documents(torch.arange(600, device="cuda")[None] // 150) & causal(),
        "predicate": lambda: causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0),
    }[kind]()  # fmt: skip
    right(*operands(1, (4, 2), (600, 600), 128), mask=mask)


@pytest.mark.parametrize("blocks", [False, True], ids=["heads", "blocks"])
def test_scores_and_sinks(blocks: bool):
    q, k, v = operands(1, (4, 2), (400, 400), 128)
    slopes, sink = torch.tensor([0.5, 0.25, 0.1, 0.05], device="cuda"), torch.randn(4, device="cuda")
    factor = numbers(1, 2, 4) if blocks else numbers(1, 2)
    descale = Descale(factor, factor.clone(), factor.clone())
    right(q, k, v, score_mod=softcap(3.0), descale=descale, sink=sink)
    right(q, k, v, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), descale=descale)
    right(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (j - i), descale=descale, mask=causal())


def test_dropout():
    right(*operands(1, (4, 2), (300, 300), 128), dropout_p=0.3)


def test_padded_batches_with_nan_behind_the_rows_in_use():
    q, k, v = operands(3, (4, 2), (700, 700), 128)
    used = torch.tensor([700, 311, 0], device="cuda", dtype=torch.int32)
    for i, n in enumerate(used.tolist()):
        for x in (q, k, v):
            x.view(torch.uint8)[i, :, n:] = NAN
    layout = Dense(seqused_q=used, seqused_k=used)
    for mask in EDGES.values():
        right(q, k, v, layout=layout, mask=mask, descale=Descale(numbers(3, 2), numbers(3, 2), numbers(3, 2)))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("blocks", [False, True], ids=["heads", "blocks"])
def test_packed_sequences(d: int, blocks: bool):
    lengths = [1, 300, 0, 129, 700, 128, 77]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], device="cuda", dtype=torch.int32)
    t, b = int(starts[-1]) + 50, len(lengths)
    q, k, v = (torch.randn(t, h, d, device="cuda").to(E4M3) for h in (4, 2, 2))
    for x in (q, k, v):
        x.view(torch.uint8)[t - 50 :] = NAN
    shape = (b, 2, 6) if blocks else (b, 2)
    descale = Descale(numbers(*shape), numbers(*shape), numbers(*shape))
    right(q, k, v, layout=Packed(starts, starts, 700, 700), descale=descale, mask=causal())


def test_nan_of_a_sequence_stays_its_own():
    starts = torch.tensor([0, 100, 300], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(300, 2, 128, device="cuda").to(E4M3) for _ in range(3))
    layout = Packed(starts, starts, 200, 200)
    before = attention(q, k, v, layout=layout, backend="gluon")
    v.view(torch.uint8)[100:] = NAN
    after = attention(q, k, v, layout=layout, backend="gluon")
    assert torch.equal(before[:100], after[:100])
    assert bool(after[100:].isnan().all())


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    ("keys", "noise"), [(1024, 0.0), (8192, 0.0), (131072, 0.0), (8192, 0.25), (131072, 0.25)], ids=str
)
def test_long_rows_keep_their_sums(d: int, keys: int, noise: float):
    """One chain of 8-bit products over 8k keys loses a seventh of the sum, and two thirds over 64k."""
    q, k = ((0.5 * torch.randn(1, 2, s, d, device="cuda")).to(E4M3) for s in (128, keys))
    v = (1 + noise * torch.randn(1, 2, keys, d, device="cuda")).to(E4M3)
    out = torch.empty(q.shape, device="cuda", dtype=torch.float16)
    attention(q, k, v, backend="gluon", out=out)
    exact = (q.double() @ k.double().mT * d**-0.5).softmax(-1) @ v.double()
    assert (out.double() - exact).abs().max() <= 2**-8


def test_repeats_are_equal():
    q, k, v = operands(2, (8, 2), (2000, 2000), 128)
    first = attention(q, k, v, backend="gluon", mask=causal())
    assert all(torch.equal(first, attention(q, k, v, backend="gluon", mask=causal())) for _ in range(20))


def test_a_graph_may_be_replayed_with_other_bytes():
    q, k, v = operands(1, (4, 2), (500, 500), 128)
    attention(q, k, v, backend="gluon")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, backend="gluon")
    v.copy_(torch.randn(v.shape, device="cuda").to(E4M3).view(v.shape))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, backend="gluon"))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("size", [16, 128])
def test_prompts_over_pages(d: int, size: int):
    """Rows and pages that are not in use hold NaN."""
    b, longest = 36, 700
    used = torch.randint(1, longest, (b,), device="cuda", dtype=torch.int32)
    used[:3] = torch.tensor([longest, 128, 1])
    width = -(-longest // size)
    table = torch.randperm(b * width, device="cuda").to(torch.int32).view(b, width)
    q = torch.randn(b, 300, 4, d, device="cuda").to(E4M3)
    k, v = (torch.randn(b * width, size, 2, d, device="cuda").to(E4M3) for _ in range(2))
    for x in (k, v):
        rows = x.view(torch.uint8)[table.long()].flatten(1, 2)  # (b, rows, h_k, d)
        rows[torch.arange(width * size, device="cuda") >= used[:, None]] = NAN
        x.view(torch.uint8)[table.long()] = rows.view(b, width, size, 2, d)
    descale = Descale(numbers(b, 2), numbers(b, 2), numbers(b, 2))
    right(q, k, v, layout=Paged(table, used), descale=descale, mask=causal())


def test_ranges_of_keys():
    starts = torch.tensor([0, 200, 330, 600], device="cuda", dtype=torch.int32)
    first = torch.tensor([100, 0, 37], device="cuda", dtype=torch.int32)
    used = torch.tensor([400, 129, 663], device="cuda", dtype=torch.int32)
    q, k, v = (torch.randn(t, h, 128, device="cuda").to(E4M3) for t, h in ((600, 4), (700, 2), (700, 2)))
    layout = Packed(starts, starts_k=first, seqused_k=used)
    for mask in EDGES.values():
        right(q, k, v, layout=layout, mask=mask, descale=Descale(v=numbers(3, 2)))


def test_auto_takes_it():
    assert explain(*operands(1, (4, 2), (300, 300), 128)).backend == "gluon"
