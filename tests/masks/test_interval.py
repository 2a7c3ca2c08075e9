"""Intervals of keys that the user gives: against an oracle of their own, by every kernel that reads them, and
in CUDA graphs that are replayed with other values."""

from __future__ import annotations

import pytest
import torch

from saccade import (
    Dense,
    Packed,
    Paged,
    alibi,
    attention,
    block_mask,
    causal,
    interval,
    mask_mod,
    prefix,
    softcap,
    window,
)
from saccade.testing.accuracy import check
from tests.support.devices import CPU, GLUON, INTERPRETER, TRITON, every_head_dim, on

B, H_Q, H_K, S_Q, S_K, D = 3, 4, 2, 70, 90, 16


def bounds(shape, keys=S_K, device="cpu", dtype=torch.int64):
    """Any intervals: empty ones, and ones that reach beyond the keys, in no order."""
    start = torch.randint(-5, keys + 5, shape, dtype=dtype)
    return start.to(device), (start + torch.randint(-5, keys, shape, dtype=dtype)).to(device)


def oracle(q, k, v, visible):
    """out and lse of (b, h, s, d) operands in float64, by the definition; `visible` broadcasts to (b, h, s_q, s_k)."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = torch.where(visible, q @ k.mT / q.shape[-1] ** 0.5, -torch.inf)
    lse = score.logsumexp(-1)
    return torch.where(visible.any(-1, keepdim=True), score.softmax(-1), 0) @ v, lse


def operands(device="cpu", dtype=torch.float32, s_q=S_Q, s_k=S_K):
    shapes = (B, H_Q, s_q, D), (B, H_K, s_k, D), (B, H_K, s_k, D)
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("shape", [(), (B, 1), (1, S_Q), (B, S_Q)], ids=str)
def test_forward_and_gradients(shape):
    start, stop = bounds(shape)
    q, k, v = (x.double().requires_grad_() for x in operands())
    r = torch.arange(S_K)
    visible = ((r >= start[..., None]) & (r < stop[..., None])).expand(B, S_Q, S_K)[:, None]
    out, lse = oracle(q, k, v, visible)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    seen = lse > -torch.inf
    wanted = torch.autograd.grad((out, torch.where(seen, lse, 0)), (q, k, v), (dout, dlse), retain_graph=True)
    found = attention(q, k, v, mask=interval(start, stop), return_lse=True)
    torch.testing.assert_close(found.out, out.nan_to_num(0))
    torch.testing.assert_close(found.lse, lse)
    gradients = torch.autograd.grad(
        (found.out, torch.where(seen, found.lse, 0)), (q, k, v), (dout, dlse), retain_graph=True
    )
    for x, y in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(x, y.nan_to_num(0))


@every_head_dim()
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("order", ["any", "ordered"])
def test_against_the_oracle(order, deterministic, device):
    start, stop = bounds((device.b, device.s_q), device.s_k, device.type, torch.int32)
    if order == "ordered":
        start, stop = start.sort().values, stop.sort().values
    for dtype in device.dtypes:
        dlse = device.randn(device.b, device.h_q, device.s_q, dtype=device.lse_dtype(dtype))
        keywords = {"mask": interval(start, stop), "dlse": dlse, "deterministic": deterministic}
        check(*device.operands(dtype), backend=device.backend, **keywords).assert_ok()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("k_offset", [None, -(1 << 28)])
def test_bounds_as_far_as_their_dtype_goes(k_offset, dtype, device):
    """Wherever keys stand, such a bound is none."""
    limits = torch.iinfo(dtype)
    stop = torch.full((device.b,), limits.max, dtype=dtype, device=device.type)
    start = torch.full_like(stop, limits.min)[:, None]
    q, k, v = device.operands()
    everything = attention(q, k, v, backend=device.backend)
    for mask in (prefix(stop), interval(start, stop[:, None]), interval(None, stop[:, None])):
        out = attention(q, k, v, mask=mask, layout=Dense(k_offset=k_offset), backend=device.backend)
        torch.testing.assert_close(out, everything)


def third(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + h) % 3 > 0


MASKS = {
    "open start": lambda start, stop: interval(None, stop),
    "open stop": lambda start, stop: interval(start, None),
    "rows of all": lambda start, stop: interval(start[:1], stop[:1]),
    "batch rows": lambda start, stop: interval(start[:, :1], stop[:, :1]),
    "numbers": lambda start, stop: interval(7, 60),
    "number and tensor": lambda start, stop: interval(3, stop),
    "two": lambda start, stop: interval(start, None) & interval(None, stop),
    "padded": lambda start, stop: interval(start[:, :1], None) & causal(),
    "window": lambda start, stop: interval(start[:, :1], stop) & window(20, 5),
    "wide window": lambda start, stop: interval(start, stop) & window(100, 20),
    "union": lambda start, stop: interval(start, stop) | window(3, 0),
    "complement": lambda start, stop: ~interval(start, stop),
    "complement & causal": lambda start, stop: ~interval(start, stop) & causal(),
    "predicate": lambda start, stop: interval(start, stop) & mask_mod(third),
    "predicate | interval": lambda start, stop: (
        interval(start, stop) | mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 7 == b)
    ),
    "nothing": lambda start, stop: interval(torch.full_like(start, 9), torch.full_like(start, 9)),
}


@every_head_dim()
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, device):
    for dtype in (torch.float16,) if device.type == "cuda" else device.dtypes[:1]:
        q, k, v = device.operands(dtype, b=2)
        mask = MASKS[name](*bounds((2, device.s_q), device.s_k, device.type))
        sink, dlse = device.randn(device.h_q, dtype=torch.float32), device.randn(*q.shape[:3], dtype=torch.float32)
        check(q, k, v, mask=mask, sink=sink, dlse=dlse, backend=device.backend).assert_ok()


@pytest.mark.parametrize("score", ["none", "softcap", "alibi"])
def test_scores_and_lengths(score, device):
    q, k, v = device.operands(b=3)
    s_q, s_k = device.s_q, device.s_k
    used = (torch.tensor(x, device=device.type) for x in ([s_q, s_q // 2, 0], [s_k // 2, s_k, 20]))
    score_mod = {"softcap": softcap(20.0), "alibi": alibi(torch.rand(device.h_q, device=device.type))}.get(score)
    mask, layout = interval(*bounds((3, s_q), s_k, device.type)), Dense("bhsd", *used)
    check(q, k, v, mask=mask, score_mod=score_mod, layout=layout, backend=device.backend).assert_ok()


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("flat", [False, True], ids=["sequences", "rows"])
def test_packed(flat, deterministic, device):
    rows, keys = (300, 511, 517), (400, 475, 900, 907)
    if device.type == "cpu":
        rows, keys = (40, 77, 80), (70, 75, 130, 131)
    offsets = [torch.tensor(x, device=device.type) for x in ([0, rows[0], *rows[:2]], [0, *keys[:3]])]
    q = device.randn(rows[2], device.h_q, device.d)
    k, v = device.randn(2, keys[3], device.h_k, device.d)
    mask = interval(*bounds((rows[2],) if flat else (3, 1), keys[2] - keys[1], device.type)) & causal()
    layout = Packed(*offsets, rows[0], keys[2] - keys[1])
    check(q, k, v, mask=mask, layout=layout, deterministic=deterministic, backend=device.backend).assert_ok()


@on(CPU, INTERPRETER, TRITON)
@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
def test_paged(end_to_end, rows, device):
    size, keys, rows = (16, 320, rows) if device.type == "cuda" else (4, 30, min(rows, 9))
    k, v = device.randn(2, 60, size, 2, device.d)
    table = torch.randperm(60, device=device.type)[: 3 * -(-keys // size)].view(3, -1).int()
    used = torch.tensor([keys, 2 * keys // 3, 0], device=device.type)
    offsets = torch.tensor([0, rows, rows + 1, 2 * rows], device=device.type) if end_to_end else None
    q = device.randn(2 * rows + 1, 8, device.d) if end_to_end else device.randn(3, rows, 8, device.d)
    some = bounds((2 * rows + 1,) if end_to_end else (3, rows), keys, device.type)
    for mask in (interval(*some), interval(*some) & causal()):
        check(q, k, v, mask=mask, layout=Paged(table, used, offsets), backend=device.backend).assert_ok()


@pytest.mark.parametrize("flat", [False, True], ids=["sequences", "rows"])
def test_packed_by_the_definition(flat):
    lengths_q, lengths_k = torch.tensor([20, 0, 37]), torch.tensor([31, 5, 64])
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths_q, lengths_k)]
    q, k, v = torch.randn(60, H_Q, D), torch.randn(101, H_K, D), torch.randn(101, H_K, D)
    start, stop = bounds((60,) if flat else (3, 1), 64)
    layout = Packed(*offsets, 37, 64)
    out = attention(q, k, v, mask=interval(start, stop), layout=layout)
    first_q, first_k = offsets[0][2], offsets[1][2]
    rows = start[first_q:57] if flat else start[2], stop[first_q:57] if flat else stop[2]
    r = torch.arange(64)
    visible = ((r >= rows[0][:, None]) & (r < rows[1][:, None])).expand(37, 64)
    last = (x[None, at:to].transpose(1, 2) for x, at, to in ((q, first_q, 57), (k, first_k, 100), (v, first_k, 100)))
    torch.testing.assert_close(out[first_q:57], oracle(*last, visible)[0][0].nan_to_num(0).transpose(0, 1).float())


def test_new_values_in_the_same_tensor():
    q, k, v = operands()
    start, stop = bounds((B, S_Q))
    mask = interval(start, stop) & mask_mod(lambda b, h, q_idx, kv_idx: kv_idx % 5 > 0)
    attention(q, k, v, mask=mask)
    start.data.copy_(bounds((B, S_Q))[0])  # which torch does not count
    check(q, k, v, mask=mask).assert_ok()


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        (torch.zeros(B, dtype=torch.int64), None, r"interval's start must be .*; got \(3,\)"),
        (None, torch.zeros(B, S_K, dtype=torch.int64), r"interval's stop must be \(\), \(3, 1\).*got \(3, 90\)"),
        (torch.zeros(B, 1), None, "must be an int32 or int64 tensor"),
        (torch.zeros(B, 1, 1, dtype=torch.int64), None, "at most two dimensions"),
    ],
)
def test_shapes_that_do_not_fit(start, stop, message):
    with pytest.raises(ValueError, match=message):
        attention(*operands(), mask=interval(start, stop))


@pytest.mark.parametrize("bound", [1.5, "3", True, [3]])
def test_bounds_that_are_no_integers(bound):
    with pytest.raises(TypeError, match="interval's start must be an integer"):
        interval(bound, None)


def test_paged_rows_that_see_nothing_beside_rows_that_do():
    cache = torch.randn(2, 4, 4, 1, D).unbind()
    for splits in (None, 1):
        layout = Paged(torch.tensor([[0, 1, 2]]), torch.tensor([5]), num_splits=splits)
        for first in (27, 20_000, 1 << 30):
            mask = interval(torch.tensor([[0, first]]), None)
            check(torch.randn(1, 2, 1, D), *cache, mask=mask, layout=layout).assert_ok()


@pytest.mark.parametrize("shape", [(), (B, 1), (1, S_Q), (B, S_Q)], ids=str)
def test_compiled_once_for_all_lengths(shape):
    """Bounds are inputs, their sizes are symbols, and `&` needs no constants."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, start: attention(q, k, v, mask=interval(start, None) & window(30, 5)),
        fullgraph=True,
        backend=count,
        dynamic=True,
    )
    for s_q in (S_Q, S_Q - 7, S_Q - 20):
        q, k, v = operands(s_q=s_q)
        start = bounds(tuple(s_q if n == S_Q else n for n in shape))[0]
        wanted = attention(q, k, v, mask=interval(start, None) & window(30, 5))
        torch.testing.assert_close(compiled(q, k, v, start), wanted)
    assert len(graphs) <= 2


def test_pictures_of_bounds_for_each_row():
    rows = interval(torch.tensor([0, 1, 1]), None)
    assert rows.draw(3).splitlines()[1:] == ["■ ■ ■", "· ■ ■", "· ■ ■"]
    assert str(rows)


def test_block_masks_keep_no_bounds():
    with pytest.raises(ValueError, match="cannot keep the tiles of ~interval"):
        block_mask(~interval(torch.zeros(1, S_Q, dtype=torch.int64), 3), B, H_Q, S_Q, S_K)
    assert block_mask(interval(2, 9), B, H_Q, S_Q, S_K) == interval(2, 9)


def test_left_padding_is_packed():
    """Rows after the padding have what the same sequences have without it."""
    lengths = [70, 41, 8]
    q, k, v = operands(s_k=S_Q)
    padding = torch.tensor([[S_Q - n] for n in lengths])
    out = attention(q, k, v, mask=interval(padding, None) & causal())
    for b, n in enumerate(lengths):
        alone = attention(*(x[b : b + 1, :, S_Q - n :] for x in (q, k, v)), mask=causal())
        torch.testing.assert_close(out[b : b + 1, :, S_Q - n :], alone)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 200])
def test_paged_by_the_chosen_backend(rows):
    k, v = torch.randn(2, 60, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
    table, used = torch.randperm(60, device="cuda").view(3, 20).int(), torch.tensor([320, 211, 0], device="cuda")
    q = torch.randn(3, rows, 8, 128, device="cuda", dtype=torch.bfloat16)
    check(q, k, v, mask=interval(*bounds((3, rows), 320, "cuda")), layout=Paged(table, used)).assert_ok()
    flat = torch.randn(3 * rows, 8, 128, device="cuda", dtype=torch.bfloat16)
    layout = Paged(table, used, torch.tensor([0, rows, 2 * rows, 3 * rows], device="cuda"))
    check(flat, k, v, mask=interval(*bounds((3 * rows,), 320, "cuda")) & causal(), layout=layout).assert_ok()


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_values(backend):
    q, k, v = (x.requires_grad_() for x in GLUON.operands(b=2, h_q=2, h_k=2, s_q=256, s_k=256, d=64))
    start, stop = bounds((2, 256), 256, "cuda")
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
        for bound, new in zip((start, stop), bounds((2, 256), 256, "cuda"), strict=True):
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


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 80, 128, 256])
@pytest.mark.parametrize("name", UNSEEING)
def test_tiles_that_see_nothing(name, d):
    q, k, v = GLUON.operands(b=4, h_q=4, h_k=2, s_q=900, s_k=900, d=d)
    sink, dlse = torch.randn(4, device="cuda"), torch.randn(4, 4, 900, device="cuda")
    mask = UNSEEING[name](4, 900)
    check(q, k, v, mask=mask, dlse=dlse, backend="gluon").assert_ok()
    check(q, k, v, mask=mask, sink=sink, backend="gluon").assert_ok()
    check(q, k, v, mask=mask, sink=sink, dropout_p=0.3, backend="gluon").assert_ok()
    check(q, k, v, mask=mask, score_mod=alibi(torch.rand(4, device="cuda")), backend="gluon").assert_ok()
    used = (torch.tensor(x, device="cuda") for x in ([900, 700, 0, 130], [900, 500, 64, 0]))
    check(q, k, v, mask=mask, sink=sink, layout=Dense("bhsd", *used), backend="gluon").assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_tiles_that_see_nothing_leave_nothing_of_what_was_there(d):
    """What memory held before, or in the next launch: the counter that work is drawn from is zero again."""
    q, k, v = GLUON.operands(b=3, h_q=8, h_k=1, s_q=700, s_k=700, d=d)
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


@pytest.mark.gpu
def test_packed_tiles_that_see_nothing():
    offsets = torch.tensor([0, 700, 700, 1500], device="cuda")
    q = torch.randn(1500, 4, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1500, 2, 64, device="cuda", dtype=torch.bfloat16)
    mask = interval(torch.tensor([[699], [0], [9999]], device="cuda"), None) & causal()
    layout, sink = Packed(offsets, offsets, 800, 800), torch.randn(4, device="cuda")
    check(q, k, v, mask=mask, layout=layout, sink=sink, backend="gluon").assert_ok()
