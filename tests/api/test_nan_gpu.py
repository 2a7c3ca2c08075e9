"""Rows that are NaN or infinite, by each backend's own kernels: maxima on a GPU leave NaN out."""

from __future__ import annotations

import pytest
import torch

from saccade import Paged, Unsupported, attention
from tests.support.non_finite import (
    BREAKS,
    CALLS,
    HEAD,
    ROW,
    TABLES,
    assert_near,
    assert_same_kind,
    operands,
    results,
    table_results,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("fill", BREAKS)
def test_rows(fill: str, name: str, d: int, backend: str) -> None:
    for rows, keys in ((9, 12), (150, 700)):
        given = operands(torch.bfloat16, "cuda", rows, keys, d)
        BREAKS[fill](*given)
        for x, y in zip(*results(given, backend=backend, **CALLS[name]), strict=True):
            assert_same_kind(x, y)


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "score"])
def test_gradients(name: str, d: int, backend: str) -> None:
    q, k, v = operands(torch.bfloat16, "cuda", 40, 40, d)
    q[0, HEAD, ROW] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(attention(*leaves, backend=backend, **CALLS[name]).sum(), leaves)
    nan = torch.zeros(4, 40, dtype=torch.bool, device="cuda")
    nan[HEAD, ROW] = True
    assert torch.equal(dq[0].isnan().all(-1), nan)
    assert torch.equal(dq[0].isnan().any(-1), nan)
    for x in (dk, dv):
        assert bool(x[0, 0, : ROW + 1].isnan().all())
        assert bool(x[0, 1].isfinite().all())


@pytest.mark.parametrize("rows", [1, 1200])
def test_paged_caches(rows: int, backend: str) -> None:
    q, (k, v) = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((2, rows, 4, 64), (2, 6, 128, 2, 64))
    )
    k[4, 1] = torch.nan
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], device="cuda", dtype=torch.int32)
    layout = Paged(table, torch.tensor([370, 300], device="cuda", dtype=torch.int32))
    given = {"layout": layout, "return_lse": True, "return_max_scores": True, "backend": backend}
    if rows == 1 and backend == "gluon":
        with pytest.raises(Unsupported, match="takes many query rows"):
            attention(q, k, v, **given)
        return
    for x in attention(q, k, v, **given):
        assert bool(x[1].isnan().all())
        assert bool(x[0].isfinite().all())


@pytest.mark.parametrize("rows", [90, 300])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_rows_beyond_the_end_reach_no_gradient(table: str, deterministic: bool, rows: int, backend: str) -> None:
    """What only they would read of a captured tensor is NaN."""
    given = operands(torch.bfloat16, "cuda", rows, 90, 64)
    found = table_results(table, given, backend, deterministic=deterministic)
    exact = table_results(table, [x.cpu().float() for x in given], "cpu")
    assert_near(found, exact)
