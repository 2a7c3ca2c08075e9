"""Latent attention: one cache, of whose columns the first are the values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade import Dense, LatentCache, Packed, Paged, append_kv, attention, causal, explain, selected, softcap, window
from saccade.backends import backend_module, cpu
from saccade.backends.device import slot_lists
from saccade.call import Call
from saccade.ops import dispatch
from saccade.testing import check
from saccade.testing.cases import Case
from saccade.util import hardware

D, D_V = 576, 512


def cache_of(dtype: torch.dtype = torch.bfloat16, pages: int = 9, size: int = 16) -> tuple[Tensor, Paged]:
    """A cache (pages, size, 1, 576), and two sequences of 70 and 20 keys."""
    table = torch.randperm(pages, dtype=torch.int32)[:8].view(2, 4)
    return torch.randn(pages, size, 1, D, dtype=dtype), Paged(table, torch.tensor([4 * size - 3, 20]))


def test_views_alone_are_latent():
    cache, layout = cache_of()
    q, other = torch.randn(2, 1, 16, D).bfloat16(), cache.clone()
    calls = {
        "the first columns": (cache, cache[..., :D_V], True),
        "all columns": (cache, cache, True),
        "a copy": (cache, cache[..., :D_V].clone(), False),
        "of another cache": (cache, other[..., :D_V], False),
        "other columns": (cache, cache[..., D - D_V :], False),
        "other pages": (cache[:-1], cache[1:, ..., :D_V], False),
    }
    for name, (k, v, latent) in calls.items():
        assert explain(q, k, v, layout=layout).spec.latent == latent, name
        check(q, k, v, layout=layout, mask=causal()).assert_ok()
    dense = torch.randn(1, 1, 8, 64)
    assert not explain(dense, dense, dense).spec.latent


@pytest.mark.parametrize(
    ("heads", "s_q", "changes", "reason"),
    [
        (128, 1, {}, None),
        (16, 2, {}, None),
        (17, 1, {"size": 1}, None),
        (16, 1, {}, "17 query rows and more for each sequence and key head, not 16"),
        (128, 1, {"packed": True}, "equally many queries for each sequence"),
        (128, 1, {"max_scores": True}, None),
        (128, 1, {"num_splits": 1}, "not with num_splits=1"),
        (128, 1, {"d_v": 448}, "takes head dims 576/512 for latent attention, not 576/448"),
        (128, 1, {"dtype": torch.float32}, "16-bit"),
    ],
)
def test_which_kernel_takes_what(on_hopper, heads, s_q, changes, reason):
    """Hopper's, and otherwise the portable one, with a reason that `explain` tells."""
    given = {"size": 16, "dtype": torch.bfloat16, "d_v": D_V, "packed": False, "num_splits": None, **changes}
    cache, layout = cache_of(given["dtype"], size=given["size"])
    q = torch.randn(2, s_q, heads, D, dtype=given["dtype"])
    offsets = torch.tensor([0, s_q, 2 * s_q]).int() if given["packed"] else None
    layout = Paged(layout.block_table, layout.seqused_k, offsets, given["num_splits"])
    rows = q.flatten(0, 1) if given["packed"] else q
    max_scores = given.get("max_scores", False)
    told = explain(rows, cache, cache[..., : given["d_v"]], layout=layout, return_max_scores=max_scores)
    assert told.spec.latent
    assert told.backend == ("gluon" if reason is None else "triton")
    assert reason is None or reason in "; ".join(told.reasons["gluon"]) or given["dtype"] == torch.float32


@pytest.mark.parametrize("heads", [128, 100, 65, 64, 16, 1])
def test_tables_of_many_rows_of_any_number_of_heads(heads):
    """From LEAST_ROWS rows on neighbours share a table, if a tile has room for the heads of two."""
    rows = slot_lists.LEAST_ROWS
    kv, q = torch.empty(1, 9, 1, D).bfloat16(), torch.empty(1, rows, heads, D).bfloat16()
    mask = selected(torch.zeros(1, 1, rows, 2).int())
    lists = slot_lists.SlotLists.empty(Call(q, kv, kv[..., :D_V], mask=mask, layout=Dense("bshd")), shares=True)
    assert lists.rows == max(1, min(8, 64 // heads))


@pytest.mark.parametrize(
    ("heads", "rows", "backend"), [(16, 2, "triton"), (17, 2, "gluon"), (16, 1024, "gluon"), (1, 1024, "gluon")]
)
def test_which_kernel_takes_slots(on_hopper, heads, rows, backend):
    cache, q = torch.randn(5, 16, 1, D).bfloat16(), torch.randn(rows, heads, D).bfloat16()
    layout = Paged(slots=torch.zeros(rows, 3).int(), seqused_k=torch.zeros(rows).int())
    assert explain(q, cache, cache[..., :D_V], layout=layout).backend == backend


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (selected, None),
        (lambda lists: selected(lists) & causal(), None),
        (lambda lists: selected(lists.expand(-1, 4, -1, -1)), "lists of keys that all heads share"),
        (lambda lists: selected(lists) | causal(), "one list of keys, beside other masks by &"),
        (lambda lists: selected(lists) & selected(lists + 1), "one list of keys, beside other masks by &"),
    ],
)
def test_lists_over_dense_latents(on_hopper, change, reason):
    kv, q = torch.randn(2, 9, 1, D).bfloat16(), torch.randn(2, 3, 4, D).bfloat16()
    mask, layout = change(torch.zeros(2, 1, 3, 2).int()), Dense("bshd")
    told = explain(q, kv, kv[..., :D_V], mask=mask, layout=layout)
    assert (told.backend == "gluon") == (reason is None)
    assert reason or told.gradient == "triton"
    assert not reason or reason in "; ".join(told.reasons["gluon"])


@pytest.fixture
def on_hopper(monkeypatch):
    """Calls on a CPU are planned as if they were on Hopper."""
    gluon, triton = (backend_module(name) for name in ("gluon", "triton"))
    for module in (gluon, triton):
        monkeypatch.setattr(module, "obstacle", lambda: None)
    monkeypatch.setattr(hardware, "name", lambda device: "sm90")
    monkeypatch.setattr(hardware, "present", lambda word: word == "sm90")  # whose cache would outlive the name
    dispatch._plans.clear()
    yield
    dispatch._plans.clear()


def test_a_compiled_call_is_latent(monkeypatch):
    """What a compiler passes on is the view."""
    cache, layout = cache_of(torch.float32)
    q, seen, run = torch.randn(2, 1, 16, D), [], cpu.run_forward
    monkeypatch.setattr(cpu, "run_forward", lambda problem, *rest: seen.append(problem.latent) or run(problem, *rest))

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q: Tensor, cache: Tensor) -> Tensor:
        return attention(q, cache, cache[..., :D_V], layout=layout)

    assert torch.equal(call(q, cache), attention(q, cache, cache[..., :D_V], layout=layout))
    assert seen == [True, True]


@pytest.mark.parametrize("compiles", [False, True])
def test_rows_are_appended_by_views(compiles):
    """Keys and values are disjoint columns of one cache, whose keys alone are rotated."""
    cache, layout = cache_of(torch.float32)
    wanted, angles = cache.clone(), torch.randn(80, 32)
    rotary = angles.cos(), angles.sin()
    latents, keys, q = torch.randn(2, 2, 1, D_V), torch.randn(2, 2, 1, D - D_V), torch.randn(2, 2, 16, D - D_V)

    def step(cache: Tensor) -> Tensor:
        found = append_kv(cache[..., D_V:], cache[..., :D_V], layout, keys, latents, q=q, rotary=rotary)
        assert found is not None
        return found

    turned = (torch.compile(step, backend="aot_eager") if compiles else step)(cache)
    apart = wanted[..., D_V:].clone(), wanted[..., :D_V].clone()
    torch.testing.assert_close(turned, append_kv(*apart, layout, keys, latents, q=q, rotary=rotary))
    assert torch.equal(cache, torch.cat(apart[::-1], dim=-1))
    assert not torch.equal(cache, wanted)


def test_a_row_is_not_written_twice():
    cache, layout = cache_of(torch.float32)
    new = torch.randn(2, 1, 1, D)
    with pytest.raises(ValueError, match=r"k_cache .* share memory with v_cache.*cache\[\.\.\., d_v:\]"):
        append_kv(cache, cache[..., :D_V], layout, new, new[..., :D_V])


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_other_layouts_take_its_head_dims(backend):
    k = torch.randn(2, 1, 40, D)
    q = torch.randn(2, 16, 3, D)
    check(q, k, k[..., :D_V], mask=causal(), backend=backend).assert_ok()
    used = torch.tensor([40, 7])
    check(q, k, k[..., :D_V], layout=Dense(seqused_k=used), backend=backend).assert_ok()
    offsets = torch.tensor([0, 2, 3]), torch.tensor([0, 30, 40])
    rows, keys = q[0].transpose(0, 1), k[0].transpose(0, 1)
    check(rows, keys, keys[..., :D_V], layout=Packed(*offsets, 2, 30), mask=causal(), backend=backend).assert_ok()


# On a GPU


def case_of(**changes) -> Case:
    case = Case("", b=3, h_q=16, h_k=1, s_q=1, s_k=2300, d=D, d_v=D_V, order="paged", page_size=64, cache="latent")
    return case.replace(**{"mask": "causal", **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 16, 1])
@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
def test_pages_and_groups(h_q: int, size: int) -> None:
    for b, s_q, splits in ((1, 1, 0), (3, 2, 0), (40, 1, 1), (2, 5, 3)):
        given = case_of(b=b, h_q=h_q, s_q=s_q, page_size=size, splits=splits).inputs("cuda", seed=b)
        check(given.q, given.k, given.v, **given.keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"mask": "window(300,0)", "sink": True, "s_q": 2},
        {"score": "softcap(9)", "s_q": 2, "page_size": 1},
        {"mask": "dilated_window", "s_q": 3, "h_q": 20},
        {"score": "alibi", "h_q": 128, "b": 5},
        {"lengths": (1, 0, 70, 2), "tail": 5, "b": 4, "sink": True},
        {"d": 320, "d_v": 264},
        {"d": 512, "d_v": 512, "h_q": 40},
        {"d": 128, "d_v": 96, "h_k": 2},
    ],
    ids=str,
)
def test_features(changes: dict, dtype: str) -> None:
    given = case_of(dtype=dtype, **changes).inputs("cuda", seed=1)
    assert explain(given.q, given.k, given.v, **given.keywords).spec.latent
    check(given.q, given.k, given.v, return_max_scores=True, **given.keywords).assert_ok()


def gpu_cache_of(b: int, n: int, size: int = 64) -> tuple[Tensor, Tensor, Paged]:
    cache = torch.randn(b * n // size, size, 1, D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(len(cache), device="cuda").view(b, -1).int()
    q = torch.randn(b, 1, 16, D, device="cuda", dtype=torch.bfloat16)
    return q, cache, Paged(table, torch.full((b,), n - 3, device="cuda", dtype=torch.int32))


@pytest.mark.gpu
def test_a_plan_for_views_is_for_views_alone() -> None:
    """Calls that differ in nothing but whose memory the values have; and their bits, where the numbers are the same."""
    q, cache, layout = gpu_cache_of(4, 1024)
    other = torch.randn_like(cache)
    view, copy, stranger = cache[..., :D_V], cache.clone()[..., :D_V], other[..., :D_V]
    for _ in range(2):
        for v in (view, stranger, copy):
            check(q, cache, v, layout=layout, mask=causal(), backend="triton").assert_ok()
    # Of one split the bits do not depend on how a cache lies; else tiles and parts are those of the bytes to read.
    one = Paged(layout.block_table, layout.seqused_k, num_splits=1)
    found = [attention(q, cache, v, layout=one, backend="triton") for v in (view, copy, stranger)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [causal(), window(200, 0)], ids=repr)
def test_a_graph_appends_and_attends(mask, captured) -> None:
    """Through views of one cache; replayed with other lengths, and nothing in it waits for the host."""
    q, cache, layout = gpu_cache_of(3, 1024)
    used = layout.seqused_k.fill_(0)
    latents, keys = (torch.randn(3, 1, 1, n, device="cuda", dtype=torch.bfloat16) for n in (D_V, D - D_V))
    angles = torch.randn(1024, 32, device="cuda")

    def step() -> Tensor:
        append_kv(cache[..., D_V:], cache[..., :D_V], layout, keys, latents, rotary=(angles.cos(), angles.sin()))
        after = Paged(layout.block_table, used + 1)
        return attention(q, cache, cache[..., :D_V], mask=mask, layout=after, score_mod=softcap(20.0))

    graph, found = captured(step)
    for lengths in ([0, 0, 0], [5, 1000, 64], [700, 63, 0]):
        used.copy_(torch.tensor(lengths))
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, step())
        after = Paged(layout.block_table, used + 1)
        check(q, cache, cache[..., :D_V], mask=mask, layout=after, score_mod=softcap(20.0)).assert_ok()


@pytest.mark.gpu
def test_a_compiled_call() -> None:
    q, cache, layout = gpu_cache_of(3, 512)

    @torch.compile(fullgraph=True)
    def call(q: Tensor, cache: Tensor) -> Tensor:
        return attention(q, cache, cache[..., :D_V], layout=layout, mask=causal())

    assert torch.equal(call(q, cache), attention(q, cache, cache[..., :D_V], layout=layout, mask=causal()))


@pytest.mark.parametrize("form", ["v3.2", "v4"])
def test_records_of_which_no_row_is_listed(form: str) -> None:
    size, d = (656, 576) if form == "v3.2" else (584, 512)
    cache = LatentCache(torch.zeros(3, 4, size, dtype=torch.uint8), form)
    layout = Paged(slots=torch.zeros(2, 0, dtype=torch.long), seqused_k=torch.zeros(2, dtype=torch.long))
    out = attention(torch.randn(2, 4, d), cache, cache, layout=layout, return_lse=True)
    assert not out.out.any()
    assert bool((out.lse == -torch.inf).all())


def test_records_share_no_memory_with_what_is_written() -> None:
    held = torch.zeros(16, 4, 656, dtype=torch.uint8)
    cache, slot = LatentCache(held, "v3.2"), torch.tensor([0])
    floats = held.view(-1).view(torch.float32)
    with pytest.raises(ValueError, match="must not share memory with k_new"):
        append_kv(cache, cache, None, floats[:576].view(1, 1, 576), None, slot_mapping=slot)
    expanded = LatentCache(held[:1].expand(3, 4, 656), "v3.2")
    with pytest.raises(ValueError, match="elements of it share memory"):
        append_kv(expanded, expanded, None, torch.randn(1, 1, 576), None, slot_mapping=slot)
    layout = Paged(slots=torch.zeros(2, 1, dtype=torch.long), seqused_k=torch.ones(2, dtype=torch.long))
    with pytest.raises(ValueError, match="out is written to, and must not share memory with k"):
        attention(torch.randn(2, 4, 576), cache, cache, layout=layout, out=floats[: 2 * 4 * 512].view(2, 4, 512))
    assert not held.any()
    with pytest.raises(ValueError, match=r"slot_mapping \(2,\)"):
        append_kv(cache, cache, None, torch.randn(1, 1, 576), None, slot_mapping=torch.tensor([0, 1]))
