"""`saccade.nn.Attention`: its formula, its layouts, its names, and what compilers make of it."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch

from saccade import Dense, Packed, Paged, attention, causal, softcap, window
from saccade.nn import Attention

OPTIONS = {
    "plain": {},
    "grouped": {"num_key_heads": 2, "mask": causal()},
    "all": {
        "num_key_heads": 1, "head_dim": 24, "mask": window(5, 0), "rotary_base": 100.0, "qk_norm": True, "sink": True,
        "bias": True, "out_bias": True, "score_mod": softcap(3.0), "scale": 0.2,
    },
}  # fmt: skip


def made(name="all", device="cpu", **more):
    layer = Attention(64, 4, **OPTIONS[name] | more, device=device, dtype=torch.float16 if device == "cuda" else None)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return layer


def tokens(*shape, device="cpu"):
    return torch.randn(*shape, 64, device=device, dtype=torch.float16 if device == "cuda" else torch.float32)


def by_hand(layer, x, positions):
    """The formula, with angles as complex numbers, on the oracle."""

    def turned(y):
        if layer.rotary_base is None:
            return y
        d = layer.head_dim
        angles = positions[:, None].double() * layer.rotary_base ** (
            -torch.arange(0, d, 2, device=x.device).double() / d
        )
        pairs = torch.complex(*y.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([pairs.real, pairs.imag], -1).to(y.dtype)

    heads = (getattr(layer, f"{name}_proj")(x).unflatten(-1, (-1, layer.head_dim)) for name in ("q", "k", "v"))
    q, k, v = heads
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    out = attention(
        turned(q), turned(k), v, mask=layer.mask, score_mod=layer.score_mod, scale=layer.scale, sink=layer.sinks,
        layout=Dense("bshd"), backend="reference",
    )  # fmt: skip
    return layer.o_proj(out.flatten(-2))


@pytest.mark.parametrize("name", OPTIONS)
def test_formula(name):
    layer, x = made(name).double(), tokens(2, 11).double()
    results = []
    for way in (layer, lambda x: by_hand(layer, x, torch.arange(11))):
        layer.zero_grad()
        out = way(x)
        out.square().sum().backward()
        results.append((out.detach(), *(parameter.grad for parameter in layer.parameters())))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def assert_right(found, layer, x):
    """Half as exact as the formula in x's dtype, beside that in float64."""
    positions = torch.arange(x.shape[1], device=x.device)
    eager, exact = by_hand(layer, x, positions), by_hand(deepcopy(layer).double(), x.double(), positions)
    assert (found - exact).abs().max() <= 2 * (eager - exact).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_on_a_gpu(name):
    layer, x = made(name, "cuda"), tokens(2, 64, device="cuda")
    out = layer(x)
    out.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())
    for found in (out, torch.compile(layer, fullgraph=True)(x)):
        assert_right(found, layer, x)


def test_sequences_end_to_end():
    """Positions begin anew in each."""
    layer, x = made(), tokens(10)
    offsets = torch.tensor([0, 3, 3, 9])  # and a row of none
    out = layer(x, layout=Packed(offsets))
    alone = [layer(x[None, start:stop])[0] for start, stop in ((0, 3), (3, 9))]
    torch.testing.assert_close(out[:9], torch.cat(alone))


@pytest.mark.parametrize("flat", [False, True], ids=["batch", "end to end"])
def test_a_cache(flat, torch_device):
    """Two prompts, then single tokens."""
    layer, x = made(device=torch_device), tokens(2, 9, device=torch_device)
    caches = [
        torch.zeros(8, 4, layer.num_key_heads, layer.head_dim, device=torch_device, dtype=x.dtype) for _ in range(2)
    ]
    table = torch.tensor([[1, 3, 5], [2, 4, 7]], device=torch_device, dtype=torch.int32)
    parts = []
    with torch.no_grad():
        for start, stop in ((0, 6), (6, 7), (7, 9)):
            used = torch.full((2,), start, device=torch_device, dtype=torch.int32)
            new = x[:, start:stop]
            if flat:
                offsets = torch.arange(3, device=torch_device, dtype=torch.int32) * (stop - start)
                out = layer(new.flatten(0, 1), layout=Paged(table, used, offsets), cache=tuple(caches))
                parts.append(out.unflatten(0, (2, -1)))
            else:
                parts.append(layer(new, layout=Paged(table, used), cache=tuple(caches)))
        assert_right(torch.cat(parts, 1), layer, x)


def test_positions():
    """Only differences matter; those of a layout are taken, and those of the call."""
    layer, x = made(), tokens(2, 9)
    wanted = layer(x)
    for given in (
        {"positions": torch.arange(5, 14)},
        {"positions": torch.arange(9).expand(2, -1) + torch.tensor([[3], [40]])},
        {"layout": Dense("bshd", q_offset=7, k_offset=7)},
        {"layout": Dense("bshd", q_offset=torch.tensor([7, 1]), k_offset=torch.tensor([7, 1]))},
    ):
        torch.testing.assert_close(layer(x, **given), wanted)
    assert not torch.allclose(layer(x, positions=torch.arange(9) * 2), wanted)


def test_another_mask():
    layer, x = made("grouped"), tokens(2, 9)
    with_window = made("grouped", mask=window(2, 0))
    with_window.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, mask=window(2, 0)), with_window(x))


def test_names_are_those_of_checkpoints():
    names = {name.removesuffix(".weight") for name in made().state_dict() if not name.endswith(".bias")}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "sinks"}
    assert {*made("plain").state_dict()} == {f"{name}_proj.weight" for name in "qkvo"}
    other = made()
    other.load_state_dict(made().state_dict())


def test_reset_parameters():
    layer = made()
    layer.reset_parameters()
    assert not layer.sinks.any()
    assert torch.equal(layer.q_norm.weight, torch.ones(24))
    assert layer.q_proj.weight.abs().max() <= 1 / 8  # 1/sqrt(dim), as nn.Linear has it


def test_dropout_in_training_alone():
    layer, x = made("grouped", dropout_p=0.5), tokens(2, 9)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_compiled(name):
    torch._dynamo.reset()
    layer = made(name)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for layout, x in ((None, tokens(2, 9)), (Packed(torch.tensor([0, 4, 9])), tokens(9))):
        torch.testing.assert_close(compiled(x, layout=layout), layer(x, layout=layout))


def test_exported():
    layer, x = made("all"), tokens(2, 9)
    program = torch.export.export(layer, (x,))
    torch.testing.assert_close(program.module()(x), layer(x))


def test_errors():
    for arguments, text in (
        (((64, 5), {}), "got dim 64 and 5 heads"),
        (((64, 4, 3), {}), "multiple of num_key_heads, got 4 and 3"),
        (((60, 4), {"rotary_base": 1e4}), "must be even"),
        (((64, 0), {}), "num_heads"),
        (((64, 4), {"rotary_base": -1.0}), "rotary_base must be a number above 0, such as 10000.0, got -1.0"),
        (((64, 4), {"rotary_base": 0}), "rotary_base must be a number above 0"),
        (((64, 4), {"dropout_p": 1.0}), r"dropout_p must be in \[0, 1\), got 1.0"),
    ):
        with pytest.raises(ValueError, match=text):
            Attention(*arguments[0], **arguments[1])
    layer, x = made(), tokens(2, 9)
    with pytest.raises(ValueError, match=r"Dense\('bshd', …\), got Dense\('sbhd'\)"):
        layer(x, layout=Dense("sbhd"))
    with pytest.raises(ValueError, match="go together"):
        layer(x, cache=(x, x))
    with pytest.raises(ValueError, match="go together"):
        layer(x, layout=Paged(torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)))


@pytest.mark.parametrize("shape", [(64,), (2, 9, 63), (2, 2, 9, 64)], ids=str)
def test_tokens_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"x must be \(b, s, 64\), or \(t, 64\) for sequences end to end, got \("):
        made()(torch.randn(shape))


@pytest.mark.parametrize("shape", [(), (8,), (3, 9), (2, 8), (9, 1), (2, 9, 1)], ids=str)
def test_positions_of_another_shape(shape):
    with pytest.raises(ValueError, match=r"positions must be \(9,\) or \(2, 9\) for x \(2, 9, 64\), got \("):
        made()(tokens(2, 9), positions=torch.zeros(shape))
    with pytest.raises(TypeError, match="positions must be a tensor, got list"):
        made()(tokens(2, 9), positions=[0] * 9)


def test_attributes_are_those_of_the_call():
    """Nothing of a call is kept for the next."""
    layer, x = made("plain", rotary_base=100.0), tokens(2, 9)
    layer(x).sum().backward()
    layer.mask, layer.rotary_base, layer.scale = causal(), 50.0, 0.3
    other = Attention(64, 4, mask=causal(), rotary_base=50.0, scale=0.3)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    assert torch.equal(deepcopy(layer)(x), other(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), other(x))
