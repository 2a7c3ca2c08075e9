"""Intervals of keys that the user gives, against an oracle of their own in float64."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, Paged, attention, block_mask, causal, interval, mask_mod, window
from saccade.testing.accuracy import check

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("monotone", [False, True], ids=["any", "ordered"])
def test_against_the_oracle(torch_device, monotone, dtype):
    start, stop = bounds((B, S_Q), dtype=torch.int32)
    if monotone:
        start, stop = start.sort().values, stop.sort().values
    q, k, v = operands(torch_device, dtype)
    dlse = torch.randn(B, H_Q, S_Q, device=torch_device)
    check(q, k, v, mask=interval(start.to(torch_device), stop.to(torch_device)), dlse=dlse).assert_ok()


STARTS, STOPS = bounds((B, S_Q))
COMBINED = {
    "open start": interval(None, STOPS),
    "open stop": interval(STARTS, None),
    "numbers": interval(7, 40),
    "number and tensor": interval(3, STOPS),
    "two": interval(STARTS, None) & interval(None, STOPS),
    "padded": interval(STARTS[:, :1], None) & causal(),
    "window": interval(STARTS[:, :1], STOPS) & window(20, 5),
    "union": interval(STARTS, STOPS) | window(3, 0),
    "complement": ~interval(STARTS, STOPS),
    "complement & causal": ~interval(STARTS, STOPS) & causal(),
    "predicate": interval(STARTS, STOPS) & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + kv_idx + h) % 3 > 0),
    "predicate | interval": interval(STARTS, STOPS) | mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 7 == b),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", COMBINED)
def test_combined(name):
    q, k, v = operands()
    check(q, k, v, mask=COMBINED[name], sink=torch.randn(H_Q), dlse=torch.randn(B, H_Q, S_Q)).assert_ok()


def test_lengths_in_use():
    layout = Dense("bhsd", torch.tensor([S_Q, 33, 0]), torch.tensor([50, S_K, 20]))
    check(*operands(), mask=interval(*bounds((B, S_Q))), layout=layout).assert_ok()


@pytest.mark.parametrize("flat", [False, True], ids=["sequences", "rows"])
def test_packed(flat):
    lengths_q, lengths_k = torch.tensor([20, 0, 37]), torch.tensor([31, 5, 64])
    offsets = [torch.nn.functional.pad(x.cumsum(0), (1, 0)) for x in (lengths_q, lengths_k)]
    q, k, v = torch.randn(60, H_Q, D), torch.randn(101, H_K, D), torch.randn(101, H_K, D)
    start, stop = bounds((60,) if flat else (3, 1), 64)
    layout = Packed(*offsets, 37, 64)
    check(q, k, v, mask=interval(start, stop) & causal(), layout=layout).assert_ok()
    out = attention(q, k, v, mask=interval(start, stop), layout=layout)
    first_q, first_k = offsets[0][2], offsets[1][2]
    rows = start[first_q:57] if flat else start[2], stop[first_q:57] if flat else stop[2]
    r = torch.arange(64)
    visible = ((r >= rows[0][:, None]) & (r < rows[1][:, None])).expand(37, 64)
    last = (x[None, at:to].transpose(1, 2) for x, at, to in ((q, first_q, 57), (k, first_k, 100), (v, first_k, 100)))
    torch.testing.assert_close(out[first_q:57], oracle(*last, visible)[0][0].nan_to_num(0).transpose(0, 1).float())


@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
def test_paged(end_to_end):
    cache = torch.randn(2, 12, 8, H_K, D).unbind()
    table, used = torch.randperm(12).view(3, 4), torch.tensor([30, 7, 0])
    if end_to_end:
        layout, q = Paged(table, used, torch.tensor([0, 5, 6, 8])), torch.randn(9, H_Q, D)
        mask = interval(*bounds((9,), 30))
    else:
        layout, q = Paged(table, used), torch.randn(3, 5, H_Q, D)
        mask = interval(*bounds((3, 5), 30))
    check(q, *cache, mask=mask & causal(), layout=layout).assert_ok()


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
