"""Score modifications: the function, its derivative, and the tensors that it travels in."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from saccade import alibi, attention, causal, compose, mask_mod, prefix, relative_bias, scores, softcap, window
from saccade.backends import Launches
from saccade.backends.device import distance_tables
from saccade.call import Call
from saccade.testing.accuracy import Report, check
from saccade.testing.call_slice import captured
from saccade.testing.cases import NAMED
from tests.support.devices import every_head_dim
from tests.support.scores import NAMES, build_score, halved_from, near_or_third

MODS = [softcap(0.5), softcap(50.0)]
AT = tuple(torch.zeros(1, dtype=torch.int64) for _ in range(4))


@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_derivative(mod):
    score = torch.linspace(-200, 200, 401, dtype=torch.float64, requires_grad=True)
    modified = mod(score, *AT)
    wanted = torch.autograd.grad(modified, score, torch.ones_like(modified))[0]
    torch.testing.assert_close(mod.derivative(score.detach(), *AT), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_dtype_and_shape_stay(mod, dtype):
    score = torch.randn(2, 3, 4, 5).to(dtype)
    for x in (mod(score, *AT), mod.derivative(score, *AT)):
        assert (x.dtype, x.shape) == (dtype, score.shape)


def test_softcap_caps():
    score = torch.tensor([-1e30, -1.0, 0.0, 1.0, 1e30], dtype=torch.float64)
    capped = softcap(2.0)(score, *AT)
    assert capped.abs().max() == 2
    assert torch.equal(capped, -capped.flip(0))
    assert torch.equal(capped, capped.sort().values)


@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_text_and_records_are_the_whole_mod(mod):
    floats = list(mod.floats)
    assert scores.from_tensors(mod.identity, [], [], floats) == mod
    assert floats == []
    assert mod.kind in scores.KINDS
    assert scores.from_tensors("none", [], [], []) is None


@pytest.mark.parametrize("mod", MODS, ids=repr)
def test_copies(mod):
    assert copy.deepcopy(mod) == pickle.loads(pickle.dumps(mod)) == mod
    assert hash(copy.deepcopy(mod)) == hash(mod)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_biases_of_narrow_slopes_are_as_exact_as_scores(dtype, backend):
    """Distances of hundreds times slopes of 8 bits: a product of 8 bits would be wrong by 1 and more."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 500, 8, dtype=torch.float64) for _ in range(3))
    slopes = torch.tensor([0.71, -0.33], dtype=dtype, requires_grad=True)
    exact = slopes.detach().double().requires_grad_()
    at = torch.arange(500)
    biased = q @ k.mT / 8**0.5 + exact[:, None, None] * (at[None] - at[:, None])
    wanted = biased.softmax(-1) @ v
    wanted.square().sum().backward()
    for run, atol in ((torch.float64, 1e-12), (torch.float32, 1e-3)):
        slopes.grad = None
        given = [x.to(run) for x in (q, k, v)]
        out = attention(*given, score_mod=alibi(slopes), backend=backend)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=atol)
        out.square().sum().backward()
        torch.testing.assert_close(slopes.grad.double(), exact.grad, rtol=2e-2, atol=0)


@pytest.mark.sample
@every_head_dim()
@pytest.mark.parametrize("name", NAMES)
def test_named(name, device):
    """Of fewer elements the plain run's largest error, by which the tolerance goes, is luck."""
    s_q, s_k = (200, 300) if device.type == "cuda" else (90, 110)
    score_mod = build_score(name, device.h_q, s_q, s_k, device.type, b=device.b)
    q, k, v = device.operands(s_q=s_q, s_k=s_k)
    check(q, k, v, mask=causal(), score_mod=score_mod, backend=device.backend).assert_ok()


# On a GPU


def operands(h_q: int, h_k: int, s_q: int, s_k: int, d: int) -> list[torch.Tensor]:
    shapes = (2, h_q, s_q, d), (2, h_k, s_k, d), (2, h_k, s_k, d)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bias-sink", "composed"])
def test_cases(name: str, backend: str) -> None:
    given = NAMED[name].replace(dtype="fp16", d=64, d_v=64).inputs("cuda", requires_grad=True)
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend=backend, **given.keywords).assert_ok()


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "causal", "window", "prefix"])
@pytest.mark.parametrize(("d", "s_q", "s_k"), [(64, 700, 600), (128, 600, 700), (256, 400, 500)])
def test_tiles_beyond_the_reach(d: int, s_q: int, s_k: int, mask: str, backend: str) -> None:
    reaching(d, s_q, s_k, mask, backend).assert_ok()


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_near_and_far_integers_in_turns(backend: str) -> None:
    """One program, in whose kernels the same number is 32 bits wide, or 64; compiled once for each."""
    q, k, v = operands(4, 2, 200, 300, 64)
    for n in (9, 1 << 30, 12, -(1 << 40), (1 << 63) - 1, 1 << 30):
        check(q, k, v, score_mod=halved_from(n), mask=mask_mod(near_or_third(n)), backend=backend).assert_ok()
