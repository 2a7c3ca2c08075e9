"""Paged caches: serving's layout against the oracle, poisoned wherever nothing is in use."""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from saccade import (
    Dense,
    Paged,
    Unsupported,
    append_kv,
    attention,
    bias,
    block_mask,
    causal,
    documents,
    explain,
    mask_mod,
    prefix,
    window,
)
from saccade.backends import hopper as gluon
from saccade.call import Call, strides
from saccade.layouts import from_tensors
from saccade.testing import check, paged
from saccade.testing.cases import NAMED, Case
from tests.support import draws

CASES = {case.name: case for case in paged.named()}


@pytest.mark.sample
@pytest.mark.parametrize("case", CASES.values(), ids=str)
@pytest.mark.parametrize("way", [("cpu", "bf16"), ("reference", "fp32")], ids="-".join)
def test_named_case(case, way, processor):
    backend, dtype = way
    given = case.replace(dtype=dtype).inputs()
    check(given.q, given.k, given.v, backend=backend, **given.keywords).assert_ok()


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "fp64"])
def test_fresh_memory_is_never_read(dtype, poison):
    for name in ("decode-window", "drafts-predicate", "mixed", "mixed-fixed"):
        given = CASES[name].replace(dtype=dtype).inputs()
        check(given.q, given.k, given.v, **given.keywords).assert_ok()


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.integers(0, 1 << 30))
def test_drawn_case(seed):
    case = draws.paged(seed, "fp32")
    given = case.inputs(seed=seed)
    report = check(given.q, given.k, given.v, **given.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask", [causal(), window(40, 0)], ids=repr)
def test_num_splits_1_is_the_same_for_every_batch(mask, dtype, processor):
    """Bit for bit: a row alone, in a batch, and in a prompt that comes in chunks."""
    pages, size, h_q, h_k, d, s = 60, 8, 6, 2, 32, 150
    k, v = (torch.randn(pages, size, h_k, d, dtype=dtype) for _ in range(2))
    table = torch.randperm(pages, dtype=torch.int32)[:57].view(3, 19)
    q = torch.randn(s, h_q, d, dtype=dtype)

    def run(rows: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Each (sequence, first row, behind the last row); the keys are those up to the last row."""
        lengths = torch.tensor([0, *(stop - start for _, start, stop in rows)]).cumsum(0).int()
        used = torch.tensor([stop for *_, stop in rows])
        layout = Paged(table[[b for b, *_ in rows]], used, lengths, num_splits=1)
        given = torch.cat([q[start:stop] for _, start, stop in rows])
        out, lse = attention(given, k, v, mask=mask, layout=layout, return_lse=True)
        return list(torch.cat([out.flatten(1), lse.T.to(dtype)], dim=1).split(lengths.diff().tolist()))

    (whole,) = run([(0, 0, s)])
    chunks = torch.cat([run([(1, 7, 90), (0, start, stop)])[1] for start, stop in ((0, 33), (33, 100), (100, s))])
    steps = torch.cat([run([(2, 3, 4), (0, i, i + 1), (1, 60, 149)])[1] for i in range(0, s, 13)])
    assert torch.equal(whole, chunks)
    assert torch.equal(whole[::13], steps)
    batch = Paged(table[:1], torch.tensor([s]), num_splits=1)
    assert torch.equal(attention(q[None, -1:], k, v, mask=mask, layout=batch).flatten(), whole[-1, : h_q * d])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_num_splits_1_is_the_same_for_every_form_of_the_cache(dtype, torch_device):
    """Bit for bit: pages of any size and in any memory, dense keys as one page for each sequence, and packed keys as
    pages of one row; queries as a batch and end to end."""
    b, s, h_k, d = 3, 96, 2, 64
    k, v = torch.randn(2, b, s, h_k, d, device=torch_device).to(dtype)
    q = torch.randn(b, 5, 4 * h_k, d, device=torch_device).to(dtype)
    used, offsets = torch.tensor([96, 70, 5], device=torch_device), torch.arange(0, 16, 5, device=torch_device)
    found = []
    for size in (s, 32, 8, 1):
        pages = torch.randperm(b * s // size, device=torch_device)
        for cache in ("apart", "heads", "pages"):
            x, y = (torch.empty_like(z).view(-1, size, h_k, d) for z in (k, v))
            x[pages], y[pages] = k.view_as(x), v.view_as(y)
            caches, table = paged.stored(cache, x, y), pages.view(b, -1)
            for starts in (None, offsets):
                layout, rows = Paged(table, used, starts, num_splits=1), q if starts is None else q.flatten(0, 1)
                found.append(attention(rows, *caches, mask=causal(), layout=layout).view_as(q))
    assert all(torch.equal(x, found[0]) for x in found)


def test_pages_that_are_not_there_are_clamped():
    k, v, q = torch.randn(4, 8, 1, 16), torch.randn(4, 8, 1, 16), torch.randn(1, 1, 2, 16)
    used = torch.tensor([20])
    for backend in ("cpu", "reference"):
        found = [
            attention(q, k, v, layout=Paged(torch.tensor([table]), used), backend=backend)
            for table in ([2, 1 << 30, -5], [2, 3, 0])
        ]
        assert torch.equal(*found)


@pytest.mark.parametrize("cache", paged.CACHES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_how_caches_lie(cache, dtype):
    """Views that servers hold are right, aligned for the kernels of a GPU, and kept as they are."""
    case = CASES["one-head-alibi"].replace(cache=cache, dtype=dtype, page_size=16, d_v=64 * (cache == "latent"))
    given = case.inputs()
    check(given.q, given.k, given.v, **given.keywords).assert_ok()
    layout = given.keywords["layout"]
    call = Call(given.q, given.k, given.v, layout=layout)
    assert call.spec.aligned
    assert cache == "apart" or not given.k.is_contiguous() or not given.v.is_contiguous()
    assert all(
        m * given.k.element_size() % 16 == 0 for m in strides(call.k.shape, call.k.stride(), call.k.element_size())[:3]
    )


def test_rows_that_begin_anywhere_are_not_aligned():
    both = torch.randn(3, 8, 2, 59 + 59).half()
    layout = Paged(torch.arange(3)[None], torch.tensor([20]))
    for x in (*both.split(59, dim=-1), both[..., 1:60]):
        q = torch.randn(1, 1, 2, 59).half()
        call = Call(q, x, x, layout=layout)
        assert not call.spec.aligned
        check(q, x, x, layout=layout).assert_ok()


@pytest.mark.parametrize("splits", [None, 1])
def test_no_heads(splits):
    q, cache = torch.zeros(2, 3, 0, 8), torch.zeros(9, 4, 0, 8)
    out, lse = attention(q, cache, cache, mask=causal(), layout=Paged(TABLE, USED, num_splits=splits), return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (2, 0, 3)


def test_functions_see_no_index_beyond_the_call():
    """Rows and keys that only fill a tile of `num_splits=1` have none of their own."""
    k, v, q = torch.randn(4, 8, 1, 16), torch.randn(4, 8, 1, 16), torch.randn(1, 3, 2, 16)
    layout = Paged(torch.arange(4)[None], torch.tensor([32]), num_splits=1)
    check(q, k, v, layout=layout, mask=causal(), score_mod=bias(torch.randn(1, 2, 32, 32))).assert_ok()
    seen = torch.rand(32, 32) < 0.5
    check(q, k, v, layout=layout, mask=mask_mod(lambda b, h, q_idx, kv_idx: seen[q_idx, kv_idx])).assert_ok()


def test_a_dense_cache_is_one_page_for_each_sequence():
    made = NAMED["causal"].replace(dtype="fp32", order="bshd", s_q=1, b=3, h_q=4, h_k=2).inputs()
    used = torch.tensor([5, 0, 64])
    layout = Paged(torch.arange(3)[:, None], used)
    found = attention(made.q, made.k, made.v, layout=layout, mask=causal(), return_lse=True)
    wanted = attention(made.q, made.k, made.v, layout=Dense("bshd", None, used), mask=causal(), return_lse=True)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y)


# The operator.


def given_of(name: str) -> tuple[tuple[torch.Tensor, ...], dict]:
    given = CASES[name].replace(dtype="fp32").inputs()
    return (given.q, given.k, given.v), given.keywords


@pytest.mark.parametrize("name", ["decode-window", "mixed"])
def test_compiled(name):
    """As one opaque operator, with and without a buffer for the result."""
    tensors, keywords = given_of(name)
    wanted = attention(*tensors, return_lse=True, **keywords)
    layout = keywords.pop("layout")

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q, k, v, buffer, *tensors):
        paged = from_tensors(layout.text, list(tensors), [])
        first = attention(q, k, v, layout=paged, return_lse=True, **keywords)
        second = attention(q, k, v, layout=paged, return_lse=True, out=buffer, **keywords)
        return first, second.lse

    buffer = torch.full_like(wanted.out, torch.nan)
    if name == "mixed":  # whose rows after the last sequence stay
        buffer[-CASES[name].tail :] = 0
    with torch.no_grad():
        first, lse = call(*tensors, buffer, *layout.tensors)
    for x, y in ((first[0], wanted.out), (first[1], wanted.lse), (buffer, wanted.out), (lse, wanted.lse)):
        assert torch.equal(x, y)


def test_operators_are_registered_well():
    (q, k, v), keywords = given_of("mixed")
    header = f"{keywords['layout'].text} causal none auto - -"
    arguments = q, k, v, None, [], keywords["layout"].tensors, header, [], [0.1], True
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(torch.ops.saccade.forward.default, arguments, test_utils=tests)
    torch.library.opcheck(torch.ops.saccade.forward_out.default, (torch.empty_like(q), *arguments), test_utils=tests)


def test_flops_count_the_keys_in_use():
    from torch.utils.flop_counter import FlopCounterMode

    (q, k, v), keywords = given_of("decode")
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, **keywords)
    pairs = q.shape[2] * int(keywords["layout"].seqused_k.sum())
    assert counter.get_total_flops() == 2 * pairs * (q.shape[3] + v.shape[3])


@pytest.mark.parametrize("case", [NAMED["causal"], NAMED["packed-cross"], NAMED["sink"], CASES["mixed"]], ids=str)
def test_out_is_written(case):
    given = case.replace(dtype="fp32").inputs()
    wanted = attention(given.q, given.k, given.v, **given.keywords)
    held = torch.full((*wanted.shape[:-1], wanted.shape[-1] + 3), 7.0)
    buffer = held[..., 3:]
    buffer.fill_(torch.nan)
    if case.name == "mixed":  # whose rows after the last sequence stay
        buffer[-case.tail :] = 0
    assert attention(given.q, given.k, given.v, out=buffer, **given.keywords) is buffer
    assert torch.equal(buffer, wanted)
    assert (held[..., :3] == 7).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("splits", [0, 1])
def test_rows_of_no_sequence_stay_in_out(backend, splits):
    """As servers pad batches: those after the last sequence, NaN in q; without `out` they are zero."""
    mixed, none = CASES["mixed"], CASES["no-sequences"].replace(tail=3, s_q=0)
    for case in (mixed, mixed.replace(sink=True), CASES["no-rows"].replace(tail=5), none):
        given = case.replace(dtype="fp32", splits=splits).inputs()
        used = int(given.keywords["layout"].cu_seqlens_q[-1])
        plain = attention(given.q, given.k, given.v, backend=backend, return_lse=True, **given.keywords)
        assert not plain.out[used:].any()
        out = torch.full_like(plain.out, 7.0)
        found = attention(given.q, given.k, given.v, backend=backend, return_lse=True, out=out, **given.keywords)
        assert found.out is out
        assert torch.equal(out[:used], plain.out[:used])
        assert (out[used:] == 7).all()
        assert (found.lse[:, used:] == -torch.inf).all()


def test_gradients_are_refused():
    (q, k, v), keywords = given_of("decode")
    with pytest.raises(Unsupported, match="a paged cache has no gradients"):
        attention(q.requires_grad_(), k, v, **keywords)
    with torch.no_grad():
        attention(q, k, v, **keywords)
    assert explain(q, k, v, **keywords).gradient is None
    x = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"out=… is for calls without gradients"):
        attention(x, x, x, out=torch.empty_like(x))


def test_text_and_records_are_the_whole_layout():
    table, used, offsets = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64), torch.zeros(3).int()
    for layout in (Paged(table, used), Paged(table, used, offsets), Paged(table, used, offsets, 4)):
        tensors = [*layout.tensors]
        again = from_tensors(layout.text, tensors, [])
        assert tensors == []
        assert (again.text, again.num_splits) == (layout.text, layout.num_splits)
        assert all(x is y for x, y in zip(again.tensors, layout.tensors, strict=True))
    assert repr(layout) == "Paged(2 sequences of up to 3 pages)"


dilated = mask_mod(lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0)
TABLE, USED = torch.zeros(2, 3, dtype=torch.int32), torch.tensor([5, 6])


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Paged(TABLE.float(), USED), "torch.float32 (2, 3)"),
        (lambda: Paged(TABLE[0], USED), "torch.int32 (3,)"),
        (lambda: Paged(TABLE, USED[:1]), "(1,) with block_table (2, 3)"),
        (lambda: Paged(TABLE, USED, USED), "(2,) with block_table (2, 3)"),
        (lambda: Paged(TABLE, USED, num_splits=0), "from 1 on, or None, got 0"),
        (lambda: call(q=torch.randn(3, 1, 4, 8)), "the batch size of block_table (2, 3): q (3, 1, 4, 8)"),
        (lambda: call(q=torch.randn(2, 4, 8)), "with a paged cache q must be (b, s, h, d)"),
        (lambda: call(layout=Paged(TABLE, USED, torch.tensor([0, 1, 2]))), "q with cu_seqlens_q must be (t, h, d)"),
        (lambda: call(v=torch.randn(9, 8, 2, 8)), "the same pages, page size and heads"),
        (lambda: call(k=torch.randn(9, 4, 3, 8), v=torch.randn(9, 4, 3, 8)), "multiple of the key heads, got 4 and 3"),
        (lambda: call(k=torch.randn(0, 4, 2, 8), v=torch.randn(0, 4, 2, 8)), "at least one page"),
        (lambda: call(layout=Paged(TABLE, torch.tensor([5, 13]))), "in [0, 12], the rows of 3 pages of 4, got [5, 13]"),
        (lambda: call(torch.randn(2, 4, 8), layout=Paged(TABLE, USED, torch.tensor([0, 2, 1]))), "never decrease"),
        (lambda: call(mask=documents(torch.zeros(2, 1).long())), "which no paged cache has"),
        (lambda: call(mask=prefix(torch.tensor([1]))), "must have shape (2,), one for each sequence, got (1,)"),
        (lambda: call(mask=block_mask(dilated, 2, 4, 1, 12)), "pass the mask"),
        (lambda: call(out=torch.empty(2, 1, 4, 9)), "out must be torch.float32 (2, 1, 4, 8) on cpu, got torch.float32"),
        (lambda: call(out=torch.empty(2, 1, 8, 4).mT), "the last dimension of out must be contiguous"),
    ],
)  # fmt: skip
def test_errors(made, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        made()


def call(q=None, k=None, v=None, layout=None, **keywords):
    q = torch.randn(2, 1, 4, 8) if q is None else q
    k = torch.randn(9, 4, 2, 8) if k is None else k
    return attention(q, k, torch.randn(9, 4, 2, 8) if v is None else v, layout=layout or Paged(TABLE, USED), **keywords)


def test_refused_by_name():
    with pytest.raises(Unsupported, match="cpu: has no dropout with paged"):
        call(dropout_p=0.1)
    assert "takes aligned rows" in explain("bf16 d64 paged sm90").reasons["triton"][0]
    assert explain("bf16 d64 paged aligned sm90").reasons["triton"] != explain("bf16 d64 paged sm90").reasons["triton"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"lengths": (700, 700, 0, 700)}, None),
        ({"page_size": 1}, "takes page sizes that are multiples of 8, not 1"),
        ({"splits": 1}, "not with num_splits=1"),
        ({"splits": 7}, "not with num_splits=7"),
        ({"s_q": 1}, "each sequence and key head has at least 17 query rows, not 4, and"),
        ({"s_q": 17, "h_q": 8}, "blocks of 128 rows times parts of 512 keys are at least 64, not 8"),
        ({"s_q": 17, "h_q": 8, "s_k": 4096}, None),
        ({"b": 0}, None),
    ],
)
def test_which_calls_come_in_bulk(changes, reason):
    """What Hopper's kernels say of shapes: they are for prompts, and other kernels for decoding."""
    case = Case("", b=4, h_q=8, h_k=2, s_q=600, s_k=700, d=8, order="paged", page_size=16).replace(**changes)
    made = case.inputs()
    layout = made.keywords["layout"]
    call = Call(made.q, made.k, made.v, layout=layout)
    found = gluon.refusals(call, False)
    assert not found if reason is None else reason in "; ".join(found)
    assert gluon.refusals(call, True) == []


# On a GPU


GPU_CASES = paged.named()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_named_cases(dtype: str) -> None:
    for case in GPU_CASES:
        given = case.replace(dtype=dtype).inputs("cuda")
        report = check(given.q, given.k, given.v, backend="triton", **given.keywords)
        assert report.ratio <= 1, f"{case}\n{report}"
        if dtype != "fp32":
            assert explain(given.q, given.k, given.v, **given.keywords).backend in ("gluon", "triton")


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "size"), [*((128, size) for size in (1, 8, 16, 32, 64, 128, 256)), (64, 16), (256, 16)])
def test_page_sizes(d: int, size: int) -> None:
    """Long enough for parts of the keys, in every batch size that cuts them differently; all heads of a group."""
    for b, h_q, h_k, s_q in ((1, 32, 8, 1), (3, 64, 8, 1), (40, 8, 8, 2), (2, 16, 2, 100)):
        case = Case("", dtype="bf16", b=b, h_q=h_q, h_k=h_k, s_q=s_q, s_k=2300, d=d, mask="causal", order="paged",
                    page_size=size)  # fmt: skip
        given = case.inputs("cuda", seed=b)
        check(given.q, given.k, given.v, **given.keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", paged.CACHES)
@pytest.mark.parametrize("size", [1, 16, 64, 128])
@pytest.mark.parametrize("s_q", [1, 300])
def test_how_caches_lie_on_a_gpu(s_q: int, size: int, cache: str) -> None:
    """Decoding and prompts: right, and to the bit what caches that lie apart give."""
    h_k = 1 if cache == "one-head" else 2
    case = Case("", dtype="bf16", b=40, h_q=4 * h_k, h_k=h_k, s_q=s_q, s_k=1100, d=128, mask="causal", order="paged",
                page_size=size, cache=cache)  # fmt: skip
    given = case.inputs("cuda", seed=size)
    check(given.q, given.k, given.v, **given.keywords).assert_ok()
    apart = given.k.clone(memory_format=torch.contiguous_format), given.v.clone(memory_format=torch.contiguous_format)
    chosen = explain(given.q, given.k, given.v, **given.keywords).backend
    assert chosen == ("gluon" if s_q > 1 and size > 1 else "triton")
    assert explain(given.q, *apart, **given.keywords).backend == chosen
    found = attention(given.q, given.k, given.v, **given.keywords)
    assert torch.equal(found, attention(given.q, *apart, **given.keywords))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_drawn_case_on_a_gpu(seed: int) -> None:
    case = draws.paged(seed, ("bf16", "fp16")[seed % 2]).replace(s_k=40 + 97 * seed)
    given = case.inputs("cuda", seed=seed)
    report = check(given.q, given.k, given.v, **given.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


class Cache:
    """A cache of bf16, all rows NaN but those in use, and tables that name pages at random."""

    def __init__(self, b: int, longest: int, size: int = 16, h_k: int = 2, d: int = 64) -> None:
        width = -(-longest // size)
        self.k, self.v = torch.full((2, b * width + 5, size, h_k, d), torch.nan, device="cuda", dtype=torch.bfloat16)
        self.table = torch.randperm(b * width + 5, device="cuda")[: b * width].view(b, width).int()
        self.used = torch.zeros(b, dtype=torch.int32, device="cuda")
        self.b, self.h_k, self.d = b, h_k, d

    def fill(self, lengths: list[int]) -> None:
        """New keys and values for so many tokens of each sequence, behind those that it has."""
        new = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        offsets = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
        rows = torch.randn(2, sum(lengths), self.h_k, self.d, device="cuda", dtype=torch.bfloat16)
        append_kv(self.k, self.v, Paged(self.table, self.used, offsets), *rows)
        self.used += new

    def layout(self, num_splits: int | None = None) -> Paged:
        return Paged(self.table, self.used, num_splits=num_splits)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [causal(), window(300, 0)], ids=repr)
def test_num_splits_1_is_the_same_for_every_batch_on_a_gpu(mask) -> None:
    """Bit for bit: alone, in a batch, and in a prompt that comes in chunks."""
    cache, s = Cache(3, 1000, d=128), 900
    cache.fill([s, 700, 1])
    q = torch.randn(s, 8, 128, device="cuda", dtype=torch.bfloat16)

    def run(rows: list[tuple[int, int, int]]) -> list[Tensor]:
        """Each (sequence, first row, behind the last row)."""
        lengths = torch.tensor([0, *(stop - start for _, start, stop in rows)], device="cuda").cumsum(0).int()
        used = torch.tensor([stop for *_, stop in rows], device="cuda")
        layout = Paged(cache.table[[b for b, *_ in rows]], used, lengths, num_splits=1)
        given = torch.cat([q[start:stop] for _, start, stop in rows])
        return list(attention(given, cache.k, cache.v, mask=mask, layout=layout).split(lengths.diff().tolist()))

    (whole,) = run([(0, 0, s)])
    chunks = torch.cat([run([(1, 7, 90), (0, start, stop)])[1] for start, stop in ((0, 33), (33, 500), (500, s))])
    steps = torch.cat([run([(1, 3, 4), (0, i, i + 1), (1, 60, 149)])[1] for i in range(0, s, 113)])
    assert torch.equal(whole, chunks)
    assert torch.equal(whole[::113], steps)
    alone = attention(q[None, -1:], cache.k, cache.v, mask=mask, layout=Paged(cache.table[:1], cache.used[:1], None, 1))
    assert torch.equal(alone[0], whole[-1:])


@pytest.mark.gpu
def test_repeats_are_bitwise_equal() -> None:
    cache = Cache(5, 3000)
    cache.fill([3000, 0, 1, 900, 2048])
    q = torch.randn(5, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    first = attention(q, cache.k, cache.v, layout=cache.layout(), return_lse=True)
    for _ in range(20):
        again = attention(q, cache.k, cache.v, layout=cache.layout(), return_lse=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_lengths_and_tables(captured: Any) -> None:
    """A step with its append, captured with empty requests; nothing in it waits for the host."""
    cache = Cache(4, 2000)
    q = torch.randn(4, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(2, 4, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    angles = torch.randn(2000, 32, device="cuda")

    def step() -> list[Tensor]:
        append_kv(cache.k, cache.v, cache.layout(), *new, rotary=(angles.cos(), angles.sin()))
        after = Paged(cache.table, cache.used + 1)
        out = torch.empty_like(q)
        _, lse = attention(q, cache.k, cache.v, mask=causal(), layout=after, out=out, return_lse=True)
        return [out, lse]

    graph, found = captured(step)
    for lengths in ([0, 0, 0, 0], [5, 1900, 0, 700], [100, 50, 0, 0]):
        cache.fill(lengths)
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        for x, wanted in zip(found, step(), strict=True):
            assert x.isfinite().all()
            assert torch.equal(x, wanted), lengths
        cache.table.copy_(cache.table[torch.randperm(4, device="cuda")])
        cache.used.zero_()


@pytest.mark.gpu
def test_caches_beyond_32_bits() -> None:
    """The last pages of a cache of more than 2^31 elements; other pages stay as they are."""
    size, h_k, d = 64, 8, 128
    pages = (1 << 31) // (size * h_k * d) + 9
    k, v = (torch.zeros(pages, size, h_k, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.tensor([[pages - 1, pages - 2], [0, pages - 3]], device="cuda", dtype=torch.int32)
    before, after = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.full((2,), 100, device="cuda")
    new = torch.randn(2, 2, 100, h_k, d, device="cuda", dtype=torch.bfloat16)
    append_kv(k, v, Paged(table, before), *new)
    written = torch.tensor([0, pages - 3, pages - 2, pages - 1], device="cuda")
    assert k[1 : pages - 3].count_nonzero() == v[1 : pages - 3].count_nonzero() == 0
    assert all(k[page].any() for page in written)
    q = torch.randn(2, 1, 32, d, device="cuda", dtype=torch.bfloat16)
    check(q, k[written], v[written], layout=Paged(torch.tensor([[3, 2], [0, 1]], device="cuda"), after)).assert_ok()
    found = attention(q, k, v, layout=Paged(table, after))
    wanted = attention(q, k[written], v[written], layout=Paged(torch.tensor([[3, 2], [0, 1]], device="cuda"), after))
    assert torch.equal(found, wanted)


@pytest.mark.gpu
def test_nothing_else_is_written() -> None:
    """Outputs between canaries, tables that name pages beyond the cache."""
    cache = Cache(2, 500)
    cache.fill([500, 30])
    table = torch.where(torch.arange(cache.table.shape[1], device="cuda") % 5 == 4, 1 << 29, cache.table)
    held = torch.full((4, 1, 8, 64), 7.0, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 1, 8, 64, device="cuda", dtype=torch.bfloat16)
    attention(q, cache.k, cache.v, layout=Paged(table.int(), cache.used, num_splits=3), out=held[1:3])
    torch.cuda.synchronize()
    assert (held[[0, 3]] == 7).all()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """gluon without its refusal of few query rows."""
    monkeypatch.setattr(gluon, "LEAST_ROWS", 0)
    monkeypatch.setattr(gluon, "LEAST_ITEMS", 0)


def in_bulk(case: Case) -> Case:
    """The same with pages that gluon takes, and keys in one piece."""
    return case.replace(page_size=case.page_size if case.page_size % 8 == 0 else 8, splits=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("d", "d_v"), [(59, 59), (111, 111), (111, 8), (59, 111), (40, 24)])
def test_partial_rows(d: int, d_v: int, dtype: str) -> None:
    """Head dims that no 16 bytes divide, in caches whose rows start at multiples of them, with NaN between. Element by
    element such tiles were once wrong on a GPU and right in the interpreter."""
    for case in GPU_CASES:
        given = case.replace(dtype=dtype, d=d, d_v=d_v).inputs("cuda")
        q, k, v = given.q, *(paged.spaced(x) for x in (given.k, given.v))
        check(q, k, v, backend="triton", **given.keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in GPU_CASES if case.d <= gluon.SUPPORT.max_d], ids=str)
def test_named_cases_in_bulk(case: Case, hopper: None) -> None:
    for dtype in ("bf16", "fp16") if case.name in ("chunk", "mixed") else ("bf16",):
        given = in_bulk(case).replace(dtype=dtype).inputs("cuda")
        check(given.q, given.k, given.v, backend="gluon", **given.keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "size"), [*((128, size) for size in (8, 16, 24, 32, 64, 128, 256)), (64, 16), (256, 16), (192, 64)]
)
def test_page_sizes_in_bulk(d: int, size: int, hopper: None) -> None:
    """Prompts and chunks of them, as batches and end to end; lengths that are no multiples of anything."""
    for lengths, s_q, s_k, mask in (
        ((), 300, 2300, "causal"),
        ((700, 0, 1, 129, 64), 0, 1100, "causal"),
        ((), 150, 150, "none"),
        ((), 200, 1100, "window(100,0)"),
    ):
        case = Case("", dtype="bf16", b=5 if lengths else 4, h_q=8, h_k=2, s_q=s_q or 700, s_k=s_k, d=d, mask=mask,
                    order="paged", page_size=size, lengths=lengths, tail=9 if lengths else 0)  # fmt: skip
        given = case.inputs("cuda", seed=s_k)
        check(given.q, given.k, given.v, backend="gluon", **given.keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("lengths", [(), (90, 0, 260, 1)], ids=["batch", "end-to-end"])
def test_predicates_and_scores_in_bulk(size: int, lengths: tuple[int, ...], hopper: None) -> None:
    predicate = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx ^ h) % 8 != 3)
    base = Case("", dtype="bf16", b=4, h_q=8, h_k=2, s_q=260, s_k=900, d=128, sink=True, order="paged", page_size=size,
                lengths=lengths)  # fmt: skip
    for score in ("none", "softcap(5)", "alibi"):
        for mask in (predicate, predicate & window(300, 0), predicate | window(9, 0), causal()):
            given = base.replace(score=score).inputs("cuda")
            check(given.q, given.k, given.v, backend="gluon", **given.keywords | {"mask": mask}).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(16))
def test_drawn_case_in_bulk(seed: int, hopper: None) -> None:
    case = in_bulk(draws.paged(seed, ("bf16", "fp16")[seed % 2]).replace(s_k=40 + 97 * seed))
    given = case.inputs("cuda", seed=seed)
    report = check(given.q, given.k, given.v, backend="gluon", **given.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


@pytest.mark.gpu
@pytest.mark.parametrize("flat", [False, True])
def test_a_graph_of_prompts_is_replayed(flat: bool, hopper: None, captured: Any) -> None:
    """Captured with empty requests; nothing in it waits for the host, and rows that nobody uses stay out of it."""
    cache, t = Cache(4, 2000, d=128), 1200
    q = torch.randn(*((t,) if flat else (4, t // 4)), 8, 128, device="cuda", dtype=torch.bfloat16)
    offsets = torch.zeros(5, dtype=torch.int32, device="cuda")
    out = torch.empty_like(q)

    def step() -> list[Tensor]:
        layout = Paged(cache.table, cache.used, offsets if flat else None)
        given = {"mask": causal(), "layout": layout, "return_lse": True, "backend": "gluon"}
        held, lse = attention(q, cache.k, cache.v, out=out, **given)
        assert held is out
        return [held, lse]

    graph, found = captured(step)
    steps = ([0] * 4, [0] * 4), ([5, 900, 0, 295], [5, 1900, 0, 700]), ([1, 1, 400, 1], [9, 64, 400, 1])
    for new, keys in steps:
        cache.used.zero_()
        cache.fill(keys)
        offsets[1:] = torch.tensor(new, device="cuda").cumsum(0)
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        held = [x.clone() for x in found]
        for x, wanted in zip(held, step(), strict=True):
            if flat and x.shape == q.shape:  # of out the rows after the last sequence stay
                assert x[sum(new) :].isnan().all()
                x, wanted = x[: sum(new)], wanted[: sum(new)]
            assert not x.isnan().any()
            assert torch.equal(x, wanted), (new, keys)
        layout = Paged(cache.table, cache.used, offsets if flat else None)
        check(q, cache.k, cache.v, mask=causal(), layout=layout, backend="gluon").assert_ok()
        cache.table.copy_(cache.table[torch.randperm(4, device="cuda")])
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)


@pytest.mark.gpu
def test_prompts_between_canaries(hopper: None) -> None:
    """Outputs that lie apart, queries that do not lie at multiples of 16 bytes, tables that name pages beyond the
    cache, and repeats."""
    cache = Cache(2, 500)
    cache.fill([500, 330])
    table = torch.where(torch.arange(cache.table.shape[1], device="cuda") % 5 == 4, 1 << 29, cache.table).int()
    cache.k.nan_to_num_()
    cache.v.nan_to_num_()
    held = torch.full((4, 130, 8, 72), 7.0, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(2, 130, 8, 65, device="cuda", dtype=torch.bfloat16)[..., 1:]
    layout, out = Paged(table, cache.used), held[1:3, ..., :64]
    first = attention(q, cache.k, cache.v, layout=layout, out=out, backend="gluon").clone()
    inside = Paged(table.clamp(max=len(cache.k) - 1), cache.used)
    assert torch.equal(attention(q, cache.k, cache.v, layout=inside, backend="gluon"), first)
    for _ in range(20):
        assert torch.equal(attention(q, cache.k, cache.v, layout=layout, backend="gluon"), first)
    assert torch.equal(out, first)
    assert (held[[0, 3]] == 7).all()
    assert (held[..., 64:] == 7).all()
    check(q, cache.k, cache.v, layout=inside, backend="gluon").assert_ok()


@pytest.mark.gpu
def test_caches_beyond_32_bits_in_bulk(hopper: None) -> None:
    size, h_k, d = 64, 8, 128
    count = (1 << 31) // (size * h_k * d) + 9
    k, v = (torch.zeros(count, size, h_k, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    table = torch.tensor([[count - 1, count - 2], [0, count - 3]], device="cuda", dtype=torch.int32)
    used = torch.full((2,), 100, device="cuda")
    written = torch.tensor([0, count - 3, count - 2, count - 1], device="cuda")
    for x in (k, v):
        x[written] = torch.randn(4, size, h_k, d, device="cuda", dtype=torch.bfloat16)
    near = Paged(torch.tensor([[3, 2], [0, 1]], device="cuda"), used)
    q = torch.randn(2, 90, 32, d, device="cuda", dtype=torch.bfloat16)
    found = attention(q, k, v, layout=Paged(table, used), backend="gluon")
    assert torch.equal(found, attention(q, k[written], v[written], layout=near, backend="gluon"))
    check(q, k[written], v[written], layout=near, backend="gluon").assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "gluon"])
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_rows_of_no_sequence_stay_in_out_on_a_gpu(splits: int, backend: str, hopper: None) -> None:
    """As servers pad batches, in memory that bulk copies can write to, and that they cannot; a tail as long as some
    tiles, and one within the last tile."""
    if backend == "gluon" and splits:
        return
    for lengths, tail in (((1, 60, 0, 7, 1), 9), ((1, 1, 1), 5), ((300, 70), 700), ((0, 0), 3), ((64, 64), 64)):
        case = Case("", dtype="bf16", b=len(lengths), h_q=8, h_k=2, s_k=900, d=64, mask="causal", order="paged",
                    lengths=lengths, tail=tail, splits=splits)  # fmt: skip
        given = case.inputs("cuda")
        used = sum(lengths)
        plain = attention(given.q, given.k, given.v, backend=backend, return_lse=True, **given.keywords)
        assert not plain.out[used:].any()
        for columns in (64, 67):
            out = torch.full((used + tail, 8, columns), 7.0, device="cuda", dtype=torch.bfloat16)[..., columns - 64 :]
            found = attention(given.q, given.k, given.v, backend=backend, return_lse=True, out=out, **given.keywords)
            assert torch.equal(out[:used], plain.out[:used])
            assert (out[used:] == 7).all()
            assert (found.lse[:, used:] == -torch.inf).all()


@pytest.mark.gpu
def test_what_auto_takes() -> None:
    """Prompts in bulk; decoding, parts, and the bits that are the same in every batch elsewhere."""
    cache = Cache(4, 2000, d=128)
    cache.fill([2000] * 4)

    def chosen(s_q: int, num_splits: int | None = None) -> str | None:
        q = torch.randn(4, s_q, 8, 128, device="cuda", dtype=torch.bfloat16)
        return explain(q, cache.k, cache.v, layout=cache.layout(num_splits)).backend

    assert [chosen(1), chosen(1000), chosen(1000, 1), chosen(1000, 2)] == ["triton", "gluon", "triton", "triton"]
