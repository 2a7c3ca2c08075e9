"""FlashAttention-3's functions: what they add to version 2's, against the oracle."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, Paged, append_kv, attention, causal, mask_mod, merge, softcap, window
from saccade.call.partial import Partial
from saccade.compat.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from saccade.testing import check
from saccade.testing.cases import Case

BSHD = Dense("bshd")


def drawn(device, **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=2, h_q=4, h_k=2, d=16, order="bshd")
    return case.replace(**{"s_q": 33, "s_k": 50, **changes}).inputs(device)


def checked(made, function, given, layout=BSHD, **meaning):
    def face(q, k, v, *, return_lse=False, **keywords):
        result = function(q, k, v, return_attn_probs=return_lse, **given)
        return Partial(*result) if return_lse else result

    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, function=face, layout=layout, **meaning).assert_ok()


def chunks(size, off):
    """Rows and keys of one chunk; `off` is a number, or one for each sequence."""

    def same(b, h, q_idx, kv_idx):
        place = q_idx + (off if isinstance(off, int) else off[b])
        return torch.div(place, size, rounding_mode="floor") == torch.div(kv_idx, size, rounding_mode="floor")

    return mask_mod(same)


@pytest.mark.parametrize(
    ("given", "meaning"),
    [
        ({}, {}),
        ({"causal": True, "softmax_scale": 0.3}, {"mask": causal(), "scale": 0.3}),
        ({"window_size": (9, 4)}, {"mask": window(9, 4)}),
        ({"softcap": 4.0, "num_splits": 3, "pack_gqa": True, "sm_margin": 8}, {"score_mod": softcap(4.0)}),
    ],
    ids=str,
)
def test_func(given, meaning, device):
    checked(drawn(device), flash_attn_func, given, **meaning)


@pytest.mark.parametrize("view", [{}, {"causal": True}, {"window_size": (7, 2)}], ids=str)
@pytest.mark.parametrize("lengths", [(33, 50), (50, 33), (50, 50)], ids=str)
@pytest.mark.parametrize("size", [1, 16, 100])
def test_attention_chunk(view, lengths, size, device):
    """Chunks count from the first key, for rows before it too."""
    made = drawn(device, s_q=lengths[0], s_k=lengths[1])
    mask = chunks(size, lengths[1] - lengths[0])
    mask = mask & causal() if "causal" in view else mask & window(7, 2) if view else mask
    checked(made, flash_attn_func, {"attention_chunk": size, **view}, mask=mask)


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"attention_chunk": 8, "causal": True}], ids=str)
@pytest.mark.parametrize("used", ["all", "k", "qk"])
def test_varlen(given, used, device):
    made = drawn(device, order="thd", b=3, used=used)
    layout = made.keywords["layout"]
    offsets = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k
    rows = layout.cu_seqlens_q.diff() if layout.seqused_q is None else layout.seqused_q
    keys = layout.cu_seqlens_k.diff() if layout.seqused_k is None else layout.seqused_k
    mask = causal() if given else None
    if "attention_chunk" in given:
        mask = chunks(8, keys - rows) & causal()

    def face(q, k, v, **options):
        used = {"seqused_q": layout.seqused_q, "seqused_k": layout.seqused_k}
        return flash_attn_varlen_func(q, k, v, *offsets, **used, **options)

    checked(made, face, given, layout, mask=mask)


@pytest.mark.parametrize("joined", [True, False])
def test_qkvpacked(joined, device):
    made = drawn(device, h_k=2 if joined else 4, s_q=40, s_k=40)

    def face(q, k, v, **options):
        if joined:
            return flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), num_heads_q=4, **options)
        return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **options)

    checked(made, face, {"causal": True}, mask=causal())


def pages(device, d=16):
    dtype = torch.float16 if device == "cuda" else torch.float32
    cache = torch.randn(2, 12, 8, 2, d, device=device, dtype=dtype)
    table = torch.randperm(12, device=device).int().view(3, 4)
    return cache[0], cache[1], table, torch.tensor([20, 3, 9], device=device).int()


@pytest.mark.parametrize("given", [{}, {"causal": True}, {"causal": True, "attention_chunk": 8}], ids=str)
@pytest.mark.parametrize("leftpad", [False, True])
def test_cache_of_sequences_end_to_end(given, leftpad, device):
    """New keys and queries of different lengths in one call."""
    k_cache, v_cache, table, used = pages(device)
    cu = torch.tensor([0, 1, 4, 6], device=device).int()
    q = torch.randn(6, 4, 16, device=device, dtype=k_cache.dtype)
    k, v = (torch.randn(6, 2, 16, device=device, dtype=q.dtype) for _ in range(2))
    left = torch.tensor([3, 1, 4], device=device).int() if leftpad else None
    wanted_caches = k_cache.clone(), v_cache.clone()
    out, lse, *rest = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=used, page_table=table, cu_seqlens_q=cu, cu_seqlens_k_new=cu,
        max_seqlen_q=3, cache_leftpad=left, return_softmax_lse=True, **given,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]
    append_kv(*wanted_caches, Paged(table, used, cu), k, v)
    assert torch.equal(k_cache, wanted_caches[0])
    assert torch.equal(v_cache, wanted_caches[1])

    after, seen = used + cu.diff(), []
    for b in range(3):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        first = 0 if left is None else int(left[b])
        own = [x[table[b].long()].flatten(0, 1)[None, first : int(after[b])] for x in wanted_caches]
        mask = causal() if given else None
        if "attention_chunk" in given:
            mask = chunks(8, own[0].shape[1] - (rows.stop - rows.start)) & causal()
        seen.append((rows, q[None, rows], *own, mask))
    for rows, *operands, mask in seen:

        def face(*_, return_lse=False, rows=rows, **keywords):
            return Partial(out[None, rows], lse[None, :, rows]) if return_lse else out[None, rows]

        check(*operands, backward=False, function=face, layout=BSHD, mask=mask).assert_ok()


def test_rotation_by_other_positions():
    """rotary_seqlens shifts the angles of new keys and of queries, and not where keys are written."""
    k_cache, v_cache, table, used = pages("cpu")
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 16)
    angles = torch.rand(64, 4) * 6
    cos, sin = angles.cos(), angles.sin()
    given = {"cache_seqlens": used, "page_table": table, "causal": True, "rotary_interleaved": False}
    shifted, moved = k_cache.clone(), {"rotary_cos": torch.roll(cos, -5, 0), "rotary_sin": torch.roll(sin, -5, 0)}
    wanted = flash_attn_with_kvcache(q, shifted, v_cache.clone(), k, v, **moved, **given)
    found = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, rotary_seqlens=used + 5, **given
    )
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(k_cache, shifted)


def test_positions_without_angles():
    """Nothing is rotated, with and without new keys."""
    q, cache, new = (torch.randn(3, rows, 2, 16) for rows in (2, 40, 2))
    for k in (None, new):
        wanted, found = (
            flash_attn_with_kvcache(q, cache.clone(), cache.clone(), k, k, cache_seqlens=9, **given)
            for given in ({}, {"rotary_seqlens": torch.tensor([1, 2, 3])})
        )
        assert torch.equal(found, wanted)


def test_rows_of_the_page_table(device):
    """cache_batch_idx says which row is whose."""
    k_cache, v_cache, table, used = pages(device)
    q = torch.randn(4, 2, 4, 16, device=device, dtype=k_cache.dtype)
    row = torch.tensor([2, 0, 2, 2], device=device).int()
    given = {"cache_seqlens": used[[2, 0, 1, 1]], "causal": True}
    found = flash_attn_with_kvcache(q, k_cache, v_cache, page_table=table, cache_batch_idx=row, **given)
    wanted = flash_attn_with_kvcache(q, k_cache, v_cache, page_table=table[[2, 0, 2, 2]], **given)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("wrong", [-1, 3])
def test_rows_that_are_not_there(device, paged, wrong):
    """New keys are not written to another's: a CPU says so, a GPU omits them."""
    k_cache, v_cache, table, _ = pages(device)
    if not paged:
        k_cache, v_cache = k_cache[:3], v_cache[:3]
    before = k_cache.clone()
    q, new = (torch.ones(2, 1, h, 16, device=device, dtype=k_cache.dtype) for h in (4, k_cache.shape[2]))
    row = torch.tensor([1, wrong], device=device).int()
    given = {"cache_seqlens": torch.full_like(row, 5), "cache_batch_idx": row, "page_table": table if paged else None}
    if device == "cpu":
        with pytest.raises(ValueError, match="cache_batch_idx must be from 0 to 2"):
            flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **given)
        assert torch.equal(k_cache, before)
        return
    flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **given)
    assert (k_cache != before).flatten(2).any(-1).sum() == 1  # one row


ANGLES = torch.rand(9, 8)


@pytest.mark.parametrize(
    ("starts", "angles", "complaint"),
    [
        ([-1, 0], ANGLES, "rotary_seqlens must be from 0 to 8"),
        ([0, 9], ANGLES, "rotary_seqlens must be from 0 to 8"),
        ([1.0, 1.5], ANGLES, "rotary_seqlens must be int32"),
        ([1], ANGLES, "rotary_seqlens must be int32"),
        ([[1], [1]], ANGLES, "rotary_seqlens must be int32"),
        ([1, 1], torch.rand(9, 9), "2 pairs <= 16"),
        ([1, 1], torch.rand(9), "2 pairs <= 16"),
        ([1, 1], torch.ones(9, 8).int(), "one float dtype"),
    ],
    ids=["negative", "beyond", "floats", "one", "column", "pairs", "vector", "integers"],
)
def test_positions_and_angles_that_are_wrong(starts, angles, complaint):
    cache = torch.zeros(2, 4, 2, 16), torch.zeros(2, 4, 2, 16)
    q, new = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16)
    given = {"rotary_cos": angles, "rotary_sin": angles, "rotary_seqlens": torch.tensor(starts), "causal": True}
    with pytest.raises(ValueError, match=complaint):
        flash_attn_with_kvcache(q, *cache, new, new, cache_seqlens=2, **given)
    assert not cache[0].any()


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed):
    q, k, v = torch.randn(2, 8, 4, 16), torch.randn(2, 30, 4, 16), torch.randn(2, 30, 4, 16)
    partials = [
        attention(q, x, y, layout=BSHD, return_lse=True) for x, y in zip(k.split(10, 1), v.split(10, 1), strict=True)
    ]
    outs, lses = torch.stack([x.out for x in partials]), torch.stack([x.lse.mT for x in partials])
    wanted = merge(*partials, layout=BSHD)
    if packed:
        outs, lses = outs[:, 0], lses[:, 0]
        wanted = Partial(wanted.out[0], wanted.lse[:1])
    out, lse = flash_attn_combine(outs, lses)
    assert torch.equal(out, wanted.out)
    assert torch.equal(lse, wanted.lse[0].mT if packed else wanted.lse.mT)
    made = torch.empty_like(out, dtype=torch.bfloat16)
    again, _ = flash_attn_combine(outs, lses, made, torch.bfloat16)
    assert again is made
    assert torch.equal(made, out.bfloat16())
    with pytest.raises(ValueError, match=r"must be \(parts, b, s, h, d\) and \(parts, b, s, h\)"):
        flash_attn_combine(outs, lses.mT)


def test_metadata():
    """Taken wherever upstream takes it."""
    metadata = get_scheduler_metadata(2, 1, 128, 8, 2, 64, torch.tensor([5, 9]), causal=True)
    assert (metadata.numel(), metadata.dtype) == (0, torch.int32)
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16)
    given = {"cache_seqlens": torch.tensor([5, 9])}
    found = flash_attn_with_kvcache(q, cache, cache, scheduler_metadata=metadata, sm_margin=4, **given)
    assert torch.equal(found, flash_attn_with_kvcache(q, cache, cache, **given))


def test_refused_by_name():
    x, offsets = torch.randn(1, 8, 2, 16), torch.tensor([0, 8])
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_func(x, x, x, qv=torch.ones(1))
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_varlen_func(x[0], x[0], x[0], offsets, offsets, 8, 8, qv=torch.ones(1))
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_with_kvcache(x, x, x, qv=torch.ones(1))


def test_eight_bits():
    """Numbers that are multiplied by a factor of each sequence and key head."""
    q, k, v = (torch.randn(2, 24, h, 16).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    names = "q_descale", "k_descale", "v_descale"
    given = {name: torch.rand(2, 2) + 0.5 for name in names}
    factors = [given[name].repeat_interleave(h, 1)[:, None, :, None] for name, h in zip(names, (2, 1, 1), strict=True)]
    wide = [x.float() * factor for x, factor in zip((q, k, v), factors, strict=True)]
    found, lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **given)
    wanted, wanted_lse = flash_attn_func(*wide, causal=True, return_attn_probs=True)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted.bfloat16(), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, wanted_lse)
    offsets = torch.tensor([0, 24, 48])
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    assert torch.equal(
        flash_attn_varlen_func(*flat, offsets, offsets, 24, 24, causal=True, **given), found.flatten(0, 1)
    )
    cached = flash_attn_with_kvcache(q, k, v, cache_seqlens=24, causal=True, **given)
    torch.testing.assert_close(cached, found, atol=1e-2, rtol=1e-2)
    with pytest.raises(ValueError, match="descale is for 8-bit operands, got q"):
        flash_attn_func(*wide, **given)


def test_wrong_calls():
    x = torch.randn(1, 8, 4, 16)
    with pytest.raises(ValueError, match=r"needs num_heads_q"):
        flash_attn_qkvpacked_func(x)
    with pytest.raises(ValueError, match=r"qkv must be \(b, s, h_q \+ 2 h_k, d\), got .* num_heads_q=3"):
        flash_attn_qkvpacked_func(x, num_heads_q=3)
    with pytest.raises(ValueError, match=r"q must be \(t_q, h_q, d\) with cu_seqlens_q, got"):
        flash_attn_with_kvcache(x, x, x, cache_seqlens=4, cu_seqlens_q=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="cu_seqlens_k_new is for new keys"):
        flash_attn_with_kvcache(x, x, x, cache_seqlens=4, cu_seqlens_k_new=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="attention_chunk must be an integer from 1 on, got -2"):
        flash_attn_func(x, x, x, attention_chunk=-2)


def test_compiled():
    x = torch.randn(1, 40, 2, 16, requires_grad=True)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, flash_attn_func):
        out = function(x, x, x, causal=True, attention_chunk=16)
        found.append((out, *torch.autograd.grad(out.sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_packed_offsets_of_a_call_that_is_dense():
    """One sequence end to end is a batch of one row."""
    x, offsets = torch.randn(30, 4, 16), torch.tensor([0, 30])
    found = flash_attn_varlen_func(x, x, x, offsets, offsets, 30, 30, causal=True)
    assert torch.equal(found, attention(x, x, x, mask=causal(), layout=Packed(offsets)))


@pytest.mark.parametrize("starts", [None, [5, 0]], ids=str)
@pytest.mark.parametrize("rotates", [False, True])
def test_new_rows_of_8_bit_caches(rotates, starts, device):
    """Are quantized by the same factors, after a rotation in float32."""
    k_cache, v_cache = (torch.zeros(2, 32, 2, 16, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    q, k, v = (torch.randn(2, 3, h, 16, device=device).bfloat16() for h in (4, 2, 2))
    factors = [torch.rand(2, 2, device=device) * 0.05 + 0.01 for _ in range(2)]
    lengths, angles = torch.tensor([7, 12], device=device), torch.randn(40, 8, device=device)
    turns = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()} if rotates else {}
    if rotates and starts is not None:
        turns["rotary_seqlens"] = torch.tensor(starts, device=device)
    given = {"cache_seqlens": lengths, "causal": True, **turns}
    wide = [torch.zeros(2, 32, 2, 16, device=device) for _ in range(2)]
    flash_attn_with_kvcache(q.float(), *wide, k.float(), v.float(), **given)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, k_descale=factors[0], v_descale=factors[1], **given)
    assert out.isfinite().all()
    for found, wanted, factor in zip((k_cache, v_cache), wide, factors, strict=True):
        right = (wanted / factor[:, None, :, None]).to(torch.float8_e4m3fn)
        assert torch.equal(found.float(), right.float())
    if rotates:
        with pytest.raises(ValueError, match="rotary_cos is for q and k of 16 bits or more"):
            flash_attn_with_kvcache(q, k_cache, v_cache, *(x.to(k_cache.dtype) for x in (k, v)), **given)
