"""Rings over flash-attn's four private functions, called as ring-flash-attention and yunchang call them: out and
gradients are those of one process.

They fill `inspect.getfullargspec`'s names with None and what they know, take (out, lse, …) of four results, and give
the backward the merged out and LSE of all keys (zhuzilin/ring-flash-attention, `ring_flash_attn.py` and
`llama3_flash_attn_varlen.py`); yunchang gives the backward its arguments by position (`kernels/attention.py`).
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from saccade import Dense, Packed, Partial, attention, causal, merge, window
from saccade.compat.flash_attn import flash_attn_interface as flash

EQUAL = 1e-12  # in float64, what sums in another order differ by
HERE = str(Path(__file__))
HEADS = 4, 2, 2


def given(function, **known):
    """Their arguments."""
    return dict.fromkeys(inspect.getfullargspec(function).args) | {"softcap": 0.0, "dropout_p": 0.0} | known


def window_of(bounds):
    return {"window_size_left": bounds[0], "window_size_right": bounds[1]}


def turned(group, *tensors):
    """Of the rank before."""
    rank, ranks = group.rank(), group.size()
    found = [torch.empty_like(x) for x in tensors]
    work = []
    for x, y in zip(tensors, found, strict=True):
        work.append(dist.P2POp(dist.isend, x.contiguous(), dist.get_global_rank(group, (rank + 1) % ranks), group))
        work.append(dist.P2POp(dist.irecv, y, dist.get_global_rank(group, (rank - 1) % ranks), group))
    for request in dist.batch_isend_irecv(work):
        request.wait()
    return found


def ring(group, q, k, v, dout, is_causal):
    """Keys and values go round, and with them their gradients."""
    rank, ranks, scale, none = group.rank(), group.size(), q.shape[-1] ** -0.5, window_of((-1, -1))
    out, lse, keys = None, None, (k, v)
    for step in range(ranks):
        if not is_causal or step <= rank:
            options = {"softmax_scale": scale, "causal": is_causal and step == 0, "return_softmax": False} | none
            known = given(flash._flash_attn_forward, q=q, k=keys[0], v=keys[1], **options)
            block, block_lse, _, _ = flash._flash_attn_forward(**known)
            block = Partial(block.transpose(1, 2), block_lse)
            out, lse = block if out is None else merge(Partial(out, lse), block)
        keys = turned(group, *keys)
    out, lse, dq = out.transpose(1, 2), lse.mT.contiguous().mT, torch.zeros_like(q)
    moving = [k, v, torch.zeros_like(k), torch.zeros_like(v)]
    for step in range(ranks):
        if not is_causal or step <= rank:
            parts = [torch.full_like(x, torch.nan) for x in (q, k, v)]
            flash._flash_attn_backward(
                dout,
                q,
                *moving[:2],
                out,
                lse,
                *parts,
                0.0,
                scale,
                is_causal and step == 0,
                -1,
                -1,
                0.0,
                None,
                False,
                None,
            )
            dq += parts[0]
            moving[2:] = [total + x for total, x in zip(moving[2:], parts[1:], strict=True)]
        moving = turned(group, *moving)
    return out, dq, *moving[2:]


def ring_beside_one(group, is_causal):
    torch.manual_seed(5)
    q, k, v, dout = (torch.randn(2, 12 * group.size(), h, 16, dtype=torch.float64) for h in (*HEADS, 4))
    mine = [x.chunk(group.size(), 1)[group.rank()] for x in (q, k, v, dout)]
    found = ring(group, *mine, is_causal)
    whole = [x.requires_grad_() for x in (q, k, v)]
    one = attention(*whole, mask=causal() if is_causal else None, layout=Dense("bshd"))
    expected = [one, *torch.autograd.grad(one, whole, dout)]
    return max(
        float((x - y.chunk(group.size(), 1)[group.rank()]).abs().max()) for x, y in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("is_causal", [True, False])
def test_keys_go_round(pool, is_causal):
    assert max(pool.run((HERE, "ring_beside_one"), 3, is_causal)) <= EQUAL


LENGTHS = [17, 3, 25, 1, 26]  # 24 rows of each of three ranks


def gathered(group, q, k, v, dout, bounds):
    """All keys to each rank, a head at a time. A rank has a stretch of the line, whose rows see a slice of the keys."""
    rank, ranks, each = group.rank(), group.size(), sum(LENGTHS) // group.size()
    offsets = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    first, last = rank * each, (rank + 1) * each
    inside = [at for at in offsets if first < at < last]
    left = max(at for at in offsets if at <= first)
    cu_q = torch.tensor([0, *(at - first for at in inside), each], dtype=torch.int32)
    cu_k = torch.tensor([0, *(at - left for at in inside), last - left], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": each, "max_seqlen_k": last - left}
    options = {"softmax_scale": 0.25, "causal": True} | window_of(bounds) | lengths
    outs, gradients = [], [torch.empty_like(x) for x in (q, k, v)]
    for head in range(k.shape[1]):
        rows = slice(2 * head, 2 * head + 2)
        both = torch.empty(2, ranks, each, 1, 16, dtype=k.dtype)
        for x, y in zip((k, v), both, strict=True):
            dist.all_gather(list(y), x[:, head : head + 1].contiguous(), group=group)
        keys, values = both.flatten(1, 2)[:, left:last]
        forward = flash._flash_attn_varlen_forward
        known = given(forward, q=q[:, rows], k=keys, v=values, return_softmax=False, **options)
        out, lse, _, _ = forward(**known | {"zero_tensors": False, "num_splits": 0})
        sums = torch.zeros_like(both).flatten(1, 2)
        backward = flash._flash_attn_varlen_backward
        results = {"dout": dout[:, rows], "out": out, "softmax_lse": lse, "dq": gradients[0][:, rows]}
        slices = {"q": q[:, rows], "k": keys, "v": values, "dk": sums[0, left:last], "dv": sums[1, left:last]}
        backward(**given(backward, deterministic=False, zero_tensors=False, **options, **results, **slices))
        dist.all_reduce(sums, group=group)
        for gradient, total in zip(gradients[1:], sums, strict=True):
            gradient[:, head : head + 1] = total[first:last]
        outs.append(out)
    return torch.cat(outs, 1), *gradients


def gathered_beside_one(group, bounds):
    torch.manual_seed(5)
    q, k, v, dout = (torch.randn(sum(LENGTHS), h, 16, dtype=torch.float64) for h in (*HEADS, 4))
    found = gathered(group, *(x.chunk(group.size())[group.rank()] for x in (q, k, v, dout)), bounds)
    whole = [x.requires_grad_() for x in (q, k, v)]
    mask = causal() if bounds[0] < 0 else window(bounds[0], 0)
    one = attention(*whole, mask=mask, scale=0.25, layout=Packed.from_lengths(LENGTHS))
    expected = [one, *torch.autograd.grad(one, whole, dout)]
    return max(
        float((x - y.chunk(group.size())[group.rank()]).abs().max()) for x, y in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("bounds", [(-1, -1), (9, 0)])
def test_keys_are_gathered(pool, bounds):
    assert max(pool.run((HERE, "gathered_beside_one"), 3, bounds)) <= EQUAL
