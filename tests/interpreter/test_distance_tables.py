"""Tensors that are read by distance: tables of all distances."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade import Dense, Packed, attention, causal, relative_bias, t5_bias, window
from saccade.backends.device import distance_tables
from saccade.masks import Mask
from saccade.problem import Problem
from saccade.scores import bind
from saccade.testing.accuracy import Report, check

MASKS: dict[str, Mask | None] = {"full": None, "causal": causal(), "window": window(40, 9)}


def learned(kind: str) -> Any:
    """A score function of two heads with parameters."""
    near, far, rows = (torch.randn(2, 257, requires_grad=True) for _ in range(3))
    match kind:
        case "t5":
            return t5_bias(torch.randn(32, 2, requires_grad=True))
        case "relative":
            return relative_bias(near)
        case "product":
            return lambda s, b, h, i, j: s * far[h, (j - i).clamp(-20, 20) + 20] + near[h, (j - i).abs()]
    return lambda s, b, h, i, j: s + near[b, (i - j) % 257] * rows[h, i]


def report(kind: str, s_q: int, s_k: int, mask: str) -> Report:
    q, k, v = (torch.randn(2, h, s, 16) for h, s in ((2, s_q), (1, s_k), (1, s_k)))
    return check(q, k, v, mask=MASKS[mask], score_mod=learned(kind), backend="triton")


CALLS = [
    ("relative", 45, 55, "window"),
    ("t5", 50, 35, "causal"),
    ("product", 32, 32, "full"),
    ("rows", 40, 41, "full"),
]


@pytest.mark.parametrize(("kind", "s_q", "s_k", "mask"), CALLS)
def test_against_the_oracle(kind: str, s_q: int, s_k: int, mask: str) -> None:
    """Forward and backward, with remainders of rows and keys; by head, by batch row, and beside another read."""
    report(kind, s_q, s_k, mask).assert_ok()


def test_a_wrong_table_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = distance_tables.tables

    def moved(problem: Problem, fast: bool = False) -> tuple[Any, ...]:
        found = fill(problem, fast)
        return (*found[:3], found[3] + 2) if found else ()

    assert report("relative", 30, 30, "causal").ratios["out"] <= 1
    monkeypatch.setattr(distance_tables, "tables", moved)
    assert report("relative", 30, 30, "causal").ratios["out"] > 1


def test_a_table_is_of_what_a_tensor_holds_now() -> None:
    q, table = torch.randn(1, 2, 30, 16), torch.randn(2, 9)
    score_mod = relative_bias(table)
    before = attention(q, q, q, score_mod=score_mod, backend="triton")
    table.add_(torch.randn(2, 9))
    after = attention(q, q, q, score_mod=score_mod, backend="triton")
    assert not torch.equal(before, after)
    assert torch.equal(after, attention(q, q, q, score_mod=relative_bias(table.clone()), backend="triton"))


OFFSETS = torch.tensor([0, 5, 20])


@pytest.mark.parametrize(
    ("layout", "count"),
    [(Dense(), 1), (Dense(seqused_k=torch.tensor([7])), 1), (Dense(q_offset=3), 0), (Packed(OFFSETS, OFFSETS), 0)],
    ids=["dense", "used", "offset", "packed"],
)
def test_calls_that_have_tables(layout: Any, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of whose distances the host knows the largest, unless a table would be too long."""
    q = torch.randn(1, 2, 20, 16)
    problem = Problem(q, q, q, None, None, bind(relative_bias(torch.randn(2, 9)), q), layout, 1.0)
    assert len(distance_tables.empty(problem)) == count * distance_tables.FIELDS
    monkeypatch.setattr(distance_tables, "MOST", 100)
    assert distance_tables.empty(problem) == ()
