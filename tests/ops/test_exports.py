"""Exported calls: sizes that stay open, and programs and packages that other processes load."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from saccade import (
    Dense,
    Descale,
    Packed,
    Paged,
    append_kv,
    attention,
    bias,
    causal,
    documents,
    interval,
    mask_mod,
    prefix,
    softcap,
    window,
)
from saccade.compat import sdpa
from saccade.nn import Attention
from tests.support.inductor import knows_this_processor


class Calls(torch.nn.Module):
    def __init__(self, calls: Callable[..., Any]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, *tensors: Tensor) -> Any:
        return self.calls(*tensors)


def offsets(n: int, t: int) -> Tensor:
    return torch.cat([torch.zeros(1), torch.randint(t + 1, (n - 1,)).sort().values, torch.tensor([t])]).int()


def of_packed(q, cu, used, starts, ids):
    t = q.shape[0]
    yield attention(q, q, q, mask=causal(), layout=Packed(cu, max_seqlen_q=t, max_seqlen_k=t))
    yield from attention(q, q, q, mask=prefix(used), layout=Packed(cu, cu), return_lse=True)
    yield attention(q, q, q, mask=window(2, 1), layout=Packed(cu, starts_k=starts, seqused_k=used))
    yield attention(q, q, q, mask=interval(used[:, None] // 2, None), layout=Packed(cu, q_offset=used, k_offset=used))
    yield attention(q, q, q, mask=interval(None, ids), layout=Packed.from_position_ids(ids, max_sequences=12))
    yield attention(q, q, q, mask=mask_mod(lambda b, h, i, j: j < used[b]), layout=Packed.from_lengths(cu.diff()))
    yield attention(q, q, q, score_mod=lambda s, b, h, i, j: s * starts[b] - j, layout=Packed(cu))


def packed(b, s, w):
    t = b * s
    return torch.randn(t, 2, 4), offsets(b, t), torch.randint(w, (b,)), torch.randint(t - w, (b,)), torch.arange(t) % s


def of_dense(q, k, used_q, used_k, rows, ids, seen, table):
    yield attention(q, k, k, mask=causal(), layout=Dense("bhsd", used_q, used_k))
    yield attention(q, k, k, mask=causal(), layout=Dense(q_offset=k.shape[2] - q.shape[2]))
    yield attention(q, k, k, mask=interval(used_k[:, None], None) | interval(0, rows), layout=Dense(q_offset=rows))
    yield attention(q, k, k, mask=seen, score_mod=bias(table))
    yield attention(q, q, q, mask=documents(ids) & prefix(used_q) & window(q.shape[2] // 2, 0))
    yield attention(q, q, q, mask=mask_mod(lambda b, h, i, j: ids[b, i] == ids[b, j]), score_mod=softcap(2.0))
    yield attention(q, k, k, score_mod=lambda s, b, h, i, j: s + table[h, i, j] + rows[b, i] - used_k[b])
    k = k.to(torch.float8_e4m3fn)
    yield attention(q, k, k, descale=Descale(k=1 + used_k[:, None].float()))


def dense(b, s, w):
    q, k, ids = torch.randn(b, 2, s, 4), torch.randn(b, 1, w, 4), torch.randint(3, (b, s))
    lengths = torch.randint(s, (b,)), torch.randint(w, (b,)), torch.randint(w, (b, s))
    return q, k, *lengths, ids, torch.rand(b, 1, s, w) > 0.3, torch.randn(2, s, w)


def of_pages(q, k, v, table, used, slots, cos):
    append_kv(k, v, Paged(table, used), q, q)
    append_kv(k, v, None, q, q, slot_mapping=slots)
    yield append_kv(k, v, Paged(table, used), q, q, q=q, rotary=(cos, cos))
    yield from (k, v)
    used = used + q.shape[1]
    yield attention(q, k, v, mask=causal(), layout=Paged(table, used))
    yield attention(q, k, v, mask=window(3, 0), layout=Paged(table, used, num_splits=1), return_lse=True).lse
    yield attention(q, k, v, score_mod=lambda s, b, h, i, j: s - table[b, 0] * j, layout=Paged(table, used))
    flat, cu = q.flatten(0, 1), torch.arange(q.shape[0] + 1) * q.shape[1]
    yield attention(flat, k, v, mask=mask_mod(lambda b, h, i, j: j < used[b]), layout=Paged(table, used, cu))


def pages(b, s, w):
    table = torch.randperm(b * w + 1)[: b * w].view(b, w)
    caches = (torch.randn(b * w + 1, 4, 2, 4) for _ in range(2))
    slots = torch.randperm((b * w + 1) * 4)[: b * s].view(b, s)
    return torch.randn(b, s, 2, 4), *caches, table, torch.randint(4 * w - s, (b,)), slots, torch.randn(4 * w, 2)


LAYER = Attention(8, 2, rotary_base=100.0)


def of_layer(x, cu):
    yield LAYER(x)
    yield LAYER(x.flatten(0, 1), layout=Packed(cu))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "tensors"),
    [
        (of_packed, packed),
        (of_dense, dense),
        (of_pages, pages),
        (of_layer, lambda b, s, w: (torch.randn(b, s, 8), offsets(b, b * s))),
    ],
    ids=["packed", "dense", "pages", "layer"],
)
def test_sizes_stay_open(calls, tensors):
    """Numbers of sequences, rows, keys and pages, of the width of a block table, and of what is captured."""
    model = Calls(lambda *given: [*calls(*given)])
    first, *others = (tensors(*sizes) for sizes in ((3, 5, 6), (7, 6, 9), (4, 11, 13)))
    differ = (zip(x.shape, y.shape, strict=True) for x, y in zip(first, others[0], strict=True))
    free = tuple({i: Dim.DYNAMIC for i, (m, n) in enumerate(shape) if m != n} for shape in differ)
    run = torch.export.export(model, first, dynamic_shapes=(free,)).module()
    for given in (first, *others):
        torch.testing.assert_close(run(*(x.clone() for x in given)), model(*(x.clone() for x in given)))


class Model(torch.nn.Module):
    """With functions that capture numbers and tensors, a cache, and calls without anything captured."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor, cu: Tensor) -> Any:
        slopes, shift = self.slopes, 0.5
        append_kv(k, v, Paged(table, used), q, q)
        out = attention(q, k, v, mask=causal(), layout=Paged(table, used + q.shape[1]))
        x = out.transpose(1, 2)
        seen = mask_mod(lambda b, h, i, j: (i - j).abs() < 3 + b) & causal()
        x = attention(x, x, x, mask=seen, score_mod=lambda s, b, h, i, j: shift * s + slopes[h] * (j - i))
        x = attention(x, x, x, score_mod=softcap(2.0), mask=(q[..., 0, 0] > 0)[:, None, None])
        y = x.transpose(1, 2).flatten(0, 1)
        return attention(y, y, y, mask=window(2, 0), layout=Packed(cu), return_lse=True)


LOAD = """
import sys, torch, saccade
calls, *programs = sys.argv[1:]
for inputs, outputs in torch.load(calls):
    for path in programs:
        aoti = path.endswith("compiled.pt2")
        run = torch._inductor.aoti_load_package(path) if aoti else torch.export.load(path).module()
        given = [x.clone() for x in inputs]
        found = run(*given)
        torch.testing.assert_close([*found, *given], outputs)
        assert type(found) is saccade.Partial
"""


class Sdpa(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def torch_loads_a_package(path):
    """Whether another process can run SDPA as AOTInductor compiled it for CUDA. With torch 2.11 a segmentation fault
    ends it."""
    x = torch.zeros(1, 2, 64, 64, device="cuda")
    torch._inductor.aoti_compile_and_package(torch.export.export(Sdpa(), (x,)), package_path=str(path))
    load = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])(torch.zeros(1, 2, 64, 64, device='cuda'))"
    return subprocess.run([sys.executable, "-c", load, path], capture_output=True, check=False).returncode == 0


@pytest.mark.rare
def test_loaded_by_another_process(torch_device, tmp_path):
    """It knows the functions of masks and scores, which it has never seen, by what a program carries: one that is
    saved, and one that AOTInductor compiles."""
    model, calls = Model().to(torch_device), []
    for b, s, w in ((3, 5, 6), (4, 6, 9)):
        inputs = [x.to(torch_device) for x in (*pages(b, s, w)[:5], offsets(b, b * s))]
        given = [x.clone() for x in inputs]
        with torch.no_grad():
            calls.append((inputs, [*model(*given), *given]))
    free = Dim.DYNAMIC
    shapes = {0: free, 1: free}, {0: free}, {0: free}, {0: free, 1: free}, {0: free}, {0: free}
    program = torch.export.export(model, tuple(x.clone() for x in calls[0][0]), dynamic_shapes=shapes)
    paths = [str(tmp_path / "saved.pt2")]
    torch.export.save(program, paths[0])
    knows_this_processor()
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")):
        if torch_device == "cpu" or torch_loads_a_package(tmp_path / "sdpa.pt2"):
            paths.append(torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "compiled.pt2")))
    torch.save(calls, tmp_path / "calls")
    command = [sys.executable, "-c", LOAD, tmp_path / "calls", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_operators_under_strict_export():
    """`&` and `|` come as `operator.and_` and `or_`, which write nothing."""

    class Masked(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            near = mask_mod(lambda b, h, i, j: ((i - j < 5) & (j > 2)) | (i == j))
            return attention(q, q, q, mask=causal() & near, score_mod=lambda s, b, h, i, j: s * ((i > j) & (j > 1)))

    q = torch.randn(1, 2, 12, 8)
    program = torch.export.export(Masked(), (q,), strict=True)
    torch.testing.assert_close(program.module()(q), Masked()(q))


def test_masks_of_sdpa_that_all_batch_rows_share_leave_the_batch_open():
    added = torch.randn(1, 2, 5, 5)
    masks = added > -1, (added > -1)[:, :1, :1], added, added[0, 0]
    model = Calls(lambda q, *masks: [sdpa.scaled_dot_product_attention(q, q, q, attn_mask=x) for x in masks])
    free = ({0: Dim.DYNAMIC}, *[None] * len(masks))
    run = torch.export.export(model, (torch.randn(3, 2, 5, 4), *masks), dynamic_shapes=(free,)).module()
    for b in (2, 7):
        q = torch.randn(b, 2, 5, 4)
        torch.testing.assert_close(run(q, *masks), model(q, *masks))
