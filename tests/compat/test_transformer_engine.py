"""TransformerEngine's interface: each of its arguments, by what it means in saccade's own words."""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager

import pytest
import torch

from saccade import (
    Dense,
    Packed,
    Unsupported,
    alibi,
    attention,
    bias,
    causal,
    compose,
    mask_mod,
    softcap,
    window,
)
from saccade.compat.transformer_engine import CallArguments, DotProductAttention, get_attention_backend
from saccade.testing.callbacks import case

B, H, G, S_Q, S_K, D, D_V = 2, 4, 2, 12, 17, 8, 6
LENGTHS_Q, LENGTHS_K = torch.tensor([12, 5]), torch.tensor([17, 9])


def cu(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()


def hidden(lengths, s):
    return (torch.arange(s) >= lengths[:, None])[:, None, None]


def normal(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


CU_Q, CU_K = cu(LENGTHS_Q), cu(LENGTHS_K)
PADDED = {"seqused_q": LENGTHS_Q, "seqused_k": LENGTHS_K}
HOLES_Q, HOLES_K = (torch.rand(B, 1, 1, s, generator=torch.Generator().manual_seed(s)) < 0.4 for s in (S_Q, S_K))
BIAS, SLOPES = normal(1, H, S_Q, S_K), normal(H).detach().exp()
ARBITRARY = torch.rand(B, 1, S_Q, S_K, generator=torch.Generator().manual_seed(5)) < 0.4


def top_left(left, right):
    return mask_mod(lambda b, h, q_idx, kv_idx: (kv_idx >= q_idx - left) & (kv_idx <= q_idx + right))


def shown(b, h, q_idx, kv_idx):
    return ~HOLES_Q[b, 0, 0, q_idx] & ~HOLES_K[b, 0, 0, kv_idx]


def distances(offset):
    """ALiBi over distances of both signs; the offset is one number, or one for each batch row."""

    def mod(score, b, h, q_idx, kv_idx):
        shift = offset if isinstance(offset, int) else offset[b]
        return score - SLOPES[h] * (q_idx + shift - kv_idx).abs()

    return mod


# Constructor, forward, what it means.
SAME = {
    "causal": ({}, {}, {"mask": top_left(99, 0)}),
    "causal_bottom_right": ({}, {"attn_mask_type": "causal_bottom_right"}, {"mask": causal()}),
    "no_mask": ({"attn_mask_type": "no_mask"}, {}, {}),
    "window": ({"attn_mask_type": "no_mask", "window_size": (3, 2)}, {}, {"mask": window(3, 2)}),
    "no window": ({"attn_mask_type": "no_mask"}, {"window_size": (-1, 0)}, {}),
    "window from the top left": (
        {"attn_mask_type": "no_mask", "bottom_right_diagonal": False},
        {"window_size": (3, 2)},
        {"mask": top_left(3, 2)},
    ),
    "causal window": ({"window_size": (4, 0)}, {}, {"mask": top_left(4, 0)}),
    "padding by lengths": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_K},
        {"layout": PADDED},
    ),
    "padding by masks": (
        {"attn_mask_type": "padding_causal_bottom_right", "attention_type": "cross"},
        {"attention_mask": (hidden(LENGTHS_Q, S_Q), hidden(LENGTHS_K, S_K))},
        {"layout": PADDED, "mask": causal()},
    ),
    "padding at the left": (
        {"attn_mask_type": "padding"},
        {"attention_mask": (HOLES_Q, HOLES_K)},
        {"mask": mask_mod(shown)},
    ),
    "holes from the top left": (
        {"attn_mask_type": "padding_causal"},
        {"attention_mask": (HOLES_Q, HOLES_K), "window_size": (5, 0)},
        {"mask": mask_mod(shown) & top_left(5, 0)},
    ),
    "padding from the top left": (
        {"attn_mask_type": "causal,padding"},
        {"cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_K},
        {"layout": PADDED, "mask": top_left(99, 0)},
    ),
    "arbitrary": (
        {"attn_mask_type": "arbitrary"},
        {"attention_mask": ARBITRARY, "window_size": (9, 9)},
        {"mask": mask_mod(lambda b, h, q_idx, kv_idx: ~ARBITRARY[b, 0, q_idx, kv_idx]) & window(9, 9)},
    ),
    "bias after the scale": (
        {},
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS},
        {"mask": top_left(99, 0), "score_mod": bias(BIAS)},
    ),
    "bias before the scale": (
        {"attn_mask_type": "no_mask", "softmax_scale": 0.3, "softcap": 2.0},
        {"core_attention_bias_type": "pre_scale_bias", "core_attention_bias": BIAS},
        {"score_mod": compose(bias(0.3 * BIAS), softcap(2.0)), "scale": 0.3},
    ),
    "alibi": (
        {"attn_mask_type": "causal_bottom_right"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES},
        {"mask": causal(), "score_mod": distances(S_K - S_Q)},
    ),
    "alibi both ways": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES.expand(B, H)},
        {"score_mod": distances(S_K - S_Q)},
    ),
    "alibi of lengths": (
        {"attn_mask_type": "padding"},
        {"core_attention_bias_type": "alibi", "alibi_slopes": SLOPES, "cu_seqlens_q": CU_Q, "cu_seqlens_kv": CU_K},
        {"score_mod": distances(LENGTHS_K - LENGTHS_Q), "layout": PADDED},
    ),
    "alibi of the paper": (
        {},
        {"core_attention_bias_type": "alibi"},
        {"mask": top_left(99, 0), "score_mod": alibi(torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]))},
    ),
    "off by one": ({"softmax_type": "off-by-one"}, {}, {"mask": top_left(99, 0), "sink": torch.zeros(H)}),
    "checkpointed": (
        {"attention_dropout": 0.3, "softcap": 1.5},
        {"checkpoint_core_attention": True},
        {"mask": top_left(99, 0), "score_mod": softcap(1.5), "dropout_p": 0.3},
    ),
}


def operands(order, s_k=S_K):
    layout = Dense(order)
    shapes = (B, H, S_Q, D), (B, G, s_k, D), (B, G, s_k, D_V)
    made = (normal(*shape, seed=i).detach() for i, shape in enumerate(shapes))
    return [layout.ordered(x).contiguous().requires_grad_() for x in made]


def equal(found, wanted, leaves):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found, wanted)
    dout = torch.randn_like(found)
    gradients = (torch.autograd.grad(out, leaves, dout, allow_unused=True) for out in (found, wanted))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.sample
@pytest.mark.parametrize("name", SAME)
def test_arguments(name):
    constructor, forward, meaning = SAME[name]
    order = "bshd" if len(name) % 2 else "sbhd"
    core = DotProductAttention(H, (D, D_V), G, qkv_format=order, **constructor)
    leaves = operands(order)
    torch.manual_seed(0)
    out = core(*leaves, **forward)
    torch.manual_seed(0)
    layout = Dense(order, **meaning.get("layout", {}))
    wanted = attention(*leaves, **{**meaning, "layout": layout}).flatten(-2)
    equal(out, wanted, [*leaves, *([BIAS] if "core_attention_bias" in forward else [])])
    assert get_attention_backend(core, *leaves, **forward).backend == "cpu"


HIDDEN = {
    "left": torch.tensor([[True, True, False, False, False, False], [False] * 6]),
    "hole": torch.tensor([[False, True, False, False, True, False], [False, False, True, True, True, True]]),
    "right": torch.tensor([[False, False, False, False, True, True], [False, True, True, True, True, True]]),
    "all": torch.ones(2, 6, dtype=torch.bool),
}


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("where", HIDDEN)
def test_padding_wherever_it_is(where, kind):
    """Of queries and keys alike, by TransformerEngine's own formula: hidden tokens see nothing, and are not seen."""
    hide = HIDDEN[where]
    q, k, v = (normal(2, 6, H, D, seed=i) for i in range(3))
    core = DotProductAttention(H, D, qkv_format="bshd", attn_mask_type=kind)
    i = torch.arange(6)
    seen = ~hide[:, :, None] & ~hide[:, None, :] & ((i[:, None] >= i) | (kind == "padding"))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / D**0.5
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    wanted = torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2)
    given = {"attention_mask": hide[:, None, None]}
    torch.testing.assert_close(core(q, k, v, **given), wanted)
    spec = get_attention_backend(core, q, k, v, **given).spec
    assert spec.layout == ("padded" if where in ("right", "all") else "dense")
    compiled = torch.compile(core, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, **given), wanted)
    hide.logical_not_()  # what was found about a mask is forgotten when it is written to
    try:
        flipped = core(q, k, v, **given)
    finally:
        hide.logical_not_()
    assert not flipped[hide.logical_not()].any()


def test_a_window_that_causal_masks_do_not_have():
    leaves = operands("bshd")
    wanted = called(window_size=(4, 0))()
    with pytest.warns(UserWarning, match=re.escape("window_size=(4, 7): 'causal' shows no keys on the right")):
        found = DotProductAttention(H, (D, D_V), G, qkv_format="bshd")(*leaves, window_size=(4, 7))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(("name", "order"), [("causal", "sbhd"), ("softcap", "bshd"), ("band", "sbhd")])
def test_score_mods(name, order):
    """As attention takes them; with a mask, dropout and a sink besides, which TransformerEngine refuses."""
    leaves = operands(order)
    given = case(name, H, S_Q, S_K)
    core = DotProductAttention(H, (D, D_V), G, qkv_format=order, attn_mask_type="no_mask")
    wanted = attention(*leaves, score_mod=given.score(), layout=Dense(order)).flatten(-2)
    equal(core(*leaves, **given._asdict()), wanted, leaves)
    core = DotProductAttention(H, (D, D_V), G, 0.2, order, "causal_bottom_right", softmax_type="off-by-one")
    torch.manual_seed(0)
    out = core(*leaves, **given._asdict())
    torch.manual_seed(0)
    keywords = {"mask": causal(), "sink": torch.zeros(H), "dropout_p": 0.2, "layout": Dense(order)}
    torch.testing.assert_close(out, attention(*leaves, score_mod=given.score(), **keywords).flatten(-2))


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("between", [False, True])
def test_packed(kind, between):
    """Sequences end to end, of lengths that differ between queries and keys; with tokens between them that hold NaN."""
    gap = 3 if between else 0
    starts_q, starts_k = cu(LENGTHS_Q + gap), cu(LENGTHS_K + gap)
    q, k, v = (
        normal(int(starts[-1]), h, d, seed=i)
        for i, (starts, h, d) in enumerate(((starts_q, H, D), (starts_k, G, D), (starts_k, G, D_V)))
    )
    used = {"seqused_q": LENGTHS_Q, "seqused_k": LENGTHS_K} if between else {}
    with torch.no_grad():
        for x, first in ((q, 12), (k, 17), (v, 17)):
            x[first : first + gap] = torch.nan
            x[len(x) - gap :] = torch.nan
    layout = Packed(starts_q, starts_k, 20, 20, **used)
    padded = {"cu_seqlens_q_padded": starts_q, "cu_seqlens_kv_padded": starts_k} if between else {}
    core = DotProductAttention(H, (D, D_V), G, qkv_format="thd", attn_mask_type=kind, return_max_logit=True)
    out, top = core(q, k, v, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_K, **padded)
    hide = None if kind != "padding_causal" else lambda s, b, h, i, j: torch.where(j <= i, s, -torch.inf)
    mask = causal() if kind.endswith("right") else None
    equal(out, attention(q, k, v, mask=mask, score_mod=hide, layout=layout).flatten(-2), [q, k, v])
    assert top.shape == (H,)
    assert bool(top.isfinite().all())


def test_self_attention_of_one_length_tensor():
    """The same lengths of queries and keys: the masks are saccade's own."""
    core = DotProductAttention(H, D, qkv_format="thd", attn_mask_type="padding_causal")
    x = normal(17, H, D)
    told = get_attention_backend(core, x, x, x, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_Q)
    assert (told.spec.mask, told.spec.score, told.backend) == ("causal", "none", "cpu")
    assert "gluon: " in str(told)
    assert "triton: " in str(told)


def test_learnable_softmax():
    core = DotProductAttention(H, (D, D_V), G, qkv_format="bshd", softmax_type="learnable", attn_mask_type="no_mask")
    assert list(core.state_dict()) == ["softmax_offset"]
    with torch.no_grad():
        core.softmax_offset.copy_(torch.randn(H))
    leaves = operands("bshd")
    wanted = attention(*leaves, sink=core.softmax_offset, layout=Dense("bshd")).flatten(-2)
    equal(core(*leaves), wanted, [*leaves, core.softmax_offset])


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_max_logit(order):
    core = DotProductAttention(H, (D, D_V), G, qkv_format=order, attn_mask_type="padding", return_max_logit=True)
    leaves = operands(order)
    given = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": BIAS}
    _, top = core(*leaves, cu_seqlens_q=CU_Q, cu_seqlens_kv=CU_K, **given)
    q, k, _ = (Dense(order).canonical(x) for x in leaves)
    scores = q @ k.repeat_interleave(H // G, 1).mT / D**0.5 + BIAS
    seen = ~hidden(LENGTHS_Q, S_Q).mT & ~hidden(LENGTHS_K, S_K)
    torch.testing.assert_close(top, scores.where(seen, -torch.inf).amax((0, 2, 3)))
    assert not top.requires_grad


def test_packed_projections():
    qkv = normal(S_Q, B, 3, H, D)
    core = DotProductAttention(H, D)
    wanted = core(*qkv.unbind(2))
    assert torch.equal(core(qkv_layer=qkv), wanted)
    assert torch.equal(core(qkv_layer=qkv.transpose(2, 3), qkv_interleave_dim=-2), wanted)
    assert torch.equal(core(qkv[:, :, 0], kv_layer=qkv[:, :, 1:]), wanted)


def test_evaluation_drops_nothing_and_trackers_fork():
    entered = []

    class Tracker:
        @contextmanager
        def fork(self):
            entered.append(1)
            yield

    core = DotProductAttention(H, (D, D_V), G, 0.5, "bshd", get_rng_state_tracker=Tracker)
    leaves = operands("bshd")
    assert not torch.equal(core(*leaves), core(*leaves))
    assert len(entered) == 2
    core.eval()
    assert torch.equal(core(*leaves), core(*leaves))
    assert len(entered) == 2


def test_takes_what_transformer_engine_takes():
    """The parameters of 2.20, in its order."""
    forward = (
        "query_layer key_layer value_layer attention_mask qkv_format cu_seqlens_q cu_seqlens_kv cu_seqlens_q_padded "
        "cu_seqlens_kv_padded max_seqlen_q max_seqlen_kv attn_mask_type window_size bottom_right_diagonal softcap "
        "checkpoint_core_attention core_attention_bias_type core_attention_bias alibi_slopes fast_zero_fill "
        "inference_params pad_between_seqs fp8_output bf16_backward num_splits score_mod score_mod_bprop "
        "score_mod_tensors score_mod_bprop_tensors qkv_layer kv_layer qkv_interleave_dim thd_attention_policies "
        "thd_attention_policy_dispatch"
    )
    constructor = (
        "num_attention_heads kv_channels num_gqa_groups attention_dropout qkv_format attn_mask_type window_size "
        "bottom_right_diagonal softcap sequence_parallel tp_size get_rng_state_tracker tp_group layer_number "
        "attention_type cp_group cp_global_ranks cp_stream cp_comm_type softmax_scale softmax_type return_max_logit "
        "name"
    )
    assert list(inspect.signature(CallArguments).parameters) == forward.split()
    assert list(inspect.signature(DotProductAttention.forward).parameters)[1:] == forward.split()
    assert list(inspect.signature(DotProductAttention).parameters)[:-1] == constructor.split()


def test_two_groups_are_refused(monkeypatch):
    core = DotProductAttention(H, (D, D_V), G, qkv_format="bshd", cp_group=[object(), object()])
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 1)
    core(*operands("bshd"))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    with pytest.raises(Unsupported, match="over a cp_group of 4 ranks: two groups are not supported"):
        core(*operands("bshd"))


def called(constructor=None, order="bshd", **forward):
    return lambda: DotProductAttention(H, (D, D_V), G, qkv_format=order, **(constructor or {}))(
        *operands(order), **forward
    )


WRONG = {
    "fp8": (called(fp8_output=True), Unsupported, "fp8_output"),
    "bf16 backward": (called(bf16_backward=True), Unsupported, "bf16_backward"),
    "policies": (called(thd_attention_policies=[1]), Unsupported, "thd_attention_policies"),
    "bprop alone": (called(score_mod_bprop=max), AssertionError, "score_mod_bprop requires score_mod"),
    "tensors alone": (called(score_mod_tensors={}), ValueError, "score_mod_tensors requires score_mod"),
    "bprop tensors alone": (
        called(score_mod=max, score_mod_bprop_tensors={}),
        AssertionError,
        "score_mod_bprop_tensors requires score_mod_bprop!",
    ),
    "no dict": (called(score_mod=max, score_mod_tensors=[1]), AssertionError, "got list"),
    "tensors that do not broadcast": (
        called(**case("alibi", 3, S_Q, S_K)._asdict()),
        ValueError,
        "slopes must broadcast to (b, h_q, s_q, s_k) = (2, 4, 12, 17), got (1, 3, 1, 1)",
    ),
    "mask type": (called(attn_mask_type="diagonal"), ValueError, "attn_mask_type is one of"),
    "format": (called(qkv_format="bhsd"), ValueError, "qkv_format is one of sbhd, bshd, thd, got 'bhsd'"),
    "dimensions": (called(qkv_format="thd"), ValueError, "wants tensors of 3 dimensions, got (2, 12, 4, 8)"),
    "no lengths": (called(attn_mask_type="padding"), ValueError, "needs cu_seqlens_q and cu_seqlens_kv"),
    "no mask": (called(attn_mask_type="arbitrary"), ValueError, "needs attention_mask"),
    "window": (called(attn_mask_type="no_mask", window_size=(3, -1)), ValueError, "got (3, -1)"),
    "window on the right alone": (called(window_size=(-1, 3)), ValueError, "got (-1, 3) with 'causal'"),
    "window below": (called(window_size=(3, -2)), ValueError, "got (3, -2)"),
    "holes of two masks": (
        called(attn_mask_type="padding_causal_bottom_right", attention_mask=(HOLES_Q, HOLES_K)),
        Unsupported,
        "attention_mask masks tokens before the end",
    ),
    "a mask of other tokens": (
        called(attn_mask_type="padding", attention_mask=(HOLES_K, HOLES_Q)),
        ValueError,
        "(2, 1, 1, 12), True where masked, or two of them, for queries and keys; got torch.bool (2, 1, 1, 17)",
    ),
    "a list for a mask": (called(attn_mask_type="padding", attention_mask="all"), ValueError, "got str"),
    "bias": (called(core_attention_bias=BIAS), ValueError, "core_attention_bias_type='no_bias' with it"),
    "slopes": (called(alibi_slopes=SLOPES), ValueError, "must be 'alibi'"),
    "slopes' shape": (
        called(alibi_slopes=SLOPES[:3], core_attention_bias_type="alibi"),
        ValueError,
        "alibi_slopes must be (4,)",
    ),
    "bias' shape": (
        called(core_attention_bias_type="post_scale_bias", core_attention_bias=BIAS[:, :3]),
        ValueError,
        "got (1, 3, 12, 17)",
    ),
    "two ways": (called(kv_layer=torch.zeros(2, 17, 2, 2, 8)), ValueError, "got query_layer, key_layer, value_layer"),
    "head dims": (
        lambda: DotProductAttention(H, D, G, qkv_format="bshd")(*operands("bshd")),
        ValueError,
        "2 heads of dims (8, 8), got (2, 17, 2, 8) and (2, 17, 2, 6)",
    ),
    "groups": (lambda: DotProductAttention(4, 8, 3), AssertionError, "got 4, 3 and 1"),
    "softmax type": (called({"softmax_type": "sharp"}), ValueError, "vanilla, off-by-one, learnable"),
    "backend": (called({"backend": "triton"}), Unsupported, "triton: "),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    wrong, kind, told = WRONG[name]
    with pytest.raises(kind, match=re.escape(told)):
        wrong()
