"""Rows that are NaN or infinite, by the Triton kernels."""

from __future__ import annotations

import math

import pytest
import torch

from saccade import Packed, Paged, attention, causal, softcap, window
from saccade.backends.triton import paged as launches
from tests.support.non_finite import (
    BREAKS,
    CALLS,
    HEAD,
    ROW,
    assert_endless_sink,
    assert_same_kind,
    endless_key,
    nan_row,
    operands,
    results,
)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fill", BREAKS)
def test_rows(fill, name):
    given = operands(torch.float32)
    BREAKS[fill](*given)
    for x, y in zip(*results(given, backend="triton", **CALLS[name]), strict=True):
        assert_same_kind(x, y)


@pytest.mark.parametrize("fill", BREAKS)
def test_rows_over_many_tiles(fill):
    """Of which those in the mask's core take no select."""
    for name in ("plain", "causal", "sink"):
        given = operands(torch.float32, rows=40, keys=300)
        BREAKS[fill](*given)
        for x, y in zip(*results(given, backend="triton", **CALLS[name]), strict=True):
            assert_same_kind(x, y)


@pytest.mark.parametrize("name", ["plain", "causal", "softcap"])
def test_gradients(name):
    q, k, v = operands(torch.float32)
    q[0, HEAD, ROW] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(attention(*leaves, backend="triton", **CALLS[name]).sum(), leaves)
    nan = torch.zeros(4, 9, dtype=torch.bool)
    nan[HEAD, ROW] = True
    assert torch.equal(dq[0].isnan().all(-1), nan)
    assert torch.equal(dq[0].isnan().any(-1), nan)
    for x in (dk, dv):
        assert bool(x[0, 0, : ROW + 4].isnan().all())
        assert bool(x[0, 1].isfinite().all())


@pytest.mark.parametrize("splits", [1, 3])
def test_paged_caches(splits, monkeypatch):
    monkeypatch.setattr(launches, "LEAST_TILES", 1)
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 7)
    q, (k, v) = torch.randn(2, 3, 4, 16), torch.randn(2, 6, 16, 2, 16)
    k[4, 1] = torch.nan
    layout = Paged(torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([41, 39]), num_splits=splits)
    found = attention(q, k, v, layout=layout, return_lse=True, return_max_scores=True, backend="triton")
    for x in found:
        assert bool(x[1].isnan().all())
        assert bool(x[0].isfinite().all())


def test_packed_sequences():
    ends = torch.tensor([0, 4, 6, 20], dtype=torch.int32)
    q, k, v = (torch.randn(20, h, 8) for h in (4, 2, 2))
    k[5] = torch.nan
    out, lse = attention(q, k, v, layout=Packed(ends, ends, 14, 14), return_lse=True, backend="triton")
    broken = torch.arange(20) // 2 == 2
    assert torch.equal(out.isnan().all(-1).all(-1), broken)
    assert torch.equal(lse.isnan(), broken.expand(4, 20))


def test_a_sink_without_end(monkeypatch):
    for fill in (None, nan_row, endless_key):
        given = operands(torch.float32)
        if fill is not None:
            fill(*given)
        for keywords in ({}, {"mask": window(2, 1)}, {"score_mod": softcap(3.0)}):
            assert_endless_sink(given, "triton", fill is None, **keywords)
    assert_endless_sink(operands(torch.float32, rows=14, keys=3), "triton", mask=causal())
    found = attention(
        *operands(torch.float32), sink=torch.full((4,), math.inf), return_max_scores=True, backend="triton"
    )
    assert not found.out.any()
    assert found.max_scores.isfinite().all()
    monkeypatch.setattr(launches, "LEAST_TILES", 1)
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 7)
    cache = torch.randn(2, 5, 16, 2, 16)
    for splits in (1, 3):
        for q in (torch.randn(2, 1, 4, 16), torch.randn(2, 3, 4, 16)):
            layout = Paged(torch.tensor([[1, 0, 3], [1, 2, 4]]), torch.tensor([45, 20]), num_splits=splits)
            assert_endless_sink([q, *cache], "triton", False, layout=layout)
