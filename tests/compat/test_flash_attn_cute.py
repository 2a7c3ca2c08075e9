"""FlashAttention-4's functions: what they add to the others, against the oracle."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Unsupported, attention, causal, mask_mod, softcap, window
from saccade.call.partial import Partial
from saccade.compat.flash_attn_cute import flash_attn_func, flash_attn_varlen_func
from saccade.scores import ScoreMod
from saccade.testing import check
from saccade.testing.cases import Case

BSHD = Dense("bshd")


def drawn(device, **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=2, h_q=4, h_k=2, d=16, order="bshd")
    return case.replace(**{"s_q": 33, "s_k": 50, **changes}).inputs(device)


def checked(made, function, given, layout=BSHD, **meaning):
    def face(q, k, v, *, return_lse=False, sink=None, **keywords):
        options = given if sink is None else {**given, "learnable_sink": sink}
        out, lse = function(q, k, v, return_lse=return_lse, **options)
        assert (lse is not None) == return_lse
        return Partial(out, lse) if return_lse else out

    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=face, layout=layout, **meaning).assert_ok()


def between(left, right, off):
    """Keys from `i + off - left` to `i + off + right`, whatever the signs."""
    return mask_mod(lambda b, h, i, j: (j >= i + off - left) & (j <= i + off + right))


@pytest.mark.parametrize(
    ("given", "mask"),
    [
        ({}, None),
        ({"causal": True}, causal()),
        ({"window_size": (None, 0)}, causal()),
        ({"window_size": (9, None)}, window(9, None)),
        ({"window_size": (9, 4)}, window(9, 4)),
        ({"window_size": (9, 4), "causal": True}, window(9, 0)),
        ({"window_size": (-1, -1)}, None),
        ({"window_size": (-1, -1), "causal": True}, causal()),
        ({"window_size": (20, -5)}, between(20, -5, 17)),
        ({"window_size": (-3, 12)}, between(-3, 12, 17)),
        ({"window_size": (None, -5)}, between(99, -5, 17)),
        ({"window_size": (-3, None)}, between(-3, 99, 17)),
        ({"window_size": (-1, 0)}, between(-1, 0, 17)),  # nothing
    ],
    ids=str,
)
def test_windows(given, mask, device):
    checked(drawn(device), flash_attn_func, given, mask=mask)


def test_sink(device):
    """With its gradient."""
    made = drawn(device, sink=True)
    checked(made, flash_attn_func, {"causal": True}, mask=causal(), sink=made.keywords["sink"])


@pytest.mark.parametrize("causally", [False, True])
def test_score_mod(causally, device):
    """Captured tensors get gradients."""
    made = drawn(device)
    slopes = torch.rand(4, device=device, requires_grad=True)

    def biased(score, b, h, q_idx, kv_idx, slopes):
        return score - slopes[h] * (q_idx - kv_idx).abs()

    mod = ScoreMod(biased, slopes)
    given = {"score_mod": mod, "causal": causally}
    checked(made, flash_attn_func, given, score_mod=mod, mask=causal() if causally else None)

    def closed(score, b, h, q_idx, kv_idx):
        return biased(score, b, h, q_idx, kv_idx, slopes)

    out, _ = flash_attn_func(made.q, made.k, made.v, score_mod=closed)
    out.sum().backward()
    assert slopes.grad.abs().sum() > 0


def test_softcap(device):
    checked(drawn(device), flash_attn_func, {"softcap": 4.0}, score_mod=softcap(4.0))


def test_mask_mod(device):
    def scattered(b, h, q_idx, kv_idx):
        return (q_idx * 7 + kv_idx * 3 + h) % 5 < 3

    checked(drawn(device), flash_attn_func, {"mask_mod": scattered}, mask=mask_mod(scattered))


@pytest.mark.parametrize("form", ["both", "q", "k", "neither"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (9, -2)}], ids=str)
def test_varlen(form, used, given, device):
    """Sequences of one length end to end are a batch; either side may come in either form."""
    made = drawn(device)
    b, (s_q, s_k) = 2, (33, 50)
    lengths = {}
    if used:
        lengths = {"seqused_q": torch.tensor([33, 20]).to(device), "seqused_k": torch.tensor([41, 50]).to(device)}
    cu_q, cu_k = (torch.arange(b + 1, device=device).int() * s for s in (s_q, s_k))
    offsets = {"cu_seqlens_q": cu_q} if form in ("both", "q") else {}
    offsets |= {"cu_seqlens_k": cu_k} if form in ("both", "k") else {}

    def face(q, k, v, **options):
        q = q.flatten(0, 1) if "cu_seqlens_q" in offsets else q
        k, v = (x.flatten(0, 1) if "cu_seqlens_k" in offsets else x for x in (k, v))
        out, lse = flash_attn_varlen_func(q, k, v, **offsets, **lengths, **options)
        if "cu_seqlens_q" in offsets:
            out = out.unflatten(0, (b, s_q))
            lse = None if lse is None else lse.unflatten(1, (b, s_q)).transpose(0, 1)
        return out, lse

    layout = Dense("bshd", lengths.get("seqused_q"), lengths.get("seqused_k"))
    mask = causal() if "causal" in given else None
    if "window_size" in given:
        off = torch.tensor([8, 30], device=device) if used else torch.tensor([17, 17], device=device)
        mask = mask_mod(lambda b, h, i, j: (j >= i + off[b] - 9) & (j <= i + off[b] - 2))
    checked(made, face, given, layout, mask=mask)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("given", [{}, {"causal": True}, {"window_size": (9, -2)}, {"num_splits": 0}], ids=str)
def test_pages(ragged, given, device):
    dtype = torch.float16 if device == "cuda" else torch.float32
    k, v = torch.randn(2, 12, 8, 2, 16, device=device, dtype=dtype)
    table, used = torch.randperm(12, device=device).int().view(3, 4), torch.tensor([20, 3, 9], device=device).int()
    q = torch.randn(3, 2, 4, 16, device=device, dtype=dtype)
    keys, values = (x[table.long()].flatten(1, 2) for x in (k, v))
    off = used - 2

    # Indices of functions count from the first row, as in every other form.
    def counted(score, b, h, q_idx, kv_idx):
        return score + 0.1 * q_idx - 0.05 * kv_idx

    def face(*_, return_lse=False, **keywords):
        rows = q.flatten(0, 1) if ragged else q
        cu = torch.arange(4, device=device).int() * 2 if ragged else None
        options = {"cu_seqlens_q": cu, "seqused_k": used, "page_table": table, "score_mod": counted}
        out, lse = flash_attn_varlen_func(rows, k, v, return_lse=return_lse, **options, **given)
        if ragged:
            out, lse = out.view_as(q), None if lse is None else lse.unflatten(1, (3, 2)).transpose(0, 1)
        return Partial(out, lse) if return_lse else out

    mask = causal() if "causal" in given else None
    if "window_size" in given:
        mask = mask_mod(lambda b, h, i, j: (j >= i + off[b] - 9) & (j <= i + off[b] - 2))
    meaning = {"layout": Dense("bshd", None, used), "mask": mask, "score_mod": counted}
    with torch.no_grad():
        check(q, keys, values, backward=False, function=face, **meaning).assert_ok()


def test_pages_and_operands_that_require_gradients():
    """A learned sink is one: the call runs, and a backward through it is refused."""
    k, v = torch.randn(2, 4, 8, 2, 16)
    q, table, used = torch.randn(2, 5, 4, 16), torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([13, 6])
    given = {"page_table": table, "seqused_k": used, "causal": True}
    sink = torch.randn(4)
    wanted, _ = flash_attn_varlen_func(q, k, v, learnable_sink=sink, **given)
    found, _ = flash_attn_varlen_func(q, k, v, learnable_sink=sink.requires_grad_(), **given)
    assert torch.equal(found, wanted)
    with pytest.raises(Unsupported, match="a cache of keys has no gradients"):
        found.sum().backward()


def test_a_mask_mod_over_pages():
    k, v = torch.randn(2, 4, 8, 2, 16)
    q, table, used = torch.randn(2, 5, 4, 16), torch.tensor([[2, 0], [1, 3]]).int(), torch.tensor([13, 6])

    def stripes(b, h, q_idx, kv_idx):
        return (q_idx + kv_idx) % 3 > 0

    found, _ = flash_attn_varlen_func(q, k, v, seqused_k=used, page_table=table, mask_mod=stripes)
    keys, values = (x[table.long()].flatten(1, 2) for x in (k, v))
    wanted = attention(q, keys, values, mask=mask_mod(stripes), layout=Dense("bshd", None, used))
    torch.testing.assert_close(found, wanted)


REFUSED = {
    "qv": torch.ones(1),
    "gather_kv_indices": torch.ones(1),
    "score_mod_bwd": abs,
    "aux_tensors": [torch.ones(1)],
    "aux_scalars": (1,),
    "block_sparse_tensors": (torch.ones(1),),
    "gather_bwd_recompute_p": True,
    "gather_bwd_token_chunk": 8,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    x = torch.randn(1, 8, 2, 16)
    for function in (flash_attn_func, flash_attn_varlen_func):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported: "):
            function(x, x, x, **{name: REFUSED[name]})


def test_wrong_calls():
    x = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match="mask_mod takes the place of causal and window_size"):
        flash_attn_func(x, x, x, causal=True, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    with pytest.raises(ValueError, match="softcap and score_mod do not go together"):
        flash_attn_func(x, x, x, softcap=3.0, score_mod=lambda score, b, h, q_idx, kv_idx: score)
    with pytest.raises(TypeError, match="window_size"):
        flash_attn_func(x, x, x, window_size=5)
    with pytest.raises(ValueError, match="page_table needs seqused_k"):
        flash_attn_varlen_func(x, x, x, page_table=torch.zeros(1, 1).int())
    used = torch.tensor([4])
    with pytest.raises(NotImplementedError, match="seqused_q with page_table"):
        flash_attn_varlen_func(x, x, x, page_table=torch.zeros(1, 1).int(), seqused_k=used, seqused_q=used)
    with pytest.raises(ValueError, match=r"k without cu_seqlens_k must be \(b, s, h, d\)"):
        flash_attn_varlen_func(x[0], x[0], x[0], cu_seqlens_q=torch.tensor([0, 8]))
    with pytest.raises(NotImplementedError, match="seqlen_k_per_split"):
        flash_attn_varlen_func(x, x, x, seqlen_k_per_split=64)


def test_compiled():
    x = torch.randn(1, 40, 2, 16, requires_grad=True)
    slopes, found = torch.rand(2), []

    def call(x, slopes):
        def biased(score, b, h, q_idx, kv_idx):
            return score + slopes[h] * (kv_idx - q_idx)

        return flash_attn_func(x, x, x, causal=True, window_size=(9, 0), score_mod=biased, return_lse=True)

    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        out, lse = function(x, slopes)
        found.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_offsets_by_position():
    """As callers of versions without qv write them."""
    x, offsets = torch.randn(10, 2, 16), torch.tensor([0, 4, 10], dtype=torch.int32)
    right, _ = flash_attn_varlen_func(x, x, x, cu_seqlens_q=offsets, cu_seqlens_k=offsets, causal=True)
    assert torch.equal(flash_attn_varlen_func(x, x, x, offsets, offsets, 6, 6, causal=True)[0], right)
    named = {"max_seqlen_q": 6, "max_seqlen_k": 6, "causal": True}
    assert torch.equal(flash_attn_varlen_func(x, x, x, offsets, offsets, **named)[0], right)
    used = torch.tensor([3, 6], dtype=torch.int32)
    for more in ((used, used), (6, 6, 4), (6, 6, used)):  # seqused_q and seqused_k in others, and what comes after
        with pytest.raises(TypeError, match="as in seqused_q="):
            flash_attn_varlen_func(x, x, x, offsets, offsets, *more, causal=True)
