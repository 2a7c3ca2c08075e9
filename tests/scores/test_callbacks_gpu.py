"""Callbacks in cuDNN's manner, and TransformerEngine's interface, in the kernels of a GPU."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, Packed, attention, causal, explain
from saccade.backends import backend_module
from saccade.compat.cudnn import cache_clear, cache_info, score_callback
from saccade.compat.transformer_engine import DotProductAttention, get_attention_backend
from saccade.testing import check
from saccade.testing.callbacks import NAMES, SoftcapCallback, case, one

pytestmark = pytest.mark.gpu


def operands(order, dtype, h_q, h_k, s_q, s_k, d):
    shapes = (2, h_q, s_q, d), (2, h_k, s_k, d), (2, h_k, s_k, d)
    return [Dense(order).ordered(torch.randn(shape, device="cuda", dtype=dtype)).contiguous() for shape in shapes]


COMPILED = [name for name in NAMES if name != "everything"]
"""All operations in one function compile for minutes; the interpreter runs them."""


@pytest.mark.parametrize("name", COMPILED)
def test_against_the_oracle(name, backend):
    order, dtype = ("sbhd", torch.bfloat16) if NAMES.index(name) % 2 else ("bshd", torch.float16)
    q, k, v = operands(order, dtype, 4, 2, 200, 300, 64)
    check(q, k, v, score_mod=case(name, 4, 200, 300, "cuda").score(), layout=Dense(order), backend=backend).assert_ok()


@pytest.mark.parametrize("name", ["causal", "softcap", "alibi"])
@pytest.mark.parametrize("s", [16, 8192])
def test_lengths(name, s, backend):
    q, k, v = operands("bshd", torch.bfloat16, 2, 1, s, s, 128)
    score_mod = case(name, 2, s, s, "cuda").score()
    check(q[:1], k[:1], v[:1], score_mod=score_mod, layout=Dense("bshd"), backend=backend).assert_ok()


def test_what_hides_runs_as_a_mask(backend):
    """Plain kernels where nothing is left of the score, and a table's gradient where that is; fewer keys than rows."""
    q, k, v = operands("bhsd", torch.bfloat16, 4, 2, 700, 700, 64)
    score_mod = case("causal", 4, 700, 700, "cuda").score()
    assert explain(q, k, v, score_mod=score_mod).spec == explain(q, k, v, mask=causal()).spec
    outs = attention(q, k, v, score_mod=score_mod, backend=backend), attention(q, k, v, mask=causal(), backend=backend)
    assert torch.equal(*outs)
    q, k, v = operands("bhsd", torch.bfloat16, 4, 2, 700, 600, 64)
    table = torch.randn(4, 600, device="cuda", requires_grad=True)

    def tabled(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx >= kv_idx) & (q_idx - kv_idx < 300), score + table[h, kv_idx], -torch.inf)

    for score_mod in (tabled, case("scaled_causal", 4, 700, 600, "cuda").score()):
        assert explain(q, k, v, score_mod=score_mod).hidden.kind == "window"
        check(q, k, v, score_mod=score_mod, backend=backend).assert_ok()
    offsets = torch.tensor([0, 300, 300, 600], device="cuda", dtype=torch.int32)
    packed = Packed(offsets, offsets, 300, 300)
    q, k, v = (x[0, :, :600].transpose(0, 1).contiguous() for x in (q, k, v))
    assert explain(q, k, v, score_mod=tabled, layout=packed).hidden.kind == "window"
    check(q, k, v, score_mod=tabled, layout=packed, backend=backend).assert_ok()


def test_with_what_others_refuse(backend):
    """A mask, a sink, dropout, padding; packed sequences; a CUDA graph, whose scalars are those of its capture."""
    q, k, v = operands("bshd", torch.bfloat16, 4, 2, 200, 200, 64)
    used = torch.tensor([200, 77], device="cuda")
    keywords = {"mask": causal(), "sink": torch.randn(4, device="cuda"), "dropout_p": 0.2, "backend": backend}
    layout = Dense("bshd", used, used)
    check(q, k, v, score_mod=case("band", 4, 200, 200, "cuda").score(), layout=layout, **keywords).assert_ok()
    offsets = torch.tensor([0, 77, 77, 200], device="cuda", dtype=torch.int32)
    if backend == "triton":
        packed = Packed(offsets, offsets, 123, 123)
        score_mod = case("alibi", 4, 123, 123, "cuda").score()
        check(q[0], k[0], v[0], score_mod=score_mod, layout=packed, **keywords).assert_ok()
    del keywords["dropout_p"]
    score_mod = case("softcap", 4, 200, 200, "cuda").score()
    wanted = attention(q, k, v, score_mod=score_mod, layout=Dense("bshd"), **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, score_mod=score_mod, layout=Dense("bshd"), **keywords)
    graph.replay()
    assert torch.equal(out, wanted)


def test_new_scalars_never_compile(backend, forward_kernel):
    q, k, v = operands("bhsd", torch.bfloat16, 2, 2, 128, 128, 64)
    softcap = SoftcapCallback()
    cache_clear()

    def call(cap):
        given = {"cap": one(cap)}
        attention(q, k, v, score_mod=score_callback(softcap.forward, softcap.backward, given, given), backend=backend)

    call(1.0)
    kernels = forward_kernel(backend).device_caches[0][0]
    compiled, recorded = len(kernels), cache_info().misses
    for cap in (0.5, 0.8, 30.0):
        call(cap)
    assert (len(kernels), cache_info().misses) == (compiled, recorded) == (compiled, 1)


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", ["causal", "softcap", "post_scale_bias"])
def test_transformer_engine(name, order, backend):
    """Its own tests' shapes: b = 2, h = 4, d = 64, s = 16 or 64."""
    s = 64 if name == "causal" else 16
    tensors = [x.requires_grad_() for x in operands(order, torch.bfloat16, 4, 4, s, s, 64)]
    core = DotProductAttention(4, 64, qkv_format=order, attn_mask_type="no_mask", layer_number=1, backend=backend)
    core.to(dtype=torch.bfloat16, device="cuda")
    given = case(name, 4, s, s, "cuda")
    out = core(*tensors, qkv_format=order, attn_mask_type="no_mask", **given._asdict())
    wanted = attention(*tensors, score_mod=given.score(), layout=Dense(order), backend=backend).flatten(-2)
    assert torch.equal(out, wanted)
    for x, y in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (out, wanted)), strict=True):
        assert torch.equal(x, y)
    assert get_attention_backend(core, *tensors, **given._asdict()).backend == backend


def test_transformer_engine_learns_everything_at_once(backend):
    """Learnable softmax, bias, checkpointing and the largest logit in one call."""
    tensors = [x.requires_grad_() for x in operands("bshd", torch.bfloat16, 4, 2, 96, 96, 64)]
    logit = "max_scores" in backend_module(backend).SUPPORT.flags
    names = {"softmax_type": "learnable", "return_max_logit": logit, "backend": backend}
    core = DotProductAttention(4, 64, 2, 0.0, "bshd", "padding_causal", **names).cuda()
    lengths = torch.tensor([0, 96, 129], device="cuda", dtype=torch.int32)
    bias = torch.randn(1, 4, 96, 96, device="cuda", requires_grad=True)
    call = {"cu_seqlens_q": lengths, "cu_seqlens_kv": lengths, "core_attention_bias": bias}
    call |= {"core_attention_bias_type": "post_scale_bias", "softcap": 20.0}
    leaves = [*tensors, bias, core.softmax_offset]
    found = [core(*tensors, **call, checkpoint_core_attention=twice) for twice in (False, True)]
    if logit:
        assert all(top.shape == (4,) for _, top in found)
    out, again = (x[0] if logit else x for x in found)
    assert torch.equal(out, again)
    for x, y in zip(*(torch.autograd.grad(x.sum(), leaves) for x in (out, again)), strict=True):
        torch.testing.assert_close(x, y)
