"""Latent attention: one cache, of whose columns the first are the values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade import Dense, Packed, Paged, append_kv, attention, causal, explain
from saccade.backends import backend_module, cpu
from saccade.ops import dispatch
from saccade.testing import check
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
        (128, 1, {"max_scores": True}, "no max_scores for latent attention"),
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


@pytest.fixture
def on_hopper(monkeypatch):
    """Calls on a CPU are planned as if they were on Hopper."""
    gluon, triton = (backend_module(name) for name in ("gluon", "triton"))
    for module in (gluon, triton):
        monkeypatch.setattr(module, "obstacle", lambda: None)
    monkeypatch.setattr(hardware, "name", lambda device: "sm90")
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
