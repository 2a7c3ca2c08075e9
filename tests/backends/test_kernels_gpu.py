"""The kernels on a GPU, those that are chosen and the portable ones: what the interpreter cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, attention, causal, documents, explain, window
from saccade.call import check_call, flatten
from saccade.ops import replay
from saccade.testing.accuracy import check
from saccade.testing.cases import MODELS, NAMED, SMALL, Case
from tests.support import draws

pytestmark = pytest.mark.gpu

DTYPES = ("fp16", "bf16", "fp32")


@pytest.fixture(params=["auto", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_named_case(case: Case, dtype: str, backend: str) -> None:
    given = case.replace(dtype=dtype).inputs("cuda")
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend=backend, **given.keywords).assert_ok()


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_model(case: Case, backend: str) -> None:
    given = case.smaller(2048).inputs("cuda")
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend=backend, **given.keywords).assert_ok()


@pytest.mark.parametrize("seed", range(40))
def test_drawn_case(seed: int, backend: str) -> None:
    case = draws.dense(seed, dtype=DTYPES[seed % 3])
    given = case.inputs("cuda", seed=seed)
    report = check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend=backend, **given.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


WINDOWS = ["window(None,7)", "window(7,None)", "window(7,0)", "window(None,0)", "window(0,9)"]


@pytest.mark.parametrize("masks", [WINDOWS, WINDOWS[::-1]], ids=["left-open first", "left-open last"])
@pytest.mark.parametrize(("s_q", "s_k"), [(65, 70), (300, 190)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "padded", "packed"])
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_windows_one_after_the_other(d: int, kind: str, s_q: int, s_k: int, masks: list[str], backend: str) -> None:
    """Of the same shapes, so that a call finds what the one before left: a window without a left bound has a kernel of
    its own in gluon."""
    replay.forget()
    told: dict[str, Any] = {"padded": {"used": "qk"}, "packed": {"order": "thd"}}.get(kind, {})
    for mask in masks:
        given = Case("", b=3, h_q=4, s_q=s_q, s_k=s_k, d=d, mask=mask, **told).inputs("cuda")
        tensors, gradients = (given.q, given.k, given.v), {"dout": given.dout, "dlse": given.dlse}
        check(*tensors, **gradients, backend=backend, **given.keywords).assert_ok()


def operands(b: int, h: int, s: int, d: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in range(3)]


def gradients(backend: str, *tensors: Tensor, **keywords: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, backend=backend, deterministic=True, **keywords)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
def test_repeats_are_bitwise_equal(mask: object, backend: str) -> None:
    tensors = operands(2, 8, 777, 128)
    tensors[1], tensors[2] = tensors[1][:, :2], tensors[2][:, :2]
    first = gradients(backend, *tensors, mask=mask)
    for _ in range(30):
        for once, again in zip(first, gradients(backend, *tensors, mask=mask), strict=True):
            assert torch.equal(once, again)


def test_more_than_65535_heads(backend: str) -> None:
    q, k, v = operands(700, 100, 16, 16)
    out = attention(q, k, v, mask=causal(), backend=backend)
    last = [x[-1:] for x in (q, k, v)]
    assert torch.equal(out[-1:], attention(*last, mask=causal(), backend=backend))


def test_more_than_two_billion_elements(backend: str) -> None:
    """Rows 2^24 + 2^10 elements apart, as in a (s, b, h, d) batch of thousands of heads: 2^31 is inside a head."""
    s, stride = 300, (1 << 24) + 1024
    memory = torch.full((s * stride,), torch.nan, device="cuda", dtype=torch.bfloat16)
    q, k, v = (torch.as_strided(memory, (1, 1, s, 64), (0, 0, stride, 1), 64 * i).normal_() for i in range(3))
    near = [x.contiguous() for x in (q, k, v)]
    for far, expected in zip(
        gradients(backend, q, k, v, mask=causal()), gradients(backend, *near, mask=causal()), strict=True
    ):
        assert torch.equal(far, expected)


def test_many_elements_in_all(backend: str) -> None:
    q, k, v = operands(33, 64, 8192, 128)  # 2.2e9 elements each
    out = attention(q, k, v, mask=window(100, 0), backend=backend)
    last = [x[-1:, -1:] for x in (q, k, v)]
    assert torch.equal(out[-1:, -1:], attention(*last, mask=window(100, 0), backend=backend))


def test_side_stream(backend: str) -> None:
    q, k, v = operands(2, 4, 500, 64)
    expected = gradients(backend, q, k, v, mask=causal())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(backend, q, k, v, mask=causal())
    torch.cuda.current_stream().wait_stream(stream)
    for once, again in zip(expected, found, strict=True):
        assert torch.equal(once, again)


def test_graph_replays_with_other_data(backend: str) -> None:
    q, k, v = operands(2, 4, 300, 64)
    used = torch.tensor([300, 120], device="cuda", dtype=torch.int32)
    bound = {"mask": causal(), "layout": Dense("bhsd", seqused_k=used), "backend": backend}
    attention(q, k, v, **bound)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, **bound)
    for x in (q, k, v):
        x.normal_()
    used.copy_(torch.tensor([17, 299], device="cuda"))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, **bound))


def test_graph_of_a_training_step(backend: str) -> None:
    leaves = [x.requires_grad_() for x in operands(1, 4, 256, 64)]

    def step() -> list[Tensor]:
        out = attention(*leaves, mask=causal(), backend=backend, deterministic=True)
        return list(torch.autograd.grad(out.float().square().sum(), leaves))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    graph.replay()
    for once, again in zip(captured, step(), strict=True):
        assert torch.equal(once, again)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_device_that_is_not_current(backend: str) -> None:
    tensors = [x.to("cuda:1") for x in operands(1, 2, 200, 64)]
    assert torch.cuda.current_device() == 0
    given = dict(zip("qkv", tensors, strict=True))
    check(**given, backend=backend, mask=causal()).assert_ok()


def test_operator_registration(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in operands(1, 2, 70, 32))
    flat = flatten(check_call(q, k, v, mask=causal()), backend)
    torch.library.opcheck(torch.ops.saccade.forward.default, (*flat, True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool, backend: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, mask=causal(), backend=backend) * 2, fullgraph=True, dynamic=dynamic
    )
    for s in (128, 200):
        q, k, v = (x.requires_grad_() for x in operands(1, 2, s, 64))
        out = compiled(q, k, v)
        assert torch.equal(out, attention(q, k, v, mask=causal(), backend=backend) * 2)
        out.sum().backward()
        assert q.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_takes_the_first_gpu_backend(dtype: torch.dtype) -> None:
    q, k, v = operands(1, 2, 64, 64, dtype)
    hopper = torch.cuda.get_device_capability() == (9, 0) and dtype == torch.bfloat16
    chosen = "gluon" if hopper else "triton"
    assert explain(q, k, v).backend == chosen
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend=chosen))


def test_no_second_compile_for_other_shapes(backend: str, forward_kernel) -> None:
    """Lengths, batches, heads, window bounds and scales are runtime arguments."""
    chosen = explain(*operands(1, 2, 64, 64), mask=window(5, 0), backend=backend).backend

    def call(b: int, h: int, s: int, left: int, scale: float) -> None:
        attention(*operands(b, h, s, 64), mask=window(left, 0), scale=scale, backend=backend)

    call(1, 2, 64, 5, 0.1)
    cache = forward_kernel(chosen).device_caches[0][0]
    before = len(cache)
    for b, h, s, left, scale in (
        (2, 3, 77, 1, 1.0),
        (1, 1, 1, 16, 0.5),
        (5, 16, 256, 0, 2.0),
        (1, 7, 1000, 300, 0.125),
    ):
        call(b, h, s, left, scale)
    assert len(cache) == before


def test_documents_in_any_order_of_ids(backend: str) -> None:
    ids = torch.randint(0, 5, (2, 400), device="cuda")
    q, k, v = operands(2, 2, 400, 64)
    check(q, k, v, mask=documents(ids) & causal(), backend=backend).assert_ok()


def test_nothing_reads_fresh_memory(backend: str) -> None:
    """torch fills what it allocates with NaN: every element of every result is written."""
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("causal", "ragged-sink", "few-keys", "d72", "everything"):
            given = NAMED[name].replace(dtype="bf16").inputs("cuda")
            check(given.q, given.k, given.v, dout=given.dout, backend=backend, **given.keywords).assert_ok()
    finally:
        torch.use_deterministic_algorithms(False)
