"""Rows of latents that list their keys in the portable kernels: forward, and gradients from tables of these keys."""

from __future__ import annotations

import pytest
import torch

from saccade import Dense, causal, explain, mask_mod, selected, softcap, window
from saccade.backends.triton import token_lists
from saccade.testing.accuracy import check
from tests.masks.test_selected import lists

B = 2


def operands(h=16, s_q=3, s_k=80, h_k=1, d=576, d_v=512):
    q, k = torch.randn(B, h, s_q, d).half(), torch.randn(B, h_k, s_k, d).half()
    return q, k, k[..., :d_v]


def listed(s_q=3, n=70, s_k=80, b=B, **keywords):
    return selected(lists(b, 1, s_q, n, blocks=s_k), **keywords)


CASES = {
    "two tiles of keys": (operands, lambda: {"mask": listed()}),
    "many heads": (lambda: operands(130, 2), lambda: {"mask": listed(2), "sink": torch.randn(130)}),
    "lengths": (lambda: operands(20), lambda: {"mask": listed(lengths=torch.randint(0, 71, (B, 1, 3)))}),
    "two key heads": (lambda: operands(6, h_k=2), lambda: {"mask": listed(b=1), "score_mod": softcap(3.0)}),
    "causal": (lambda: operands(4, 9), lambda: {"mask": listed(9) & causal(), "dlse": torch.randn(B, 4, 9)}),
    "window": (lambda: operands(4, 9), lambda: {"mask": listed(9) & window(20, 3), "return_max_scores": True}),
    "predicate": (lambda: operands(4), lambda: {"mask": listed() & mask_mod(lambda b, h, i, j: (i + j + b) % 3 > 0)}),
    "rows": (lambda: operands(4, 5), lambda: {"mask": listed(3, rows=2)}),
    "v4": (lambda: operands(4, d=512), lambda: {"mask": listed()}),
    "few values": (lambda: operands(4, d_v=448), lambda: {"mask": listed()}),
    "narrow": (lambda: operands(4, d=320, d_v=256), lambda: {"mask": listed()}),
    "no entry": (lambda: operands(4), lambda: {"mask": listed(n=0), "sink": torch.randn(4)}),
    "no key": (lambda: operands(4), lambda: {"mask": selected(torch.full((1, 1, 3, 5), -1))}),
    "hot": (lambda: operands(4, 9), lambda: {"mask": selected(torch.tensor([5, -1, 99]).expand(1, 1, 9, 3))}),
    "positions": (lambda: operands(4, 9), lambda: {"mask": listed(9) & causal(), "layout": Dense(q_offset=50)}),
    "padded": (
        lambda: operands(4),
        lambda: {"mask": listed(), "sink": torch.randn(4), "layout": Dense("bhsd", *torch.tensor([[2, 3], [80, 33]]))},
    ),
}


@pytest.mark.parametrize("memory", [token_lists.MOST_BYTES, 1 << 20], ids=["at once", "row by row"])
@pytest.mark.parametrize("name", CASES)
def test_latents(name, memory, monkeypatch):
    monkeypatch.setattr(token_lists, "MOST_BYTES", memory)
    given, keywords = (made() for made in CASES[name])
    assert "a program gathers those of a row" in explain(*given, backend="triton", mask=keywords["mask"]).lists
    check(*given, backend="triton", **keywords).assert_ok()
