"""bfloat16 on a CPU beside PyTorch's own kernel, on every processor's path: errors against float64, by the spread of
the scores."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from saccade import Paged, attention, causal, mask_mod, softcap
from saccade.util import hardware

PROCESSORS = "amx", "avx512_bf16", "none"
ALLOWED = 1.2
"""Error over that of PyTorch's kernel."""
FORMS = {
    "plain": {},
    "causal": {"mask": causal()},
    "function": {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 1.0},
    "pieces": {"mask": mask_mod(lambda b, h, q_idx, kv_idx: (kv_idx // 128) % 3 != 1)},
}
"""The keywords of a call, of which each takes another way: PyTorch's kernel, tiles of whole rows, tiles in pieces."""


def operands(s: int, d: int, spread: float, rows: int | None = None) -> list[torch.Tensor]:
    """q, k, v and dout, with scores of this standard deviation; of long rows two heads, which take long."""
    numbers = [torch.randn(1, 8 if s < 2048 else 2, n, d) for n in (rows or s, s, s, rows or s)]
    factors = spread**0.5, spread**0.5, 1.0, 1.0
    return [(x * factor).bfloat16() for x, factor in zip(numbers, factors, strict=True)]


def results(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    *leaves, dout = (x.detach().requires_grad_() for x in tensors)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(x.double() - y).square().mean().sqrt() for x, y in zip(found, exact, strict=True)])


@pytest.fixture(params=FORMS)
def shares(request, monkeypatch):
    """The errors of out, dq, dk and dv over those of PyTorch's kernel, (processors, 4), of s, d and a spread."""

    def find(s: int, d: int, spread: float) -> torch.Tensor:
        tensors, seen = operands(s, d, spread), None
        if request.param == "causal":
            seen = torch.ones(1, 1, s, s, dtype=torch.bool).tril()
        elif request.param == "pieces":
            seen = ((torch.arange(s) // 128) % 3 != 1).expand(1, 1, s, s)
        native = partial(scaled_dot_product_attention, attn_mask=seen)
        exact, found = results(native, [x.double() for x in tensors]), []
        for processor in PROCESSORS:
            monkeypatch.setattr(hardware, "cpu_bf16", lambda processor=processor: processor)
            found.append(results(partial(attention, backend="cpu", **FORMS[request.param]), tensors))
        return torch.stack([errors(x, exact) for x in found]) / errors(results(native, tensors), exact)

    return find


@pytest.mark.parametrize("spread", [1, 8, 40])
@pytest.mark.parametrize("d", [64, 128])
def test_errors_are_those_of_pytorch(d, spread, shares):
    assert shares(512, d, spread).max() <= ALLOWED


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("spread", [1, 8, 40])
@pytest.mark.parametrize("d", [64, 128])
def test_errors_of_long_rows(d, spread, shares):
    assert shares(2048, d, spread).max() <= ALLOWED


@pytest.mark.parametrize("spread", [1 / 16, 1 / 4, 2, 4])
def test_errors_between(spread, shares):
    assert shares(256, 64, spread).max() <= ALLOWED


@pytest.mark.parametrize("spread", [1, 8, 40])
@pytest.mark.parametrize("paged", [False, True, 1], ids=["dense", "pages", "one split"])
def test_errors_of_few_rows(spread, paged, processor):
    """And of pages, which hold a whole sequence each."""
    q, k, v, _ = operands(512, 64, spread, rows=3)
    layout = Paged(torch.zeros(1, 1, dtype=torch.int32), torch.tensor([512]), num_splits=1 if paged == 1 else None)
    exact, native = (scaled_dot_product_attention(*x) for x in ([y.double() for y in (q, k, v)], (q, k, v)))
    if paged:
        found = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout=layout, backend="cpu").transpose(1, 2)
    else:
        found = attention(q, k, v, score_mod=softcap(1e4), backend="cpu")
    assert errors([found], [exact]) <= ALLOWED * errors([native], [exact])
