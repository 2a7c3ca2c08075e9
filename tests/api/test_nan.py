"""What is NaN stays NaN, and nothing else becomes it: rows against the reference in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from saccade import Dense, Packed, Paged, attention, causal, merge, softcap, window
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

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PADDED = {"padded": {"layout": Dense("bhsd", torch.tensor([8]), torch.tensor([10]))}}


@pytest.mark.parametrize("name", [*CALLS, *PADDED])
@pytest.mark.parametrize("fill", BREAKS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype, fill, name):
    given, keywords = operands(dtype), (CALLS | PADDED)[name]
    BREAKS[fill](*given)
    found, exact = results(given, **keywords)
    for x, y in zip(found, exact, strict=True):
        assert_same_kind(x, y)
    assert_same_kind(attention(*given, **keywords), exact[0])


@pytest.mark.parametrize("instructions", ["default", "avx2"])
def test_rows_with_other_instructions(instructions):
    """PyTorch's kernels of processors without AVX512 have rules of their own for what is not finite."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": instructions}
    done = subprocess.run([sys.executable, "-c", ROWS], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [instructions.upper(), str(len(BREAKS))]


ROWS = """
import torch
from saccade import attention
from tests.support.non_finite import BREAKS, assert_same_kind, operands, results
for fill in BREAKS.values():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        given = operands(dtype)
        fill(*given)
        exact = results(given, backend="reference")[1]
        assert_same_kind(attention(*given), exact[0])
print(torch.backends.cpu.get_cpu_capability(), len(BREAKS))
"""


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_beside_nan_that_are_not_finite(dtype, value):
    """PyTorch's kernel multiplies them by zero, and its LSE of the row is 0."""
    q, k, v = (torch.randn(1, 1, 3, 16).to(dtype) for _ in range(3))
    q[0, 0, 1, 0], v[0, 0, 2, 5] = math.nan, value
    out, lse = attention(q, k, v, return_lse=True)
    assert bool(out[0, 0, 1].isnan().all())
    assert lse.isnan().tolist() == [[[False, True, False]]]


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("keys", [1, 7, 15, 40, 700])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lengths(dtype, keys, rows):
    """Around the width of a vector, and of a tile."""
    given = operands(dtype, rows=rows, keys=keys)
    nan_row(*given)
    for call in ("plain", "sink", "softcap"):
        found, exact = results(given, **CALLS[call])
        for x, y in zip(found, exact, strict=True):
            assert_same_kind(x, y)
        assert_same_kind(attention(*given, **CALLS[call]), exact[0])


@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "sink"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype, name):
    """NaN in those of the row and of the keys that it sees, and in no other head's."""
    grads = []
    for made in (dtype, torch.float64):
        q, k, v = operands(dtype)
        q[0, HEAD, ROW] = torch.nan
        leaves = [x.to(made).requires_grad_() for x in (q, k, v)]
        options = {"backend": "reference"} if grads else {}
        out = attention(*leaves, **CALLS[name], **options)
        grads.append(torch.autograd.grad(out.sum(), leaves))
    assert_same_kind(grads[0][0], grads[1][0])
    seen = slice(0, ROW + 12 - 9 + 1) if name == "causal" else slice(None)
    for x in grads[0][1:]:
        assert bool(x[:, 0, seen].isnan().all())
        assert bool(x[:, 1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_nan(dtype):
    given, sink = operands(dtype), torch.tensor([0.0, torch.nan, -torch.inf, 1.0])
    found, exact = results(given, sink=sink)
    for x, y in zip(found, exact, strict=True):
        assert_same_kind(x, y)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_without_end(dtype, backend):
    for fill in (None, nan_row, endless_key):
        for keywords in ({}, {"mask": window(2, 1)}, {"score_mod": softcap(3.0), "layout": PADDED["padded"]["layout"]}):
            given = operands(dtype)
            if fill is not None:
                fill(*given)
            assert_endless_sink(given, backend, fill is None, **keywords)
    assert_endless_sink(operands(dtype, rows=14, keys=3), backend, mask=causal())  # rows that see no key
    assert_endless_sink(operands(dtype, keys=0), backend)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sink_without_end_of_other_layouts(backend):
    q, k, v = (x[0].transpose(0, 1) for x in operands(torch.float32, rows=12))
    assert_endless_sink([q, k, v], backend, layout=Packed(torch.tensor([0, 5, 5, 11])))
    pages = Paged(torch.tensor([[1, 0], [2, 0]]), torch.tensor([7, 3]))
    for shared in (0, 1):
        table = Paged(torch.tensor([[1, 0], [1, 2]]), torch.tensor([7, 6]), shared_pages=shared)
        cache = torch.randn(2, 3, 4, 2, 8)
        for layout in (pages, table):
            assert_endless_sink([torch.randn(2, 2, 4, 8), *cache], backend, False, layout=layout)


def test_merged_with_a_sink_without_end():
    q, k, v = operands(torch.float64)
    sink = torch.tensor([torch.inf, 0.0, -torch.inf, 1.0], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    parts = [
        attention(q, k[:, :, at], v[:, :, at], return_lse=True, sink=x)
        for at, x in ((slice(5), sink), (slice(5, 9), None), (slice(9, 12), None))
    ]
    merged, whole = merge(*parts), attention(q, k, v, sink=sink, return_lse=True)
    for x, y in zip(merged, whole, strict=True):
        torch.testing.assert_close(x, y)
    dlse = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)[None, :, None].expand(1, 4, 9)
    found, right = (torch.autograd.grad(x, leaves, [torch.ones_like(q), dlse]) for x in (merged, whole))
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(dtype):
    q, k, v = operands(dtype)
    nan_row(q, k, v)
    out, lse = attention(q, k, v, dropout_p=0.3, return_lse=True)
    assert bool(out[0, HEAD, ROW].isnan().all())
    assert bool(lse[0, HEAD, ROW].isnan())
    out[0, HEAD, ROW], lse[0, HEAD, ROW] = 0, 0
    assert bool(out.isfinite().all())
    assert bool(lse.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_sequences(dtype):
    """No further than its own sequence."""
    torch.manual_seed(0)
    ends = torch.tensor([0, 4, 6, 20], dtype=torch.int32)
    q, k, v = (torch.randn(20, h, 8).to(dtype) for h in (4, 2, 2))
    k[5] = torch.nan
    out, lse = attention(q, k, v, layout=Packed(ends, ends, 14, 14), return_lse=True)
    assert torch.equal(out.isnan().all(-1), (torch.arange(20)[:, None] // 2 == 2).expand(20, 4))
    assert torch.equal(lse.isnan(), (torch.arange(20) // 2 == 2).expand(4, 20))
    assert bool((out.isnan().any(-1) == out.isnan().all(-1)).all())


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_caches(dtype, splits):
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, 3, 4, 8).to(dtype), torch.randn(2, 6, 4, 2, 8).to(dtype)
    k[4, 1] = torch.nan
    layout = Paged(torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([11, 9]), num_splits=splits)
    out, lse, top = attention(q, k, v, layout=layout, return_lse=True, return_max_scores=True)
    for x in (out, lse, top):
        assert bool(x[1].isnan().all())
        assert bool(x[0].isfinite().all())


def test_merge():
    """Of Partials of which one is NaN in a row, or endless."""
    q, k, v = operands(torch.float64)
    nan_row(q, k, v)
    parts = [attention(q, k[:, :, at], v[:, :, at], return_lse=True) for at in (slice(0, 5), slice(5, 12))]
    whole = attention(q, k, v, return_lse=True)
    for found, wanted in zip(merge(*parts), whole, strict=True):
        assert_same_kind(found, wanted)
    clean = attention(*operands(torch.float64), return_lse=True)
    for value in (torch.nan, torch.inf):
        clean.lse[0, HEAD, ROW] = value
        out, lse = merge(clean, parts[1])
        assert bool(out[0, HEAD, ROW].isnan().all())
        assert bool(lse[0, HEAD, ROW].isnan())
