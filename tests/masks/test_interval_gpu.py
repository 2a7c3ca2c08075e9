"""Intervals of keys on a GPU: every kernel that reads them, and CUDA graphs that are replayed with other values."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, Paged, alibi, attention, causal, interval, mask_mod, softcap, window
from saccade.testing.accuracy import check

pytestmark = pytest.mark.gpu

BACKENDS = ["gluon", "triton"]


def bounds(shape, keys, order="any"):
    start = torch.randint(-5, keys, shape, device="cuda")
    stop = start + torch.randint(-10, keys, shape, device="cuda")
    return (start.sort(-1).values, stop.sort(-1).values) if order == "ordered" else (start, stop)


def operands(b, h_q, h_k, s_q, s_k, d, dtype=torch.bfloat16):
    shapes = (b, h_q, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d)
    return tuple(torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("order", ["any", "ordered"])
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_gluon(d, order, deterministic):
    q, k, v = operands(2, 4, 2, 700, 900, d)
    mask = interval(*bounds((2, 700), 900, order))
    dlse = torch.randn(2, 4, 700, device="cuda")
    check(q, k, v, mask=mask, dlse=dlse, deterministic=deterministic, backend="gluon").assert_ok()


MASKS = {
    "batch rows": lambda: interval(*bounds((2, 1), 700)),
    "stops": lambda: interval(None, bounds((1, 500), 700)[1]),
    "starts": lambda: interval(bounds((2, 500), 700)[0], None),
    "numbers": lambda: interval(70, 600),
    "left padding": lambda: interval(bounds((2, 1), 300)[0], None) & causal(),
    "window": lambda: interval(*bounds((2, 500), 700)) & window(100, 20),
    "union": lambda: interval(*bounds((2, 500), 700)) | window(30, 0),
    "complement": lambda: ~interval(*bounds((2, 500), 700)) & causal(),
    "predicate": lambda: interval(*bounds((2, 500), 700)) & mask_mod(lambda b, h, i, j: (i + j + h) % 3 > 0),
    "nothing": lambda: interval(*(torch.full((2, 500), n, device="cuda") for n in (9, 9))),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, d, backend):
    q, k, v = operands(2, 4, 2, 500, 700, d, torch.float16)
    check(q, k, v, mask=MASKS[name](), sink=torch.randn(4, device="cuda"), backend=backend).assert_ok()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("score", ["softcap", "alibi"])
def test_scores_and_lengths(score, backend):
    q, k, v = operands(3, 4, 4, 300, 400, 128)
    score_mod = softcap(20.0) if score == "softcap" else alibi(torch.rand(4, device="cuda"))
    used = (torch.tensor(x, device="cuda") for x in ([300, 77, 0], [400, 130, 50]))
    mask = interval(*bounds((3, 300), 400))
    check(q, k, v, mask=mask, score_mod=score_mod, layout=Dense("bhsd", *used), backend=backend).assert_ok()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("flat", [False, True], ids=["sequences", "rows"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_packed(flat, backend, deterministic):
    offsets = [torch.tensor(x, device="cuda") for x in ([0, 300, 300, 511], [0, 400, 475, 900])]
    q = torch.randn(517, 4, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 907, 2, 128, device="cuda", dtype=torch.bfloat16)
    mask = interval(*bounds((517,) if flat else (3, 1), 425)) & causal()
    layout = Packed(*offsets, 300, 425)
    check(q, k, v, mask=mask, layout=layout, deterministic=deterministic, backend=backend).assert_ok()


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_paged(rows):
    k, v = torch.randn(2, 60, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
    table, used = torch.randperm(60, device="cuda").view(3, 20).int(), torch.tensor([320, 211, 0], device="cuda")
    q = torch.randn(3, rows, 8, 128, device="cuda", dtype=torch.bfloat16)
    check(q, k, v, mask=interval(*bounds((3, rows), 320)), layout=Paged(table, used)).assert_ok()
    flat = torch.randn(3 * rows, 8, 128, device="cuda", dtype=torch.bfloat16)
    layout = Paged(table, used, torch.tensor([0, rows, 2 * rows, 3 * rows], device="cuda"))
    check(flat, k, v, mask=interval(*bounds((3 * rows,), 320)) & causal(), layout=layout).assert_ok()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_is_replayed_with_other_values(backend):
    q, k, v = (x.requires_grad_() for x in operands(2, 2, 2, 256, 256, 64))
    start, stop = bounds((2, 256), 256)
    dout = torch.randn_like(q)

    def run():
        out = attention(q, k, v, mask=interval(start, stop), backend=backend)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    for _ in range(3):
        for bound, new in zip((start, stop), bounds((2, 256), 256), strict=True):
            bound.copy_(new)
        graph.replay()
        replayed = [x.clone() for x in results]
        for x, y in zip(replayed, run(), strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


UNSEEING = {  # rows that see nothing, in whole tiles
    "left padding": lambda b, s: (
        interval(torch.tensor([[s], [s - 1], [s - 300], [0]], device="cuda")[:b], None) & causal()
    ),
    "starts beyond the keys": lambda b, s: interval(torch.full((b, 1), s + 999, device="cuda"), None),
    "the middle": lambda b, s: interval((torch.arange(s, device="cuda")[None] - s // 2).abs().lt(s // 3) * 2 * s, None),
}


@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("name", UNSEEING)
def test_tiles_that_see_nothing(name, d):
    q, k, v = operands(4, 4, 2, 900, 900, d)
    sink, dlse = torch.randn(4, device="cuda"), torch.randn(4, 4, 900, device="cuda")
    mask = UNSEEING[name](4, 900)
    check(q, k, v, mask=mask, dlse=dlse, backend="gluon").assert_ok()
    check(q, k, v, mask=mask, sink=sink, backend="gluon").assert_ok()
    check(q, k, v, mask=mask, sink=sink, dropout_p=0.3, backend="gluon").assert_ok()
    check(q, k, v, mask=mask, score_mod=alibi(torch.rand(4, device="cuda")), backend="gluon").assert_ok()
    used = (torch.tensor(x, device="cuda") for x in ([900, 700, 0, 130], [900, 500, 64, 0]))
    check(q, k, v, mask=mask, sink=sink, layout=Dense("bhsd", *used), backend="gluon").assert_ok()


@pytest.mark.parametrize("d", [64, 128])
def test_tiles_that_see_nothing_leave_nothing_of_what_was_there(d):
    """What memory held before, or in the next launch: the counter that work is drawn from is zero again."""
    q, k, v = operands(3, 8, 1, 700, 700, d)
    mask = interval(torch.tensor([[700], [650], [9999]], device="cuda"), None) & causal()
    junk = torch.full((3, 8, 700, 4 * d), torch.nan, device="cuda", dtype=torch.bfloat16)
    del junk  # memory that the results are likely to get
    for _ in range(3):
        out, lse, top = attention(q, k, v, mask=mask, return_lse=True, return_max_scores=True, backend="gluon")
        hidden = torch.ones(3, 700, dtype=torch.bool, device="cuda")
        hidden[1, 650:] = False
        hidden = hidden[:, None].expand(3, 8, 700)
        assert (out[hidden] == 0).all()
        for x in (lse, top):
            assert (x[hidden] == -torch.inf).all()
            assert x[~hidden].isfinite().all()


def test_packed_tiles_that_see_nothing():
    offsets = torch.tensor([0, 700, 700, 1500], device="cuda")
    q = torch.randn(1500, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1500, 2, 64, device="cuda", dtype=torch.bfloat16)
    mask = interval(torch.tensor([[699], [0], [9999]], device="cuda"), None) & causal()
    layout, sink = Packed(offsets, offsets, 800, 800), torch.randn(4, device="cuda")
    check(q, k, v, mask=mask, layout=layout, sink=sink, backend="gluon").assert_ok()
