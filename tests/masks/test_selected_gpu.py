"""Lists of keys on a GPU: more forms of calls, and CUDA graphs that are replayed with other lists."""

from __future__ import annotations

import pytest
import torch

from saccade import (
    Dense,
    Packed,
    Paged,
    attention,
    causal,
    explain,
    selected,
    selected_blocks,
    softcap,
)
from saccade.backends import key_lists
from saccade.testing.accuracy import check
from tests.masks.test_selected import lists
from tests.masks.test_selected_kernels import MASKS, sized
from tests.support.devices import TRITON

pytestmark = pytest.mark.gpu

BACKENDS = ["gluon", "triton"]
DEVICE = sized(TRITON)
B, H_Q, H_K, S_Q, S_K = DEVICE.b, DEVICE.h_q, DEVICE.h_k, DEVICE.s_q, DEVICE.s_k


def operands(b=B, h_q=H_Q, h_k=H_K, s_q=S_Q, s_k=S_K, d=64, d_v=None, dtype=torch.bfloat16):
    shapes = (b, h_q, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d_v or d)
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)


def on(*shape, blocks=S_K, dtype=torch.int32):
    return lists(*shape, blocks=blocks, device="cuda", dtype=dtype)


def lengths(n, *shape, dtype=torch.int32):
    return torch.randint(0, n + 1, shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("d", "d_v"), [(192, 128), (256, 256), (72, 40)])
def test_head_dims(d, d_v, backend):
    check(*operands(d=d, d_v=d_v), mask=MASKS["tiles"](DEVICE), backend=backend).assert_ok()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes(dtype):
    check(*operands(dtype=dtype), mask=MASKS["blocks"](DEVICE)).assert_ok()


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize(("h_q", "s_q"), [(8, 1), (64, 1), (64, 3)])
def test_latent_pages(h_q, s_q, size):
    """576/512 over one key head, by `gluon` where rows are many."""
    pages, width = 2000 // size, 600 // size
    cache = torch.randn(pages, size, 1, 576, device="cuda").bfloat16()
    table = torch.randperm(pages, device="cuda")[: 3 * width].view(3, width).int()
    layout = Paged(table, torch.tensor([600 // size * size, 77, 300], device="cuda"))
    q = torch.randn(3, s_q, h_q, 576, device="cuda").bfloat16()
    check(q, cache, cache[..., :512], mask=selected(on(3, 1, s_q, 128, blocks=600)), layout=layout).assert_ok()
    check(
        q, cache, cache[..., :512], mask=selected(on(3, 1, s_q, 128, blocks=600)) & causal(), layout=layout
    ).assert_ok()


@pytest.mark.parametrize("size", [16, 64, 128])
@pytest.mark.parametrize(("h_q", "h_k", "d"), [(64, 4, 128), (16, 4, 64), (8, 1, 256), (4, 4, 128), (6, 2, 96)])
def test_gathered_blocks(h_q, h_k, d, size):
    """Of groups of 16, 4, 8, 1 and 3 heads: dense, padded, packed and over pages."""
    given, blocks = operands(h_q=h_q, h_k=h_k, s_q=260, d=d), -(-S_K // size)
    mask = selected_blocks(on(B, h_k, 260, 4, blocks=blocks), size, lengths(4, B, h_k, 260))
    check(*given, mask=mask & causal(), sink=torch.randn(h_q, device="cuda"), deterministic=True).assert_ok()
    used = torch.tensor([260, 77], device="cuda"), torch.tensor([333, S_K], device="cuda")
    check(*given, mask=mask, layout=Dense("bhsd", *used), score_mod=softcap(9.0)).assert_ok()
    layout = Packed.from_lengths((100, 0, 130, 37), (300, 64, 700, 37), device="cuda")
    q, k, v = (torch.randn(t, h, d, device="cuda").bfloat16() for t, h in ((267, h_q), (1101, h_k), (1101, h_k)))
    mask = selected_blocks(on(h_k, 267, 4, blocks=blocks), size) & causal()
    check(q, k, v, mask=mask, layout=layout).assert_ok()
    cache = [torch.randn(90, 16, h_k, d, device="cuda").bfloat16() for _ in range(2)]
    table = torch.randperm(90, device="cuda").view(2, 45).int()
    layout = Paged(table, torch.tensor([700, 333], device="cuda"), torch.tensor([0, 130, 267], device="cuda").int())
    check(q, *cache, mask=mask, layout=layout).assert_ok()


@pytest.mark.parametrize(("h_q", "h_k", "d", "d_v"), [(64, 1, 128, 128), (16, 2, 64, 64), (4, 4, 96, 40)])
def test_gradients_of_few_keys(h_q, h_k, d, d_v, monkeypatch):
    """Without a table of bits."""
    monkeypatch.setattr(key_lists, "FEW", 0)
    given = operands(h_q=h_q, h_k=h_k, s_q=70, d=d, d_v=d_v)
    for heads in {1, h_k, h_q}:
        mask = selected(on(B, heads, 70, 100), lengths(100, B, heads, 70)) & causal()
        assert "gradients too" in explain(*given, mask=mask, backend="triton").lists
        check(*given, mask=mask, sink=torch.randn(h_q, device="cuda"), deterministic=True, backend="triton").assert_ok()


@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("s_q", [1, 200])
def test_pages(s_q, end_to_end):
    cache = [torch.randn(90, 16, H_K, 128, device="cuda").bfloat16() for _ in range(2)]
    table = torch.randperm(90, device="cuda")[:90].view(3, 30).int()
    starts = torch.tensor([0, s_q, s_q, 2 * s_q + 1], device="cuda").int() if end_to_end else None
    layout = Paged(table, torch.tensor([480, 30, 333], device="cuda"), starts)
    rows = (2 * s_q + 1,) if end_to_end else (3, s_q)
    q = torch.randn(*rows, H_Q, 128, device="cuda").bfloat16()
    shape = (H_K, *rows, 100) if end_to_end else (3, H_K, s_q, 100)
    check(q, *cache, mask=selected(on(*shape, blocks=480)), layout=layout).assert_ok()


@pytest.mark.parametrize("backend", BACKENDS)
def test_lists_that_are_wrong_only_where_the_host_reads(backend):
    """In tables of bits a key counts once, however often it is listed; lengths are clamped."""
    given = operands(s_q=64)
    once = torch.arange(30, device="cuda").expand(B, 1, 1, 30).clone()
    twice = torch.cat([once, once.flip(-1)], -1)
    wanted = attention(*given, mask=selected(once, rows=64), backend=backend, return_lse=True)
    for counts in (None, torch.full((B, 1, 1), 1 << 30, device="cuda")):
        found = attention(*given, mask=selected(twice, counts, rows=64), backend=backend, return_lse=True)
        assert torch.equal(found.out, wanted.out)
        assert torch.equal(found.lse, wanted.lse)
    none, many = (torch.full((B,), n, device="cuda") for n in (-5, 1 << 30))
    assert not attention(*given, mask=selected(twice, none, rows=64), backend=backend).any()
    by_row = [on(B, 1, 64, 30), none], [on(B, 1, 64, 30), many]
    assert not attention(*given, mask=selected(*by_row[0]), backend=backend).any()
    wanted = attention(*given, mask=selected(by_row[1][0]), backend=backend)
    assert torch.equal(attention(*given, mask=selected(*by_row[1]), backend=backend), wanted)


def test_many_rows():
    given = operands(1, 2, 1, 70_000, 128, 64)
    check(*given, mask=selected(on(1, 1, 70_000, 20, blocks=128)), backward=False, backend="triton").assert_ok()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["keys", "tiles"])
def test_lists_are_read_in_each_call(name, backend):
    """Also where the host repeats what an earlier call did."""
    given, mask = operands(), MASKS[name](DEVICE)
    for _ in range(4):
        check(*given, mask=mask, backend=backend).assert_ok()
        mask.lists.copy_(MASKS[name](DEVICE).lists)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["keys of query heads", "wide tiles"])
def test_graphs(name, backend):
    given, mask = [x.requires_grad_() for x in operands()], MASKS[name](DEVICE)
    dout = torch.randn_like(given[0])

    def run():
        out, lse = attention(*given, mask=mask, backend=backend, return_lse=True)
        return out, lse, *torch.autograd.grad(out, given, dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(2):
        other = MASKS[name](DEVICE)
        mask.lists.copy_(other.lists)
        mask.lengths.copy_(other.lengths)
        graph.replay()
        out, lse = attention(*given, mask=mask, backend=backend, return_lse=True)
        torch.testing.assert_close(found[0], out)
        torch.testing.assert_close(found[1], lse)
        for x, y in zip(found[2:], torch.autograd.grad(out, given, dout), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)  # sums of dq have no order


def test_compiled():
    torch.compiler.reset()

    def run(q, k, v, entries):
        return attention(q, k, v, mask=selected_blocks(entries, rows=64) & causal())

    entries, given = on(B, H_Q, -(-S_Q // 64), 3, blocks=-(-S_K // 64)), operands()
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(*given, entries), run(*given, entries))
