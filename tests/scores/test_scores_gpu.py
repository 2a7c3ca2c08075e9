"""Score functions in the kernels of a GPU, forward and backward, gradients of captured tensors among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade import attention, causal, compose, mask_mod, prefix, relative_bias, window
from saccade.backends import Launches
from saccade.backends.device import distance_tables
from saccade.call import Call
from saccade.testing.accuracy import Report, check
from saccade.testing.call_slice import captured
from saccade.testing.cases import NAMED
from tests.support.scores import build_score, halved_from, near_or_third

pytestmark = pytest.mark.gpu


def operands(h_q: int, h_k: int, s_q: int, s_k: int, d: int) -> list[torch.Tensor]:
    shapes = (2, h_q, s_q, d), (2, h_k, s_k, d), (2, h_k, s_k, d)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize("name", ["bias-sink", "composed"])
def test_cases(name: str, backend: str) -> None:
    given = NAMED[name].replace(dtype="fp16", d=64, d_v=64).inputs("cuda", requires_grad=True)
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend=backend, **given.keywords).assert_ok()


def test_new_values_never_compile(backend: str, forward_kernel) -> None:
    def call(s: int, reach: int, cap: float) -> None:
        table = torch.randn(4, 2 * reach + 1, device="cuda")

        def mod(score, b, h, q_idx, kv_idx):
            return score * cap + table[h, torch.clamp(kv_idx - q_idx, -reach, reach) + reach]

        attention(*operands(4, 4, s, s, 64), score_mod=mod, backend=backend)

    call(64, 5, 0.5)
    cache = forward_kernel(backend).device_caches[0][0]
    before = len(cache)
    for s, reach, cap in ((77, 1, 1.0), (256, 16, 0.0), (1000, 300, 2.5)):
        call(s, reach, cap)
    assert len(cache) == before


def test_reads_by_distance_are_of_what_a_tensor_holds_now(backend: str) -> None:
    """In calls that repeat an earlier one too, and in their gradients."""
    q, k, v = operands(4, 2, 200, 300, 64)
    table = torch.zeros(4, 65, device="cuda")
    before = attention(q, k, v, score_mod=relative_bias(table), backend=backend)
    for _ in range(6):
        table.normal_()
        out, again = (attention(q, k, v, score_mod=relative_bias(x), backend=backend) for x in (table, table.clone()))
        assert not torch.equal(out, before)
        assert torch.equal(out, again)
        before = out
        check(q, k, v, score_mod=relative_bias(table), backend=backend).assert_ok()


def reaching(d: int, s_q: int, s_k: int, mask: str, backend: str) -> Report:
    """Of a table whose reach is less than a tile, so that tiles lie before it and behind it."""
    masks = {"full": None, "causal": causal(), "window": window(300, 50), "prefix": prefix(70)}
    torch.manual_seed(1)
    q, k, v = operands(4, 2, s_q, s_k, d)
    score_mod = relative_bias(torch.randn(4, 81, device="cuda", requires_grad=True))
    return check(q, k, v, mask=masks[mask], score_mod=score_mod, backend=backend)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "prefix"])
@pytest.mark.parametrize(("d", "s_q", "s_k"), [(64, 700, 600), (128, 600, 700), (256, 400, 500)])
def test_tiles_beyond_the_reach(d: int, s_q: int, s_k: int, mask: str, backend: str) -> None:
    reaching(d, s_q, s_k, mask, backend).assert_ok()


@pytest.mark.parametrize("radius", [0, 1, 2])
@pytest.mark.parametrize(("d", "s_q", "s_k", "heads"), [(64, 300, 200, 4), (128, 50, 40, 1), (192, 127, 127, 4)])
def test_few_distances(d: int, s_q: int, s_k: int, heads: int, radius: int, backend: str) -> None:
    """Of one distance no tile is in reach, and all lie on both sides of it. With a sink its gradient is not zero."""
    q, k, v = operands(4, 2, s_q, s_k, d)
    table = torch.randn(heads, 2 * radius + 1, device="cuda", requires_grad=True)
    sink = torch.randn(4, device="cuda")
    check(q, k, v, score_mod=relative_bias(table), sink=sink, backend=backend).assert_ok()
    constant = compose(relative_bias(table), lambda s, b, h, i, j: s + table[0, (i * j).clamp(0, 0)])
    check(q, k, v, score_mod=constant, sink=sink, backend=backend).assert_ok()


@pytest.mark.parametrize("ends", [(150.0, 0.0), (0.0, -150.0)], ids=["low", "high"])
@pytest.mark.parametrize("d", [64, 128])
def test_a_wrong_reach_is_rejected(d: int, ends: tuple[float, float], backend: str, monkeypatch) -> None:
    fill = distance_tables.tables

    def nearer(call: Call, launches: Launches, fast: bool = False) -> tuple[Any, ...]:
        found = fill(call, launches, fast)
        if found:
            found[0][..., :2] += torch.tensor(ends, device="cuda")
        return found

    monkeypatch.setattr(distance_tables, "tables", nearer)
    ratios = reaching(d, 700, 800, "full", backend).ratios
    assert min(ratios[name] for name in ("out", "dq", "dk", "dv")) > 1


@pytest.mark.parametrize("name", ["relative_bias", "gated", "ids"])
def test_learning_repeatably(name: str, backend: str) -> None:
    """Right, and the same bits each time."""
    q, k, v = operands(4, 2, 700, 900, 64)
    mod = build_score(name, 4, 700, 900, "cuda")
    keywords = {"mask": causal(), "score_mod": mod, "deterministic": True, "backend": backend}
    check(q, k, v, **keywords).assert_ok()
    leaves = list(captured(mod).values())
    first = torch.autograd.grad(attention(q, k, v, **keywords).square().sum(), leaves)
    for _ in range(20):
        again = torch.autograd.grad(attention(q, k, v, **keywords).square().sum(), leaves)
        assert all(map(torch.equal, again, first))


def test_near_and_far_integers_in_turns(backend: str) -> None:
    """One program, in whose kernels the same number is 32 bits wide, or 64; compiled once for each."""
    q, k, v = operands(4, 2, 200, 300, 64)
    for n in (9, 1 << 30, 12, -(1 << 40), (1 << 63) - 1, 1 << 30):
        check(q, k, v, score_mod=halved_from(n), mask=mask_mod(near_or_third(n)), backend=backend).assert_ok()
