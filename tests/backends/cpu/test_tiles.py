"""The cpu backend's own: threads that draw tiles, what is float32 in bfloat16 calls, and what it keeps of masks."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from saccade import attention, bias, causal, mask_mod, softcap, window
from saccade.backends.cpu import score_mods, sdpa, tiled, tiling
from saccade.call.spec import TORCH_DTYPES
from saccade.testing import check
from saccade.util.caches import BoundedCache

pytestmark = pytest.mark.usefixtures("poison")


def operands(*lengths: int, dtype: torch.dtype = torch.float32, h_q: int = 4, h_k: int = 2):
    s_q, s_k = (*lengths, *lengths)[:2]
    return [torch.randn(2, h, s, 16).to(dtype) for h, s in ((h_q, s_q), (h_k, s_k), (h_k, s_k))]


@pytest.fixture
def crew(monkeypatch):
    """Three threads, however small the call."""
    monkeypatch.setattr(tiled, "threads", lambda: 3)
    monkeypatch.setattr(tiled, "ALONE", 0)


def test_every_item_once():
    done = []
    tiled.spread(range(100), lambda: done.append, 4)
    assert sorted(done) == list(range(100))


def test_threads_work_alone_and_stay_few():
    numbers, before, own = set(), threading.active_count(), torch.get_num_threads()
    for _ in range(50):
        tiled.spread(range(20), lambda: lambda _: numbers.add(torch.get_num_threads()), 3)
    assert numbers == {1}
    assert threading.active_count() <= before + 64
    assert torch.get_num_threads() == own
    fresh = []
    thread = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert fresh == [own]


def test_an_exception_comes_through_and_ends_the_drawing():
    drawn = []

    def fails(item):
        drawn.append(item)
        raise ValueError("of an item")

    with pytest.raises(ValueError, match="of an item"):
        tiled.spread(range(1000), lambda: fails, 3)
    assert len(drawn) <= 3
    test_every_item_once()


def test_modes_of_the_caller(crew):
    q, k, v = operands(70)
    wanted = attention(q, k, v, mask=window(9, 2), backend="reference")
    with torch.inference_mode():
        x = [y.clone() for y in (q, k, v)]
        out = attention(*x, mask=window(9, 2))
        assert out.is_inference()
    torch.testing.assert_close(out.clone(), wanted)
    leaves = [y.requires_grad_() for y in (q, k, v)]
    assert attention(*leaves, mask=window(9, 2)).requires_grad
    seen = []
    with torch.inference_mode():
        tiled.spread(range(3), lambda: lambda _: seen.append(torch.is_inference_mode_enabled()), 3)
    assert seen == [True] * 3
    tiled.spread(range(3), lambda: lambda _: seen.append(torch.is_grad_enabled()), 3)
    assert seen[3:] == [False] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork(fresh_process):
    code = """
import os, torch
from saccade import attention, window
from saccade.backends.cpu import tiled
torch.set_num_threads(1)
tiled.threads, tiled.ALONE = (lambda: 2), 0
q = torch.randn(1, 4, 70, 16)
run = lambda: attention(q, q, q, mask=window(9, 2))
first, child = run(), os.fork()
if child == 0:
    os._exit(0 if torch.equal(run(), first) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), torch.equal(run(), first))
"""
    assert fresh_process(code).split() == ["0", "True"]


def test_a_user_s_one_thread_is_respected(monkeypatch):
    submitted = []
    monkeypatch.setattr(tiled, "_executor", lambda: submitted.append(1))
    assert torch.get_num_threads() == 1
    attention(*operands(300), mask=window(100, 3))
    assert not submitted


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads, monkeypatch):
    """With gradients of a captured tensor, which all items add to."""
    monkeypatch.setattr(tiled, "threads", lambda: threads)
    monkeypatch.setattr(tiled, "ALONE", 0)
    q, k, v = operands(150, 190, dtype=torch.bfloat16)
    table = torch.randn(4, requires_grad=True)
    check(q, k, v, mask=causal(), score_mod=lambda s, b, h, i, j: s * table[h]).assert_ok()


def test_a_score_is_rounded_once(processor):
    """A score function of float32 in bfloat16 calls: what it adds is not rounded to the scores' dtype."""
    q, k, v = operands(60, dtype=torch.bfloat16)
    found = attention(0 * q, k, v, score_mod=lambda s, b, h, i, j: s + 1000 + j / 1000, return_lse=True)
    lse = torch.logsumexp(1000 + torch.arange(60).double() / 1000, 0)
    torch.testing.assert_close(found.lse.double(), lse.expand(2, 4, 60), rtol=torch.finfo(torch.float32).eps, atol=0)


def test_one_key_has_no_gradient_of_its_score(processor):
    q, k, v = operands(40, 1, dtype=torch.bfloat16)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, score_mod=softcap(5.0))
    dq, dk, _ = torch.autograd.grad(out, leaves, torch.randn_like(out))
    eps = torch.finfo(torch.bfloat16).eps ** 2  # delta is there to twice the digits and more
    assert max(dq.abs().max(), dk.abs().max()) < eps


@pytest.mark.parametrize("mask", [None, causal(), window(5, 9)], ids=repr)
def test_scale_zero(mask, processor):
    q, k, v = operands(66, dtype=torch.bfloat16)
    check(q, k, v, scale=0.0, mask=mask).assert_ok()


@pytest.mark.parametrize("mask", [None, causal(), window(5, 9)], ids=repr)
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_nan_stays_where_it_is_seen(which, mask, place):
    if place.device != "cpu":
        return
    made = operands(50, dtype=TORCH_DTYPES[place.dtype])
    made[which][0, 1, 20, 3] = torch.nan
    found, wanted = (attention(*made, mask=mask, backend=x, return_lse=True) for x in (place.backend, "reference"))
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x.isnan(), y.isnan())


def test_known_masks_are_looked_up(monkeypatch):
    """By the second call the function is recorded, and nothing of the mask is computed."""
    looked = []
    seen = torch.rand(60, 60) > 0.4
    q, k, v = operands(60, dtype=torch.bfloat16)

    def function(b, h, i, j):
        looked.append(1)
        return seen[i, j]

    mask = mask_mod(function)
    attention(q, k, v, mask=mask)
    before = len(looked)
    first = attention(q, k, v, mask=mask)
    assert len(looked) == before + 1
    seen.logical_not_()
    assert not torch.equal(attention(q, k, v, mask=mask), first)
    check(q, k, v, mask=mask).assert_ok()


def test_what_is_kept_of_masks_is_bounded(monkeypatch):
    cache = BoundedCache(1 << 16)
    monkeypatch.setattr(tiling, "MASK_TILES_BYTES", 1 << 16)
    monkeypatch.setattr(tiling, "mask_tiles", cache)
    q, k, v = operands(60)
    for left in range(40):
        attention(q, k, v, mask=window(left, 1), score_mod=softcap(3.0))
        assert 0 < sum(entry.value.nbytes for entry in cache._entries.values()) <= 1 << 16


@pytest.mark.parametrize("h_k", [2, 4])
def test_tensors_that_the_native_kernel_adds(h_k):
    q, k, v = operands(70, 90, h_k=h_k)
    seen = torch.rand(2, 4, 70, 90) > 0.2
    for given in (seen, seen[:1, :1], seen[:, :1]):
        check(q, k, v, mask=given).assert_ok()
    for shape in ((70, 90), (4, 70, 90), (2, 1, 70, 90), (4, 1, 90), (90,)):
        check(q, k, v, score_mod=bias(torch.randn(shape).requires_grad_())).assert_ok()
    seen[:, :, 7] = False
    for sink in (None, torch.randn(4)):  # rows that see nothing, twice
        check(q, k, v, mask=seen, sink=sink).assert_ok()
        check(q, k, v, mask=causal(), sink=sink).assert_ok()
        check(k.repeat_interleave(4 // h_k, 1), q[:, :h_k, :40], q[:, :h_k, :40], mask=causal(), sink=sink).assert_ok()
    hiding = torch.randn(70, 90)
    hiding[4] = -torch.inf
    check(q, k, v, score_mod=bias(hiding)).assert_ok()


@pytest.mark.parametrize("strides", [(27, 2, 1, 1), (27, 2, 3, 1), (400, 1, 20, 1), (27, 1, 0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_share_memory(strides, dtype):
    """PyTorch's kernel left parts of such a result unwritten, and its products refused such rows."""
    for place in range(3):
        given = operands(17, h_q=2, dtype=dtype)
        given[place] = torch.randn(1000).to(dtype).as_strided(given[place].shape, strides)
        check(*given).assert_ok()


def test_known_masks_and_biases_are_native(monkeypatch):
    """In float32, where that kernel is the faster one."""
    q, k, v = operands(70)
    wanted = sdpa._without_sink
    calls = []
    monkeypatch.setattr(sdpa, "_without_sink", lambda *x: calls.append(1) or wanted(*x))
    attention(q, k, v, mask=torch.rand(70, 70) > 0.2)
    attention(q, k, v, score_mod=bias(torch.randn(70, 70)))
    attention(q[:, :, :1], k, v, mask=causal())
    assert len(calls) == 3


def test_a_captured_tensor_is_never_written():
    """A score function that is a captured tensor, and nothing else: tiles hide scores in place."""
    table = torch.randn(70, 70)
    before = table.clone()
    q, k, v = operands(70)
    check(q, k, v, mask=window(9, 9), score_mod=lambda s, b, h, i, j: table[i, j]).assert_ok()
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    "fn",
    [
        lambda score, b, h, q_idx, kv_idx: torch.exp(score),
        lambda score, b, h, q_idx, kv_idx: 0.5 * score * score,
        lambda score, b, h, q_idx, kv_idx: 3 * torch.tanh(score) + torch.tanh(score) * (q_idx - kv_idx),
    ],
    ids=["its own derivative", "whose derivative is the score", "tanh"],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_value_and_derivative_of_one_graph(fn, dtype, crew):
    """What is shared by both is nobody's to write to."""
    q, k, v = operands(70, 90, dtype=TORCH_DTYPES[dtype])
    check(q, k, v, mask=causal(), score_mod=fn, dout=torch.randn_like(q), backend="cpu").assert_ok()


def test_tanh_has_all_its_digits():
    x = torch.cat([torch.linspace(-30, 30, 10001), torch.logspace(-40, 1, 10001), torch.tensor([0.0, 1e38])])
    x = torch.cat([x, -x, torch.tensor([torch.inf, -torch.inf])])
    wrong = (score_mods.tanh(x).double() - x.double().tanh()).abs()
    assert bool((wrong <= 4 * torch.finfo(torch.float32).eps * x.double().tanh().abs()).all())
    assert bool(score_mods.tanh(torch.tensor([torch.nan])).isnan().all())


@pytest.mark.parametrize("shape", [(2, 4, 70, 90), (1, 4, 70, 90), (4, 70, 90), (70, 90), (90,)])
def test_a_bias_is_added_in_place(shape, crew):
    q, k, v = operands(70, 90, dtype=torch.bfloat16)
    check(q, k, v, mask=causal(), score_mod=bias(torch.randn(shape)), backend="cpu").assert_ok()
