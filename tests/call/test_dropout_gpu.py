"""Dropout in the kernels of a GPU: the oracle's bits, forward and backward, and torch's generator in graphs."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, causal
from saccade.call.dropout import Dropout
from saccade.testing.accuracy import check
from saccade.testing.cases import NAMED, Case

pytestmark = pytest.mark.gpu
CASES = [
    NAMED["dropout"],
    NAMED["dropout-wide"],
    NAMED["dropout-everything"],
    Case("d64", h_q=4, s_q=300, s_k=333, d=64, mask="causal", dropout_p=0.1),
    Case("d64-full", h_q=4, s_q=300, s_k=333, d=64, sink=True, dropout_p=0.5),
    Case("d128", h_q=8, s_q=500, s_k=500, d=128, mask="window(200,0)", dropout_p=0.1, used="k"),
    Case("d128-table", h_q=4, s_q=300, s_k=300, d=128, score="relative_bias(20)", dropout_p=0.3),
    Case("d256", h_q=4, s_q=300, s_k=300, d=256, mask="causal", score="temperature", dropout_p=0.2),
    Case("few-queries", h_q=16, h_k=1, s_q=3, s_k=300, d=64, mask="causal", dropout_p=0.2),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_oracle(case: Case, deterministic: bool, backend: str) -> None:
    given = case.inputs("cuda", requires_grad=True)
    keywords = {"backend": backend, "deterministic": deterministic, **given.keywords}
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, **keywords).assert_ok()


@pytest.mark.parametrize(("s", "d"), [(64, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
def test_bits(s: int, d: int, mask, backend: str) -> None:
    """v = identity makes out the probabilities; dout = identity makes dv those of the backward, transposed."""
    q, k = (torch.randn(2, 3, s, d, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.eye(s, device="cuda", dtype=torch.bfloat16).expand(2, 3, s, s).clone().requires_grad_()
    torch.manual_seed(3)
    out = attention(q, k, v, mask=mask, dropout_p=0.4, backend=backend)
    torch.manual_seed(3)
    dropout = Dropout.draw(0.4, q.device)
    at = (torch.arange(n, device="cuda") for n in (2, 3))
    kept = dropout.keep(*at, slice(0, s), slice(0, s))
    seen = attention(q, k, v, mask=mask, backend=backend) != 0
    assert torch.equal(out != 0, kept & seen)
    (dv,) = torch.autograd.grad(out, v, v.detach())
    assert torch.equal(dv.mT != 0, kept & seen)


def test_replays_draw_anew(backend: str) -> None:
    """Each replay of a graph drops others, forward and backward the same ones."""
    # Every probability is 1/128 and each kept one counts twice: sums that bfloat16 holds exactly.
    q, k, v = (torch.zeros(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v = torch.ones_like(v).requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = attention(q, k, v, dropout_p=0.5, backend=backend)
        return out, torch.autograd.grad(out, v, torch.ones_like(out))[0]

    step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    found = []
    for _ in range(3):
        graph.replay()
        # With ones all around, both sums are those of the kept probabilities.
        assert torch.equal(out.float().sum((2, 3)), dv.float().sum((2, 3)))
        found.append(out.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


def test_another_p_never_compiles(backend: str, forward_kernel) -> None:
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, dropout_p=0.3, backend=backend)
    cache = forward_kernel(backend).device_caches[0][0]
    before = len(cache)
    for p in (0.5, 0.1, 1e-9, 0.75, 1 - 1e-9):
        attention(q.clone()[:, :, : int(100 * p) + 5], k, v, dropout_p=p, backend=backend)
    assert len(cache) == before
