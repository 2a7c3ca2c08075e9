"""The Triton backend on a GPU: what the interpreter cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, attention, causal, documents, window
from saccade.testing.accuracy import check
from saccade.testing.cases import MODELS, NAMED, SMALL, Case, draw

pytestmark = pytest.mark.gpu

DTYPES = ("fp16", "bf16", "fp32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_named_case(case: Case, dtype: str) -> None:
    given = case.replace(dtype=dtype).inputs("cuda")
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_model(case: Case) -> None:
    given = case.smaller(2048).inputs("cuda")
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords).assert_ok()


@pytest.mark.parametrize("seed", range(40))
def test_drawn_case(seed: int) -> None:
    case = draw(seed, dtype=DTYPES[seed % 3])
    given = case.inputs("cuda", seed=seed)
    report = check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, backend="triton", **given.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


def operands(b: int, h: int, s: int, d: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(b, h, s, d, device="cuda", dtype=dtype) for _ in range(3)]


def gradients(*tensors: Tensor, **keywords: Any) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves, backend="triton", **keywords)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
def test_repeats_are_bitwise_equal(mask: object) -> None:
    tensors = operands(2, 8, 777, 128)
    tensors[1], tensors[2] = tensors[1][:, :2], tensors[2][:, :2]
    first = gradients(*tensors, mask=mask)
    for _ in range(30):
        for once, again in zip(first, gradients(*tensors, mask=mask), strict=True):
            assert torch.equal(once, again)


def test_more_than_65535_heads() -> None:
    q, k, v = operands(700, 100, 16, 16)
    out = attention(q, k, v, mask=causal(), backend="triton")
    last = [x[-1:] for x in (q, k, v)]
    assert torch.equal(out[-1:], attention(*last, mask=causal(), backend="triton"))


def test_more_than_two_billion_elements() -> None:
    """Rows 2^24 + 2^10 elements apart, as in a (s, b, h, d) batch of thousands of heads: 2^31 is inside a head."""
    s, stride = 300, (1 << 24) + 1024
    memory = torch.full((s * stride,), torch.nan, device="cuda", dtype=torch.bfloat16)
    q, k, v = (torch.as_strided(memory, (1, 1, s, 64), (0, 0, stride, 1), 64 * i).normal_() for i in range(3))
    near = [x.contiguous() for x in (q, k, v)]
    for far, expected in zip(gradients(q, k, v, mask=causal()), gradients(*near, mask=causal()), strict=True):
        assert torch.equal(far, expected)


def test_many_elements_in_all() -> None:
    q, k, v = operands(33, 64, 8192, 128)  # 2.2e9 elements each
    out = attention(q, k, v, mask=window(100, 0), backend="triton")
    last = [x[-1:, -1:] for x in (q, k, v)]
    assert torch.equal(out[-1:, -1:], attention(*last, mask=window(100, 0), backend="triton"))


def test_side_stream() -> None:
    q, k, v = operands(2, 4, 500, 64)
    expected = gradients(q, k, v, mask=causal())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(q, k, v, mask=causal())
    torch.cuda.current_stream().wait_stream(stream)
    for once, again in zip(expected, found, strict=True):
        assert torch.equal(once, again)


def test_graph_replays_with_other_data() -> None:
    q, k, v = operands(2, 4, 300, 64)
    used = torch.tensor([300, 120], device="cuda", dtype=torch.int32)
    bound = {"mask": causal(), "layout": Dense("bhsd", seqused_k=used), "backend": "triton"}
    attention(q, k, v, **bound)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, **bound)
    for x in (q, k, v):
        x.normal_()
    used.copy_(torch.tensor([17, 299], device="cuda"))
    graph.replay()
    assert torch.equal(out, attention(q, k, v, **bound))


def test_graph_of_a_training_step() -> None:
    leaves = [x.requires_grad_() for x in operands(1, 4, 256, 64)]

    def step() -> list[Tensor]:
        out = attention(*leaves, mask=causal(), backend="triton")
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
def test_tensors_on_a_device_that_is_not_current() -> None:
    tensors = [x.to("cuda:1") for x in operands(1, 2, 200, 64)]
    assert torch.cuda.current_device() == 0
    given = dict(zip("qkv", tensors, strict=True))
    check(**given, backend="triton", mask=causal()).assert_ok()


def test_operator_registration() -> None:
    q, k, v = (x.requires_grad_() for x in operands(1, 2, 70, 32))
    torch.library.opcheck(
        torch.ops.saccade.forward.default, (q, k, v, None, [], "bhsd causal none triton any_order", [], [0.25], True)
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: attention(q, k, v, mask=causal(), backend="triton") * 2, fullgraph=True, dynamic=dynamic
    )
    for s in (128, 200):
        q, k, v = (x.requires_grad_() for x in operands(1, 2, s, 64))
        out = compiled(q, k, v)
        assert torch.equal(out, attention(q, k, v, mask=causal(), backend="triton") * 2)
        out.sum().backward()
        assert q.grad is not None


def test_auto_takes_a_gpu_backend() -> None:
    q, k, v = operands(1, 2, 64, 64)
    assert torch.equal(attention(q, k, v), attention(q, k, v, backend="triton"))


def test_no_second_compile_for_other_shapes() -> None:
    """Lengths, batches, heads, window bounds and scales are runtime arguments."""
    from saccade.backends.triton.forward_kernel import forward_kernel

    def call(b: int, h: int, s: int, left: int, scale: float) -> None:
        attention(*operands(b, h, s, 64), mask=window(left, 0), scale=scale, backend="triton")

    call(1, 2, 64, 5, 0.1)
    cache = forward_kernel.device_caches[0][0]
    before = len(cache)
    for b, h, s, left, scale in (
        (2, 3, 77, 1, 1.0),
        (1, 1, 1, 16, 0.5),
        (5, 16, 256, 0, 2.0),
        (1, 7, 1000, 300, 0.125),
    ):
        call(b, h, s, left, scale)
    assert len(cache) == before


def test_documents_in_any_order_of_ids() -> None:
    ids = torch.randint(0, 5, (2, 400), device="cuda")
    q, k, v = operands(2, 2, 400, 64)
    check(q, k, v, mask=documents(ids) & causal(), backend="triton").assert_ok()


def test_nothing_reads_fresh_memory() -> None:
    """torch fills what it allocates with NaN: every element of every result is written."""
    torch.use_deterministic_algorithms(True)
    try:
        for name in ("causal", "ragged-sink", "few-keys", "d72", "everything"):
            given = NAMED[name].replace(dtype="bf16").inputs("cuda")
            check(given.q, given.k, given.v, dout=given.dout, backend="triton", **given.keywords).assert_ok()
    finally:
        torch.use_deterministic_algorithms(False)
