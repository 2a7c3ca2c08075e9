"""What is NaN stays NaN, and nothing else becomes it: rows against the reference in float64."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch

from saccade import Dense, Packed, Paged, Unsupported, attention, causal, interval, merge, selected, softcap, window
from tests.support.devices import CPU, EMULATOR, GLUON, INTERPRETER, TRITON, every_head_dim, on
from tests.support.non_finite import (
    BREAKS,
    CALLS,
    HEAD,
    ROW,
    TABLES,
    assert_endless_sink,
    assert_near,
    assert_same_kind,
    endless_key,
    nan_row,
    operands,
    results,
    table_results,
)

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PADDED = {"padded": {"layout": Dense("bhsd", torch.tensor([8]), torch.tensor([10]))}}


SIZES = {"cpu": ((9, 12),), "interpreter": ((9, 12), (40, 300)), "emulator": ((9, 12), (70, 300))}
"""Few rows, and many tiles, of which those in the mask's core take no select: on a GPU, 150 rows and 700 keys."""


@every_head_dim()
@pytest.mark.parametrize("name", [*CALLS, *PADDED])
@pytest.mark.parametrize("fill", BREAKS)
def test_rows(fill, name, device):
    keywords = {"backend": device.backend, **(CALLS | PADDED)[name]}
    if name == "padded":
        keywords["layout"] = Dense("bhsd", *(torch.tensor([n], device=device.type) for n in (8, 10)))
    for rows, keys in SIZES.get(device.name, ((9, 12), (150, 700))):
        for dtype in device.dtypes:
            given = operands(dtype, device.type, rows, keys, device.d)
            BREAKS[fill](*given)
            found, exact = results(given, **keywords)
            for x, y in zip(found, exact, strict=True):
                assert_same_kind(x, y)
            assert_same_kind(attention(*given, **device.moved(keywords)), exact[0])


@pytest.mark.slow
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


@every_head_dim()
@pytest.mark.parametrize("name", ["plain", "causal", "softcap", "score", "sink"])
def test_gradients(name, device):
    """NaN in those of the row and of the keys that it sees, and in no other head's."""
    rows, keys = (40, 40) if device.type == "cuda" else (9, 12)
    for dtype in device.dtypes:
        grads = []
        for backend, made in ((device.backend, dtype), ("reference", torch.float64)):
            q, k, v = operands(dtype, device.type, rows, keys, device.d)
            q[0, HEAD, ROW] = torch.nan
            leaves = [x.to(made).requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, backend=backend, **device.moved(CALLS[name]))
            grads.append(torch.autograd.grad(out.sum(), leaves))
        dq, *others = grads[0]
        assert_same_kind(dq, grads[1][0])
        nan = torch.zeros(4, rows, dtype=torch.bool, device=device.type)
        nan[HEAD, ROW] = True
        assert torch.equal(dq[0].isnan().all(-1), nan)
        assert torch.equal(dq[0].isnan().any(-1), nan)
        seen = slice(0, ROW + keys - rows + 1) if name == "causal" else slice(None)
        for x in others:
            assert bool(x[:, 0, seen].isnan().all())
            assert bool(x[:, 1].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_of_nan(dtype):
    given, sink = operands(dtype), torch.tensor([0.0, torch.nan, -torch.inf, 1.0])
    found, exact = results(given, sink=sink)
    for x, y in zip(found, exact, strict=True):
        assert_same_kind(x, y)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sink_of_nan_beside_rows_without_keys(backend):
    q, k, v = (x.requires_grad_() for x in operands(torch.float32))
    sink = torch.full((q.shape[1],), torch.nan, requires_grad=True)
    out, lse = attention(q, k, v, sink=sink, mask=interval(0, 0), backend=backend, return_lse=True)
    assert not out.any()
    assert bool(lse.isnan().all())
    *others, dsink = torch.autograd.grad(out.sum() + lse.sum(), [q, k, v, sink])
    assert not any(x.any() for x in others)
    assert bool(dsink.isnan().all())


def test_rows_without_keys_beside_a_sink_and_a_key_of_nan():
    q, k, v = (x.requires_grad_() for x in operands(torch.float32))
    with torch.no_grad():
        k[:, :, 0], v[:, :, 0] = math.nan, math.nan
    stop = torch.arange(9)[None] % 2 * 3  # every second row sees three keys
    for mask in (interval(0, stop), selected(torch.where(stop > 0, 0, -1)[:, None, :, None])):
        out = attention(q, k, v, sink=torch.randn(q.shape[1]), mask=mask)
        assert not out[:, :, ::2].any()
        (dq,) = torch.autograd.grad(out[:, :, ::2].sum(), [q])
        assert not dq[:, :, ::2].any()


@on(CPU, INTERPRETER, EMULATOR, GLUON, TRITON)
def test_rows_without_keys_beside_others_and_a_sink_of_nan(device):
    none, keys = (130, 200) if device.type == "cuda" else (19, 11)
    q, k, v = (x.requires_grad_() for x in device.operands(s_q=none + keys, s_k=keys))
    sink = torch.full((q.shape[1],), math.nan, device=device.type)
    out, lse = attention(q, k, v, sink=sink, mask=causal(), backend=device.backend, return_lse=True)
    assert not out[:, :, :none].any()
    assert bool(out[:, :, none:].isnan().all())
    assert bool(lse.isnan().all())
    (dq,) = torch.autograd.grad(out.sum() + lse.sum(), [q])
    assert not dq[:, :, :none].any()
    assert bool(dq[:, :, none:].isnan().all())


@on(CPU, INTERPRETER, EMULATOR, GLUON, TRITON)
def test_rows_without_keys_beside_a_sink_of_nan_over_pages(device):
    """The first sequence has keys for its last rows, and the second for none."""
    cache = device.randn(2, 5, 16, 2, device.d)
    table = torch.tensor([[1, 0, 3], [1, 2, 4]], device=device.type, dtype=torch.int32)
    used = torch.tensor([37, 0], device=device.type, dtype=torch.int32)
    rows = 40 if device.type == "cpu" or device.backend == "triton" else 1200
    q, sink = device.randn(2, rows, 4, device.d), torch.full((4,), math.nan, device=device.type)
    for splits in (None,) if device.backend == "gluon" else (None, 1, 3):
        layout = Paged(table, used, num_splits=splits)
        for mask in (causal(), None):
            keywords = {"layout": layout, "sink": sink, "mask": mask, "backend": device.backend, "return_lse": True}
            out, lse = attention(q, *cache, **keywords)
            none = rows - 37 if mask is not None else 0
            assert not out[0, :none].any()
            assert not out[1].any()
            assert bool(out[0, none:].isnan().all())
            assert bool(lse.isnan().all())


@pytest.mark.parametrize("where", ["dense", "packed", "paged"])
def test_a_sink_without_end(where, device):
    for backend in {device.backend, "reference"} if device.name == "cpu" else {device.backend}:
        for dtype in device.dtypes:
            ENDLESS[where](device, dtype, backend)


def dense_sinks_without_end(device, dtype, backend):
    padded = Dense("bhsd", *(torch.tensor([n], device=device.type) for n in (8, 10)))
    for fill in (None, nan_row, endless_key):
        for keywords in ({}, {"mask": window(2, 1)}, {"score_mod": softcap(3.0), "layout": padded}):
            given = operands(dtype, device.type, d=device.d)
            if fill is not None:
                fill(*given)
            assert_endless_sink(given, backend, fill is None, **keywords)
    assert_endless_sink(operands(dtype, device.type, 14, 3, device.d), backend, mask=causal())  # rows that see no key
    assert_endless_sink(operands(dtype, device.type, keys=0, d=device.d), backend)
    given, sink = operands(dtype, device.type, d=device.d), torch.full((4,), math.inf, device=device.type)
    found = attention(*given, sink=sink, return_max_scores=True, backend=backend)
    assert not found.out.any()
    assert found.max_scores.isfinite().all()


def packed_sinks_without_end(device, dtype, backend):
    q, k, v = (x[0].transpose(0, 1) for x in operands(dtype, device.type, rows=12, d=device.d))
    layout = Packed(torch.tensor([0, 5, 5, 11], device=device.type))
    assert_endless_sink([q, k, v], backend, layout=layout)


def paged_sinks_without_end(device, dtype, backend):
    cache = device.randn(2, 5, 16, 2, device.d, dtype=dtype)
    table = torch.tensor([[1, 0, 3], [1, 2, 4]], device=device.type, dtype=torch.int32)
    used = torch.tensor([45, 20], device=device.type, dtype=torch.int32)
    many = device.backend == "gluon"  # which takes no few rows
    for options in [{}] if many else [{"num_splits": 1}, {"num_splits": 3}, {"shared_pages": 1}]:
        for rows in (1200 if device.type == "cuda" else 40,) if many else (1, 3):
            layout = Paged(table, used, **options)
            assert_endless_sink(
                [device.randn(2, rows, 4, device.d, dtype=dtype), *cache], backend, False, layout=layout
            )


ENDLESS = {"dense": dense_sinks_without_end, "packed": packed_sinks_without_end, "paged": paged_sinks_without_end}


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


def test_packed_sequences(device):
    """No further than its own sequence."""
    for dtype in device.dtypes:
        torch.manual_seed(0)
        ends = torch.tensor([0, 4, 6, 20], dtype=torch.int32, device=device.type)
        q, k, v = (device.randn(20, h, device.d, dtype=dtype) for h in (4, 2, 2))
        k[5] = torch.nan
        layout = Packed(ends, ends, 14, 14)
        out, lse = attention(q, k, v, layout=layout, return_lse=True, backend=device.backend)
        broken = torch.arange(20, device=device.type) // 2 == 2
        assert torch.equal(out.isnan().all(-1), broken[:, None].expand(20, 4))
        assert torch.equal(lse.isnan(), broken.expand(4, 20))
        assert bool((out.isnan().any(-1) == out.isnan().all(-1)).all())


@on(CPU, INTERPRETER, TRITON)
@pytest.mark.parametrize("rows", [1, 3, 1200])
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_paged_caches(splits, rows, device):
    assert_paged_caches(device, rows if device.type == "cuda" else min(rows, 40), num_splits=splits)


@on(CPU, INTERPRETER, EMULATOR, GLUON, TRITON)
def test_many_rows_over_pages(device):
    assert_paged_caches(device, 1200 if device.type == "cuda" else 40)


def assert_paged_caches(device, rows, **options):
    size = 128 if device.backend == "gluon" or device.type == "cuda" else 16
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], device=device.type, dtype=torch.int32)
    used = torch.tensor([3 * size - 14, 2 * size + 44 * size // 128], device=device.type, dtype=torch.int32)
    layout = Paged(table, used, **options)
    for dtype in device.dtypes:
        torch.manual_seed(0)
        q, (k, v) = device.randn(2, rows, 4, device.d, dtype=dtype), device.randn(2, 6, size, 2, device.d, dtype=dtype)
        k[4, 1] = torch.nan
        given = {"layout": layout, "return_lse": True, "return_max_scores": True, "backend": device.backend}
        for x in attention(q, k, v, **given):
            assert bool(x[1].isnan().all())
            assert bool(x[0].isfinite().all())


@on(GLUON)
def test_hopper_takes_many_rows_over_pages(device):
    q, cache = device.randn(2, 1, 4, 64), device.randn(6, 128, 2, 64)
    table = torch.tensor([[0, 1, 2], [3, 4, 5]], device=device.type, dtype=torch.int32)
    layout = Paged(table, torch.tensor([370, 300], device=device.type, dtype=torch.int32))
    with pytest.raises(Unsupported, match="takes pages if each sequence"):
        attention(q, cache, cache, layout=layout, return_max_scores=True, backend=device.backend)


@pytest.mark.parametrize("rows", [90, 300])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("table", TABLES)
def test_rows_beyond_the_end_reach_no_gradient(table, deterministic, rows, device):
    """What only they would read of a captured tensor is NaN."""
    given = operands(device.dtypes[0], device.type, rows if device.type == "cuda" else 90, 90, device.d)
    found = table_results(table, given, device.backend, deterministic=deterministic)
    exact = table_results(table, [x.cpu().float() for x in given], "reference")
    assert_near(found, exact)


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
