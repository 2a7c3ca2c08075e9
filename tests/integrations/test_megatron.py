"""Megatron-core's attention: each of its arguments by what it means, with the configuration, mask types and packed
parameters of an installed megatron-core, or with stubs of them."""

from __future__ import annotations

import enum
import importlib
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from saccade import Dense, Packed, Unsupported, attention, bias, causal, window
from saccade.call.partial import Partial
from saccade.integrations.megatron import CoreAttention
from saccade.testing import check
from saccade.testing.cases import Case

H_Q, H_K, D = 4, 2, 16
FIELDS = {
    "num_layers": 1, "hidden_size": H_Q * D, "num_attention_heads": H_Q, "num_query_groups": H_K,
    "attention_dropout": 0.0,
}  # fmt: skip
LATER = {
    "kv_channels": D, "context_parallel_size": 1, "tensor_model_parallel_size": 1, "sequence_parallel": False,
    "window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla", "deterministic_mode": False,
    "qk_clip": False, "log_max_attention_logit": False, "fp8_dot_product_attention": False,
}  # fmt: skip


class StubMaskType(enum.Enum):
    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


@dataclass
class StubPackedSeqParams:
    qkv_format: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_kv: Any = None
    cu_seqlens_q_padded: Any = None
    cu_seqlens_kv_padded: Any = None
    max_seqlen_q: Any = None
    max_seqlen_kv: Any = None
    local_cp_size: Any = None
    cp_group: Any = None


def stub_config(**fields):
    return SimpleNamespace(**FIELDS | LATER | fields)


def stub_modules(monkeypatch):
    """What CoreAttention imports."""
    names = "megatron", "megatron.core", "megatron.core.parallel_state", "megatron.core.tensor_parallel"
    parts = {name: ModuleType(name) for name in names}
    parts[names[2]].get_tensor_model_parallel_group = lambda check_initialized: None
    parts[names[3]].get_cuda_rng_tracker = Tracker
    for name, module in parts.items():
        monkeypatch.setitem(sys.modules, name, module)


class Tracker:
    """Megatron's states of random numbers; here it counts."""

    forks = 0

    def is_initialized(self):
        return True

    def fork(self):
        Tracker.forks += 1
        return nullcontext()


@pytest.fixture(params=["stub", "megatron"])
def core(request, monkeypatch):
    """Configurations, mask types and packed parameters: stubs, or those of an installed megatron-core."""
    if request.param == "stub":
        stub_modules(monkeypatch)
        return SimpleNamespace(config=stub_config, masks=StubMaskType, packed=StubPackedSeqParams)
    pytest.importorskip("megatron.core")
    config = importlib.import_module("megatron.core.transformer.transformer_config").TransformerConfig
    masks = importlib.import_module("megatron.core.transformer.enums").AttnMaskType
    packed = importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
    return SimpleNamespace(config=lambda **fields: config(**FIELDS | fields), masks=masks, packed=packed)


def made(core, mask="causal", layer=1, fields=(), **arguments):
    return CoreAttention(core.config(**dict(fields)), layer, core.masks[mask], "self", **arguments)


def operands(device, s_q=24, s_k=24, order="sbhd", **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=2, h_q=H_Q, h_k=H_K, d=D, order=order)
    return case.replace(s_q=s_q, s_k=s_k, **changes).inputs(device)


def checked(q, k, v, run, layout, **meaning):
    """Out and gradients are the oracle's; the layer returns no LSE."""

    def face(q, k, v, *, return_lse=False, backend="auto", **keywords):
        sink = [keywords["sink"]] if "sink" in keywords else []
        out = run(q, k, v, *sink).unflatten(-1, (q.shape[-2], v.shape[-1]))
        return Partial(out, attention(q, k, v, return_lse=True, **keywords).lse.detach()) if return_lse else out

    check(q, k, v, function=face, layout=layout, **meaning).assert_ok()


@pytest.mark.parametrize(
    ("mask", "fields", "meaning"),
    [
        ("no_mask", {}, None),
        ("causal", {}, causal()),
        ("causal_bottom_right", {}, causal()),
        ("causal", {"window_size": (7, 0)}, window(7, 0)),
        ("no_mask", {"window_size": (7, 3)}, window(7, 3)),
    ],
    ids=str,
)
def test_masks(core, mask, fields, meaning, device):
    layer, drawn = made(core, mask, fields=fields), operands(device)
    for given in (None, core.masks[mask]):
        checked(drawn.q, drawn.k, drawn.v, lambda *x, t=given: layer(*x, None, t), Dense("sbhd"), mask=meaning)


def test_padding(core, device):
    """An attention_mask (b, 1, 1, s), True where an element is masked."""
    layer, drawn = made(core, "padding"), operands(device)
    lengths = torch.tensor([24, 9], device=device)
    hidden = (torch.arange(24, device=device) >= lengths[:, None])[:, None, None]
    layout = Dense("sbhd", seqused_q=lengths, seqused_k=lengths)
    checked(drawn.q, drawn.k, drawn.v, lambda *x: layer(*x, hidden), layout)


@pytest.mark.parametrize(("mask", "meaning"), [("causal", causal()), ("no_mask", None), ("padding_causal", causal())])
def test_packed(core, mask, meaning, device):
    layer, drawn = made(core, mask), operands(device, order="thd", tail=3)
    layout = drawn.keywords["layout"]
    ends, longest = layout.cu_seqlens_q, layout.max_seqlen_q
    packed = core.packed("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)

    def run(q, k, v):
        return layer(q, k, v, None, core.masks[mask], packed_seq_params=packed)

    checked(drawn.q, drawn.k, drawn.v, run, Packed(ends, ends, longest, longest), mask=meaning)


def test_bias_and_its_gradient(core, device):
    layer, drawn = made(core), operands(device)
    t = torch.randn(1, H_Q, 24, 24, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    run = lambda *x: layer(*x, None, attention_bias=t)  # noqa: E731
    checked(drawn.q, drawn.k, drawn.v, run, Dense("sbhd"), mask=causal(), score_mod=bias(t))


def test_a_step_of_decoding_with_a_window(core):
    """Megatron says no_mask there, and the window ends at the last key."""
    layer, drawn = made(core, fields={"window_size": (7, 0)}), operands("cpu", s_q=1)
    run = lambda *x: layer(*x, None, core.masks.no_mask)  # noqa: E731
    checked(drawn.q, drawn.k, drawn.v, run, Dense("sbhd"), mask=window(7, 0))


@pytest.mark.parametrize(("every", "windows"), [(None, [1, 1, 1]), (2, [1, 0, 1]), ([0, 1, 1], [0, 1, 1])], ids=str)
def test_which_layers_have_a_window(core, every, windows):
    fields = {"window_size": (7, 0), "window_attn_skip_freq": every, "num_layers": 3}
    found = [made(core, layer=n, fields=fields).defaults.window_size for n in (1, 2, 3)]
    assert found == [(7, 0) if has else None for has in windows]


def test_a_learned_sink(core):
    layer, drawn = made(core, fields={"softmax_type": "learnable"}), operands("cpu")
    assert list(layer.state_dict()) == ["softmax_offset"]
    sink = torch.randn(H_Q, generator=torch.Generator().manual_seed(1))

    def run(q, k, v, sink):
        return torch.func.functional_call(layer, {"softmax_offset": sink}, (q, k, v, None))

    checked(drawn.q, drawn.k, drawn.v, run, Dense("sbhd"), mask=causal(), sink=sink)


def test_the_largest_scores(core):
    """Over all calls, until someone resets them."""
    layer, drawn = made(core, fields={"log_max_attention_logit": True}), operands("cpu")
    wanted = attention(drawn.q, drawn.k, drawn.v, mask=causal(), layout=Dense("sbhd"), return_max_scores=True)
    assert layer(drawn.q, drawn.k, drawn.v, None).shape == (24, 2, H_Q * D)
    assert torch.equal(layer.current_max_attn_logits, wanted.max_scores.amax((0, 2)))
    layer(drawn.q * 0, drawn.k, drawn.v, None)
    assert torch.equal(layer.current_max_attn_logits, wanted.max_scores.amax((0, 2)))


def test_head_dims_of_latent_attention(core):
    layer = made(core, k_channels=24, v_channels=D, softmax_scale=0.2, fields={"num_query_groups": H_Q})
    drawn = operands("cpu", h_k=H_Q, d=24, d_v=D)
    run = lambda *x: layer(*x, None)  # noqa: E731
    checked(drawn.q, drawn.k, drawn.v, run, Dense("sbhd"), mask=causal(), scale=0.2)


def test_dropout_forks_the_tracker(monkeypatch):
    stub_modules(monkeypatch)
    layer = CoreAttention(stub_config(attention_dropout=0.5), 1, StubMaskType.causal, "self")
    drawn, before = operands("cpu"), Tracker.forks
    dropped = layer(drawn.q, drawn.k, drawn.v, None)
    assert Tracker.forks == before + 1
    kept = layer.eval()(drawn.q, drawn.k, drawn.v, None)
    assert Tracker.forks == before + 1
    assert not torch.equal(dropped, kept)


def test_deterministic_mode_reaches_the_call(core, monkeypatch):
    given = []
    monkeypatch.setattr(
        "saccade.compat.transformer_engine.module.attention",
        lambda *x, **keywords: given.append(keywords["deterministic"]) or attention(*x, **keywords),
    )
    drawn = operands("cpu")
    for mode in (False, True):
        layer = CoreAttention(stub_config(deterministic_mode=mode), 1, StubMaskType.causal, "self", pg_collection=ALONE)
        layer(drawn.q, drawn.k, drawn.v, None)
    assert given == [None, True]


ALONE = SimpleNamespace(tp=None)


@pytest.mark.parametrize(
    ("fields", "text"),
    [({"context_parallel_size": 2}, "context_parallel_size=2"), ({"fp8_dot_product_attention": True}, "FP8")],
    ids=str,
)
def test_refused(fields, text):
    with pytest.raises(Unsupported, match=re.escape(text)):
        CoreAttention(stub_config(**fields), 1, StubMaskType.causal, "self", pg_collection=ALONE)


def test_wrong_heads():
    layer = CoreAttention(stub_config(), 1, StubMaskType.causal, "self", pg_collection=ALONE)
    drawn = operands("cpu", h_k=H_Q)
    with pytest.raises(ValueError, match=re.escape("2 heads of dims (16, 16), got (24, 2, 4, 16)")):
        layer(drawn.q, drawn.k, drawn.v, None)


def test_in_a_layer_of_megatron():
    """An attention layer built from Megatron's own spec, forward and backward, on one process without a GPU."""
    pytest.importorskip("megatron.core")
    get = lambda name: importlib.import_module(f"megatron.core.{name}")  # noqa: E731
    config = get("transformer.transformer_config").TransformerConfig(**FIELDS, use_cpu_initialization=True)
    spec = get("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec().submodules.self_attention
    spec.submodules.core_attention = CoreAttention
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        get("parallel_state").initialize_model_parallel()
        layer = get("transformer.spec_utils").build_module(spec, config=config, layer_number=1)
        hidden = torch.randn(6, 2, H_Q * D, requires_grad=True)
        out, _ = layer(hidden, attention_mask=None)
        assert out.shape == hidden.shape
        out.sum().backward()
        first, _ = layer(hidden[:3], attention_mask=None)
        torch.testing.assert_close(first, out[:3])  # no token sees a later one
    finally:
        get("parallel_state").destroy_model_parallel()
        torch.distributed.destroy_process_group()


def test_sharded_checkpoint():
    """The learned sink is sharded by heads."""
    pytest.importorskip("megatron.core")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    state = importlib.import_module("megatron.core.parallel_state")
    try:
        state.initialize_model_parallel()
        config = stub_config(softmax_type="learnable")
        layer = CoreAttention(config, 1, StubMaskType.causal, "self")
        groups = {"dp_cp_group": state.get_data_parallel_group(with_context_parallel=True)}
        found = layer.sharded_state_dict("core.", (), groups)
        assert list(found) == ["core.softmax_offset"]
        assert found["core.softmax_offset"].global_shape == (H_Q,)
    finally:
        state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
