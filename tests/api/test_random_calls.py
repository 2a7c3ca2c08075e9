"""Random calls through the public doors, against attention computed pair by pair in float64 by this file alone: views
of any memory with NaN around what is in use, layouts, masks and scores together, out=, LSE and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade import Dense, Packed, Paged, attention, bias, causal, mask_mod, prefix, relative_bias, softcap, window
from saccade.compat.sdpa import scaled_dot_product_attention

DOUBLE = torch.float64


class Call(NamedTuple):
    """q, k and v (b, h, s, d) in float64, of which the first `rows` and `keys` of each batch row are in use."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: list[int]
    keys: list[int]
    mask: Any
    sees: Callable[[int, int, int, int], bool]
    """(b, h, i, j)"""
    score: Any
    modified: Callable[[Tensor, int, int, int, int], Tensor]
    """(score, b, h, i, j)"""
    sink: Tensor | None


def oracle(call: Call) -> tuple[Tensor, Tensor]:
    """out and lse, one row and one key at a time."""
    b, h, s_q, d = call.q.shape
    out, lse = torch.zeros(b, h, s_q, call.v.shape[3], dtype=DOUBLE), torch.full((b, h, s_q), -torch.inf, dtype=DOUBLE)
    group = h // call.k.shape[1]
    for n, head, i in [(x, y, z) for x in range(b) for y in range(h) for z in range(call.rows[x])]:
        scores, values = [], []
        for j in range(call.keys[n]):
            if call.sees(n, head, i, j):
                plain = (call.q[n, head, i] * call.k[n, head // group, j]).sum() / math.sqrt(d)
                scores.append(call.modified(plain, n, head, i, j))
                values.append(call.v[n, head // group, j])
        if call.sink is not None:
            scores.append(call.sink[head])
            values.append(torch.zeros_like(out[0, 0, 0]))
        if any(bool(x > -torch.inf) for x in scores):
            lse[n, head, i] = torch.stack(scores).logsumexp(0)
            weights = (torch.stack(scores) - lse[n, head, i]).exp()
            out[n, head, i] = (weights[:, None] * torch.stack(values)).sum(0)
    return out, lse


def masks(draw: Any, call: dict[str, Any], depth: int = 0) -> tuple[Any, Callable[[int, int, int, int], bool]]:
    rows, keys = call["rows"], call["keys"]

    def at(b: int, i: int) -> int:
        return i + keys[b] - rows[b]

    kind = draw(
        st.sampled_from(["causal", "window", "prefix", "function", "not", "and", "or"][: 7 if depth < 2 else 4])
    )
    match kind:
        case "causal":
            return causal(), lambda b, h, i, j: j <= at(b, i)
        case "window":
            left, right = (draw(st.none() | st.integers(0, 4)) for _ in range(2))
            return window(
                left, right
            ), lambda b, h, i, j: (left is None or j >= at(b, i) - left) and (right is None or j <= at(b, i) + right)
        case "prefix":
            n = draw(st.integers(0, 9) | st.just(1 << 40))
            return prefix(n), lambda b, h, i, j: j < n or j <= at(b, i)
        case "function":
            n, far = draw(st.integers(2, 4)), draw(st.sampled_from([1, 1 << 30, -(1 << 40)]))
            return (
                mask_mod(lambda b, h, i, j: ((i * 3 + j + h + b) % n != 0) | (j - i > far)),
                lambda b, h, i, j: (i * 3 + j + h + b) % n != 0 or j - i > far,
            )
    one, sees = masks(draw, call, depth + 1)
    if kind == "not":
        return ~one, lambda *pair: not sees(*pair)
    two, also = masks(draw, call, depth + 1)
    if kind == "and":
        return one & two, lambda *pair: sees(*pair) and also(*pair)
    return one | two, lambda *pair: sees(*pair) or also(*pair)


def scores(draw: Any, h: int, s_q: int, s_k: int) -> tuple[Any, Callable[..., Tensor]]:
    match draw(st.sampled_from(["none", "softcap", "table", "bias", "sentinel", "hides"])):
        case "softcap":
            return softcap(1.5), lambda x, b, h, i, j: 1.5 * torch.tanh(x / 1.5)
        case "table":
            table = torch.randn(h, 5, dtype=DOUBLE)
            return relative_bias(table), lambda x, b, h, i, j: x + table[h, min(max(j - i, -2), 2) + 2]
        case "bias":
            t = torch.randn(h, s_q, s_k, dtype=DOUBLE)
            return bias(t), lambda x, b, h, i, j: x + t[h, i, j]
        case "sentinel":
            far = draw(st.sampled_from([2, 1 << 30, (1 << 63) - 1]))
            return (
                lambda score, b, h, i, j: torch.where(j - i < far, score, 0.5 * score),
                lambda x, b, h, i, j: x if j - i < far else 0.5 * x,
            )
        case "hides":
            n = draw(st.integers(0, 5))
            return (
                lambda score, b, h, i, j: torch.where((i - j).abs() <= n, score, -torch.inf),
                lambda x, b, h, i, j: x if abs(i - j) <= n else torch.full_like(x, -torch.inf),
            )
    return None, lambda x, *pair: x


@st.composite
def calls(draw: Any) -> Call:
    b, h_k, group = draw(st.integers(0, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    s_q, s_k, d, d_v = (
        draw(st.integers(0, 6)),
        draw(st.integers(0, 9)),
        draw(st.integers(1, 9)),
        draw(st.integers(1, 5)),
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    h = h_k * group
    shapes = (b, h, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d_v)
    q, k, v = (torch.randn(shape, dtype=DOUBLE) for shape in shapes)
    rows, keys = ([draw(st.integers(0, s)) for _ in range(b)] for s in (s_q, s_k))
    mask = masks(draw, {"rows": rows, "keys": keys}) if draw(st.booleans()) else (None, lambda *pair: True)
    sink = torch.randn(h, dtype=DOUBLE) if draw(st.booleans()) else None
    return Call(q, k, v, rows, keys, *mask, *scores(draw, h, s_q, s_k), sink)


def elsewhere(draw: Any, x: Tensor, used: list[int]) -> Tensor:
    """x (b, h, s, d) in memory of another order, in NaN, which is also what rows that are not in use hold."""
    order = draw(st.permutations(range(4)))
    step = draw(st.sampled_from([1, 1, 2]))
    sizes = [x.shape[dim] * (step if dim == 3 else 1) + 2 for dim in order]
    made = torch.full(sizes, torch.nan, dtype=x.dtype).permute([order.index(dim) for dim in range(4)])
    made = made[:, :, :, 1 : 1 + step * x.shape[3] : step][1 : 1 + x.shape[0], : x.shape[1], 2 : 2 + x.shape[2]]
    for n, rows in enumerate(used):
        made[n, :, :rows] = x[n, :, :rows]
    return made


@settings(max_examples=60)
@given(st.data())
def test_padded(data):
    call = data.draw(calls())
    layout = Dense(
        data.draw(st.sampled_from(["bhsd", "bshd", "sbhd"])),
        torch.tensor(call.rows).long(),
        torch.tensor(call.keys).long(),
    )
    uses = (call.q, call.rows), (call.k, call.keys), (call.v, call.keys)
    operands = [layout.ordered(elsewhere(data.draw, x, used)).detach().requires_grad_() for x, used in uses]
    out, lse = attention(
        *operands, mask=call.mask, score_mod=call.score, sink=call.sink, layout=layout, return_lse=True
    )
    leaves = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    wanted, wanted_lse = oracle(call._replace(q=leaves[0], k=leaves[1], v=leaves[2]))
    torch.testing.assert_close(layout.canonical(out), wanted)
    torch.testing.assert_close(lse, wanted_lse)
    if wanted.requires_grad:
        dout = torch.randn_like(wanted)
        found = torch.autograd.grad(layout.canonical(out), operands, dout)
        right = torch.autograd.grad(wanted, leaves, dout, allow_unused=True, materialize_grads=True)
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(layout.canonical(one), other)
    with torch.no_grad():
        buffer = torch.full_like(out, torch.nan)
        given_ = [x.detach() for x in operands]
        attention(*given_, mask=call.mask, score_mod=call.score, sink=call.sink, layout=layout, out=buffer)
    torch.testing.assert_close(layout.canonical(buffer), wanted.detach())


@settings(max_examples=40)
@given(st.data())
def test_packed(data):
    call = data.draw(calls())
    b, h = len(call.rows), call.q.shape[1]
    offsets = [torch.tensor([0, *used]).cumsum(0) for used in (call.rows, call.keys)]
    tail = data.draw(st.integers(0, 2))

    def end_to_end(x: Tensor, used: list[int]) -> Tensor:
        parts = [x[n, :, :rows].transpose(0, 1) for n, rows in enumerate(used)]
        return torch.cat([*parts, torch.full((tail, x.shape[1], x.shape[3]), torch.nan, dtype=DOUBLE)])

    operands = end_to_end(call.q, call.rows), end_to_end(call.k, call.keys), end_to_end(call.v, call.keys)
    layout = Packed(*offsets, max([0, *call.rows]), max([0, *call.keys]))
    out, lse = attention(
        *operands, mask=call.mask, score_mod=call.score, sink=call.sink, layout=layout, return_lse=True
    )
    wanted, wanted_lse = oracle(call)
    rows = [(n, i) for n in range(b) for i in range(call.rows[n])]
    torch.testing.assert_close(out[: len(rows)], torch.stack([wanted[n, :, i] for n, i in rows]) if rows else out[:0])
    torch.testing.assert_close(
        lse[:, : len(rows)], torch.stack([wanted_lse[n, :, i] for n, i in rows], 1) if rows else lse[:, :0]
    )
    assert not out[len(rows) :].any()
    assert lse.shape == (h, len(rows) + tail)
    assert bool((lse[:, len(rows) :] == -torch.inf).all())


@settings(max_examples=40)
@given(st.data())
def test_paged(data):
    call = data.draw(calls())
    b, h_k, s_k, d = call.k.shape
    s_q = call.q.shape[2]
    call = call._replace(rows=[s_q] * b, mask=None, sees=lambda *pair: True)
    size = data.draw(st.sampled_from([1, 2, 5]))
    width = max(-(-s_k // size), 1)
    table = torch.randperm(b * width + 2)[: b * width].view(b, width)
    caches = [torch.full((b * width + 2, size, h_k, n), torch.nan, dtype=DOUBLE) for n in (d, call.v.shape[3])]
    for cache, x in zip(caches, (call.k, call.v), strict=True):
        for n, j in [(y, z) for y in range(b) for z in range(call.keys[y])]:
            cache[table[n, j // size], j % size] = x[n, :, j]
    if getattr(call.score, "kind", None) == "bias":  # of fewer keys than there is room for
        call = call._replace(score=None, modified=lambda x, *pair: x)
    counted = call.modified  # rows stand after the keys that were there before them
    call = call._replace(modified=lambda x, n, head, i, j: counted(x, n, head, i + call.keys[n] - s_q, j))
    layout = Paged(table, torch.tensor(call.keys).long(), num_splits=data.draw(st.sampled_from([None, 1, 3])))
    given_ = {"mask": causal(), "score_mod": call.score, "sink": call.sink, "layout": layout}
    out, lse = attention(call.q.transpose(1, 2), *caches, return_lse=True, **given_)
    wanted, wanted_lse = oracle(call._replace(sees=lambda n, head, i, j: j <= i + call.keys[n] - s_q))
    torch.testing.assert_close(out.transpose(1, 2), wanted)
    torch.testing.assert_close(lse, wanted_lse)


@pytest.mark.parametrize("added", [False, True])
@settings(max_examples=30)
@given(st.data())
def test_sdpa(added, data):
    """Outer dimensions of any number, sizes of zero, masks that broadcast."""
    outer = data.draw(st.lists(st.integers(0, 2), max_size=2))
    h, s_q, s_k, d = (data.draw(st.integers(low, 4)) for low in (1, 0, 0, 1))
    q, k, v = (torch.randn(*outer, h, s, d, dtype=DOUBLE) for s in (s_q, s_k, s_k))
    whole = *outer, h, s_q, s_k
    shape = [data.draw(st.sampled_from([1, n])) for n in whole][data.draw(st.integers(0, len(whole))) :]
    mask = torch.randn(shape, dtype=DOUBLE) if added else torch.rand(shape) > 0.4
    s = q @ k.mT / math.sqrt(d)
    s = s + mask if added else s.masked_fill(~mask, -torch.inf)
    weights = s.softmax(-1).nan_to_num(0) if s_k else s
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), weights @ v)
