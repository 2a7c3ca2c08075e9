"""PyTorch's registry: its functions run here, and PyTorch's kernels return."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    activate_flash_attention_impl,
    bias,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from saccade import Partial, Unsupported, attention, window
from saccade.integrations import torch as registry
from saccade.testing import check
from saccade.testing.cases import Case
from saccade.util import hardware

HAS_WINDOWS = "window_size" in inspect.signature(varlen_attn).parameters


@pytest.fixture(autouse=True)
def active(monkeypatch):
    """Saccade is active, and every processor one where it takes bfloat16."""
    monkeypatch.setattr(hardware, "cpu_bf16", lambda: "avx512_bf16")
    registry.activate()
    yield
    registry.restore()


@pytest.fixture
def calls(monkeypatch):
    """What ran here: "forward" and "backward"."""
    made = []

    def counted(function, name):
        return lambda *args, **kwargs: made.append(name) or function(*args, **kwargs)

    monkeypatch.setattr(registry, "_forward", counted(registry._forward, "forward"))
    monkeypatch.setattr(registry, "_backward", counted(registry._backward, "backward"))
    return made


def sdpa(q, k, v, *, mask=None, return_lse=False, backend=None, scale=None, **_):
    """scaled_dot_product_attention; PyTorch gives its LSE to none but its backward."""
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None, scale=scale, enable_gqa=grouped)
    return Partial(out, torch.ops.aten._scaled_dot_product_flash_attention(
        q.detach(), k.detach(), v.detach(), 0.0, mask is not None, scale=scale,
    )[1]) if return_lse else out  # fmt: skip


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_scaled_dot_product_attention(mask, heads, device, calls):
    made = Case("", h_q=heads[0], h_k=heads[1], s_q=70, s_k=70, d=16, mask=mask).inputs(device)
    keywords = {name: x for name, x in made.keywords.items() if name != "layout"} | {"scale": 0.3}
    check(made.q, made.k, made.v, dout=made.dout, function=sdpa, **keywords).assert_ok()
    assert {"forward", "backward"} <= {*calls}


@pytest.mark.parametrize("lengths", [(20, 33), (33, 33), (33, 20)], ids=str)
@pytest.mark.parametrize("aligned", ["top left", "bottom right"])
def test_causal_is_pytorchs(lengths, aligned, device):
    if aligned == "bottom right" and lengths[0] > lengths[1]:
        pytest.skip("PyTorch's bias has NaN where a row sees nothing")
    if aligned == "top left" and device == "cuda" and lengths[0] != lengths[1]:
        pytest.skip("flash attention has no such mask")
    made = Case("", dtype="bf16", s_q=lengths[0], s_k=lengths[1], d=16).inputs(device)
    ones = torch.ones(lengths, dtype=torch.bool, device=device)
    if aligned == "top left":
        seen, way = ones.tril(), {"is_causal": True}
    else:
        seen, way = ones.tril(lengths[1] - lengths[0]), {"attn_mask": bias.causal_lower_right(*lengths)}

    def function(q, k, v, *, return_lse=False, **_):
        out = F.scaled_dot_product_attention(q, k, v, **way)
        return Partial(out, attention(q, k, v, mask=seen, return_lse=True).lse) if return_lse else out

    check(made.q, made.k, made.v, dout=made.dout, function=function, mask=seen).assert_ok()


def varlen(q, k, v, *, layout, mask=None, return_lse=False, backend=None, **_):
    offsets = layout.cu_seqlens_q, layout.cu_seqlens_k, int(layout.max_seqlen_q), int(layout.max_seqlen_k)
    causal = {} if mask is None else {"window_size": (-1, 0)} if HAS_WINDOWS else {"is_causal": True}
    aux = AuxRequest(lse=True) if return_lse else None
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    result = varlen_attn(q, k, v, *offsets, return_aux=aux, **causal, **grouped)
    return Partial(*result) if return_lse else result


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_varlen_attn(mask, device, calls):
    made = Case("", b=4, h_q=4, h_k=4, s_q=60, s_k=60, d=16, order="thd", mask=mask).inputs(device)
    check(made.q, made.k, made.v, dout=made.dout, function=varlen, **made.keywords).assert_ok()
    assert {"forward", "backward"} <= {*calls}


@pytest.mark.parametrize("bounds", [(9, 0), (5, 3), (-1, 7)], ids=str)
def test_windows_of_flash_attention(bounds, device):
    made = Case("", b=4, h_q=4, h_k=4, s_q=60, s_k=60, d=16, order="thd").inputs(device)
    layout = made.keywords["layout"]
    arguments = layout.cu_seqlens_q, layout.cu_seqlens_k, 60, 60
    mask = window(None if bounds[0] < 0 else bounds[0], bounds[1])

    def function(q, k, v, *, return_lse=False, **_):
        sides = {"window_size_left": bounds[0], "window_size_right": bounds[1]}
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *arguments, 0.0, False, False, **sides)
        return Partial(out, lse) if return_lse else out

    check(made.q, made.k, made.v, dout=made.dout, function=function, **made.keywords | {"mask": mask}).assert_ok()


@pytest.mark.skipif(not hasattr(torch_varlen, "varlen_attn_out"), reason="PyTorch 2.12")
def test_varlen_attn_out(device):
    made = Case("", b=4, h_q=4, h_k=4, s_q=60, s_k=60, d=16, order="thd").inputs(device)
    layout = made.keywords["layout"]
    arguments = layout.cu_seqlens_q, layout.cu_seqlens_k, 60, 60
    out = torch.full_like(made.q, torch.nan)
    found = torch_varlen.varlen_attn_out(out, made.q, made.k, made.v, *arguments)
    assert found is out
    assert torch.equal(out, varlen_attn(made.q, made.k, made.v, *arguments))


def test_what_is_refused_goes_to_pytorchs_kernel(calls):
    """With the same bits: dropout, masks, and on a CPU what PyTorch's kernel is faster at."""
    q, k, v = (torch.randn(2, 4, 40, 16) for _ in range(3))
    ways = {
        "float32": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "mask": lambda: F.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), torch.zeros(40, 40)),
        "bool": lambda: F.scaled_dot_product_attention(q, k, v, torch.ones(40, 40, dtype=torch.bool)),
    }
    found = {name: way() for name, way in ways.items()}
    assert not calls
    registry.restore()
    assert all(torch.equal(found[name], way()) for name, way in ways.items())


def test_where_pytorch_has_no_kernel(calls):
    q = torch.randn(2, 4, 40, 16)
    with pytest.raises(Unsupported, match=r"_flash_attention on CPU.*dropout"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.5)
    with pytest.raises(Unsupported, match="return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, False, True)
    x, slopes = q.transpose(1, 2), torch.ones(4)
    with pytest.raises(Unsupported, match="alibi_slopes"):
        torch.ops.aten._flash_attention_forward(x, x, x, None, None, 40, 40, 0, False, False, alibi_slopes=slopes)
    assert not calls


def test_strides_are_those_that_compiled_code_expects(device, request):
    """torch.compile knows the memory of PyTorch's results. Inductor, which takes half a minute for C++, too."""
    whole = device == "cuda" or request.config.getoption("--everything")
    compiler = "inductor" if whole else "aot_eager"

    def block(x):
        q, k, v = x.unflatten(-1, (3, 4, 16)).unbind(2)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    x = torch.randn(2, 24, 192, device=device, dtype=torch.bfloat16, requires_grad=True)
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend=compiler)):
        out = function(x)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled)


def test_activate_and_restore():
    assert current_flash_attention_impl() == registry.NAME
    assert registry.NAME in list_flash_attention_impls()
    registry.activate()
    assert current_flash_attention_impl() == registry.NAME
    registry.restore()
    assert current_flash_attention_impl() is None
    registry.restore()


def test_no_warning_is_left(fresh_process):
    """PyTorch warns once in a process."""
    told = "import warnings; warnings.simplefilter('error')\nfrom saccade.integrations import torch\ntorch.activate()"
    fresh_process(told)


def test_another_implementation_takes_the_place(calls):
    class Other:
        def remove(self):
            pass

    register_flash_attention_impl("another", register_fn=Other)
    activate_flash_attention_impl("another")
    q = torch.randn(1, 2, 8, 8, dtype=torch.bfloat16)
    F.scaled_dot_product_attention(q, q, q)
    registry.restore()  # which is not ours to restore
    assert current_flash_attention_impl() == "another"
    assert not calls
    restore_flash_attention_impl()


def test_a_new_argument_of_pytorch_is_not_ignored():
    x = torch.randn(1, 8, 2, 8)
    with pytest.raises(Unsupported, match="new_option"):
        registry.flash_forward(x, x, x, None, None, 8, 8, 0.0, False, False, new_option=3)
    assert len(registry.flash_forward(x, x, x, None, None, 8, 8, 0.0, False, False, new_option=None)) == 5


def test_the_order_of_pytorchs_kernels(monkeypatch):
    """Flash attention before cuDNN's, and the order before when it ends."""
    registry.restore()
    cudnn_first = [3, 1, 2, 0, 4]
    empty, before = torch.empty, torch._C._get_sdp_priority_order()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *sizes, dtype, device: empty(*sizes, dtype=dtype))
    torch._C._set_sdp_priority_order(cudnn_first)
    try:
        registry.activate()
        assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
        registry.restore()
        assert torch._C._get_sdp_priority_order() == cudnn_first
    finally:
        torch._C._set_sdp_priority_order(before)
