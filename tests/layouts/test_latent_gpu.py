"""Latent attention on a GPU: every size of pages and group, graphs, and plans that know whose columns values are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade import Paged, append_kv, attention, causal, explain, softcap, window
from saccade.testing import check
from saccade.testing.cases import Case

pytestmark = pytest.mark.gpu
D, D_V = 576, 512


def case_of(**changes) -> Case:
    case = Case("", b=3, h_q=16, h_k=1, s_q=1, s_k=2300, d=D, d_v=D_V, order="paged", page_size=64, cache="latent")
    return case.replace(**{"mask": "causal", **changes})


@pytest.mark.parametrize("size", [64, 16, 1])
@pytest.mark.parametrize("h_q", [1, 16, 64, 128])
def test_pages_and_groups(h_q: int, size: int) -> None:
    for b, s_q, splits in ((1, 1, 0), (3, 2, 0), (40, 1, 1), (2, 5, 3)):
        given = case_of(b=b, h_q=h_q, s_q=s_q, page_size=size, splits=splits).inputs("cuda", seed=b)
        check(given.q, given.k, given.v, **given.keywords).assert_ok()


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


def cache_of(b: int, n: int, size: int = 64) -> tuple[Tensor, Tensor, Paged]:
    cache = torch.randn(b * n // size, size, 1, D, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(len(cache), device="cuda").view(b, -1).int()
    q = torch.randn(b, 1, 16, D, device="cuda", dtype=torch.bfloat16)
    return q, cache, Paged(table, torch.full((b,), n - 3, device="cuda", dtype=torch.int32))


def test_a_plan_for_views_is_for_views_alone() -> None:
    """Calls that differ in nothing but whose memory the values have; and their bits, where the numbers are the same."""
    q, cache, layout = cache_of(4, 1024)
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


@pytest.mark.parametrize("mask", [causal(), window(200, 0)], ids=repr)
def test_a_graph_appends_and_attends(mask, captured) -> None:
    """Through views of one cache; replayed with other lengths, and nothing in it waits for the host."""
    q, cache, layout = cache_of(3, 1024)
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


def test_a_compiled_call() -> None:
    q, cache, layout = cache_of(3, 512)

    @torch.compile(fullgraph=True)
    def call(q: Tensor, cache: Tensor) -> Tensor:
        return attention(q, cache, cache[..., :D_V], layout=layout, mask=causal())

    assert torch.equal(call(q, cache), attention(q, cache, cache[..., :D_V], layout=layout, mask=causal()))
