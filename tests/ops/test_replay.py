"""Calls that repeat an earlier one: what a key holds, and what takes the long way.

`done` (conftest.py) has the cpu backend stand in for one with kernels.
"""

from __future__ import annotations

import importlib
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from saccade import Dense, alibi, attention, causal, compose, mask_mod, scores, softcap, t5_bias, window
from saccade.ops import replay
from saccade.util.arguments import Unsupported
from tests.ops.conftest import LaunchRecorder

bind = importlib.import_module("saccade.scores.bind")
"""By name, as the package holds its function."""


def operands(s: int = 8, *, grad: bool = False, dtype: torch.dtype = torch.bfloat16, order: str = "bhsd") -> Any:
    shape = {"bhsd": (1, 2, s, 16), "bshd": (1, s, 2, 16)}[order]
    return [torch.randn(shape).to(dtype).requires_grad_(grad) for _ in range(3)]


def exact(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
    return attention(*(x.detach().double() for x in (q, k, v)), backend="reference", **keywords)


def check(found: Tensor, given: Any, **keywords: Any) -> None:
    torch.testing.assert_close(found.double(), exact(*given, **keywords), rtol=0.02, atol=0.02)


def settle(*given: Any, **keywords: Any) -> None:
    """Calls until a shortcut is known."""
    for _ in range(3):
        attention(*given, **keywords)


def test_later_calls_are_repeated(done: list[str]) -> None:
    given = operands()
    settle(*given)
    done.clear()
    for _ in range(3):
        given = operands()
        check(attention(*given), given)
    assert done == ["forward"] * 3


def test_calls_of_other_sizes_are_recorded_at_once(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As each step of a model has them, whose layers repeat them."""
    settle(*operands(8))
    for s in (9, 10):
        for times in range(3):
            done.clear()
            given = operands(s)
            check(attention(*given), given)
            assert done == ["forward"] * bool(times)
            done.clear()
            other = operands(s)  # of another form, which was not made twice
            check(attention(*other, scale=0.5 + s), other, scale=0.5 + s)
            assert done == ["forward"] * (times == 2)
    # What a first call did besides, as to compile, is no reason against the second.
    with monkeypatch.context() as patch:
        patch.setattr(LaunchRecorder, "replay", lambda *given: None)
        attention(*operands(11))
    for times in range(2):
        done.clear()
        attention(*operands(11))
        assert done == ["forward"] * times


def test_an_address_that_is_used_again(done: list[str]) -> None:
    """Freed memory comes back with other numbers, other shapes, other strides and other dtypes."""
    memory = torch.randn(4096)
    settle(*operands())
    for shape, dtype, order in [
        ((1, 2, 8, 16), torch.bfloat16, (0, 1, 2, 3)), ((1, 8, 2, 16), torch.bfloat16, (0, 2, 1, 3)),
        ((1, 2, 8, 16), torch.float16, (0, 1, 2, 3)), ((1, 2, 4, 32), torch.bfloat16, (0, 1, 2, 3)),
        ((2, 1, 8, 16), torch.bfloat16, (0, 1, 2, 3)),
    ]:  # fmt: skip
        for _ in range(4):
            memory.normal_()
            pieces = memory.view(4, 1024).to(dtype)[:3, :256].contiguous()
            given = [x.view(shape).permute(order) for x in pieces]
            check(attention(*given), given)
    assert len(done) >= 5


CHANGES = {
    "mask": {"mask": causal()},
    "window": {"mask": window(2, 1)},
    "scale": {"scale": 0.5},
    "score": {"score_mod": softcap(0.5)},
    "sink": {"sink": torch.tensor([1.0, -1.0])},
    "lse": {"return_lse": True},
    "max_scores": {"return_max_scores": True},
    "backend": {"backend": "reference"},
    "order": {"layout": Dense("bshd")},
    "lengths": {"layout": Dense(seqused_k=torch.tensor([3]))},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_argument_counts(change: str, done: list[str]) -> None:
    given, keywords = operands(), CHANGES[change]
    settle(*given)
    settle(*given, **keywords)
    done.clear()
    found, plain = attention(*given, **keywords), attention(*given)
    check(plain, given)
    found = found[0] if isinstance(found, tuple) else found
    keywords = {name: x for name, x in keywords.items() if name not in ("return_lse", "return_max_scores", "backend")}
    check(found, given, **keywords)
    assert "forward" in done


def test_results_that_are_asked_for(done: list[str]) -> None:
    given = operands()
    for keywords in (
        {"return_lse": True},
        {"return_max_scores": True},
        {"return_lse": True, "return_max_scores": True},
    ):
        want = attention(*(x.double() for x in given), backend="reference", **keywords)
        settle(*given, **keywords)
        done.clear()
        found = attention(*given, **keywords)
        assert done == ["forward"]
        assert type(found) is type(want)
        for x, y in zip(found, want, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x.double(), y, rtol=0.02, atol=0.02)


def test_arguments_are_checked_as_ever(done: list[str]) -> None:
    q, k, v = operands()
    settle(q, k, v)
    done.clear()
    for wrong, error in [
        ((q[0], k, v), ValueError), ((q.float(), k, v), ValueError), ((q, k[:, :, :4], v), ValueError),
        ((None, k, v), TypeError), ((q.to_sparse(), k, v), ValueError),
    ]:  # fmt: skip
        with pytest.raises(error):
            attention(*wrong)
    for keywords, error in [
        ({"scale": "x"}, TypeError), ({"mask": 3}, TypeError), ({"layout": "bhsd"}, TypeError),
        ({"return_lse": "yes"}, TypeError), ({"dropout_p": 2.0}, ValueError), ({"backend": "cuda"}, ValueError),
    ]:  # fmt: skip
        with pytest.raises(error):
            attention(q, k, v, **keywords)
    assert not done


def test_unaligned_rows_and_other_views(done: list[str]) -> None:
    given = operands()
    settle(*given)
    done.clear()
    q = torch.randn(1 + 256).bfloat16()[1:].view(1, 2, 8, 16)
    negative = torch._neg_view(given[0])
    for x in (q, given[0].mT.contiguous().mT):
        for _ in range(3):
            check(attention(x, *given[1:]), (x, *given[1:]))
    assert replay._find((), (negative, *given[1:])) is None


@pytest.mark.parametrize("place", range(5))
def test_negated_views(done: list[str], place: int) -> None:
    """As `z.conj().imag` is one: what lies in memory has the other sign. Gradients have torch look at every tensor."""
    sink, table = torch.tensor([0.5, -0.5]), torch.randn(8)
    given = [*operands(), sink, table]

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, t: Tensor, **keywords: Any) -> Tensor:
        return attention(q, k, v, sink=sink, score_mod=lambda score, b, h, i, j: score + t[j], **keywords)

    right = run(*(x.double() for x in given), backend="reference")
    for _ in range(4):
        run(*given)
    given[place] = torch._neg_view(-given[place])
    for _ in range(4):
        torch.testing.assert_close(run(*given).double(), right, rtol=0.02, atol=0.02)


def test_results_in_negated_memory(done: list[str]) -> None:
    given = operands()
    with pytest.raises(ValueError, match="view of negated numbers"):
        attention(*given, out=torch._neg_view(torch.empty_like(given[0])))


# Gradients


def gradients(given: Any, dout: Tensor, call: Any = attention) -> Any:
    return torch.autograd.grad(call(*given), given, dout)


def check_gradients(given: Any, dout: Tensor, call: Any = attention) -> None:
    wide = [x.detach().double().requires_grad_() for x in given]
    want = gradients(wide, dout.double(), lambda *of: call(*of, backend="reference"))
    for x, y in zip(gradients(given, dout, call), want, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)


def test_gradients_are_repeated(done: list[str]) -> None:
    for _ in range(5):
        given, dout = operands(grad=True), operands()[0]
        done.clear()
        check_gradients(given, dout)
    assert done == ["forward", "backward"]


def test_gradients_that_lie_otherwise(done: list[str]) -> None:
    """dout may be expanded, or have another order, in each backward."""
    given = operands(grad=True)
    douts = [operands()[0], torch.ones(()).bfloat16().expand(1, 2, 8, 16), torch.randn(1, 8, 2, 16).bfloat16().mT]
    douts[2] = torch.randn(1, 8, 2, 16).bfloat16().transpose(1, 2)
    for _ in range(4):
        for dout in douts:
            check_gradients(given, dout)
    assert done.count("backward") >= 3


def test_which_operands_need_gradients(done: list[str]) -> None:
    q, k, v = operands(grad=True)
    dout = operands()[0]
    for _ in range(5):
        check_gradients((q, k, v), dout)
        for held in range(3):
            given = [x.detach() if i == held else x for i, x in enumerate((q, k, v))]
            asked = [x for i, x in enumerate(given) if i != held]
            found = torch.autograd.grad(attention(*given), asked, dout)
            want = gradients((q, k, v), dout)
            assert all(
                torch.equal(x, y) for x, y in zip(found, [x for i, x in enumerate(want) if i != held], strict=True)
            )
    done.clear()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad
    assert attention(q, k, v).requires_grad
    assert not attention(*(x.detach() for x in (q, k, v))).requires_grad


def test_gradients_of_the_lse(done: list[str]) -> None:
    def call(*given: Tensor, **keywords: Any) -> Tensor:
        out, lse = attention(*given, return_lse=True, **keywords)
        return out * lse[..., None].to(out.dtype)

    for _ in range(5):
        check_gradients(operands(grad=True), operands()[0], call)
    assert "backward" in done
    q, k, v = operands(grad=True)
    assert torch.autograd.grad(attention(q, k, v, return_lse=True).lse.sum(), (q, k))[0].abs().sum() > 0


def test_saved_tensors_that_come_back_otherwise(done: list[str], processor: str) -> None:
    """Hooks may pack what is saved as they like; and what was changed in place is an error."""
    given, dout = operands(grad=True), operands()[0]
    for _ in range(5):
        check_gradients(given, dout)
    for unpack in (lambda x: x.clone(), lambda x: x.mT.contiguous().mT if x.dim() == 4 else x):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            check_gradients(given, dout)
    q, k, v = operands(grad=True)
    k2 = k * 1
    out = attention(q, k2, v)
    k2.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


def test_second_derivatives_are_refused(done: list[str]) -> None:
    given, dout = operands(grad=True), operands()[0]
    for _ in range(5):
        gradients(given, dout)
    found = torch.autograd.grad(attention(*given), given, dout, create_graph=True)
    with pytest.raises(Unsupported, match="first derivatives"):
        found[0].sum().backward()


def test_batched_gradients(done: list[str]) -> None:
    given, douts = operands(grad=True), torch.stack([operands()[0] for _ in range(3)])
    for _ in range(5):
        gradients(given, douts[0])
    found = torch.autograd.grad(attention(*given), given, douts, is_grads_batched=True)
    for i, dout in enumerate(douts):
        for x, y in zip(found, gradients(given, dout), strict=True):
            torch.testing.assert_close(x[i], y, rtol=0.05, atol=0.05)


# What watches


def test_modes_transforms_and_subclasses_take_the_long_way(done: list[str]) -> None:
    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Own(Tensor):
        pass

    given, seen = operands(), []
    settle(*given)
    done.clear()
    with Sees():
        attention(*given)
    assert seen == ["saccade.forward.default"]
    with FlopCounterMode(display=False) as counted:
        attention(*given)
    assert counted.get_total_flops() > 0
    torch.vmap(attention)(*(torch.stack([x, x]) for x in given))
    torch.func.vjp(attention, *given)[1](given[0])
    attention(given[0].as_subclass(Own), *given[1:])
    assert replay.of_tensors((), (given[0].as_subclass(Own), *given[1:])) is None
    with pytest.raises(Unsupported, match="forward mode"):
        torch.func.jvp(lambda q: attention(q, *given[1:]), (given[0],), (given[0],))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert attention(*given).shape == given[0].shape


def test_compiled_calls_are_repeated(done: list[str]) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, backend: str = "auto") -> Tensor:
        return attention(q, k, v, mask=causal(), backend=backend)

    compiled = torch.compile(plain, backend="aot_eager", fullgraph=True)
    for _ in range(5):
        given, dout = operands(grad=True), operands()[0]
        done.clear()
        check_gradients(given, dout, lambda *of, backend="": compiled(*of) if not backend else plain(*of, backend))
    assert done == ["forward", "backward"]


def test_autocast(done: list[str]) -> None:
    given, wide = operands(), operands(dtype=torch.float32)
    settle(*given)
    done.clear()
    with torch.autocast("cpu", torch.bfloat16):
        check(attention(*given), given)
        assert done == ["forward"]
        assert attention(*wide).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert attention(*given).dtype == torch.float16
    assert attention(*given).dtype == torch.bfloat16


def test_deterministic_algorithms(done: list[str]) -> None:
    given = operands(grad=True)
    for _ in range(5):
        gradients(given, given[0].detach())
    kept = len(replay._replays)
    torch.use_deterministic_algorithms(True)
    try:
        gradients(given, given[0].detach())
    finally:
        torch.use_deterministic_algorithms(False)
    settle(*given, deterministic=True)
    assert len(replay._replays) > kept


def test_a_repeat_that_may_not_run(done: list[str]) -> None:
    """As on another device than the current one, or where a profiler listens to launches."""
    given = operands(grad=True)
    for _ in range(5):
        gradients(given, given[0].detach())
    done.clear()
    for entry in replay._replays._entries.values():
        if hasattr(entry.value, "stopped"):
            entry.value.stopped = True
    check(attention(*given), given)
    check_gradients(given, given[0].detach())
    assert not done


def test_threads(done: list[str]) -> None:
    wrong = []

    def work(s: int) -> None:
        for i in range(20):
            given = operands(s, grad=bool(i % 2))
            try:
                check(attention(*given).detach(), given)
            except Exception as error:  # to be told by the test's own thread
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in (8, 8, 16, 24)]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    assert not wrong
    assert "forward" in done


def test_numbers_of_a_score_count(done: list[str]) -> None:
    """By their bits: 0.0 and -0.0 are equal, and a function may divide by them."""
    given = operands()

    def of(c: float) -> Any:
        return lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx > q_idx, torch.tanh(1 / (c + 0 * score)), score)

    for c in (0.0, -0.0, 0.5, 0.0, -0.0):
        for _ in range(3):
            check(attention(*given, score_mod=of(c)), given, score_mod=of(c))


# Score functions and sinks


SLOPES = torch.tensor([0.5, -0.25])
FACTOR = 0.5


def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return FACTOR * score + SLOPES[h] * (kv_idx - q_idx)


def divided(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(kv_idx > q_idx, torch.tanh(1 / (FACTOR + 0 * score)), score)


def scored(given: Any, fn: Any, **keywords: Any) -> None:
    check(attention(*given, score_mod=fn, **keywords), given, score_mod=fn, **keywords)


def test_functions_that_capture_are_found_by_their_proofs(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shortcut binds nothing, and has what the function would compute in this call."""
    here, ready = sys.modules[__name__], alibi(torch.tensor([1.0, 2.0]))
    for fn in (biased, ready):
        for _ in range(4):
            scored(operands(), fn)
    done.clear()
    given = operands()
    with monkeypatch.context() as without:
        without.setattr(bind, "_bind", None)
        found = [attention(*given, score_mod=fn) for fn in (biased, ready)]
    assert done == ["forward"] * 2
    for fn, x in zip((biased, ready), found, strict=True):
        check(x, given, score_mod=fn)
    SLOPES.mul_(-3)  # in place: the same tensor
    scored(operands(), biased)
    monkeypatch.setattr(here, "SLOPES", torch.tensor([-1.0, 4.0]))  # another of the same form
    scored(operands(), biased)
    for other in (
        torch.tensor([3.0, 1.0, 7.0, 7.0])[::2],
        torch.tensor([1.0, 2.0]).double(),
        torch.tensor([[2.0, 5.0]])[0],
    ):
        monkeypatch.setattr(here, "SLOPES", other)
        for _ in range(4):
            scored(operands(), biased)
    for number in (0.25, 0.0, -0.0, 2, 2.0, True):
        monkeypatch.setattr(here, "FACTOR", number)
        for _ in range(4):
            scored(operands(), biased)
            scored(operands(), divided)
            scored(operands(), ready)
    ready.tensors = (torch.tensor([9.0, -2.0]),)
    scored(operands(), ready)


def test_what_a_function_captures_is_checked_as_ever(done: list[str]) -> None:
    given, ready = operands(), alibi(torch.tensor([1.0, 2.0]))
    for _ in range(4):
        scored(given, ready)
    done.clear()
    ready.tensors = (torch.tensor([1.0, 2.0, 3.0]),)
    with pytest.raises(ValueError, match="one of each query head"):
        attention(*given, score_mod=ready)
    ready.tensors = (torch.tensor([1.0, 2.0]),)
    ready.heads = None  # which the check reads
    with pytest.raises(ValueError, match="must broadcast"):
        attention(*given, score_mod=ready)
    with pytest.raises(TypeError, match="must be a function"):
        attention(*given, score_mod=3)
    assert not done


def guessed(monkeypatch: pytest.MonkeyPatch, fn: Any, given: Any) -> None:
    """Calls until a function is found by its address: no other way is taken then."""
    for _ in range(6):
        scored(given, fn)
    with monkeypatch.context() as without:
        without.setattr(scores, "guarded", None)
        out = attention(*given, score_mod=fn)
    check(out, given, score_mod=fn)


def test_guessed_functions(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes after a function was found by its address is seen."""
    here, given = sys.modules[__name__], operands()
    monkeypatch.setattr(here, "SLOPES", SLOPES.clone())
    for name, x in {
        "values": SLOPES.mul_(-3),
        "stride": torch.tensor([3.0, 1.0, 7.0, 7.0])[::2],
        "offset": torch.tensor([3.0, 1.0, -7.0])[1:],
        "expanded": torch.tensor(2.0).expand(2),
        "sign": torch._neg_view(torch.tensor([3.0, 1.0])),
        "dtype": torch.tensor([1.0, 2.0]).double(),
        "gradient": torch.tensor([1.0, 2.0]).requires_grad_(),
        "class": torch.nn.Parameter(torch.tensor([4.0, 2.0])),
    }.items():
        monkeypatch.setattr(here, "SLOPES", torch.tensor([0.5, -0.25]))
        guessed(monkeypatch, biased, given)
        monkeypatch.setattr(here, "SLOPES", x)
        out = attention(*given, score_mod=biased)
        assert out.requires_grad == x.requires_grad, name
        check(out, given, score_mod=biased)
    monkeypatch.setattr(here, "SLOPES", torch.tensor([0.5, -0.25]))
    guessed(monkeypatch, biased, given)
    monkeypatch.setattr(here, "FACTOR", 0.25)
    scored(given, biased)
    guessed(monkeypatch, biased, given)
    monkeypatch.setattr(biased, "__code__", divided.__code__)
    scored(given, biased)


def test_a_guess_is_of_one_kind_of_call(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given, asked, guarded = operands(), [], scores.guarded
    guessed(monkeypatch, biased, given)
    monkeypatch.setattr(scores, "guarded", lambda *of: asked.append(1) or guarded(*of))
    for keywords in ({"mask": causal()}, {"sink": torch.ones(2)}, {"scale": 0.5}):
        check(attention(*given, score_mod=biased, **keywords), given, score_mod=biased, **keywords)
    assert isinstance(attention(*given, score_mod=biased, return_lse=True), tuple)
    assert not asked
    for mode in (torch.no_grad(), torch.inference_mode()):
        asked.clear()
        with mode:
            attention(*given, score_mod=biased)
        assert asked
    asked.clear()
    torch.set_default_dtype(torch.float64)
    try:
        attention(*given, score_mod=biased)
    finally:
        torch.set_default_dtype(torch.float32)
    assert asked
    asked.clear()
    assert attention(*operands(grad=True), score_mod=biased).requires_grad
    attention(*given, score_mod=biased)
    assert not asked


def test_an_address_that_another_function_has(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def of(factor: float) -> Any:
        return lambda score, b, h, q_idx, kv_idx: factor * score

    monkeypatch.setattr(replay, "id", lambda x: 1, raising=False)
    given, table = operands(), torch.tensor([1.0, -2.0])
    for fn in (
        of(2.0),
        of(3.0),
        lambda score, b, h, q_idx, kv_idx: score + kv_idx,
        softcap(2.0),
        alibi(table),
        of(2.0),
    ):
        guessed(monkeypatch, fn, given)


def test_numbers_that_tensors_hold_are_read_in_each_call(done: list[str]) -> None:
    given, cap = operands(), torch.tensor(2.0, dtype=torch.float64)

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score)

    for value in (2.0, 0.5, -1.0):
        cap.fill_(value)
        for _ in range(6):
            scored(given, fn)


def test_gradients_of_what_a_function_captures(done: list[str]) -> None:
    """Of some of the captures, and of none of them, in turns."""
    slopes, bias = torch.tensor([0.5, -0.25]), torch.randn(8)

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * slopes[h] + bias[kv_idx]

    for turn in range(12):
        given, dout = operands(grad=True), operands()[0]
        slopes.requires_grad_(turn % 3 == 1), bias.requires_grad_(turn % 3 > 0)
        with torch.no_grad():
            slopes.mul_(-1.1)
        wanted = [*given, *(x for x in (slopes, bias) if x.requires_grad)]
        done.clear()
        found = torch.autograd.grad(attention(*given, score_mod=fn), wanted, dout)
        want = torch.autograd.grad(
            attention(*(x.double() for x in given), score_mod=fn, backend="reference"), wanted, dout.double()
        )
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=0.05, atol=0.05)
    assert done == ["forward", "backward"]


@pytest.mark.parametrize("name", ["computed", "rows", "t5_bias", "own", "in a mask"])
def test_checkpoints_of_what_a_function_computes(name: str, done: list[str]) -> None:
    """The first call, the ones that are noted and recorded, and replays save the same for autograd, in one order."""
    t, buckets = torch.randn(8, requires_grad=True), torch.randn(32, 2, requires_grad=True)
    reads = lambda s, b, h, i, j: s + t.tanh()[i % 8]  # noqa: E731
    keywords: dict[str, Any] = {
        "computed": {"score_mod": reads},
        "rows": {"score_mod": lambda s, b, h, i, j: s * (t.exp()[h] + t[j % 8])},
        "t5_bias": {"score_mod": compose(t5_bias(buckets), reads)},
        "own": {"score_mod": scores.ScoreMod(lambda s, b, h, i, j, t: s + t[i % 8], t, bprop=lambda g, *_: g)},
        "in a mask": {"mask": mask_mod(lambda b, h, i, j: (t.tanh()[i % 8] > 0) | (j < 3)), "score_mod": reads},
    }[name]
    saved: list[Any] = []
    for s in (0, 8):
        saved.clear()
        for _ in range(6):
            given, now = operands(s, grad=True), []
            with saved_tensors_hooks(lambda x: (now.append(x.shape), x)[1], lambda x: x):  # noqa: B023
                attention(*given, **keywords)
            saved.append(now)
        assert all(x == saved[0] for x in saved)
        given = operands(s, grad=True)
        checkpoint(partial(attention, **keywords), *given, use_reentrant=False).sum().backward()
    assert ("forward" in done) == (name != "in a mask")  # whose key would hold what it computes


def test_captured_tensors_that_were_made_in_inference_mode(done: list[str]) -> None:
    """The backward takes what they held at the call."""
    with torch.inference_mode():
        slopes, sink = torch.tensor([0.5, -0.25]), torch.randn(2)

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * slopes[h]

    for _ in range(6):
        given, dout = operands(grad=True), operands()[0]
        exactly = attention(*(x.double() for x in given), score_mod=fn, sink=sink.double(), backend="reference")
        want = torch.autograd.grad(exactly, given, dout.double())
        done.clear()
        out = attention(*given, score_mod=fn, sink=sink)
        with torch.inference_mode():
            slopes.mul_(-1.1), sink.add_(0.5)
        for x, y in zip(torch.autograd.grad(out, given, dout), want, strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=0.05, atol=0.05)
    assert done == ["forward", "backward"]


def test_sinks(done: list[str]) -> None:
    for turn in range(8):
        given, dout = operands(grad=True), operands()[0]
        sink = torch.randn(2).requires_grad_(turn % 2 == 0)
        wanted = [*given, sink] if turn % 2 == 0 else given
        done.clear()
        found = torch.autograd.grad(attention(*given, sink=sink), wanted, dout)
        exactly = attention(*(x.double() for x in given), sink=sink.double(), backend="reference")
        for x, y in zip(found, torch.autograd.grad(exactly, wanted, dout.double()), strict=True):
            torch.testing.assert_close(x.double(), y.double(), rtol=0.05, atol=0.05)
    assert done == ["forward", "backward"]
    with pytest.raises(ValueError, match="sink must be a float tensor"):
        attention(*given, sink=torch.zeros(3))
    with pytest.raises(TypeError, match="sink must be a float tensor"):
        attention(*given, sink=1.0)
    assert replay._find((), [torch.zeros(2, 2).to_sparse_csr()]) is None
    assert replay._find((), [torch.zeros(2).to("meta")]) is None


def test_compiled_functions_that_capture_are_repeated(done: list[str]) -> None:
    slopes = torch.tensor([0.5, -0.25])
    compiled = torch.compile(lambda *of: attention(*of, score_mod=alibi(slopes)), backend="aot_eager", fullgraph=True)
    for _ in range(5):
        given, dout = operands(grad=True), operands()[0]
        slopes.mul_(-1.1)
        done.clear()
        found = torch.autograd.grad(compiled(*given), given, dout)
        wide = [x.detach().double().requires_grad_() for x in given]
        want = gradients(wide, dout.double(), lambda *of: attention(*of, score_mod=alibi(slopes), backend="reference"))
        for x, y in zip(found, want, strict=True):
            torch.testing.assert_close(x.double(), y, rtol=0.05, atol=0.05)
    assert done == ["forward", "backward"]
