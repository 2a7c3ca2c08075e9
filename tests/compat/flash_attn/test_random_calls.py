"""Random calls of the faces beside a formula written from flash-attn's documentation, in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch.testing import assert_close

from saccade.compat import flash_attn, flash_attn_cute, flash_attn_interface

LENGTHS = [0, 1, 2, 5, 17, 70]
BOUNDS = [None, None, 0, 1, 3, 50, 1000]


def formula(q, k, v, *, scale, window, softcap=0.0, chunk=0, leftpad=0, sink=None):
    """One sequence: q (s_q, h_q, d), k (s_k, h_k, d), v (s_k, h_k, d_v) to out (s_q, h_q, d_v), LSE (h_q, s_q)."""
    groups, off = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    row, key = torch.arange(q.shape[0])[:, None] + off, torch.arange(k.shape[0])[None]
    seen = (key >= leftpad) & (row == row)
    left, right = window
    seen = seen if left is None else seen & (key >= row - left)
    seen = seen if right is None else seen & (key <= row + right)
    if chunk:
        seen = seen & (torch.floor((key - leftpad) / chunk) == torch.floor((row - leftpad) / chunk))
    scores = scores.masked_fill(~seen, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink[:, None, None].expand(-1, q.shape[0], 1)], -1)
    lse = scores.logsumexp(-1)
    p = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", p, v), lse


def drawn(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    h_k = draw.choice([1, 2, 3])
    return draw, h_k * draw.choice([1, 2, 16]), h_k, draw.choice([1, 2, 7, 16, 65]), draw.choice([1, 8, 40])


def values(*shape, twisted=False):
    x = torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1], dtype=torch.float64).transpose(-2, -3)
    return (x if twisted else x.contiguous()).requires_grad_()


@pytest.mark.parametrize("seed", range(40))
def test_sequences(seed):
    draw, h_q, h_k, d, d_v = drawn(seed)
    version, count, is_causal = draw.choice([2, 3, 4]), draw.choice([1, 2, 4]), draw.random() < 0.4
    lengths_q = [draw.choice(LENGTHS) for _ in range(count)]
    lengths_k = [draw.choice(LENGTHS) for _ in range(count)]
    left, right = draw.choice(BOUNDS), draw.choice(BOUNDS)
    scale, softcap = draw.choice([None, 0.3]), draw.choice([0.0, 5.0])
    q = values(sum(lengths_q), h_q, d, twisted=draw.random() < 0.5)
    k = values(sum(lengths_k), h_k, d, twisted=draw.random() < 0.5)
    v = values(sum(lengths_k), h_k, d_v, twisted=draw.random() < 0.5)
    unbounded = None if version == 4 else draw.choice([-1, -7])
    given = {
        "causal": is_causal, "window_size": tuple(unbounded if x is None else x for x in (left, right)),
        "softmax_scale": scale, "softcap": softcap, "return_lse" if version == 4 else "return_attn_probs": True,
    }  # fmt: skip
    meant = {"scale": scale, "softcap": softcap, "window": (left, 0 if is_causal else right)}
    chunk = draw.choice([1, 5, 64]) if version == 3 and draw.random() < 0.5 else 0
    if chunk:
        given["attention_chunk"] = meant["chunk"] = chunk
    if version == 4 and draw.random() < 0.5:
        given["learnable_sink"] = meant["sink"] = torch.randn(h_q, dtype=torch.float64)
    face = {2: flash_attn, 3: flash_attn_interface, 4: flash_attn_cute}[version]
    offsets = [torch.tensor([0, *x]).cumsum(0, dtype=torch.int32) for x in (lengths_q, lengths_k)]
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
    out, lse, *_ = face.flash_attn_varlen_func(
        q, k, v, **named, max_seqlen_q=max(lengths_q), max_seqlen_k=max(lengths_k), **given
    )
    parts = [
        formula(*x, **meant)
        for x in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]  # fmt: skip
    expected = torch.cat([x for x, _ in parts])
    assert_close(out, expected)
    assert_close(lse.float(), torch.cat([x for _, x in parts], 1).float())
    dout = torch.randn_like(expected)
    wanted = [x.nan_to_num(0.0) for x in torch.autograd.grad(expected, (q, k, v), dout)]
    assert_close(list(torch.autograd.grad(out, (q, k, v), dout)), wanted)


def turned(x, cos, sin, interleaved):
    """x (s, h, d) turned by cos and sin (s, rotary_dim / 2)."""
    size = 2 * cos.shape[1]
    one, two = (x[..., :size:2], x[..., 1:size:2]) if interleaved else x[..., :size].chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    pairs = [one * cos - two * sin, one * sin + two * cos]
    inner = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([inner, x[..., size:]], -1)


@pytest.mark.parametrize("seed", range(40))
def test_caches(seed):
    draw, h_q, h_k, _, d_v = drawn(seed)
    d, version, b, size = draw.choice([8, 16, 66]), draw.choice([2, 3]), draw.choice([1, 3]), draw.choice([20, 64])
    s_q, s_new = draw.choice([1, 2, 5]), draw.choice([1, 2, 5])
    lengths = [draw.randint(0, size - s_new) for _ in range(b)]
    starts = [draw.randint(0, x) if draw.random() < 0.5 else 0 for x in lengths]
    is_causal, interleaved = draw.random() < 0.5, draw.random() < 0.5
    with torch.no_grad():
        q, k_new, v_new = values(b, s_q, h_q, d), values(b, s_new, h_k, d), values(b, s_new, h_k, d_v)
        given = {"k": k_new, "v": v_new, "cache_seqlens": torch.tensor(lengths, dtype=torch.int32)}
        if draw.random() < 0.5:  # pages, in any order
            table = torch.randperm(b * size // 4 + 3)[: b * size // 4].view(b, -1).int()
            caches = [values(b * size // 4 + 3, 4, h_k, x) for x in (d, d_v)]
            given["block_table" if version == 2 else "page_table"] = table
            read = lambda cache: cache[table.long()].flatten(1, 2)  # noqa: E731
        else:
            rows = torch.randperm(b + 2)[:b].int()
            caches = [values(b + 2, size, h_k, x) for x in (d, d_v)]
            given["cache_batch_idx"] = rows
            read = lambda cache: cache[rows.long()]  # noqa: E731
        keys, vals = (read(x).clone() for x in caches)
        angles = torch.rand(size + 5, draw.choice([1, 4]), dtype=torch.float64)
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
        if any(starts):
            given["cache_leftpad"] = torch.tensor(starts, dtype=torch.int32)
        face = flash_attn if version == 2 else flash_attn_interface
        out = face.flash_attn_with_kvcache(q, *caches, **given, causal=is_causal)
        for i, (first, end) in enumerate(zip(starts, lengths, strict=True)):
            new = torch.arange(end, end + s_new)
            keys[i, new] = turned(k_new[i], angles[new].cos(), angles[new].sin(), interleaved)
            vals[i, new] = v_new[i]
            at = angles[end + torch.arange(s_q) * is_causal]  # without a mask all rows stand where the first does
            expected, _ = formula(
                turned(q[i], at.cos(), at.sin(), interleaved), keys[i, : end + s_new], vals[i, : end + s_new],
                scale=None, window=(None, 0 if is_causal else None), leftpad=first,
            )  # fmt: skip
            assert_close(out[i].float(), expected.float())  # angles are float32
        assert_close(read(caches[0]).float(), keys.float())
        assert_close(read(caches[1]), vals)
