"""The Hopper kernels on a Hopper GPU: head dims, ragged ends, packed heads, streams, graphs, repeats.

Every new combination of head dims, dtype, kind of mask and packing compiles a kernel, so tests share theirs where they
can, and ask for the LSE always: without it there is another kernel of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Dense, Partial, attention, causal, documents, explain, prefix, softcap, window
from saccade.masks import Mask
from saccade.testing.accuracy import check
from saccade.testing.cases import NAMED

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]

DEVICE, BACKEND = "cuda", "gluon"
MASKS = {"full": None, "causal": causal(), "left": window(100, 0), "both": window(50, 20)}
EDGES = {"full": None, "causal": causal()}
TUNED = [(64, 64), (128, 128), (256, 256), (192, 128)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCHES = 1000

edges = pytest.mark.parametrize("mask", EDGES.values(), ids=EDGES)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def operands(
    b: int, heads: tuple[int, int], lengths: tuple[int, int], d: int, d_v: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    (h_q, h_k), (s_q, s_k) = heads, lengths
    shapes = (b, h_q, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d_v or d)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes)
    return q, k, v


def with_lse(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **keywords: Any) -> Any:
    """`attention` by the kernel that also gives the LSE."""
    found = attention(q, k, v, return_lse=True, **keywords)
    return found if return_lse else found.out


def right(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> None:
    """The forward is within the tolerance, and it is this backend's."""
    check(q, k, v, backend=BACKEND, backward=False, function=with_lse, **keywords).assert_ok()


def run(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Partial:
    return with_lse(q, k, v, return_lse=True, backend=BACKEND, **keywords)


def same(one: Partial, other: Partial) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


# Shapes


@edges
@pytest.mark.parametrize(
    ("d", "d_v"),
    [
        *((192, 128), (96, 96), (80, 80), (72, 72), (8, 8), (40, 24), (64, 128), (128, 64), (256, 128), (128, 256)),
        *((200, 200), (48, 256), (136, 32)),
    ],
)
def test_head_dims(d: int, d_v: int, mask: Mask | None) -> None:
    right(*operands(2, (4, 2), (300, 333), d, d_v), mask=mask)


@edges
@dtypes
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
def test_orders(d: int, order: str, dtype: torch.dtype, mask: Mask | None) -> None:
    layout = Dense(order)
    q, k, v = (layout.ordered(x).contiguous() for x in operands(2, (6, 3), (400, 417), d, dtype=dtype))
    right(q, k, v, mask=mask, layout=layout)


@masks
@pytest.mark.parametrize(("s_q", "s_k"), [(1, 1), (1, 777), (777, 1), (63, 65), (129, 1000), (1000, 129), (2049, 2049)])
@pytest.mark.parametrize(("heads", "d"), [((4, 4), 128), ((12, 2), 64)], ids=["mha", "gqa"])
def test_lengths(heads: tuple[int, int], d: int, s_q: int, s_k: int, mask: Mask | None) -> None:
    right(*operands(2, heads, (s_q, s_k), d), mask=mask)


@pytest.mark.parametrize("s", [1, 5, 100])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 71])
def test_packed_heads(group: int, s: int) -> None:
    """Heads that share keys share a tile where there are few rows."""
    right(*operands(2, (2 * group, 2), (s, 300), 128), mask=causal())


def test_many_batch_rows() -> None:
    q, k, v = operands(70_000, (2, 1), (16, 16), 64)
    whole = run(q, k, v, mask=causal())
    for start in (0, 34_567, 69_992):
        part = [x[start : start + 8] for x in (q, k, v)]
        right(*part, mask=causal())
        assert same(run(*part, mask=causal()), Partial(*(x[start : start + 8] for x in whole)))


@pytest.mark.parametrize("mask", [prefix(37), prefix(10) | window(20, 0), prefix(40) & window(99, None)], ids=str)
def test_prefixes(mask: Mask) -> None:
    right(*operands(2, (4, 2), (300, 333), 64), mask=mask)


@pytest.mark.parametrize("scattered", [False, True])
def test_documents(scattered: bool) -> None:
    ids = torch.randint(0, 5, (2, 700), device=DEVICE)
    ids = ids if scattered else ids.sort(1).values
    right(*operands(2, (4, 2), (700, 700), 64), mask=documents(ids) & causal())


@pytest.mark.parametrize("d", [64, 80, 128, 192, 256])
def test_rows_that_see_nothing_in_several_tiles(d: int) -> None:
    """Two equal maxima of nothing: their difference has to be 0, whatever the factor rounds to."""
    ids = torch.arange(900, device=DEVICE)[None] // 300
    right(*operands(1, (2, 2), (900, 900), d), mask=documents(ids))


# Scores


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-3, 3.0])
def test_scales(scale: float) -> None:
    right(*operands(1, (2, 2), (200, 200), 64), scale=scale, mask=causal())


@dtypes
@pytest.mark.parametrize("cap", [20.0, 2.0])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_softcap(d: int, cap: float, dtype: torch.dtype) -> None:
    right(*operands(2, (4, 2), (500, 500), d, dtype=dtype), score_mod=softcap(cap), mask=causal())


@dtypes
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sink(d: int, dtype: torch.dtype) -> None:
    sink = torch.randn(4, device=DEVICE)
    for s_q in (500, 700):  # the first 200 rows of the second see nothing else
        right(*operands(2, (4, 2), (s_q, 500), d, dtype=dtype), sink=sink, mask=window(64, 0))


@edges
@pytest.mark.parametrize(("d", "d_v"), TUNED)
def test_without_the_lse(d: int, d_v: int, mask: Mask | None) -> None:
    check(*operands(2, (8, 8), (700, 700), d, d_v), mask=mask, backend=BACKEND, backward=False).assert_ok()


@edges
def test_large_scores(mask: Mask | None) -> None:
    """One key takes all, thousands above the others."""
    q, k, v = operands(1, (2, 2), (300, 300), 128)
    right(q * 30, k * 30, v, mask=mask)


# Strides and padding


def test_keys_for_every_batch_row() -> None:
    q, k, v = operands(3, (4, 2), (500, 500), 128)
    k = k[:1].expand(3, -1, -1, -1)
    right(q, k, v, mask=causal())
    assert same(run(q, k, v, mask=causal()), run(q, k.contiguous(), v, mask=causal()))


@pytest.mark.parametrize("d", [64, 128])
def test_packed_projections(d: int) -> None:
    """q, k and v are slices of one tensor (b, s, 3, h, d)."""
    packed = torch.randn(2, 500, 3, 4, d, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = packed.unbind(2)
    right(q, k, v, layout=Dense("bshd"), mask=causal())
    near = [x.contiguous() for x in (q, k, v)]
    assert same(run(q, k, v, layout=Dense("bshd"), mask=causal()), run(*near, layout=Dense("bshd"), mask=causal()))


@edges
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (80, 80), (128, 64)])
def test_memory_around_the_tensors(d: int, d_v: int, mask: Mask | None, surrounded: Any) -> None:
    """NaN behind every row, behind the last row and before the first."""
    q, k, v = operands(2, (4, 4), (200, 217), d, d_v)
    assert same(run(*map(surrounded, (q, k, v)), mask=mask), run(q, k, v, mask=mask))


@edges
@pytest.mark.parametrize(("d", "d_v"), TUNED)
def test_padding(d: int, d_v: int, mask: Mask | None) -> None:
    """Used lengths around every edge of a tile; NaN behind them."""
    used_q = torch.tensor([0, 1, 63, 64, 65, 191, 192, 300, 300, 5], device=DEVICE)
    used_k = torch.tensor([7, 0, 64, 65, 1, 128, 127, 129, 300, 300], device=DEVICE, dtype=torch.int32)
    q, k, v = operands(10, (2, 2), (300, 300), d, d_v)
    for used, tensors in ((used_q, (q,)), (used_k, (k, v))):
        for x in tensors:
            x.masked_fill_((torch.arange(300, device=DEVICE) >= used[:, None])[:, None, :, None], torch.nan)
    layout = Dense("bhsd", used_q, used_k)
    right(q, k, v, mask=mask, layout=layout)
    out, lse = run(q, k, v, mask=mask, layout=layout)
    unused = (torch.arange(300, device=DEVICE) >= used_q[:, None])[:, None].expand(lse.shape)
    assert not out[unused].any()
    assert (lse[unused] == -torch.inf).all()


@pytest.mark.parametrize("name", ["ragged", "ragged-sink", "few-keys", "everything", "d72"])
def test_nothing_reads_fresh_memory(name: str) -> None:
    """torch fills what it allocates with NaN: every element of out and lse is written."""
    given = NAMED[name].replace(dtype="bf16").inputs(DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        right(given.q, given.k, given.v, **given.keywords)
    finally:
        torch.use_deterministic_algorithms(False)


# Repeats, streams and graphs


@edges
@pytest.mark.parametrize(("d", "d_v"), TUNED)
def test_repeats_are_bitwise_equal(company: None, d: int, d_v: int, mask: Mask | None) -> None:
    """More work than multiprocessors, drawn in an order that no two launches share, interrupted, and other work in
    between. Nothing waits for the GPU, so that launches queue up."""
    given, other = operands(2, (16, 16), (1500, 1500), d, d_v), operands(1, (3, 3), (900, 1100), d, d_v)
    first = run(*given, mask=mask)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(LAUNCHES):
        if i % 4 == 0:
            for x in other:
                x.normal_()
            run(*other, mask=mask)
        for x, y in zip(first, run(*given, mask=mask), strict=True):
            differ += (x != y).sum()
    assert not differ


def test_streams_do_not_share_counters() -> None:
    q, k, v = operands(2, (16, 8), (900, 900), 128)
    expected = run(q, k, v, mask=causal())
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for i in range(40):
        with torch.cuda.stream(streams[i % 4]):
            found.append(run(q, k, v, mask=causal()))
    torch.cuda.synchronize()
    assert all(same(expected, one) for one in found)


def test_a_graph_has_its_own_counters() -> None:
    """It replays with other data, many times, beside the same kernel on another stream."""
    q, k, v = operands(2, (16, 8), (900, 900), 128)
    run(q, k, v, mask=causal())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(q, k, v, mask=causal())
        again = run(q, k, v, mask=causal())
    side = torch.cuda.Stream()
    for _ in range(5):
        for x in (q, k, v):
            x.normal_()
        for x in (*found, *again):
            x.fill_(torch.nan)
        expected = run(q, k, v, mask=causal())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            beside = [run(q, k, v, mask=causal()) for _ in range(10)]
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert same(expected, found)
        assert same(expected, again)
        assert all(same(expected, one) for one in beside)


def test_a_graph_replays_on_two_streams_in_turn() -> None:
    q, k, v = operands(1, (16, 8), (600, 600), 64)
    expected = run(q, k, v, mask=causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(q, k, v, mask=causal())
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(6):
        found.out.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(streams[i % 2]):
            graph.replay()
        torch.cuda.synchronize()
        assert same(expected, found)


# What is compiled, and what goes elsewhere


@pytest.fixture
def kernels() -> Iterator[Any]:
    """How many kernels have been compiled in this process."""
    from saccade.backends.hopper.forward.kernel import forward_kernel

    return lambda: len(forward_kernel.device_caches[torch.cuda.current_device()][0])


@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (256, 256)])
def test_no_second_compile_for_other_shapes(d: int, d_v: int, kernels: Any) -> None:
    """Lengths, batches, heads, window bounds, scales and strides are runtime arguments. Up to d = 64 lengths choose one
    of two kernels."""

    def call(b: int, h: int, s: int, left: int, scale: float, order: str = "bhsd") -> None:
        layout = Dense(order)
        given = (layout.ordered(x).contiguous() for x in operands(b, (h, h), (s, s), d, d_v))
        run(*given, mask=window(left, 0), scale=scale, layout=layout)

    call(2, 3, 77, 5, 0.3)
    call(8, 64, 576, 5, 0.3)
    before = kernels()
    call(1, 1, 1, 0, 1.0)
    call(1, 16, 16, 1, 0.5)
    call(5, 16, 256, 16, 2.0)
    call(1, 7, 1000, 300, 0.125, "bshd")
    call(16, 1, 2048, 2047, 0.25, "sbhd")
    assert kernels() == before


@pytest.mark.parametrize("d", [64, 128])
def test_each_item_has_a_program(d: int) -> None:
    """Of up to four rounds, whose order is fixed, and of more; rows of one item, and of several."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for heads in (n * processors + more for n in range(1, 6) for more in (-1, 0, 1)):
        check(*operands(1, (heads, heads), (50, 50), d), mask=causal(), backend=BACKEND, backward=False).assert_ok()
    for heads, rows in ((8, 2048), (13, 1500), (3, 4100)):
        check(*operands(1, (heads, 1), (rows, rows), d), mask=causal(), backend=BACKEND, backward=False).assert_ok()


def test_two_kernels_for_a_group(kernels: Any) -> None:
    """Its heads share a tile or not, whatever the lengths."""
    before = kernels()
    for s in (1, 2, 7, 16, 33, 64, 100, 128, 500, 1024, 1999):
        for b, h_k in ((1, 1), (3, 2)):
            run(*operands(b, (4 * h_k, h_k), (s, 300), 64, 128), mask=causal())
    assert kernels() - before <= 2


def test_rows_that_are_not_aligned_go_to_triton() -> None:
    memory = torch.randn(3, 2 * 2 * 50 * 64 + 1, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = (x[1:].view(2, 2, 50, 64) for x in memory)
    told = explain(q, k, v, mask=causal())
    assert told.backend == "triton"
    assert told.reasons["gluon"] == ["takes aligned rows: pointers and strides of q, k and v at multiples of 16 bytes"]
    check(q, k, v, mask=causal()).assert_ok()


@pytest.mark.parametrize(("d", "d_v"), [(111, 111), (64, 60), (4, 8)])
def test_odd_head_dims_go_to_triton(d: int, d_v: int) -> None:
    q, k, v = operands(2, (2, 2), (50, 50), d, d_v)
    told = explain(q, k, v)
    assert told.backend == "triton"
    assert told.reasons["gluon"] == [f"takes head dims that are multiples of 8, not {d} and {d_v}"]
    check(q, k, v).assert_ok()


def test_float32_goes_to_triton() -> None:
    q, k, v = operands(2, (2, 2), (50, 50), 64, dtype=torch.float32)
    told = explain(q, k, v)
    assert told.backend == "triton"
    assert told.reasons["gluon"] == ["takes fp16, bf16, fp8_e4m3, fp8_e5m2, not fp32"]


def test_everything_else_is_gluon_s() -> None:
    for d, d_v in (*TUNED, (8, 8), (40, 24)):
        assert not explain(*operands(1, (4, 2), (50, 60), d, d_v), mask=causal()).reasons["gluon"]


@edges
@pytest.mark.parametrize(("d", "d_v"), TUNED)
def test_gradients_of_whatever_backward_is_planned(d: int, d_v: int, mask: Mask | None) -> None:
    check(*operands(2, (4, 2), (300, 333), d, d_v), mask=mask, backend=BACKEND).assert_ok()
