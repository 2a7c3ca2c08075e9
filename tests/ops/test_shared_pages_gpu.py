"""Shared prefixes on a GPU: the oracle's answers, lengths of a server's, and graphs that are replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import (
    Descale,
    Paged,
    Partial,
    alibi,
    attention,
    causal,
    explain,
    interval,
    mask_mod,
    prefix,
    softcap,
    window,
)
from saccade.ops import shared_pages
from saccade.testing import check

pytestmark = pytest.mark.gpu

H_Q, H_K, D = 16, 4, 128


@pytest.fixture(autouse=True)
def _whatever_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "LEAST_SAVED", 0)
    monkeypatch.setattr(shared_pages, "LEAST_KEYS", 0)
    monkeypatch.setattr(shared_pages, "MOST_ROWS", 1 << 30)


def cache(b: int, shared: int, own: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Caches and a table whose rows begin with the same pages."""
    pages = shared + b * own
    order = torch.randperm(pages, device="cuda")
    table = torch.cat([order[:shared].expand(b, -1), order[shared:].view(b, own)], 1).int()
    k, v = torch.randn(2, pages, size, H_K, D, device="cuda").to(dtype)
    return k, v, table


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("s_q", [1, 4, 64, 300])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_is_the_plain_call(size: int, s_q: int, dtype: torch.dtype, backend: str) -> None:
    b, shared, own = 5, 1024 // size, 512 // size
    k, v, table = cache(b, shared, own, size, dtype)
    q = torch.randn(b, s_q, H_Q, D, device="cuda").to(dtype)
    starts = torch.tensor([[0], [700], [1030], [9], [1]], device="cuda")
    masks = [
        None, causal(), window(800, 0), prefix(torch.tensor([3, 1100, 0, 9, 1], device="cuda")),
        causal() & interval(starts, None), causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 0),
    ]  # fmt: skip
    scores = [None, softcap(20.0), alibi(torch.rand(H_Q, device="cuda")), None, None, None]
    for lengths in ([1500, 1025, 1024, 1400, 1536], [1536, 700, 0, 1024, 3]):
        layout = Paged(table, torch.tensor(lengths, device="cuda"), shared_pages=shared)
        for mask, score in zip(masks, scores, strict=True):
            sink = torch.randn(H_Q, device="cuda")
            keywords: dict[str, Any] = {"mask": mask, "score_mod": score, "sink": sink, "layout": layout}
            report = check(q, k, v, backend=backend, return_max_scores=True, **keywords)
            assert report.ratio <= 1, f"{lengths} {mask}\n{report}"


@pytest.mark.parametrize("rows", [(1, 1, 1, 1, 1), (1, 400, 0, 1, 64)])
def test_queries_end_to_end(rows: tuple[int, ...]) -> None:
    k, v, table = cache(5, 64, 32, 16, torch.bfloat16)
    offsets = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    q = torch.randn(sum(rows) + 7, H_Q, D, device="cuda").bfloat16()
    q[sum(rows) :] = torch.nan
    lengths = torch.tensor([1500, 1424, 1024, 30, 1100], device="cuda")
    layout = Paged(table, lengths, offsets, shared_pages=64)
    for mask in (causal(), window(500, 0), prefix(9)):
        for score in (None, alibi(torch.rand(H_Q, device="cuda"))):
            check(q, k, v, layout=layout, mask=mask, score_mod=score).assert_ok()


def test_descale() -> None:
    k, v, table = cache(4, 64, 32, 16, torch.float32)
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    q = torch.randn(4, 1, H_Q, D, device="cuda").bfloat16()
    layout = Paged(table, torch.tensor([1500, 1030, 1024, 40], device="cuda"), shared_pages=64)
    blocks = (torch.rand(1, H_K, 12, device="cuda") + 0.5).expand(4, H_K, 12)
    for factor in (0.5, torch.rand(H_K, device="cuda") + 0.5, blocks):
        keywords: dict[str, Any] = {"layout": layout, "mask": causal(), "descale": Descale(k=factor, v=factor)}
        if explain(q, k, v, **keywords).backend is not None:
            check(q, k, v, **keywords).assert_ok()


@pytest.mark.parametrize("s_q", [1, 8])
def test_a_graph_is_replayed_with_other_lengths(s_q: int, captured: Any) -> None:
    """Nothing waits for the host, and lengths and tables are read in each replay."""
    b, shared, size = 6, 32, 16
    k, v, table = cache(b, shared, 32, size, torch.bfloat16)
    q, used = torch.randn(b, s_q, H_Q, D, device="cuda").bfloat16(), torch.full((b,), 600, device="cuda")

    layout = Paged(table, used, shared_pages=shared)

    def call() -> Partial:
        return attention(q, k, v, mask=causal(), layout=layout, return_lse=True)

    graph, (out, lse) = captured(call)

    def replayed(*given: Tensor, return_lse: bool = False, **keywords: Any) -> Tensor | Partial:
        graph.replay()
        return Partial(out.clone(), lse.clone()) if return_lse else out.clone()

    for lengths in ([600, 513, 512, 700, 0, 40], [900, 901, 902, 903, 904, 905]):
        used.copy_(torch.tensor(lengths))
        table[:, shared:] = table[:, shared:].roll(1, 0)
        check(q, k, v, mask=causal(), layout=layout, function=replayed).assert_ok()
