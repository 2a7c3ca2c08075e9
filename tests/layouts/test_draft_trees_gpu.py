"""Trees of drafted tokens over pages, on a GPU: the oracle's answers, and graphs replayed with other trees."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from saccade import Paged, attention, causal, interval, mask_mod
from saccade.testing import check, gallery

pytestmark = pytest.mark.gpu

H_Q, H_K, D, SIZE = 32, 8, 128, 16


def cache(b: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(2, b * width, SIZE, H_K, D, device="cuda").to(dtype)
    return k, v, torch.randperm(b * width, device="cuda").view(b, width).int()


def binary(n: int) -> list[int]:
    return [(i - 1) // 2 for i in range(n)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("context", [100, 2100])
def test_one_tree_for_all(context: int, n: int, dtype: torch.dtype) -> None:
    k, v, table = cache(5, 140, dtype)
    q = torch.randn(5, n, H_Q, D, device="cuda").to(dtype)
    layout = Paged(table, torch.full((5,), context + n, device="cuda"))
    check(q, k, v, layout=layout, mask=gallery.tree(binary(n), context, "cuda")).assert_ok()


@pytest.mark.parametrize("shared", [0, 8])
def test_branches(shared: int) -> None:
    """By bounds that tensors hold, with and without a shared prefix."""
    branches, length = 4, 5
    n, contexts = branches * length, torch.tensor([900, 128, 1500], device="cuda")
    k, v, table = cache(3, 100, torch.bfloat16)
    table[:, :8] = table[0, :8]
    q, rows = torch.randn(3, n, H_Q, D, device="cuda").bfloat16(), torch.arange(n, device="cuda")
    start, stop = contexts[:, None] + rows // length * length, contexts[:, None] + rows + 1
    mask = interval(None, contexts[:, None].expand(3, n).contiguous()) | interval(start, stop)
    check(q, k, v, layout=Paged(table, contexts + n, shared_pages=shared), mask=mask).assert_ok()


def test_a_graph_is_replayed_with_other_trees() -> None:
    """The tree is a tensor that the predicate reads: each replay has what it holds then."""
    b, n = 4, 16
    k, v, table = cache(b, 40, torch.bfloat16)
    q = torch.randn(b, n, H_Q, D, device="cuda").bfloat16()
    contexts = torch.tensor([500, 90, 300, 7], device="cuda")
    seen = torch.ones(b, n, n, dtype=torch.bool, device="cuda").tril()

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = contexts[b]
        i, j = (q_idx - first).clamp(0, n - 1), (kv_idx - first).clamp(0, n - 1)
        return (kv_idx < first) | seen[b, i, j]

    mask = causal() & mask_mod(sees)

    def call() -> Tensor:
        return attention(q, k, v, mask=mask, layout=Paged(table, contexts + n))

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for seed in range(3):
        torch.manual_seed(seed)
        seen.copy_((torch.rand(b, n, n, device="cuda") < 0.4).tril() | torch.eye(n, device="cuda").bool())
        contexts.copy_(torch.randint(1, 600, (b,)))
        graph.replay()
        assert torch.equal(out, call())
        check(q, k, v, mask=mask, layout=Paged(table, contexts + n)).assert_ok()
