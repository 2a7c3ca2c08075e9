"""Trees of drafted tokens over pages: what each draft sees is its context and its own path from the root."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade import Paged, alibi, attention, causal, explain, interval, mask_mod
from saccade.testing import check, gallery

H_Q, H_K, D, SIZE = 4, 2, 16, 16


def drawn_tree(n: int, seed: int) -> list[int]:
    """The parent of each draft, -1 for a root; parents come first."""
    dice = random.Random(seed)
    return [dice.randint(-1, i - 1) for i in range(n)]


def ancestors(parents: list[int]) -> Tensor:
    """bool (n, n): row i sees itself and the drafts on its path to the root."""
    seen = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for i in range(len(parents)):
        at = i
        while at >= 0:
            seen[i, at] = True
            at = parents[at]
    return seen


def cache(b: int, width: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    k, v = torch.randn(2, b * width, SIZE, H_K, D, device=device).to(dtype)
    return k, v, torch.randperm(b * width, device=device).view(b, width).int()


def tree_mask(seen: Tensor, contexts: Tensor) -> Any:
    """Over positions: one tree for each sequence, (b, n, n), whose drafts follow `contexts` (b,) keys."""

    def sees(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = contexts[b]
        i, j = (q_idx - first).clamp(0, seen.shape[1] - 1), (kv_idx - first).clamp(0, seen.shape[2] - 1)
        return (kv_idx < first) | seen[b, i, j]

    return causal() & mask_mod(sees)


@pytest.mark.parametrize("n", [2, 7, 16, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_tree_for_all(n: int, dtype: torch.dtype) -> None:
    """The gallery's tree counts its context from the first key, so sequences have contexts of one length."""
    k, v, table = cache(3, 12, dtype)
    q = torch.randn(3, n, H_Q, D).to(dtype)
    context, parents = 90, drawn_tree(n, n)
    layout = Paged(table, torch.full((3,), context + n))
    check(q, k, v, layout=layout, mask=gallery.tree(parents, context)).assert_ok()
    check(q, k, v, layout=layout, mask=gallery.tree(parents, context), score_mod=alibi(torch.rand(H_Q))).assert_ok()


@pytest.mark.parametrize("n", [2, 8, 64])
def test_a_tree_for_each_sequence(n: int) -> None:
    """Of other contexts and other forms; each row is what its own path alone gives."""
    contexts, trees = torch.tensor([90, 3, 60]), [drawn_tree(n, seed) for seed in range(3)]
    k, v, table = cache(3, 10)
    q = torch.randn(3, n, H_Q, D)
    mask = tree_mask(torch.stack([ancestors(tree) for tree in trees]), contexts)
    layout = Paged(table, contexts + n)
    check(q, k, v, layout=layout, mask=mask).assert_ok()
    out = attention(q, k, v, layout=layout, mask=mask)
    for b, tree in enumerate(trees):
        keys, values = (x[table[b].long()].flatten(0, 1) for x in (k, v))
        for i in range(n):
            path = ancestors(tree)[i].nonzero()[:, 0] + contexts[b]
            kept = torch.cat([torch.arange(int(contexts[b])), path])
            alone = Paged(torch.zeros(1, 1).int(), torch.tensor([len(kept)]))
            wanted = attention(q[b : b + 1, i : i + 1], keys[None, kept], values[None, kept], layout=alone)
            torch.testing.assert_close(out[b, i], wanted[0, 0])


def test_the_context_as_an_interval() -> None:
    """The same tree where the predicate is asked behind the context alone, with a shared prefix and without."""
    n, contexts = 9, torch.tensor([90, 70, 64])
    seen = torch.stack([ancestors(drawn_tree(n, seed)) for seed in range(3)])
    k, v, table = cache(3, 10)
    table[:, :4] = table[0, :4]
    q = torch.randn(3, n, H_Q, D)

    def drafted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        i, j = (q_idx - contexts[b]).clamp(0, n - 1), (kv_idx - contexts[b]).clamp(0, n - 1)
        return seen[b, i, j]

    mask = causal() & (interval(None, contexts[:, None]) | mask_mod(drafted))
    wanted = attention(q, k, v, layout=Paged(table, contexts + n), mask=tree_mask(seen, contexts))
    for shared in (0, 4):
        layout = Paged(table, contexts + n, shared_pages=shared)
        check(q, k, v, layout=layout, mask=mask).assert_ok()
        torch.testing.assert_close(attention(q, k, v, layout=layout, mask=mask), wanted)


def test_as_branches() -> None:
    """Branches of one length, by bounds that tensors hold: every branch sees the context and itself. No predicate."""
    branches, length, contexts = 4, 5, torch.tensor([50, 17])
    n = branches * length
    parents = [-1 if i % length == 0 else i - 1 for i in range(n)]
    k, v, table = cache(2, 8)
    q = torch.randn(2, n, H_Q, D)
    layout = Paged(table, contexts + n)
    rows = torch.arange(n)
    start, stop = contexts[:, None] + rows // length * length, contexts[:, None] + rows + 1
    mask = interval(None, contexts[:, None].expand(2, n)) | interval(start, stop)
    wanted = attention(q, k, v, layout=layout, mask=tree_mask(ancestors(parents).expand(2, n, n), contexts))
    torch.testing.assert_close(attention(q, k, v, layout=layout, mask=mask), wanted)
    check(q, k, v, layout=layout, mask=mask).assert_ok()


def test_end_to_end_beside_decoding() -> None:
    """A batch of no drafts, some, and many; and pages that the sequences share."""
    drafts, contexts = torch.tensor([1, 9, 0, 30]), torch.tensor([80, 64, 70, 100])
    n = int(drafts.max())
    seen = torch.stack([ancestors(drawn_tree(n, seed)) for seed in range(4)])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), drafts.cumsum(0)])
    k, v, table = cache(4, 9)
    table[:, :4] = table[0, :4]
    q = torch.randn(int(drafts.sum()), H_Q, D)
    for shared in (0, 4):
        layout = Paged(table, contexts + drafts, offsets, shared_pages=shared)
        check(q, k, v, layout=layout, mask=tree_mask(seen, contexts)).assert_ok()


def test_drafts_from_zero_on() -> None:
    """One tree for all, told by positions: drafts stand from 0 on, and contexts of any length before them."""
    n = 12
    seen, contexts = ancestors(drawn_tree(n, 1)), torch.tensor([70, 90, 66])
    k, v, table = cache(3, 8)
    q, mask = torch.randn(3, n, H_Q, D), tree_mask(seen.expand(3, n, n), contexts)
    wanted = attention(q, k, v, layout=Paged(table, contexts + n), mask=mask)
    layout = Paged(table, contexts + n, q_offset=torch.zeros(3, 1, dtype=torch.int64), k_offset=-contexts)
    one = mask_mod(lambda b, h, i, j: (j < 0) | seen[i.clamp(0, n - 1), j.clamp(0, n - 1)])
    torch.testing.assert_close(attention(q, k, v, layout=layout, mask=causal() & one), wanted)


@pytest.mark.parametrize("name", ["tree", "branches"])
def test_a_shared_prefix_is_read_once(name: str) -> None:
    """One tree after contexts of one length, and branches by bounds after any: neither takes the batch row."""
    n, contexts = 6, torch.tensor([70, 70, 70] if name == "tree" else [70, 64, 83])
    k, v, table = cache(3, 8)
    table[:, :4] = table[0, :4]
    layout, rows = Paged(table, contexts + n, shared_pages=4), torch.arange(n)
    start = contexts[:, None] + rows // 3 * 3
    branches = interval(None, contexts[:, None].expand(3, n)) | interval(start, contexts[:, None] + rows + 1)
    mask = gallery.tree(drawn_tree(n, 3), 70) if name == "tree" else branches
    q = torch.randn(3, n, H_Q, D)
    assert "once for all 3 sequences" in str(explain(q, k, v, layout=layout, mask=mask).shared)
    check(q, k, v, layout=layout, mask=mask).assert_ok()


def test_a_wrong_tree_fails() -> None:
    """Causal drafts, which see their siblings, and a tree in the wrong place are not the tree."""
    n, contexts = 8, torch.tensor([60, 60])
    k, v, table = cache(2, 6)
    q, seen = torch.randn(2, n, H_Q, D), ancestors([(i - 1) // 2 for i in range(n)]).expand(2, n, n)
    layout, right = (
        Paged(table, contexts + n),
        tree_mask(ancestors([(i - 1) // 2 for i in range(n)]).expand(2, n, n), contexts),
    )
    for wrong in (causal(), tree_mask(seen, contexts - 1)):

        def function(*given: Any, mask: Any, wrong: Any = wrong, **keywords: Any) -> Any:
            return attention(*given, mask=wrong, **keywords)

        assert check(q, k, v, layout=layout, mask=right, function=function).ratio > 1


@settings(max_examples=25)
@given(st.integers(2, 64), st.integers(0, 99), st.integers(1, 60), st.booleans())
def test_drawn(n: int, seed: int, context: int, sink: bool) -> None:
    k, v, table = cache(2, 8)
    contexts = torch.tensor([context, 61 - context])
    seen = torch.stack([ancestors(drawn_tree(n, seed + b)) for b in range(2)])
    logits = torch.randn(H_Q) if sink else None
    layout = Paged(table, contexts + n)
    check(torch.randn(2, n, H_Q, D), k, v, layout=layout, mask=tree_mask(seen, contexts), sink=logits).assert_ok()


# On a GPU


GPU_H_Q, GPU_H_K, GPU_D, GPU_SIZE = 32, 8, 128, 16


def gpu_cache(b: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(2, b * width, GPU_SIZE, GPU_H_K, GPU_D, device="cuda").to(dtype)
    return k, v, torch.randperm(b * width, device="cuda").view(b, width).int()


def binary(n: int) -> list[int]:
    return [(i - 1) // 2 for i in range(n)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("context", [100, 2100])
def test_one_tree_for_all_on_a_gpu(context: int, n: int, dtype: torch.dtype) -> None:
    k, v, table = gpu_cache(5, 140, dtype)
    q = torch.randn(5, n, GPU_H_Q, GPU_D, device="cuda").to(dtype)
    layout = Paged(table, torch.full((5,), context + n, device="cuda"))
    check(q, k, v, layout=layout, mask=gallery.tree(binary(n), context, "cuda")).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [0, 8])
def test_branches(shared: int) -> None:
    """By bounds that tensors hold, with and without a shared prefix."""
    branches, length = 4, 5
    n, contexts = branches * length, torch.tensor([900, 128, 1500], device="cuda")
    k, v, table = gpu_cache(3, 100, torch.bfloat16)
    table[:, :8] = table[0, :8]
    q, rows = torch.randn(3, n, GPU_H_Q, GPU_D, device="cuda").bfloat16(), torch.arange(n, device="cuda")
    start, stop = contexts[:, None] + rows // length * length, contexts[:, None] + rows + 1
    mask = interval(None, contexts[:, None].expand(3, n).contiguous()) | interval(start, stop)
    check(q, k, v, layout=Paged(table, contexts + n, shared_pages=shared), mask=mask).assert_ok()


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_trees() -> None:
    """The tree is a tensor that the predicate reads: each replay has what it holds then."""
    b, n = 4, 16
    k, v, table = gpu_cache(b, 40, torch.bfloat16)
    q = torch.randn(b, n, GPU_H_Q, GPU_D, device="cuda").bfloat16()
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
