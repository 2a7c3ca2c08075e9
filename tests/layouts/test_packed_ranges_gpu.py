"""Packed sequences that share keys on a GPU: every kernel, repeats, graphs, streams without the host, broken ranges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Packed, attention, causal, explain, mask_mod, window
from saccade.masks import Mask
from saccade.testing import check
from saccade.testing.cases import Case

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


@pytest.fixture(params=["auto", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def operands(t_q: int, t_k: int, h_q: int = 8, h_k: int = 2, d: int = 128) -> list[Tensor]:
    sizes = (t_q, h_q), (t_k, h_k), (t_k, h_k)
    return [torch.randn(t, h, d, device=DEVICE, dtype=torch.bfloat16) for t, h in sizes]


def chunks(ends: list[int], device: str = DEVICE) -> Packed:
    """Chunks of one sequence, each of which sees all keys up to its last."""
    cuts = torch.tensor([0, *ends], device=device)
    return Packed(cuts, starts_k=torch.zeros_like(cuts[1:]), seqused_k=cuts[1:])


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "window(300,0)", "prefixes", "interval_rows"])
def test_masks(mask: str, d: int, backend: str) -> None:
    case = Case("", b=9, h_q=8, h_k=2, s_q=700, s_k=1300, d=d, mask=mask, order="thd", ranges=True, tail=150, used="q")
    for deterministic in (False, True):
        made = case.inputs(DEVICE)
        keywords = made.keywords | {"backend": backend, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


@pytest.mark.parametrize("b", [1, 70, 300])
@pytest.mark.parametrize("group", [1, 4])
def test_many_sequences(b: int, group: int, backend: str) -> None:
    """More than a program looks at at once; some of them empty."""
    case = Case("", b=b, h_q=2 * group, h_k=2, s_q=60, s_k=200, d=64, mask="causal", order="thd", ranges=True)
    made = case.inputs(DEVICE)
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=backend, **made.keywords).assert_ok()


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("score", ["softcap(9)", "relative_bias(40)", "bias"])
def test_scores_and_their_tensors(score: str, dtype: str) -> None:
    case = Case("", dtype=dtype, b=7, h_q=8, h_k=2, s_q=300, s_k=500, d=64, mask="causal", score=score, sink=True,
                order="thd", ranges=True)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs(DEVICE, requires_grad=True)
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, deterministic=deterministic,
              **made.keywords).assert_ok()  # fmt: skip


@pytest.mark.parametrize(("d", "mask"), [(64, "none"), (128, "causal"), (256, "window(200,0)")])
def test_dropout(d: int, mask: str, backend: str) -> None:
    """Its bits are those of a place in the sequence, wherever its keys begin."""
    case = Case("", b=7, h_q=8, h_k=2, s_q=700, s_k=500, d=d, mask=mask, order="thd", ranges=True, sink=True,
                dropout_p=0.3)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs(DEVICE)
        keywords = made.keywords | {"backend": backend, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


def tiles(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A third of the tiles is empty, and others are partial."""
    return ((q_idx // 128 + kv_idx // 64 + h + b) % 3 != 0) & ((q_idx ^ kv_idx) % 256 != 5)


MASKS: dict[str, Mask] = {"intervals": window(700, 0), "listed": mask_mod(tiles) & causal(), "not": ~window(3, 0)}


@pytest.mark.parametrize("name", ["listed", "not"])
def test_predicates(name: str, backend: str) -> None:
    case = Case("", b=9, h_q=8, h_k=2, s_q=500, s_k=900, d=128, order="thd", ranges=True, sink=True, score="alibi")
    for deterministic in (False, True):
        made = case.inputs(DEVICE, requires_grad=True)
        keywords = made.keywords | {"mask": MASKS[name], "backend": backend, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


@pytest.mark.parametrize("d", [64, 128])
def test_chunks_of_one_sequence_are_the_whole(d: int, backend: str) -> None:
    x = Case("", b=1, h_q=8, h_k=2, s_q=3000, s_k=3000, d=d, order="thd", lengths=(3000,)).inputs(DEVICE)
    layout = chunks([700, 1280, 2999, 3000])

    def chunked(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        return attention(q, k, v, **keywords | {"layout": layout})

    keywords = x.keywords | {"mask": causal()}
    check(x.q, x.k, x.v, dout=x.dout, dlse=x.dlse, backend=backend, function=chunked, **keywords).assert_ok()


def gradients(x: list[Tensor], layout: Packed, backend: str, **keywords: Any) -> list[Tensor]:
    leaves = [y.detach().requires_grad_() for y in x]
    out, lse = attention(*leaves, layout=layout, return_lse=True, backend=backend, **keywords)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.float().square().sum() + lse[:, :9].sum(), leaves)]


@pytest.mark.parametrize("name", MASKS)
def test_repeats_are_bitwise_equal(name: str, backend: str) -> None:
    layout, x = chunks([*range(64, 1024, 64), 1024]), operands(1024, 1024)
    first = gradients(x, layout, backend, mask=MASKS[name], deterministic=True)
    for _ in range(20):
        again = gradients(x, layout, backend, mask=MASKS[name], deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in order"])
def test_a_graph_is_replayed_with_other_ranges(name: str, deterministic: bool, backend: str) -> None:
    cuts = [[0, 512, 1024, 2048], [0, 1, 2000, 2001], [0, 0, 0, 0], [0, 300, 601, 903]]
    vectors = [([0, 0, 0], [512, 1024, 2048]), ([700, 3, 5], [1, 1000, 0]), ([0, 0, 0], [0, 0, 0]), ([9, 0, 900],) * 2]
    offsets, starts, used = (torch.tensor(y, device=DEVICE) for y in (cuts[0], *vectors[0]))
    x = operands(2048, 2048)

    def call() -> list[Tensor]:
        layout = Packed(offsets, starts_k=starts, seqused_k=used)
        return gradients(x, layout, backend, mask=MASKS[name], deterministic=deterministic)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for cut, (start, use) in zip(cuts, vectors, strict=True):
        for vector, numbers in ((offsets, cut), (starts, start), (used, use)):
            vector.copy_(torch.tensor(numbers))
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        for of, y, z in zip(("out", "lse", "dq", "dk", "dv"), found, call(), strict=True):
            assert torch.equal(y, z), (of, cut)


def test_nothing_waits_for_the_host(backend: str) -> None:
    layout, x = chunks([100, 300, 400]), operands(400, 400)
    lengths, ids = torch.tensor([100, 300], device=DEVICE), torch.arange(400, device=DEVICE) % 100
    gradients(x, layout, backend, mask=causal())
    gradients(x, Packed.from_lengths(lengths), backend, mask=causal())
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(x, layout, backend, mask=causal())
        gradients(x, Packed.from_lengths(lengths), backend, mask=causal())
        gradients(x, Packed.from_lengths([100, 300], device=DEVICE), backend, mask=causal())
        ranked = Packed.from_position_ids(ids, max_sequences=3)
        found = gradients(x, ranked, backend, mask=causal())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ranked.cu_seqlens_q.tolist() == [0, 100, 200, 300]
    assert not found[0][300:].any()  # of a sequence too many
    assert bool((found[1][:, 300:] == -torch.inf).all())


@pytest.mark.parametrize(
    ("starts", "used"),
    [([-5, 300], [400, 400]), ([1 << 40, 0], [9, 1 << 40]), ([0, 399], [-7, 400]), ([-(1 << 40), 400], [400, 400])],
    ids=str,
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in order"])
def test_broken_ranges_stay_inside(
    starts: list[int], used: list[int], name: str, deterministic: bool, backend: str
) -> None:
    """What comes out means nothing, but no row before or behind the tensors is written."""
    memory = [torch.zeros(1200, h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (8, 2, 2)]
    x = [y[400:800].normal_() for y in memory]
    offsets = torch.tensor([0, 390, 400], device=DEVICE)
    vectors = {"starts_k": torch.tensor(starts, device=DEVICE), "seqused_k": torch.tensor(used, device=DEVICE)}
    gradients(x, Packed(offsets, **vectors), backend, mask=MASKS[name], deterministic=deterministic)
    torch.cuda.synchronize()
    for y in memory:
        assert not y[:400].any()
        assert not y[800:].any()
    with pytest.raises(ValueError, match="no range may end beyond"):
        gradients(x, Packed(offsets, **vectors, validate=True), backend)


def test_who_runs_it() -> None:
    """Hopper's forward, and the portable backward."""
    x = [y.requires_grad_() for y in operands(400, 400)]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert explain(*x, layout=chunks([100, 400])).backend == ("gluon" if hopper else "triton")
