"""The Hopper backward on a Hopper GPU: masks, ragged ends, strides, padding, repeats, training.

Every new kind of mask compiles a kernel for each width of tiles, so tests share theirs where they can. `right` runs
each call twice: the second one takes what the first one kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade import Dense, attention, causal, documents, prefix, softcap, window
from saccade.api import explain
from saccade.backends.hopper.backward import launch as backward_launch
from saccade.masks import Mask
from saccade.ops import dispatch, replay
from saccade.testing.accuracy import check

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU (sm_90)")]

DEVICE, BACKEND = "cuda", "gluon"
LAUNCHES, REPEATS, STEPS = 1000, 100, 200
EDGES = {"full": None, "causal": causal()}
MASKS = EDGES | {"left": window(100, 0), "both": window(64, 32)}

edges = pytest.mark.parametrize("mask", EDGES.values(), ids=EDGES)
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
dims = pytest.mark.parametrize("d", [64, 128])
every_kernel = pytest.mark.parametrize("d", [64, 128, 256])


def operands(
    b: int, heads: tuple[int, int], lengths: tuple[int, int], d: int, d_v: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    (h_q, h_k), (s_q, s_k) = heads, lengths
    shapes = (b, h_q, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d_v or d)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=dtype) for shape in shapes)
    return q, k, v


def right(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> None:
    """Output and gradients are within the tolerance, and the gradients are this backend's."""
    told = {name: x for name, x in keywords.items() if name not in ("dout", "dlse")}
    spec = explain(q, k, v, backend=BACKEND, **told).plan.spec
    assert dispatch.plan(spec, BACKEND, gradient=True).backend == BACKEND
    for _ in range(2):
        check(q, k, v, backend=BACKEND, **keywords).assert_ok()


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **keywords: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(attention(*leaves, backend=BACKEND, **keywords), leaves, dout)


def far(x: Tensor, other: Tensor) -> Tensor:
    """Where they differ by more than one rounding and the order of a sum in float32."""
    x, other = x.float(), other.float()
    return (x - other).abs() > 2**-7 * x.abs() + 1e-5 * x.abs().max()


def near(x: Tensor, other: Tensor) -> bool:
    return not far(x, other).any()


# Shapes


@masks
@every_kernel
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        ((2, 2), (128, 128)), ((3, 3), (384, 512)), ((2, 2), (1024, 1024)),
        ((2, 2), (64, 128)), ((2, 2), (192, 192)),  # rows end in half a block
        ((6, 2), (321, 577)), ((6, 2), (577, 321)), ((8, 2), (1000, 1000)),
        ((2, 2), (1, 1)), ((4, 1), (1, 700)), ((2, 2), (700, 1)), ((4, 1), (65, 129)), ((2, 2), (300, 100)),
    ],
    ids=str,
)  # fmt: skip
def test_lengths(heads: tuple[int, int], lengths: tuple[int, int], d: int, mask: Mask | None) -> None:
    right(*operands(2, heads, lengths, d), mask=mask)


@pytest.mark.parametrize(("d", "d_v"), [
    (80, 80), (96, 96), (64, 128), (128, 64), (40, 24), (8, 8), (104, 72),
    (192, 128), (160, 160), (136, 72), (64, 256), (256, 192),
])  # fmt: skip
def test_head_dims(d: int, d_v: int) -> None:
    right(*operands(2, (4, 2), (256, 300), d, d_v), mask=causal())


@every_kernel
@pytest.mark.parametrize("group", [2, 3, 8, 16])
def test_groups(group: int, d: int) -> None:
    right(*operands(2, (2 * group, 2), (300, 333), d), mask=causal())


@every_kernel
def test_many_heads(d: int) -> None:
    """More blocks of keys than multiprocessors, in sections of heads of which the last is short."""
    right(*operands(3, (13, 13), (512, 700), d), mask=causal())


# dq of one block of keys is stored, where others are added up


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 77, 128, 129])
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("d", [40, 64, 72, 128])
def test_one_block_of_keys(d: int, heads: tuple[int, int], order: str, keys: int) -> None:
    layout = Dense(order)
    q, k, v = (layout.ordered(x).contiguous() for x in operands(2, heads, (333, keys), d))
    right(q, k, v, layout=layout)


@pytest.mark.parametrize(("d", "d_v"), [(40, 128), (128, 40), (64, 24), (8, 8), (80, 96), (104, 112)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_dims_beside_one_block_of_keys(d: int, d_v: int, dtype: torch.dtype) -> None:
    q, k, v = operands(2, (4, 2), (200, 77), d, d_v, dtype)
    right(q, k, v)
    right(q, k, v, score_mod=softcap(5.0), sink=torch.randn(4, device=DEVICE))
    right(q, k, v, dropout_p=0.3, deterministic=True)


@dims
def test_one_block_of_keys_of_a_projection(d: int) -> None:
    """Of texts and images: views of one tensor each; and rows of q that are the same for all heads."""
    q = torch.randn(3, 500, 4, 3 * d, device=DEVICE, dtype=torch.bfloat16)[..., d : 2 * d]
    k, v = torch.randn(3, 77, 4, 2 * d, device=DEVICE, dtype=torch.bfloat16).split(d, -1)
    right(q, k, v, layout=Dense("bshd"))
    right(q[:, :, :1].expand(-1, -1, 4, -1), k, v, layout=Dense("bshd"))


@dims
@pytest.mark.parametrize("deterministic", [False, True])
def test_repeats_of_one_block_of_keys(company: None, d: int, deterministic: bool) -> None:
    """All gradients are the same bits, each row of every call written, in graphs too."""
    q, k, v = (x.requires_grad_() for x in operands(16, (8, 8), (1000, 77), d))
    dout = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        out = attention(q, k, v, backend=BACKEND, deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), dout)

    first = step()
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(LAUNCHES):
        for x, y in zip(first, step(), strict=True):
            differ += (x != y).sum()
    assert not differ
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for x in (q, k, v, dout):
        x.detach().normal_()
    for _ in range(3):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(found, step(), strict=True))


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float16])
def test_float16(dtype: torch.dtype, d: int) -> None:
    right(*operands(2, (4, 2), (320, 448), d, dtype=dtype), mask=causal())


# Masks and scores


@pytest.mark.parametrize(
    ("mask", "d"),
    [
        (prefix(70), 64), (prefix(70), 128), (prefix(100) | causal(), 128), (prefix(40) & window(99, 3), 64),
        (window(0, 0), 64), (window(7, None), 128),
    ],
    ids=str,
)  # fmt: skip
def test_masks(mask: Mask, d: int) -> None:
    right(*operands(2, (4, 2), (600, 600), d), mask=mask)


@every_kernel
@pytest.mark.parametrize("scattered", [False, True])
def test_documents(scattered: bool, d: int) -> None:
    ids = torch.randint(0, 5, (2, 600), device=DEVICE)
    ids = ids if scattered else ids.sort(1).values
    right(*operands(2, (4, 2), (600, 600), d), mask=documents(ids) & causal())


@every_kernel
def test_rows_without_keys(d: int) -> None:
    """Whole tiles of them, and keys that nobody sees."""
    q, k, v = operands(2, (4, 2), (700, 300), d)
    right(q, k, v, mask=causal())
    dq, _, _ = gradients(q, k, v, torch.randn_like(q), mask=causal())
    assert not dq[:, :, :400].any()
    q, k, v = operands(2, (4, 2), (100, 900), d)
    right(q, k, v, mask=window(100, 0))
    _, dk, dv = gradients(q, k, v, torch.randn_like(q), mask=window(100, 0))
    assert not dk[:, :, :700].any()
    assert not dv[:, :, :700].any()


@every_kernel
def test_softcap(d: int) -> None:
    right(*operands(2, (4, 2), (320, 448), d), score_mod=softcap(5.0), mask=causal())


@dims
@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-7, 1e-3, 3.0])
def test_scales(scale: float, d: int) -> None:
    right(*operands(2, (4, 2), (320, 448), d), scale=scale, mask=causal())


@dims
def test_sink(d: int) -> None:
    right(*operands(2, (4, 2), (320, 448), d), sink=torch.randn(4, device=DEVICE), mask=causal())


@edges
@dims
@pytest.mark.parametrize("factor", [4.0, 30.0])
def test_scores_far_from_zero(factor: float, d: int, mask: Mask | None) -> None:
    """Alike and far below zero: no row's LSE has an exponential in float32. Then one key takes all."""
    q, k, v = operands(1, (2, 2), (300, 333), d)
    low_q, low_k = factor + 0.1 * q, -factor + 0.1 * k
    assert attention(low_q, low_k, v, mask=mask, backend=BACKEND, return_lse=True).lse.max() < -88
    right(low_q, low_k, v, mask=mask)
    right(q * factor, k * factor, v, mask=mask)


@edges
@every_kernel
def test_gradient_of_the_lse(d: int, mask: Mask | None) -> None:
    q, k, v = operands(2, (4, 2), (320, 448), d)
    right(q, k, v, mask=mask, dlse=torch.randn(q.shape[:3], device=DEVICE))
    far = torch.randn(4 * 2 * 320 + 1, device=DEVICE)[1:].view(2, 4, 320)  # not at a multiple of 16 bytes
    right(q, k, v, mask=mask, dlse=far)


# Strides


@edges
@dims
@pytest.mark.parametrize("order", ["bshd", "sbhd"])
def test_orders(order: str, d: int, mask: Mask | None) -> None:
    layout = Dense(order)
    right(*(layout.ordered(x).contiguous() for x in operands(2, (6, 3), (256, 384), d)), mask=mask, layout=layout)


GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda x: torch.ones((), device=x.device, dtype=x.dtype).expand(x.shape),
    "same for all rows": lambda x: x[:, :, :1].expand(x.shape),
    "same for all heads": lambda x: x[:, :1].expand(x.shape),
    "columns first": lambda x: x.mT.contiguous().mT,
    "rows first": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "odd address": lambda x: F.pad(x, (1, 7))[..., 1:-7],
    "odd rows": lambda x: F.pad(x, (0, 1))[..., :-1],
}


@dims
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_strides_of_dout(given: Callable[[Tensor], Tensor], d: int) -> None:
    q, k, v = operands(2, (4, 2), (320, 448), d)
    dout = given(torch.randn_like(q))
    right(q, k, v, mask=causal(), dout=dout)
    expected = gradients(q, k, v, dout.contiguous(), mask=causal())
    found = gradients(q, k, v, dout, mask=causal())
    assert near(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    assert torch.equal(expected[2], found[2])


@dims
def test_nothing_kept_for_one_dout_is_taken_for_another(d: int) -> None:
    q, k, v = operands(2, (4, 2), (320, 448), d)
    dout = torch.randn_like(q)[:, :1, :1].expand(q.shape)
    for scale in (0.1, -0.1, 0.1):  # a negative one has a kernel of its own
        expected = gradients(q, k, v, dout.contiguous(), mask=causal(), scale=scale)
        for name, given in GIVEN.items():
            if name != "ones":
                found = gradients(q, k, v, given(dout), mask=causal(), scale=scale)
                assert near(expected[0], found[0]), name
                assert torch.equal(expected[1], found[1]), name
                assert torch.equal(expected[2], found[2]), name


def test_packed_projections() -> None:
    """q, k and v are slices of one tensor (b, s, 3, h, d)."""
    q, k, v = torch.randn(2, 384, 3, 4, 128, device=DEVICE, dtype=torch.bfloat16).unbind(2)
    right(q, k, v, layout=Dense("bshd"), mask=causal())


def test_keys_for_every_batch_row() -> None:
    q, k, v = operands(3, (4, 2), (320, 448), 128)
    right(q, k[:1].expand(3, -1, -1, -1), v, mask=causal())


# Programs that stay


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three programs up to d = 128, so that each has many blocks of keys; plans that are kept know another number."""
    monkeypatch.setattr(backward_launch, "multiprocessors", lambda _: 3)
    replay.forget()
    yield
    replay.forget()


@masks
@dims
@pytest.mark.parametrize("deterministic", [False, True])
def test_blocks_one_after_the_other(deterministic: bool, d: int, mask: Mask | None, few_programs: None) -> None:
    q, k, v = operands(3, (4, 2), (650, 910), d)
    used = torch.tensor([650, 0, 77], device=DEVICE), torch.tensor([910, 300, 1], device=DEVICE)
    right(q, k, v, mask=mask, deterministic=deterministic)
    right(q, k, v, mask=mask, layout=Dense("bhsd", *used), deterministic=deterministic)
    keywords = {"mask": mask, "layout": Dense("bhsd", *used), "deterministic": deterministic}
    dout = torch.randn_like(q)
    many = [gradients(q, k, v, dout, **keywords) for _ in range(20)]
    for dq, dk, dv in many:
        assert torch.equal(dk, many[0][1])
        assert torch.equal(dv, many[0][2])
        assert not deterministic or torch.equal(dq, many[0][0])


# Padding and fresh memory


@masks
@every_kernel
def test_padding(d: int, mask: Mask | None) -> None:
    """Used lengths around every edge of a tile; NaN behind them, and gradients of exactly zero."""
    used_q = torch.tensor([0, 1, 63, 64, 65, 191, 192, 300, 300, 5], device=DEVICE)
    used_k = torch.tensor([7, 0, 64, 65, 1, 128, 127, 129, 300, 300], device=DEVICE, dtype=torch.int32)
    q, k, v = operands(10, (4, 2), (300, 300), d)
    dout = torch.randn_like(q)
    index = torch.arange(300, device=DEVICE)
    unused = {"q": (index >= used_q[:, None])[:, None, :, None], "k": (index >= used_k[:, None])[:, None, :, None]}
    for name, tensors in (("q", (q, dout)), ("k", (k, v))):
        for x in tensors:
            x.masked_fill_(unused[name], torch.nan)
    layout = Dense("bhsd", used_q, used_k)
    right(q, k, v, mask=mask, layout=layout, dout=dout)
    dq, dk, dv = gradients(q, k, v, dout, mask=mask, layout=layout)
    assert not dq.masked_select(unused["q"]).any()
    assert not dk.masked_select(unused["k"]).any()
    assert not dv.masked_select(unused["k"]).any()


@edges
@every_kernel
@pytest.mark.parametrize("lengths", [(320, 448), (64, 200), (1, 1)], ids=str)
def test_nothing_reads_fresh_memory(lengths: tuple[int, int], d: int, mask: Mask | None, poison: None) -> None:
    right(*operands(2, (4, 2), lengths, d), mask=mask)


@edges
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (80, 80), (128, 64), (192, 128)])
def test_memory_around_the_tensors(d: int, d_v: int, mask: Mask | None, surrounded: Any) -> None:
    """NaN behind every row, behind the last row and before the first."""
    q, k, v = operands(2, (4, 4), (200, 217), d, d_v)
    dout = torch.randn(2, 4, 200, d_v, device=DEVICE, dtype=q.dtype)
    expected = gradients(q, k, v, dout, mask=mask)
    found = gradients(*map(surrounded, (q, k, v, dout)), mask=mask)
    assert near(expected[0], found[0])
    assert torch.equal(expected[1], found[1])
    assert torch.equal(expected[2], found[2])


def test_workspace() -> None:
    """A backward takes dq's sums and two numbers of each row beside its results, and keeps none of it."""
    from saccade.backends.hopper.backward.plan import BackwardConfig

    q, k, v = (x.requires_grad_() for x in operands(1, (8, 8), (4000, 4000), 128))
    dout = torch.randn_like(q)
    torch.autograd.grad(attention(q, k, v, backend=BACKEND), (q, k, v), dout)  # compiles
    out = attention(q, k, v, backend=BACKEND)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(out, (q, k, v), dout)
    results = sum(x.numel() * x.element_size() for x in found)
    extra = torch.cuda.max_memory_allocated() - before - results
    # torch hands out large blocks with up to 1 MB more than was asked for; there are three.
    config = BackwardConfig.of(128, 128)
    rows = 8 * -(-4000 // config.block_q) * config.block_q
    assert extra <= rows * (4 * config.columns + 8) + (3 << 20)
    del found, out
    deadline = time.monotonic() + 10  # autograd's thread drops what it holds when `grad` has returned
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() <= before


# Repeats, streams and graphs


@edges
@every_kernel
def test_repeats(company: None, d: int, mask: Mask | None) -> None:
    """dk and dv are the same bits; dq is a sum over blocks of keys in any order, with other work in between and on the
    same memory. Nothing waits for the GPU, so that launches queue up."""
    q, k, v = operands(2, (16, 16), (1500, 1500), d)
    dout, other = torch.randn_like(q), operands(1, (3, 3), (900, 1100), d)
    first = gradients(q, k, v, dout, mask=mask)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(LAUNCHES):
        if i % 4 == 0:
            gradients(*other, torch.randn_like(other[0]), mask=mask)
        dq, dk, dv = gradients(q, k, v, dout, mask=mask)
        differ += (dk != first[1]).sum() + (dv != first[2]).sum() + far(first[0], dq).sum()
    assert not differ


@masks
@every_kernel
@pytest.mark.parametrize("heads", [(16, 16), (8, 2)], ids=str)
def test_deterministic_repeats(d: int, heads: tuple[int, int], mask: Mask | None) -> None:
    """All gradients are the same bits each time, with more programs than the GPU runs at once."""
    q, k, v = operands(2, heads, (1500, 3000), d)
    dout, other = torch.randn_like(q), operands(1, (3, 3), (900, 1100), d)
    first = gradients(q, k, v, dout, mask=mask, deterministic=True)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(REPEATS):
        if i % 4 == 0:
            gradients(*other, torch.randn_like(other[0]), mask=mask, deterministic=True)
        for x, y in zip(first, gradients(q, k, v, dout, mask=mask, deterministic=True), strict=True):
            differ += (x != y).sum()
    assert not differ


@masks
@every_kernel
@pytest.mark.parametrize(
    ("heads", "lengths"), [((2, 2), (384, 512)), ((6, 2), (321, 577)), ((2, 1), (577, 321)), ((2, 2), (1, 1))], ids=str
)
def test_deterministic(heads: tuple[int, int], lengths: tuple[int, int], d: int, mask: Mask | None) -> None:
    right(*operands(2, heads, lengths, d), mask=mask, deterministic=True)


@edges
@every_kernel
def test_groups_of_many_programs(d: int, mask: Mask | None) -> None:
    """With fewer programs the heads of a group are divided among them, as in all the other tests."""
    right(*operands(64, (4, 2), (300, 1000), d), mask=mask)


def test_deterministic_padding() -> None:
    q, k, v = operands(3, (4, 2), (300, 400), 128)
    used = torch.tensor([300, 0, 77], device=DEVICE), torch.tensor([5, 400, 211], device=DEVICE)
    right(q, k, v, mask=causal(), layout=Dense("bhsd", *used), deterministic=True)


def test_deterministic_documents() -> None:
    q, k, v = operands(2, (2, 2), (700, 700), 64)
    ids = torch.arange(700, device=DEVICE).expand(2, -1) // 90 % 4
    right(q, k, v, mask=documents(ids) & causal(), deterministic=True)


def test_streams() -> None:
    q, k, v = operands(2, (16, 8), (900, 900), 128)
    dout = torch.randn_like(q)
    expected = gradients(q, k, v, dout, mask=causal())
    streams = [torch.cuda.Stream() for _ in range(4)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    found = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 4]):
            found.append(gradients(q, k, v, dout, mask=causal()))
    torch.cuda.synchronize()
    for dq, dk, dv in found:
        assert near(expected[0], dq)
        assert torch.equal(expected[1], dk)
        assert torch.equal(expected[2], dv)


def test_graph_replays_with_other_data() -> None:
    q, k, v = (x.requires_grad_() for x in operands(2, (8, 4), (320, 448), 128))
    dout = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(q, k, v, mask=causal(), backend=BACKEND), (q, k, v), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        for x in (q, k, v, dout):
            x.detach().normal_()
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        expected = step()
        assert near(expected[0], found[0])
        assert torch.equal(expected[1], found[1])
        assert torch.equal(expected[2], found[2])


# What is compiled, and what goes elsewhere


@pytest.fixture
def kernels() -> Iterator[Any]:
    """How many kernels of the backward have been compiled in this process."""
    from saccade.backends.hopper.backward.dq import postprocess_kernel, preprocess_kernel
    from saccade.backends.hopper.backward.kernel import backward_kernel
    from saccade.backends.hopper.backward.wide import wide_backward_kernel

    kernels: tuple[Any, ...] = preprocess_kernel, backward_kernel, wide_backward_kernel, postprocess_kernel
    return lambda: sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)


@every_kernel
def test_no_second_compile_for_other_shapes(d: int, kernels: Any) -> None:
    """Lengths, batches, heads, groups, window bounds, scales and strides are runtime arguments."""

    def call(b: int, heads: tuple[int, int], s: int, left: int, scale: float, order: str = "bhsd") -> None:
        layout = Dense(order)
        q, k, v = (layout.ordered(x).contiguous() for x in operands(b, heads, (s, s), d))
        gradients(q, k, v, torch.randn_like(q), mask=window(left, 0), scale=scale, layout=layout)

    call(2, (3, 3), 77, 5, 0.3)
    before = kernels()
    call(1, (1, 1), 1, 0, 1.0)
    call(1, (16, 16), 16, 1, 0.5)
    call(5, (16, 1), 256, 16, 2.0)
    call(1, (14, 2), 1000, 300, 0.125, "bshd")
    call(16, (1, 1), 2048, 2047, 0.25, "sbhd")
    assert kernels() == before


# Training


def losses(attend: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
    """Of STEPS steps of one layer; `attend` gets and gives (b, h, s, d) tensors of a dtype, all else is float32."""
    made = torch.Generator(DEVICE).manual_seed(0)
    b, s, h, d = 2, 320, 4, 64
    x, goal = (torch.randn(b, s, h * d, generator=made, device=DEVICE) for _ in range(2))
    inward = torch.randn(h * d, 3 * h * d, generator=made, device=DEVICE).div_((h * d) ** 0.5).requires_grad_()
    outward = torch.randn(h * d, h * d, generator=made, device=DEVICE).div_((h * d) ** 0.5).requires_grad_()
    optimizer = torch.optim.Adam([inward, outward], lr=3e-3)
    found = []
    for _ in range(STEPS):
        q, k, v = (x @ inward).to(dtype).unflatten(-1, (3, h, d)).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v).transpose(1, 2).flatten(2).float()
        loss = F.mse_loss(out @ outward, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


def test_training_follows_pytorch() -> None:
    """From PyTorch's plain attention in float32 at most twice as far as the same in bfloat16, and a rounding."""

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=causal(), backend=BACKEND)

    exact, eager = losses(plain, torch.float32), losses(plain, torch.bfloat16)
    found = losses(ours, torch.bfloat16)
    assert exact[-1] < exact[0]
    rounding = torch.finfo(torch.bfloat16).eps / 2 * exact.max()
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max() + rounding
