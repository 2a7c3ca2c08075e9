"""Calls without sequences, rows or keys: no kernel reads a table that is empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade import Dense, Packed, attention, mask_mod, relative_bias

NONE, EMPTY = torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {
    "no sequence": ((3, 1, 16), (3, 1, 16), Packed(NONE, NONE, 0, 0)),
    "no range": ((3, 1, 16), (3, 1, 16), Packed(NONE, starts_k=EMPTY, seqused_k=EMPTY)),
    "no rows": ((0, 1, 16), (0, 1, 16), Packed(NONE, NONE, 0, 0)),
    "empty sequences": ((3, 1, 16), (3, 1, 16), Packed(torch.zeros(3).int(), torch.zeros(3).int(), 0, 0)),
    "no batch row": ((0, 1, 4, 16), (0, 1, 4, 16), Dense()),
    "no keys": ((2, 1, 4, 16), (2, 1, 0, 16), Dense()),
    "no queries": ((2, 1, 0, 16), (2, 1, 4, 16), Dense()),
    "no heads": ((2, 0, 4, 16), (2, 0, 4, 16), Dense()),
}
FUNCTIONS = {
    "row": lambda table: lambda s, b, h, i, j: s + table[0, i],
    "sequence": lambda table: lambda s, b, h, i, j: s * table[b, j],
    "distance": lambda table: relative_bias(table[:1, :9]),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_captured_tensors(name: str, function: str) -> None:
    q_shape, k_shape, layout = CALLS[name]
    q, k = (torch.randn(shape, requires_grad=True) for shape in (q_shape, k_shape))
    table = torch.randn(4, 1100, requires_grad=True)
    mask = mask_mod(lambda b, h, i, j: (i + j) % 2 == 0)
    calls: list[dict[str, Any]] = [{}, {"deterministic": True}, {"mask": mask}]
    for keywords in calls:
        score_mod = FUNCTIONS[function](table)
        out = attention(q, k, k, score_mod=score_mod, layout=layout, backend="triton", **keywords)
        for x in (out, *torch.autograd.grad(out.sum(), (q, k, table))):
            assert not x.count_nonzero()


def test_tables_of_no_distance() -> None:
    """Where there are no keys, what is read for them may be empty too; and the sink is the LSE."""
    q, k, table = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 0, 16), torch.zeros(0)
    keywords: dict[str, Any] = {"sink": torch.tensor([0.5]), "return_lse": True, "backend": "triton"}
    score_mod = lambda s, b, h, i, j: s + table[(j - i).clamp(-2, 2) + 2]  # noqa: E731
    out, lse = attention(q, k, k, score_mod=score_mod, **keywords)
    assert not out.count_nonzero()
    assert torch.equal(lse, torch.full((2, 1, 4), 0.5))
