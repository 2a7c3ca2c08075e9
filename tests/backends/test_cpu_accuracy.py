"""bfloat16 on a CPU beside PyTorch's own kernel, on every processor's path: errors against float64, by the spread of
the scores."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from saccade import Paged, attention, causal, mask_mod, softcap

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
    """q, k, v and dout, with scores of this standard deviation."""
    numbers = [torch.randn(1, 8, n, d) for n in (rows or s, s, s, rows or s)]
    factors = spread**0.5, spread**0.5, 1.0, 1.0
    return [(x * factor).bfloat16() for x, factor in zip(numbers, factors, strict=True)]


def results(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk and dv."""
    *leaves, dout = (x.detach().requires_grad_() for x in tensors)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def errors(found: list[torch.Tensor], exact: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(x.double() - y).square().mean().sqrt() for x, y in zip(found, exact, strict=True)])


def shares(s: int, d: int, spread: float, form: str, rows: int | None = None) -> torch.Tensor:
    tensors, keywords = operands(s, d, spread, rows), FORMS[form]
    seen = None
    if "mask" in keywords:
        seen = torch.ones(s, s, dtype=torch.bool).tril() if form == "causal" else (torch.arange(s) // 128) % 3 != 1
        seen = seen.expand(1, 1, s, s)

    def native(q, k, v):
        return scaled_dot_product_attention(q, k, v, attn_mask=seen)

    exact = results(native, [x.double() for x in tensors])
    found = results(lambda q, k, v: attention(q, k, v, backend="cpu", **keywords), tensors)
    return errors(found, exact) / errors(results(native, tensors), exact)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [1, 8, 40])
@pytest.mark.parametrize("d", [64, 128])
def test_errors_are_those_of_pytorch(d, spread, form, processor):
    assert shares(512, d, spread, form).max() <= ALLOWED


@pytest.mark.sample
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spread", [1, 8, 40])
@pytest.mark.parametrize("d", [64, 128])
def test_errors_of_long_rows(d, spread, form, processor):
    assert shares(2048, d, spread, form).max() <= ALLOWED


@pytest.mark.parametrize("spread", [1 / 16, 1 / 4, 2, 4])
def test_errors_between(spread, processor):
    assert shares(256, 64, spread, "plain").max() <= ALLOWED


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
