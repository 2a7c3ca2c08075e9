"""Packed sequences on a GPU: order of work, graphs, streams without the host, offsets that are broken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Packed, attention, causal, explain, mask_mod, window
from saccade.masks import Mask
from saccade.testing import check
from saccade.testing.cases import Case

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["auto", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def operands(t: int, h_q: int = 8, h_k: int = 2, d: int = 128) -> list[Tensor]:
    return [torch.randn(t, h, d, device="cuda", dtype=torch.bfloat16) for h in (h_q, h_k, h_k)]


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "window(300,0)"])
@pytest.mark.parametrize(
    "lengths",
    [(5000, *[30] * 60), tuple(range(0, 700, 7)), (128, 256, 192, 64, 384), (1,) * 200],
    ids=["one-long", "all", "whole-tiles", "ones"],
)
def test_lengths(lengths: tuple[int, ...], mask: str, d: int, backend: str) -> None:
    longest = max(lengths)
    case = Case("", b=len(lengths), h_q=8, h_k=2, s_q=longest, s_k=longest, d=d, mask=mask, order="thd",
                lengths=lengths, tail=150)  # fmt: skip
    made = case.inputs("cuda")
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=backend, **made.keywords).assert_ok()


def tiles(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A third of the tiles is empty, and others are partial."""
    return ((q_idx // 128 + kv_idx // 64 + h + b) % 3 != 0) & ((q_idx ^ kv_idx) % 256 != 5)


MASKS: dict[str, Mask] = {
    "intervals": window(700, 0),
    "listed": mask_mod(tiles) & causal(),
    "shared": mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + 7 * b ^ kv_idx) & 192 != 0),
    "all-but": ~(mask_mod(tiles) | window(3, 0)),
    "nowhere": mask_mod(lambda b, h, q_idx, kv_idx: q_idx < 0),
}


@pytest.mark.parametrize(
    ("d", "name"),
    [*((d, name) for d in (64, 128, 256) for name in ("listed", "all-but")), (128, "nowhere"), (128, "shared")],
)
def test_predicates(d: int, name: str, backend: str) -> None:
    """Other lengths of queries and keys, of which some are not in use."""
    case = Case("", b=9, h_q=8, h_k=2, s_q=900, s_k=1300, d=d, order="thd", used="qk", sink=True, score="alibi",
                tail=90, dropout_p=0.2 if name == "all-but" else 0.0)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs("cuda", requires_grad=True)
        keywords = made.keywords | {"mask": MASKS[name], "backend": backend, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


@pytest.mark.parametrize(("d", "mask"), [(64, "none"), (128, "causal"), (256, "window(200,0)")])
def test_dropout(d: int, mask: str, backend: str) -> None:
    """Its bits are those of a place in the sequence, wherever that begins."""
    case = Case("", b=7, h_q=8, h_k=2, s_q=700, s_k=500, d=d, mask=mask, order="thd", used="k", sink=True,
                tail=40, dropout_p=0.3)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs("cuda")
        keywords = made.keywords | {"backend": backend, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


def gradients(x: list[Tensor], layout: Packed, backend: str, **keywords: Any) -> list[Tensor]:
    leaves = [y.detach().requires_grad_() for y in x]
    out, lse = attention(*leaves, layout=layout, return_lse=True, backend=backend, **keywords)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.float().square().sum() + lse[:, :9].sum(), leaves)]


@pytest.mark.parametrize(
    ("d", "name", "whole"),
    [(128, "intervals", False), (128, "intervals", True), (128, "listed", True), (256, "listed", True)],
)
def test_repeats_are_bitwise_equal(d: int, name: str, whole: bool, backend: str) -> None:
    """With whole blocks, half of the programs have none, and come in several rounds: all add to one piece of dq."""
    offsets = offsets_of([128] * 200 if whole else [900, 0, 33, 400, 1])
    layout, x = Packed(offsets, offsets, 900, 900), operands(int(offsets[-1]) + 66, d=d)
    first = gradients(x, layout, backend, mask=MASKS[name], deterministic=True)
    for _ in range(20):
        again = gradients(x, layout, backend, mask=MASKS[name], deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["intervals", "listed"])
def test_a_graph_is_replayed_with_other_offsets(name: str, backend: str) -> None:
    """Captured with upper bounds, and nothing in it waits for the host."""
    batches = [[512, 512, 512, 512], [1, 2000, 0, 47], [0, 0, 0, 2048], [300, 301, 302, 0], [2, 3, 5, 7]]
    offsets, x = offsets_of(batches[0]), operands(2048)
    layout = Packed(offsets, offsets, 2048, 2048)

    def call() -> list[Tensor]:
        return gradients(x, layout, backend, mask=MASKS[name])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for lengths in batches:
        offsets.copy_(offsets_of(lengths))
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        wanted = call()
        for of, y, z in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            if of == "dq" and backend == "auto":  # added up in any order
                torch.testing.assert_close(y, z)
            else:
                assert torch.equal(y, z), (of, lengths)


def test_nothing_waits_for_the_host(backend: str) -> None:
    offsets, x = offsets_of([100, 0, 300]), operands(400)
    layout = Packed(offsets, offsets, torch.tensor(300, device="cuda"), torch.tensor(300, device="cuda"))
    gradients(x, layout, backend, mask=causal())
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(x, layout, backend, mask=causal())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "offsets",
    [
        [5, 100, 400],
        [0, 300, 100],
        [0, -7, 400],
        [0, 200, 1 << 20],
        [400, 400, 400],
        [0, 1 << 40, 9],
        [0, 300, 100, 400],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["intervals", "listed"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in order"])
def test_broken_offsets_stay_inside(offsets: list[int], name: str, deterministic: bool, backend: str) -> None:
    """What comes out means nothing, but no row before or behind the tensors is written, and nobody waits for ever."""
    cu = torch.tensor(offsets, device="cuda")
    memory = [torch.zeros(1200, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
    x = [y[400:800].normal_() for y in memory]
    keywords = {"mask": MASKS[name], "deterministic": deterministic}
    gradients(x, Packed(cu, cu, 400, 400), backend, **keywords)
    whole = torch.tensor([0, *[390] * (len(offsets) - 2), 400], device="cuda")
    gradients(x, Packed(whole, cu, 400, 400), backend, **keywords)
    torch.cuda.synchronize()
    for y in memory:
        assert not y[:400].any()
        assert not y[800:].any()
    with pytest.raises(ValueError, match="must begin at 0"):
        gradients(x, Packed(cu, cu, 400, 400, validate=True), backend)


def test_heads_that_share_a_tile() -> None:
    """One query for each sequence: the heads of a group fill the tile."""
    made = Case("", b=50, h_q=16, h_k=2, s_q=1, s_k=900, d=128, mask="causal", order="thd", lengths=(1,) * 50).inputs(
        "cuda"
    )
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **made.keywords).assert_ok()
    assert explain(made.q, made.k, made.v, **made.keywords).backend in ("gluon", "triton")


def test_captured_tensors_of_no_sequence(backend: str) -> None:
    none = torch.zeros(1, device="cuda", dtype=torch.int32)
    x = torch.randn(3, 1, 192, device="cuda", dtype=torch.float16, requires_grad=True)
    table = torch.randn(1100, device="cuda", dtype=torch.float16, requires_grad=True)
    layout = Packed(none, none, 0, 0)
    out = attention(x, x, x, score_mod=lambda s, b, h, i, j: s + table[i], layout=layout, backend=backend)
    for gradient in torch.autograd.grad(out.sum(), (x, table)):
        assert not gradient.count_nonzero()
