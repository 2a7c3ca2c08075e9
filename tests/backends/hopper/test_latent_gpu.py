"""Latent attention on Hopper: more than 16 query rows on one key head, whose values are the keys' first columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, LatentCache, Paged, append_kv, attention, causal, explain, selected
from saccade.backends.hopper.latent import launch
from saccade.ops import replay
from saccade.testing import check
from saccade.testing.cases import Case
from tests.support import draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]

LATENT = Case(
    "latent", dtype="bf16", b=5, h_q=128, h_k=1, s_q=1, s_k=1000, d=576, d_v=512, order="paged", page_size=64,
    cache="latent",
)  # fmt: skip
CASES = [
    LATENT,
    LATENT.replace(name="one", b=1, s_k=1),
    LATENT.replace(name="tiles", b=1, s_k=64),
    LATENT.replace(name="long", b=2, s_k=9000, dtype="fp16"),
    LATENT.replace(name="many", b=140, s_k=300),
    LATENT.replace(name="half", h_q=64, page_size=128),
    LATENT.replace(name="odd", h_q=100, s_q=3, mask="causal", page_size=16),
    LATENT.replace(name="drafts", s_q=2, mask="causal", page_size=1),
    LATENT.replace(name="few-heads", h_q=16, s_q=6, mask="causal", page_size=48),
    LATENT.replace(name="few-rows", h_q=16, s_q=2, mask="causal"),
    LATENT.replace(name="few-rows-apart", h_q=20, page_size=1),
    LATENT.replace(name="two-heads", h_q=128, h_k=2, s_q=2, mask="causal", page_size=32),
    LATENT.replace(name="window", s_q=2, mask="window(200,0)", sink=True, page_size=8),
    LATENT.replace(name="prefix", s_q=4, mask="prefix(9)|window(60,0)", dtype="fp16"),
    LATENT.replace(name="predicate", s_q=2, mask="dilated_window", page_size=1),
    LATENT.replace(name="softcap", score="softcap(5)", sink=True, dtype="fp16"),
    LATENT.replace(name="alibi", s_q=2, score="alibi", mask="causal"),
    LATENT.replace(name="prompt", b=2, h_q=64, s_q=70, mask="causal"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    for seed in range(2):
        given = case.inputs("cuda", seed=seed)
        check(given.q, given.k, given.v, backend="gluon", **given.keywords).assert_ok()
        assert explain(given.q, given.k, given.v, **given.keywords).backend == "gluon"


@pytest.mark.parametrize("seed", range(16))
def test_drawn_cases(seed: int) -> None:
    drawn = draws.paged(seed, ("bf16", "fp16")[seed % 2])
    group = (64, 128, 100)[seed % 3]
    case = drawn.replace(
        h_k=1, h_q=group, d=576, d_v=512, s_k=40 + 197 * seed, cache="latent", splits=0, tail=0, s_q=1 + seed % 4
    )
    given = case.inputs("cuda", seed=seed)
    if explain(given.q, given.k, given.v, **given.keywords).backend == "gluon":
        report = check(given.q, given.k, given.v, backend="gluon", **given.keywords)
        assert report.ratio <= 1, f"{case.describe()}\n{report}"


def cache_of(lens: list[int], size: int = 64) -> tuple[Tensor, Paged]:
    """A cache whose unused rows are NaN, and whose tables name no page where there is none."""
    width = -(-max(lens) // size)
    cache = torch.full((len(lens) * width + 3, size, 1, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(len(cache), device="cuda").int()[: len(lens) * width].view(len(lens), width)
    for row, n in zip(order, lens, strict=True):
        for i in range(-(-n // size)):
            there = min(size, n - i * size)
            cache[row[i], :there] = torch.randn(there, 1, 576, device="cuda").bfloat16()
        row[-(-n // size) :] = 2**30
    return cache, Paged(order, torch.tensor(lens, dtype=torch.int32, device="cuda"))


LENS = [1000, 0, 64, 129, 4000, 1]


@pytest.mark.parametrize("size", [1, 16, 64])
def test_repeats_are_bitwise_equal(size: int) -> None:
    cache, layout = cache_of(LENS, size)
    q = torch.randn(len(LENS), 2, 128, 576, device="cuda").bfloat16()
    given: dict[str, Any] = {"layout": layout, "mask": causal(), "return_lse": True, "backend": "gluon"}
    first = attention(q, cache, cache[..., :512], **given)
    for _ in range(300):
        again = attention(q, cache, cache[..., :512], **given)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_a_graph_is_replayed_with_other_lengths(captured: Any) -> None:
    cache, layout = cache_of([4000] * 6)
    used = layout.seqused_k
    assert used is not None
    q = torch.randn(6, 1, 128, 576, device="cuda").bfloat16()

    def step() -> list[Tensor]:
        given: dict[str, Any] = {"layout": Paged(layout.block_table, used), "return_lse": True, "backend": "gluon"}
        return list(attention(q, cache, cache[..., :512], **given))

    used.zero_()
    graph, found = captured(step)
    for lens in (LENS, [0] * 6, [4000] * 6, [5, 4000, 0, 0, 64, 3]):
        used.copy_(torch.tensor(lens, dtype=torch.int32))
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(found, step(), strict=True)), lens
        check(q, cache, cache[..., :512], layout=Paged(layout.block_table, used), backend="gluon").assert_ok()


def _nothing(parts: Tensor, part_lse: Tensor) -> None:
    pass


def _a_part_is_lost(parts: Tensor, part_lse: Tensor) -> None:
    part_lse[2] = -torch.inf  # of the second line


def _halves_are_swapped(parts: Tensor, part_lse: Tensor) -> None:
    parts.copy_(parts.roll(256, -1))


def _a_stale_stage(parts: Tensor, part_lse: Tensor) -> None:
    parts[2] = parts[0]


def _sums_of_one_consumer(parts: Tensor, part_lse: Tensor) -> None:
    parts[0] *= 2
    part_lse[0] -= 0.7


def _one_percent(parts: Tensor, part_lse: Tensor) -> None:
    parts *= 1.01


FAULTS = [_a_part_is_lost, _halves_are_swapped, _a_stale_stage, _sums_of_one_consumer, _one_percent]


@pytest.mark.parametrize("fault", [_nothing, *FAULTS])
def test_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong parts fail by the tolerance; those of the kernel stay below it."""
    merging = launch.merging

    def faulty(*given: Any) -> Any:
        merge = merging(*given)

        def run(device: Any, tensors: tuple[Any, ...]) -> None:
            fault(*tensors[:2])
            merge(device, tensors)

        return run

    monkeypatch.setattr(launch, "merging", faulty)
    replay.forget()  # a replay of an earlier call would merge by itself
    cache, layout = cache_of([3000, 700])
    q = torch.randn(2, 1, 128, 576, device="cuda").bfloat16()
    report = check(q, cache, cache[..., :512], layout=layout, backend="gluon")
    assert (report.ratio <= 1) == (fault is _nothing), report


@pytest.mark.parametrize("heads", [1, 8, 16, 20, 64, 128])
def test_lists_of_rows(heads: int) -> None:
    """Rows of few heads share tiles from 1,024 rows on; of 64 heads and more they do not. Slots are the same lists."""
    torch.manual_seed(heads)
    b, s_q, s_k, n = 2, 601, 900, 130
    q = torch.randn(b, s_q, heads, 576, device="cuda").bfloat16()
    kv = torch.randn(b, s_k, 1, 576, device="cuda").bfloat16()
    lists = torch.rand(b, 1, s_q, s_k + 100, device="cuda").argsort(-1)[..., :n].int() - 50
    used = torch.randint(0, n + 1, (b, 1, s_q), device="cuda").int()
    layout, sink = Dense("bshd", torch.tensor([601, 77], device="cuda")), torch.randn(heads, device="cuda")
    given = {"sink": sink, "return_max_scores": True, "backend": "gluon", "backward": False}
    for mask in (selected(lists, used), selected(lists, used) & causal()):
        check(q, kv, kv[..., :512], mask=mask, layout=layout, **given).assert_ok()
    one = attention(q, kv, kv[..., :512], mask=selected(lists, used), layout=Dense("bshd"), backend="gluon")
    start = torch.arange(b, device="cuda").view(b, 1, 1) * s_k
    slots = torch.where((lists[:, 0] >= 0) & (lists[:, 0] < s_k), lists[:, 0] + start, -1)
    layout = Paged(slots=slots, seqused_k=used[:, 0])
    out = attention(q, kv, kv[..., :512], layout=layout, return_lse=True)
    assert explain(q, kv, kv[..., :512], layout=layout).backend == "gluon"
    torch.testing.assert_close(out.out, one, rtol=2**-7, atol=2**-7)
    compiled = torch.compile(attention, fullgraph=True)(q, kv, kv[..., :512], layout=layout, return_lse=True)
    assert torch.equal(compiled.lse, out.lse)


@pytest.mark.parametrize("heads", [1, 8, 16, 64, 100, 128])
def test_gradients_of_lists(heads: int) -> None:
    """Some rows see no key, some lists name what is none, and one key is in all; the same bits in each call."""
    torch.manual_seed(heads)
    b, s_q, s_k, n = 2, 45, 300, 130
    q = torch.randn(b, s_q, heads, 576, device="cuda").bfloat16()
    kv = torch.randn(b, s_k, 1, 576, device="cuda").bfloat16()
    lists = torch.rand(b, 1, s_q, s_k + 100, device="cuda").argsort(-1)[..., :n].int() - 50
    lists = torch.where(lists == 7, -1, lists)
    lists[..., 0] = 7
    used = torch.randint(0, n + 1, (b, 1, s_q), device="cuda").int()
    sink, dlse = torch.randn(heads, device="cuda"), torch.randn(b, heads, s_q, device="cuda")
    layout, dense = Dense("bshd", torch.tensor([45, 31], device="cuda")), Dense("bshd")
    check(q, kv, kv[..., :512], mask=selected(lists, used), layout=layout, sink=sink, dlse=dlse).assert_ok()
    check(q, kv, kv[..., :512], mask=selected(lists, used) & causal(), layout=dense).assert_ok()
    leaves = q.requires_grad_(), kv.requires_grad_()
    dout = torch.randn(b, s_q, heads, 512, device="cuda").bfloat16()

    def gradients() -> Any:
        out = attention(q, kv, kv[..., :512], mask=selected(lists), layout=dense, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    first = gradients()
    assert all(torch.equal(x, y) for _ in range(5) for x, y in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("fill", [-(1 << 31), (1 << 31) - 1, -1, 300, 114514])
def test_gradients_of_lists_that_name_nothing(fill: int) -> None:
    """Rows whose entries are no keys read no memory; the only key that is listed is NaN in no gradient of others."""
    q = torch.randn(1, 9, 20, 576, device="cuda").bfloat16().requires_grad_()
    kv = torch.full((1, 300, 1, 576), torch.nan, device="cuda").bfloat16()
    kv[:, 11] = 1
    kv.requires_grad_()
    lists = torch.full((1, 1, 9, 70), fill, device="cuda", dtype=torch.int32)
    lists[:, :, ::2, 33] = 11
    out = attention(q, kv, kv[..., :512], mask=selected(lists), layout=Dense("bshd"))
    dq, dkv = torch.autograd.grad(out.sum(), (q, kv))
    assert torch.equal(out[:, ::2], torch.ones_like(out[:, ::2]))
    assert not dq.any()
    assert not dkv[:, :11].any()
    assert not dkv[:, 12:].any()
    torch.testing.assert_close(dkv[0, 11, 0, :512], torch.full_like(dkv[0, 11, 0, :512], 5 * 20))


@pytest.mark.parametrize(("form", "size", "d"), [("v3.2", 656, 576), ("v4", 584, 512)])
def test_records(form: str, size: int, d: int) -> None:
    """As on a CPU, in a graph too, where another row is written in each replay."""
    torch.manual_seed(0)
    cache = LatentCache(torch.zeros(9, 64, size, dtype=torch.uint8, device="cuda"), form)
    rows, slots = torch.randn(500, 1, d, device="cuda").bfloat16(), torch.randperm(576, device="cuda")[:500]
    slots[::7] = -1
    append_kv(cache, cache, None, rows, None, slot_mapping=slots)
    other = LatentCache(torch.zeros(9, 64, size, dtype=torch.uint8), form)
    append_kv(other, other, None, rows.cpu(), None, slot_mapping=slots.cpu())
    assert torch.equal(cache.bytes.cpu(), other.bytes)
    listed = torch.rand(3, 1, 576, device="cuda").argsort(-1)[..., :100]
    layout, q = Paged(slots=listed, seqused_k=torch.full((3, 1), 100, device="cuda")), rows[:192].view(3, 1, 64, d)
    wide = cache.rows(None, q.dtype).view(9, 64, 1, d)

    def over_records(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        return attention(q, cache, cache, **keywords)

    check(q, wide, wide[..., :512], layout=layout, function=over_records).assert_ok()
    assert explain(q, cache, cache, layout=layout).spec.kv == ("records" if form == "v3.2" else "")
    few = {"layout": Paged(slots=listed, seqused_k=layout.seqused_k, num_splits=1)}  # no kernel reads these records
    check(q, wide, wide[..., :512], function=over_records, **few).assert_ok()
    pages = Paged(torch.randint(0, 9, (3, 7), device="cuda"), torch.tensor([400, 0, 77], device="cuda"))
    check(q, wide, wide[..., :512], layout=pages, mask=causal(), function=over_records).assert_ok()


def test_numbers_of_records() -> None:
    """Each byte of e4m3, times factors of all sizes, in the values of a row that sees one key; a byte that is NaN makes
    all of a row's values NaN."""
    cache = LatentCache(torch.zeros(1, 9, 656, dtype=torch.uint8, device="cuda"), "v3.2")
    finite = torch.tensor([x for x in range(256) if x & 0x7F != 0x7F], dtype=torch.uint8, device="cuda")
    cache.bytes[0, :8, :512] = finite[torch.arange(4096, device="cuda") % 254].view(8, 512)
    cache.bytes[0, 8, 300] = 0xFF
    factors = torch.tensor([2.0**-120, 1e-9, 1 / 448, 0.37, 1.0, 3.1, 777.7, 1e30, 1.0], device="cuda")
    cache.bytes[0, :, 512:528] = factors[:, None].expand(9, 4).contiguous().view(torch.uint8)
    layout = Paged(slots=torch.arange(9, device="cuda").view(9, 1, 1), seqused_k=torch.ones(9, 1, device="cuda").int())
    q = torch.zeros(9, 1, 64, 576, dtype=torch.bfloat16, device="cuda")
    out = attention(q, cache, cache, layout=layout, backend="gluon")
    wanted = cache.rows(None, torch.bfloat16)[:8, None, None, :512].expand_as(out[:8])
    torch.testing.assert_close(out[:8], wanted, rtol=2**-7, atol=0)
    assert bool(out[8].isnan().all())


def test_what_is_refused_names_what_would_work() -> None:
    cache, layout = cache_of([100, 50])
    q = torch.randn(2, 1, 16, 576, device="cuda").bfloat16()
    with pytest.raises(Exception, match="17 query rows and more for each sequence and key head, not 16"):
        attention(q, cache, cache[..., :512], layout=layout, backend="gluon")
    with pytest.raises(Exception, match="576/512 for latent attention, not 576/448"):
        attention(q.repeat(1, 1, 8, 1), cache, cache[..., :448], layout=layout, backend="gluon")
