"""PyTorch's registry on a GPU: what reaches flash attention's kernels there, and what is left to them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from saccade.integrations import torch as registry

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def active():
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


def operands(s=256, h=4, d=64):
    return (torch.randn(2, h, s, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))


def test_flash_attention_is_preferred(calls):
    """PyTorch prefers cuDNN on Hopper."""
    before = torch._C._get_sdp_priority_order()
    q, k, v = operands()
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert calls == ["forward", "backward"]
    registry.restore()
    assert before[0] == int(SDPBackend.FLASH_ATTENTION)
    F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize("d", [40, 68, 96, 128, 256])
def test_head_dims(d, calls):
    """PyTorch pads head dims to multiples of 8."""
    q, k, v = operands(d=d)
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert calls == ["forward", "backward"]
    assert q.grad.isfinite().all()


def test_dropout_has_pytorchs_bits(calls):
    q, k, v = operands()
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))))
        registry.restore()
    assert not calls
    assert torch.equal(results[0][0], results[1][0])  # the gradients of PyTorch's kernel are not repeatable


def test_nested_tensors(calls):
    offsets = torch.tensor([0, 30, 100], device="cuda")
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(
            torch.randn(100, 4, 64, device="cuda", dtype=torch.bfloat16), offsets
        ).transpose(1, 2)
        for _ in range(3)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert calls == ["forward"]
    alone = F.scaled_dot_product_attention(*(x.unbind()[1][None] for x in (q, k, v)), is_causal=True)
    assert torch.equal(out.unbind()[1][None], alone)


def test_a_cuda_graph_holds_it(calls):
    q, k, v = (x.detach() for x in operands())
    F.scaled_dot_product_attention(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = F.scaled_dot_product_attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert torch.equal(out, F.scaled_dot_product_attention(q, k, v))
    assert calls == ["forward"] * 3
