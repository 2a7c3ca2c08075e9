"""Calls that repeat an earlier one on a GPU: the same launches with other addresses, wherever and whenever they run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, Paged, append_kv, attention, causal, softcap, window
from saccade.backends.device.replay import Replay
from saccade.ops import replay
from saccade.testing.accuracy import check
from saccade.testing.cases import Case

pytestmark = pytest.mark.gpu


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The addresses of each replay."""
    seen: list[Any] = []
    call = Replay.__call__

    def counted(self: Any, addresses: Any) -> Any:
        seen.append(addresses)
        return call(self, addresses)

    monkeypatch.setattr(Replay, "__call__", counted)
    replay.forget()
    yield seen
    replay.forget()


PLAIN = Case("", b=2, h_q=4, s_q=300, s_k=333, d=128)
CASES = {
    "plain": PLAIN,
    "causal": PLAIN.replace(mask="causal", order="bshd", dtype="fp16"),
    "window": PLAIN.replace(mask="window(70,9)", d=64, d_v=64, order="sbhd"),
    "prefix": PLAIN.replace(mask="prefix(100)"),
    "softcap": PLAIN.replace(mask="causal", score="softcap(5)"),
    "alibi": PLAIN.replace(score="alibi"),
    "group": PLAIN.replace(h_k=2, d=64, d_v=64),
    "wide": PLAIN.replace(d=256, d_v=256),
    "unequal": PLAIN.replace(d=192, d_v=128),
    "sink": PLAIN.replace(sink=True),
    "dropout": PLAIN.replace(dropout_p=0.3),
    "odd": PLAIN.replace(d=80, d_v=80),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_repeats_are_right(case: Case, backend: str, repeated: list[Any]) -> None:
    """Of new tensors each time, without gradients and with them."""
    for backward in (False, True):
        repeated.clear()
        for seed in range(4):
            given = case.inputs("cuda", seed=seed)
            check(given.q, given.k, given.v, backend=backend, backward=backward, **given.keywords).assert_ok()
        assert repeated


SEQUENCES = Case("", b=3, h_q=4, h_k=2, s_q=211, s_k=211, d=64, order="thd", lengths=(100, 0, 211), mask="causal")
PAGES = Case("", b=4, h_q=8, h_k=2, s_q=1, s_k=300, d=128, order="paged", mask="causal")
OTHERS = {
    "padded": PLAIN.replace(used="qk", mask="causal"),
    "intervals": PLAIN.replace(mask="causal&interval_rows", h_k=2),
    "documents": PLAIN.replace(mask="causal&documents", s_k=300),
    "packed": SEQUENCES,
    "packed, a sink and a function": SEQUENCES.replace(sink=True, score="alibi", tail=3),
    "ranges": SEQUENCES.replace(ranges=True, lengths=(), mask="none"),
    "one token": PAGES,
    "drafts": PAGES.replace(s_q=4),
    "prompts": PAGES.replace(s_q=200),
    "pages of sequences end to end": PAGES.replace(s_q=90, lengths=(1, 90, 0, 7)),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_every_layout_is_replayed(case: Case, backend: str, repeated: list[Any]) -> None:
    """Of other numbers in tensors that lie alike, without gradients and with them."""
    given, paged = case.inputs("cuda", seed=0), case.order == "paged"
    if paged and backend == "gluon":
        backend = "auto"  # which knows what gluon is slower at, and refuses
    for backward in (False,) if paged else (False, True):
        repeated.clear()
        for _ in range(4):
            q, k, v = (x.detach().normal_().requires_grad_(x.requires_grad) for x in (given.q, given.k, given.v))
            check(q, k, v, backend=backend, backward=backward, **given.keywords).assert_ok()
        assert repeated


@pytest.mark.parametrize("shape", [(300, 333), (1, 4, 300, 333), (2, 1, 1, 333)])
def test_tensor_masks_are_replayed(shape: tuple[int, ...], backend: str, repeated: list[Any]) -> None:
    for _ in range(4):
        given, seen = PLAIN.inputs("cuda"), torch.rand(shape, device="cuda") < 0.7
        check(given.q, given.k, given.v, backend=backend, mask=seen).assert_ok()
    assert repeated


@pytest.mark.parametrize("rotates", [False, True])
def test_appends_are_replayed(rotates: bool, repeated: list[Any]) -> None:
    """To other caches each time, whose lengths grow in place."""
    layout = Paged(torch.arange(8, device="cuda", dtype=torch.int32).view(2, 4), torch.tensor([3, 30]).cuda())
    turns = {"rotary": (torch.randn(99, 32).cuda(), torch.randn(99, 32).cuda())} if rotates else {}
    found: list[list[Tensor]] = []
    for forgets in (False, True):
        torch.manual_seed(0)
        caches = [torch.zeros(8, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        layout.seqused_k.copy_(torch.tensor([3, 30]))
        queries = []
        for _ in range(5):
            k, v, q = (torch.randn(2, 1, h, 64, device="cuda").bfloat16() for h in (2, 2, 8))
            queries.append(append_kv(*caches, layout, k, v, **({"q": q, **turns} if rotates else {})))
            layout.seqused_k.add_(1)
            if forgets:
                replay.forget()
        found.append([*caches, *(x for x in queries if x is not None)])
    assert len(repeated) >= 3
    assert all(map(torch.equal, *found))


def test_memory_that_is_used_again(backend: str, repeated: list[Any]) -> None:
    """One piece of memory as tensors of several shapes, strides and dtypes, in turns."""
    memory = torch.empty(3, 1 << 17, dtype=torch.int16, device="cuda")
    forms = [
        ((1, 4, 256, 64), "bhsd"),
        ((1, 256, 4, 64), "bshd"),
        ((2, 4, 128, 64), "bhsd"),
        ((1, 2, 256, 128), "bhsd"),
    ]
    for turn in range(5):
        for shape, order in forms:
            for dtype in (torch.bfloat16, torch.float16):
                q, k, v = (x.view(dtype)[: 1 << 16].view(shape).normal_() for x in memory)
                options: Any = {"layout": Dense(order), "mask": causal() if turn % 2 else None}
                check(q, k, v, backend=backend, backward=False, **options).assert_ok()
    assert len(repeated) >= 8


def test_keys_that_grow(backend: str, repeated: list[Any]) -> None:
    """Steps of three layers, whose keys are one more each time: the second call of each is replayed."""
    for s in range(250, 262):
        repeated.clear()
        for seed in range(3):
            given = PLAIN.replace(s_q=1, s_k=s).inputs("cuda", seed=seed)
            check(given.q, given.k, given.v, backend=backend, backward=False).assert_ok()
        assert repeated
    assert len(repeated) >= 2


def test_dout_that_lies_otherwise(backend: str, repeated: list[Any]) -> None:
    q, k, v = (torch.randn(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    dout = torch.randn_like(q)
    others = dout, dout.transpose(1, 2).contiguous().transpose(1, 2), torch.ones_like(dout[..., :1]).expand_as(dout)
    want = [
        torch.autograd.grad(attention(q, k, v, backend=backend, score_mod=softcap(1e4)), (q, k, v), x) for x in others
    ]
    for _ in range(4):
        for x, expected in zip(others, want, strict=True):
            found = torch.autograd.grad(attention(q, k, v, backend=backend), (q, k, v), x)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert repeated


def test_functions_that_capture(backend: str, repeated: list[Any]) -> None:
    """What is captured changes in place and by name; gradients too."""
    slopes = torch.tensor([0.5, -0.1, 0.2, 0.01], device="cuda")

    def fn(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    for learned in (False, True):
        slopes = slopes.detach().requires_grad_(learned)
        for turn in range(6):
            repeated.clear()
            q, k, v = operands()
            with torch.no_grad():
                slopes.mul_(-1.1)
            check(q, k, v, backend=backend, backward=turn % 2 == 0, score_mod=fn).assert_ok()
        assert repeated
    sink = torch.randn(4, device="cuda")
    for _ in range(4):
        check(*operands(), backend=backend, backward=True, sink=sink.mul_(-1.1)).assert_ok()


def test_captured_tensors_that_were_made_in_inference_mode(backend: str, repeated: list[Any]) -> None:
    with torch.inference_mode():
        slopes = torch.tensor([0.5, -0.1, 0.2, 0.01], device="cuda")
    for _ in range(4):
        check(
            *operands(), backend=backend, backward=True, score_mod=lambda s, b, h, i, j: s + slopes[h] * j
        ).assert_ok()
    assert repeated


def operands(s: int = 200) -> list[Tensor]:
    return [torch.randn(1, 4, s, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def test_streams_and_threads(backend: str, repeated: list[Any]) -> None:
    wrong: list[Any] = []
    for s in (200, 264):
        for _ in range(4):
            attention(*operands(s), backend=backend)

    def work(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(30):
                given = operands((200, 264)[(n + i) % 2])
                found, want = attention(*given, backend=backend), attention(*given, backend="reference")
                torch.cuda.current_stream().synchronize()
                if not torch.allclose(found.float(), want.float(), rtol=0.02, atol=0.02):
                    wrong.append((n, i))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(repeated) > 100


def test_a_thread_that_has_not_used_the_device(backend: str, repeated: list[Any]) -> None:
    given, found = operands(), []
    for _ in range(4):
        want = attention(*given, backend=backend)
    thread = threading.Thread(target=lambda: found.append(attention(*given, backend=backend)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], want)


def test_a_graph_captures_repeats(backend: str, repeated: list[Any]) -> None:
    given = [x.requires_grad_() for x in operands()]
    dout = torch.randn_like(given[0])

    def step() -> Any:
        out = attention(*given, mask=window(50, 0), backend=backend)
        return out, *torch.autograd.grad(out, given, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    repeated.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    assert len(repeated) == 2
    for _ in range(3):
        with torch.no_grad():
            for x in (*given, dout):
                x.normal_()
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_compiled_calls_are_repeated(backend: str, repeated: list[Any]) -> None:
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, mask=causal(), backend=backend), backend="aot_eager")
    for _ in range(4):
        given = [x.requires_grad_() for x in operands()]
        dout = torch.randn_like(given[0])
        repeated.clear()
        out = compiled(*given)
        found = out, *torch.autograd.grad(out, given, dout)
        own = attention(*given, mask=causal(), backend=backend)
        for a, b in zip(found, (own, *torch.autograd.grad(own, given, dout)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)
    assert len(repeated) == 4
